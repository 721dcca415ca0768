"""The planted faults follow the code, and each is noticed by the test it names."""

import ast

import pytest
import run_mutants
from mutants import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_applies_to_the_code(name):
    mutant = MUTANTS[name]
    text = run_mutants.mutated(mutant)
    ast.parse(text)
    assert text != (run_mutants.ROOT / mutant.file).read_text()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_names_a_test_that_exists(name):
    path, *parts = MUTANTS[name].test.split("[")[0].split("::")
    node = ast.parse((run_mutants.ROOT / path).read_text())
    for part in parts:
        node = next(child for child in node.body if getattr(child, "name", None) == part)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    copy = run_mutants.Scratch(tmp_path_factory.mktemp("scratch") / "copy")
    tests = sorted({mutant.test for mutant in MUTANTS.values()})
    done = copy.run(*tests)
    assert done.returncode == 0, f"the tests fail without any mutant:\n{done.stdout[-3000:]}"
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(scratch, name):
    assert scratch.catches(MUTANTS[name])
