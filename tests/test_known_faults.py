"""Every row of docs/known_faults.md has the tests that it promises."""

import ast
import re
from typing import NamedTuple

import pytest
from mutants import MUTANTS

import import_rules


TABLE = import_rules.ROOT / "docs" / "known_faults.md"
ROW = re.compile(r"^\| (?P<bold>\*\*)?(?P<id>[A-H]\d\d)(\*\*)? \| .+ \| .+ \| (?P<remark>[\w ]*) \|$", re.MULTILINE)
ID = re.compile(r"(?<![A-Za-z0-9])[A-H]\d\d(?!\d)")


class Row(NamedTuple):
    id: str
    is_most_valuable: bool
    remark: str


ROWS = [Row(match["id"], bool(match["bold"]), match["remark"].strip()) for match in ROW.finditer(TABLE.read_text())]
MOST_VALUABLE = [row.id for row in ROWS if row.is_most_valuable and row.remark != "open"]


@pytest.fixture(scope="module")
def tested():
    """Per generation the ids in the names of tests, or at the beginning of the ids of their parameters."""
    ids = {"first": set(), "second": set()}
    for path in (import_rules.ROOT / "tests").rglob("test_*.py"):
        found = ids["second" if "hysparse2" in path.name else "first"]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.update(ID.findall(node.name.replace("_", " ")))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"^[A-H]\d\d(?=-)", node.value))
    return ids


def test_the_table_is_read_whole():
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \**[A-H]\d", line)]
    assert len(ROWS) == len(lines) == len({row.id for row in ROWS}) > 90


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_has_a_test_or_a_remark(tested, row):
    remark = "" if row.id in tested["first"] else "second generation" if row.remark == "second generation" else "open"
    assert row.remark == remark, "correct the remark in docs/known_faults.md, or add the test"
    assert remark != "second generation" or row.id in tested["second"]


def test_every_id_in_a_tests_name_is_a_row(tested):
    assert (tested["first"] | tested["second"]) - {row.id for row in ROWS} == set()


@pytest.mark.parametrize("row", MOST_VALUABLE)
def test_a_valuable_row_has_a_planted_fault_that_its_test_notices(row):
    planted = {name: mutant for name, mutant in MUTANTS.items() if name.startswith(f"{row}-")}
    assert planted, f"add a mutant whose name begins with {row}-"
    for mutant in planted.values():
        assert row in ID.findall(mutant.test.replace("_", " "))
