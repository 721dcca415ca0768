"""What may import what, as tables and checks on source text.

Only the standard library is used, so that pre-commit can run `python tests/import_rules.py modeling/*.py`: it prints
what breaks the flat rules in these files and exits with 1 if anything does.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent

# A checkpoint's code may import these, its siblings, and triton inside `try`. huggingface_hub is a dependency of
# transformers and the home of `strict`, which configuration classes need.
MODELING_THIRD_PARTY = {"torch", "transformers", "huggingface_hub"}

# Stem prefix of a file in modeling/ -> prefixes of the siblings that it may import.
MODELING_ARROWS = {
    "modeling": {
        "modeling",
        "decoder",
        "inputs",
        "prompt",
        "layers",
        "moe",
        "cache",
        "compat",
        "configuration",
        "rows",
    },
    "decoder": {"decoder", "prompt", "layers", "moe", "cache", "attention", "dispatch", "configuration", "rows"},
    "prompt": {"layers", "cache", "configuration", "rows"},
    "inputs": {"cache", "compat", "configuration", "rows"},
    "moe": {"layers", "configuration"},
    "layers": {"layers", "dispatch", "reference", "triton", "configuration"},
    "cache": {"cache", "compat", "configuration", "rows"},
    "attention": {"attention", "dispatch", "reference", "triton", "selection", "rows"},
    "dispatch": {"triton"},
    "reference": {"reference", "selection", "rows"},
    "triton": {"triton", "selection", "rows"},
    "selection": {"rows"},
    "configuration": {"configuration"},
    "compat": set(),
    "rows": set(),
}

# Package -> packages of ours that it may import. `hysparse_hf` means the files of that folder alone.
PACKAGE_ARROWS = {
    "hysparse_hf": {"hysparse_hf", "hysparse_hf.modeling"},
    "hysparse_hf.conversion": {"hysparse_hf.conversion", "hysparse_hf.modeling"},
    "hysparse_hf.modeling": {"hysparse_hf.modeling"},
}

# Exceptions, file by file: the command line dispatches to every package, by name and late; a diagnosis reads the text
# and the checkpoint that it is given as the conversion does.
FILE_EXCEPTIONS = {
    "hysparse_hf/cli.py": {"hysparse_hf.conversion"},
    "hysparse_hf/oracle_recall.py": {"hysparse_hf.conversion"},
}

# Folder -> package.
FOLDERS = {"hysparse_hf": "hysparse_hf", "conversion": "hysparse_hf.conversion", "modeling": "hysparse_hf.modeling"}

# The loader of transformers reads these patterns line by line over the whole text, docstrings included.
_LOADER_PATTERN = re.compile(r"^\s*(?:from\s+\.|import\s+\.)")


def _nodes_outside_try(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node with the answer to: does it stand in a `try` statement, body or handlers?"""
    for child in ast.iter_child_nodes(tree):
        guarded = inside or isinstance(child, ast.Try)
        yield child, guarded
        yield from _nodes_outside_try(child, guarded)


