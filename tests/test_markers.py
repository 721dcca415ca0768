"""Which tests run by default, that a selection on the command line has the last word, and when nothing runs."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

import pytest

import import_rules


PLANTED = """
import pytest
def test_plain(): pass
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.network
def test_network(): pass
"""

# All that the settings ask of torch.
TORCH = """
import os
class Tensor: pass
class cuda:
    is_available = staticmethod(lambda: os.environ["PLANTED_CARD"] == "True")
get_num_threads = lambda: 1
set_num_threads = lambda number: None
"""


@pytest.fixture
def collected(tmp_path):
    """A function that runs pytest on planted tests under our settings and returns outcome by test."""
    for name in ("setup.cfg", "tests/conftest.py"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(import_rules.ROOT / name, target)
    (tmp_path / "tests" / "test_planted.py").write_text(PLANTED)
    (tmp_path / "torch.py").write_text(TORCH)

    def run(*arguments, card):
        environ = {**os.environ, "PLANTED_CARD": str(card)}
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        lines = [line.split("::test_")[1].split() for line in done.stdout.splitlines() if line.startswith("tests/")]
        return {name: outcome for name, outcome, *_ in lines}

    return run


@pytest.mark.parametrize(
    ("arguments", "outcomes"),
    [
        pytest.param([], {"plain": "PASSED", "gpu": "SKIPPED"}, id="default"),
        pytest.param(["-m", "slow"], {"slow": "PASSED"}, id="selected"),
        pytest.param(["-m", "not slow"], {"plain": "PASSED", "gpu": "SKIPPED", "network": "PASSED"}, id="expression"),
        pytest.param(["tests/test_planted.py::test_network"], {"network": "PASSED"}, id="named"),
    ],
)
def test_selection(collected, arguments, outcomes):
    assert collected(*arguments, card=False) == outcomes


def test_a_card_runs_what_needs_one(collected):
    assert collected(card=True) == {"plain": "PASSED", "gpu": "PASSED"}


@pytest.mark.parametrize(
    ("triton", "numpy", "interpreted", "stops"),
    [("3.6.0", "2.4.6", "1", True), ("3.6.0", "2.3.5", "1", False), ("3.7.1", "2.4.6", "1", False)]
    + [("3.6.0", "2.4.6", "0", False)],
)
def test_packages_under_which_no_kernel_can_be_interpreted(
    pytestconfig, monkeypatch, triton, numpy, interpreted, stops
):
    conftest = pytestconfig.pluginmanager.get_plugin(str(import_rules.ROOT / "tests" / "conftest.py"))
    monkeypatch.setattr(importlib.metadata, "version", {"triton": triton, "numpy": numpy}.get)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    if stops:
        with pytest.raises(pytest.UsageError, match="numpy<2.4"):
            conftest.pytest_configure()
    else:
        conftest.pytest_configure()
