"""docs/support.md says nothing that no test shows: cells name tests, and refusals have the messages of the code."""

import ast
import re
from typing import NamedTuple

import pytest

import import_rules


PAGE = import_rules.ROOT / "docs" / "support.md"
TEXT = PAGE.read_text()
WORKS, REFUSALS = TEXT.split("\n## Refusals\n")

# [label]: ../tests/file.py "Class::test"
DEFINITION = re.compile(r'^\[(?P<label>[\w-]+)\]: (?P<path>\.\./\S+) "(?P<test>[\w:]+)"$', re.MULTILINE)
DEFINED = {match["label"]: (match["path"], match["test"]) for match in DEFINITION.finditer(TEXT)}
LINK = re.compile(r"\[(?P<words>[^\]]+)\]\[(?P<label>[\w-]+)\]")
# What a cell may say without a test: it makes no sense, or the second generation brings it.
WORDS_ALONE = {"–", "", "second generation"}


def rows_of(text: str) -> list[list[str]]:
    """Cells of every table row but headers and rules."""
    lines = text.splitlines()
    rules = {number for number, line in enumerate(lines) if re.fullmatch(r"\|[-| ]+\|", line)}
    skipped = rules | {number - 1 for number in rules}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in skipped
    ]


class Refusal(NamedTuple):
    """One error of the code: its kind, and its message with … for what is filled in."""

    kind: str
    message: str


def template_of(node: ast.expr) -> str:
    """The message of a raise statement; … stands for every value that is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr), f"line {node.lineno}: write the message where it is raised"
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def raised() -> list[Refusal]:
    """Every error of the model code that has a message."""
    found = []
    for path in import_rules.modeling_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                found.append(Refusal(ast.unparse(node.exc.func), template_of(node.exc.args[0])))
    return found


def begins(refusal: Refusal, listed: Refusal) -> bool:
    """Whether the listed message is the beginning of the raised one."""
    return refusal.kind == listed.kind and refusal.message.startswith(listed.message)


LISTED = [(Refusal(cells[1].strip("`"), cells[0].strip('"')), cells[3]) for cells in rows_of(REFUSALS)]
RAISED = raised()


def function_of(label: str) -> ast.FunctionDef:
    """The test function that a label stands for."""
    path, name = DEFINED[label]
    node: ast.AST = ast.parse((PAGE.parent / path).resolve().read_text())
    for part in name.split("::"):
        children = {getattr(child, "name", None): child for child in node.body}  # type: ignore[attr-defined]
        assert part in children, f"{path} has no {name}"
        node = children[part]
    assert isinstance(node, ast.FunctionDef)
    return node


@pytest.mark.parametrize("label", DEFINED)
def test_a_label_names_a_test_that_exists(label):
    assert function_of(label).name.startswith("test_")


def test_labels_are_defined_once_and_used():
    used = {match["label"] for match in LINK.finditer(TEXT)}
    assert used == set(DEFINED)
    assert len(DEFINITION.findall(TEXT)) == len(DEFINED)


def test_every_cell_names_its_test():
    rows = rows_of(WORKS)
    assert len(rows) > 40
    bare = [
        (row[0], cell)
        for row in rows
        for cell in row[1:]
        if cell not in WORDS_ALONE and LINK.sub("", cell).strip(" ,;")
    ]
    assert bare == [], "a cell is made of links to tests"


@pytest.mark.parametrize("listed", [listed for listed, _ in LISTED], ids=lambda listed: listed.message[:60])
def test_a_listed_refusal_is_in_the_code(listed):
    assert any(begins(refusal, listed) for refusal in RAISED)


@pytest.mark.parametrize("refusal", RAISED, ids=lambda refusal: refusal.message[:60])
def test_a_refusal_of_the_code_is_listed(refusal):
    assert any(begins(refusal, listed) for listed, _ in LISTED), "add it to docs/support.md, with the test of it"


@pytest.mark.parametrize("cell", [cell for _, cell in LISTED])
def test_a_refusal_names_a_test_of_an_error(cell):
    labels = [match["label"] for match in LINK.finditer(cell)]
    assert labels
    for label in labels:
        text = ast.unparse(function_of(label))
        assert "pytest.raises" in text or "error" in text
