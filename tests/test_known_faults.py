"""Every row of docs/known_faults.md has the tests that it promises."""

import ast
import re
from collections import defaultdict
from typing import NamedTuple

import pytest
from mutants import MUTANTS

import import_rules


TABLE = import_rules.ROOT / "docs" / "known_faults.md"
ROW = re.compile(
    r"^\| (?P<bold>\*\*)?(?P<id>[A-H]\d\d)(\*\*)? \| .+ \| .+ \| (?P<where>[\w, ]*) \| (?P<remark>[\w ]*) \|$",
    re.MULTILINE,
)
ID = re.compile(r"(?<![A-Za-z0-9])[A-H]\d\d(?!\d)")


class Row(NamedTuple):
    id: str
    is_most_valuable: bool
    where: set[str]
    remark: str


ROWS = [
    Row(match["id"], bool(match["bold"]), set(match["where"].split(", ")) - {""}, match["remark"].strip())
    for match in ROW.finditer(TABLE.read_text())
]
MOST_VALUABLE = [row.id for row in ROWS if row.is_most_valuable and row.remark != "open"]


def places_of(path, function=None) -> set[str]:
    """What a test, or one of its file, runs on: a small model of a generation, the operations, or the conversion."""
    folder = path.parent.name
    if folder != "models":
        return {folder if folder in ("ops", "convert") else "package"}
    if function is not None and any(argument.arg == "generation" for argument in function.args.args):
        return {"T1", "T2"}
    return {"T2" if "hysparse2" in path.name else "T1"}


@pytest.fixture(scope="module")
def tested():
    """Where each id is tested: in names of tests, or at the beginning of the ids of their parameters."""
    places = defaultdict(set)
    for path in (import_rules.ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for found in ID.findall(node.name.replace("_", " ")):
                    places[found] |= places_of(path, node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for found in re.findall(r"^[A-H]\d\d(?=-)", node.value):
                    places[found] |= places_of(path)
    return places


def test_the_table_is_read_whole():
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \**[A-H]\d", line)]
    assert len(ROWS) == len(lines) == len({row.id for row in ROWS}) > 90


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_says_where_it_is_tested(tested, row):
    assert row.where == tested[row.id], "correct docs/known_faults.md, or add the test"
    assert bool(row.where) == (row.remark != "open")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_concerns_models_is_tested_on_both_generations_or_says_why_not(row):
    assert bool(row.remark) == (len(row.where & {"T1", "T2"}) == 1 or not row.where)


def test_every_id_in_a_tests_name_is_a_row(tested):
    assert set(tested) - {row.id for row in ROWS} == set()


@pytest.mark.parametrize("row", MOST_VALUABLE)
def test_a_valuable_row_has_a_planted_fault_that_its_test_notices(row):
    planted = {name: mutant for name, mutant in MUTANTS.items() if name.startswith(f"{row}-")}
    assert planted, f"add a mutant whose name begins with {row}-"
    for mutant in planted.values():
        assert row in ID.findall(mutant.test.replace("_", " "))
