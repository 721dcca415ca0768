"""Faults planted on purpose, each with the test that must notice it; one table for each area."""

from . import cache, conversion, hysparse2, known_faults, layers, model, operations


TABLES = (operations, layers, model, cache, known_faults, hysparse2, conversion)
MUTANTS = {name: mutant for table in TABLES for name, mutant in table.MUTANTS.items()}
assert len(MUTANTS) == sum(len(table.MUTANTS) for table in TABLES), "two mutants have one name"
