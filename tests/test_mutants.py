"""The planted faults follow the code, and each is noticed by the test it names."""

import ast

import mutants
import pytest


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutant_applies_to_the_code(name):
    mutant = mutants.MUTANTS[name]
    text = mutants.mutated(mutant)
    ast.parse(text)
    assert text != (mutants.ROOT / mutant.file).read_text()


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutant_names_a_test_that_exists(name):
    path, *parts = mutants.MUTANTS[name].test.split("[")[0].split("::")
    node = ast.parse((mutants.ROOT / path).read_text())
    for part in parts:
        node = next(child for child in node.body if getattr(child, "name", None) == part)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    copy = mutants.Scratch(tmp_path_factory.mktemp("scratch") / "copy")
    tests = sorted({mutant.test for mutant in mutants.MUTANTS.values()})
    done = copy.run(*tests)
    assert done.returncode == 0, f"the tests fail without any mutant:\n{done.stdout[-3000:]}"
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutant_is_caught(scratch, name):
    assert scratch.catches(mutants.MUTANTS[name])