def flat_violations(source: str, name: str, siblings: set[str]) -> list[str]:
    """Check one file of modeling/ against what the remote-code loader can follow.

    Args:
        source (`str`): the file's text.
        name (`str`): the file's name, for the messages.
        siblings (`set[str]`): stems of the files beside it.
    Returns:
        `list[str]`: one line per violation.
    """
    tree = ast.parse(source, filename=name)
    found = []

    def report(line: int, message: str) -> None:
        found.append(f"{name}:{line}: {message}")

    def check_absolute(line: int, module: str, guarded: bool) -> None:
        package = module.split(".")[0]
        if package == "triton":
            if not guarded:
                report(line, "triton must be imported inside `try`; it is optional")
        elif package not in sys.stdlib_module_names | MODELING_THIRD_PARTY:
            allowed = ", ".join(sorted(MODELING_THIRD_PARTY))
            report(line, f"`{module}` does not travel with a checkpoint; it may use siblings, {allowed} and triton")

    relative_lines = set()
    for node, guarded in _nodes_outside_try(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                check_absolute(node.lineno, alias.name, guarded)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            check_absolute(node.lineno, node.module or "", guarded)
        elif isinstance(node, ast.ImportFrom):
            relative_lines.add(node.lineno)
            if node.level > 1:
                report(node.lineno, "two dots: checkpoints are flat; write `from .name import X`")
            elif node.module is None:
                report(node.lineno, "`from . import name` is not seen by the loader; write `from .name import X`")
            elif "." in node.module:
                report(node.lineno, f"`.{node.module}` is a package; checkpoints are flat")
            elif node.module not in siblings - {"__init__"}:
                report(node.lineno, f"`.{node.module}` is no sibling file; the loader needs it even inside `try`")
    for number, line in enumerate(source.splitlines(), start=1):
        if _LOADER_PATTERN.match(line) and number not in relative_lines:
            report(number, "the loader takes this line of text for an import; begin the line with another word")
    return found


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every module that a file of `package` imports, in functions too.

    `from package import name` yields `package.name` where that may be a module of ours.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base] if base else parents)
            if base == "hysparse_hf":
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            else:
                yield node.lineno, base


def _package_of(module: str) -> str | None:
    """Return which of our packages a module name belongs to, or None for a foreign one."""
    for package in ("hysparse_hf.modeling", "hysparse_hf.conversion", "hysparse_hf"):
        if module == package or module.startswith(f"{package}."):
            return package
    return None


def arrow_violations(source: str, path: str) -> list[str]:
    """Check one file's imports against the arrows.

    Args:
        source (`str`): the file's text.
        path (`str`): its path in the repository, such as `modeling/cache_hysparse.py`.
    Returns:
        `list[str]`: one line per violation.
    """
    folder, _, file = path.partition("/")
    package = FOLDERS[folder]
    stem = file.removesuffix(".py")
    prefix = stem.split("_")[0]
    allowed_packages = PACKAGE_ARROWS[package] | FILE_EXCEPTIONS.get(path, set())
    found = []
    if package == "hysparse_hf.modeling" and stem != "__init__" and prefix not in MODELING_ARROWS:
        found.append(f"{path}:1: no row for `{prefix}_*` in MODELING_ARROWS; say what it may import")
    for line, module in imported_modules(source, package):
        target = _package_of(module)
        if target is None:
            continue
        if target not in allowed_packages:
            found.append(f"{path}:{line}: {package} may not import {module}")
        elif package == target == "hysparse_hf.modeling" and stem != "__init__":
            sibling = module.removeprefix("hysparse_hf.modeling.").split("_")[0]
            if sibling not in MODELING_ARROWS.get(prefix, {sibling}):
                found.append(f"{path}:{line}: {prefix}_* may not import {sibling}_*")
    return found


def isinstance_violations(source: str, path: str) -> list[str]:
    """Find `isinstance(x, HySparse...)` outside modeling/; a remote copy's classes are others, so ask the config."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            names = {part.id for part in ast.walk(node.args[-1]) if isinstance(part, ast.Name)}
            names |= {part.attr for part in ast.walk(node.args[-1]) if isinstance(part, ast.Attribute)}
            for name in sorted(names):
                if name.startswith("HySparse"):
                    found.append(f"{path}:{node.lineno}: isinstance on {name}; a remote copy's class is another one")
    return found


def modeling_files() -> list[Path]:
    """Return the files of modeling/."""
    return sorted((ROOT / "modeling").glob("*.py"))


def package_files() -> list[Path]:
    """Return the files of the three packages."""
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))


def main(names: list[str]) -> int:
    """Check the named files of modeling/ and print the violations."""
    siblings = {file.stem for file in modeling_files()}
    files = [Path(name) for name in names] or modeling_files()
    found = [line for file in files for line in flat_violations(file.read_text(), file.name, siblings)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
