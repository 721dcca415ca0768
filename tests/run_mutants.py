"""Plant the faults of `mutants`.

`python tests/run_mutants.py [name ...]` applies each mutant to a scratch copy of the packages, runs its test there and
prints whether it was caught; the exit status is the number of those that were not.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import MUTANTS
from mutants.entry import Mutant


ROOT = Path(__file__).resolve().parent.parent


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the file's text with the fault in it.

    Raises:
        ValueError: the text to replace does not occur exactly once, so the mutant must follow the code.
    """
    text = (root / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {text.count(mutant.old)} times {mutant.old!r}; adapt the mutant")
    return text.replace(mutant.old, mutant.new)


class Scratch:
    """A copy of packages and tests in which Python finds `hysparse_hf` before the installed one."""

    def __init__(self, folder: Path):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "hysparse_hf", folder / "hysparse_hf", ignore=ignored)
        for name in ("modeling", "conversion"):
            shutil.copytree(ROOT / name, folder / "hysparse_hf" / name, ignore=ignored)
            (folder / name).symlink_to(folder / "hysparse_hf" / name)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
        shutil.copy(ROOT / "setup.cfg", folder)

    def run(self, *tests: str) -> subprocess.CompletedProcess:
        """Run tests on what the copy holds now."""
        # No bytecode: a file changed twice within one second would be taken for unchanged.
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=600)

    def catches(self, mutant: Mutant) -> bool:
        """Whether the mutant's test fails on it, and not for want of a test or an importable file."""
        path = self.folder / mutant.file
        original = path.read_text()
        path.write_text(mutated(mutant, self.folder))
        try:
            done = self.run(mutant.test)
        finally:
            path.write_text(original)
        return done.returncode == 1 and " failed" in done.stdout and "SyntaxError" not in done.stdout


def main(names: list[str]) -> int:
    """Run the named mutants, or all, and print what became of each."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(Path(folder))
        sound = scratch.run(*sorted({MUTANTS[name].test for name in names or MUTANTS}))
        if sound.returncode:
            print(sound.stdout, "the tests fail without any mutant", sep="\n")
            return len(MUTANTS)
        for name in names or MUTANTS:
            caught = scratch.catches(MUTANTS[name])
            print(f"{'caught' if caught else 'NOT CAUGHT':12}{name:44}{MUTANTS[name].test}", flush=True)
            missed += [] if caught else [name]
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
