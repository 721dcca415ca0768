"""Pages whose tables name tests and quote errors: what they say, and what the code raises."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


# [label]: ../tests/file.py "Class::test"
DEFINITION = re.compile(r'^\[(?P<label>[\w-]+)\]: (?P<path>\.\./\S+) "(?P<test>[\w:]+)"$', re.MULTILINE)
LINK = re.compile(r"\[(?P<words>[^\]]+)\]\[(?P<label>[\w-]+)\]")


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

    def begins_with(self, listed: "Refusal") -> bool:
        """Whether the listed message is the beginning of this one."""
        return self.kind == listed.kind and self.message.startswith(listed.message)


def template_of(node: ast.expr) -> str:
    """The message of a raise statement; … stands for every value that is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.BinOp):
        return template_of(node.left) + template_of(node.right)
    if isinstance(node, ast.Call):
        return "…"
    assert isinstance(node, ast.JoinedStr), f"line {node.lineno}: write the message where it is raised"
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def raised(files: Iterable[Path]) -> list[Refusal]:
    """Every error of some files that has a message."""
    return [
        Refusal(ast.unparse(node.exc.func), template_of(node.exc.args[0]))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    ]


class Page:
    """A page of docs/.

    Attributes:
        text, works, refusals (`str`): the page; what stands before its section `Refusals`; that section.
        defined (`dict`): label -> path and name of a test.
        listed (`list`): refusals with the cell that names their tests.
    """

    def __init__(self, path: Path):
        self.path = path
        self.text = path.read_text()
        self.works, self.refusals = self.text.split("\n## Refusals\n")
        self.defined = {m["label"]: (m["path"], m["test"]) for m in DEFINITION.finditer(self.text)}
        cells = rows_of(self.refusals)
        self.listed = [(Refusal(row[1].strip("`"), row[0].strip('"')), row[3]) for row in cells]

    def function_of(self, label: str) -> ast.FunctionDef:
        """The test function that a label stands for."""
        path, name = self.defined[label]
        node: ast.AST = ast.parse((self.path.parent / path).resolve().read_text())
        for part in name.split("::"):
            children = {getattr(child, "name", None): child for child in node.body}  # type: ignore[attr-defined]
            assert part in children, f"{path} has no {name}"
            node = children[part]
        assert isinstance(node, ast.FunctionDef)
        return node
