"""Faults of the conversion."""

from .entry import Mutant


MUTANTS = {
    "gate-and-up-of-fused-experts-swapped": Mutant(
        "conversion/key_map.py",
        '("gate_proj", "up_proj")',
        '("up_proj", "gate_proj")',
        "tests/convert/test_experts.py::test_the_fit_is_the_same_in_both_layouts",
    ),
}
