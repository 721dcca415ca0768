"""The opt-in search for launch sizes: what it tries, keeps, writes and reads. Times are made up, except on a card."""

import json
import os
import subprocess
import sys

import pytest
import torch
from kernel_checks import DEVICE, make_states


pytest.importorskip("triton")

from hysparse_hf.modeling import (
    attention_hysparse,
    dispatch_hysparse,
    triton_autotune,
    triton_common,
    triton_sliding_window,
)  # noqa: E402


KEY = (4, 128)
TABLE = triton_sliding_window.LAUNCH
BEST = (64, 32, 4, 1)


@pytest.fixture(autouse=True)
def kept_tables(monkeypatch):
    """Whatever a test finds is gone after it."""
    before = dict(TABLE)
    monkeypatch.setattr(triton_common, "_TUNERS", [])
    yield
    TABLE.clear()
    TABLE.update(before)


def distance_from_best(_):
    """Milliseconds that grow with the steps between the present sizes and the best ones."""
    return 1 + sum(abs(now.bit_length() - best.bit_length()) for now, best in zip(TABLE[KEY], BEST, strict=True))


def read_sizes(tuner):
    """What a kernel would launch with."""
    states = make_states(8)
    triton_common.use_tuner(tuner)
    return triton_common.launch_sizes(TABLE, states[0], states[2])


def test_the_fastest_sizes_are_found_and_kept(tmp_path):
    path = tmp_path / "sizes.json"
    assert TABLE[KEY] != BEST
    assert read_sizes(triton_autotune.Tuner(path, distance_from_best)) == BEST
    assert TABLE[KEY] == BEST
    ((machine, sizes),) = json.loads(path.read_text()).items()
    assert "triton" in machine
    assert sizes == {"sliding_window 4 bytes 128 dims": list(BEST)}
    assert [path.name for path in tmp_path.iterdir()] == ["sizes.json"]


def test_kept_sizes_are_read_and_not_searched_again(tmp_path):
    path = tmp_path / "sizes.json"
    before = TABLE[KEY]
    read_sizes(triton_autotune.Tuner(path, distance_from_best))
    TABLE[KEY] = before

    def never(_):
        raise AssertionError("searched again")

    assert read_sizes(triton_autotune.Tuner(path, never)) == BEST


def test_sizes_of_another_machine_are_not_read(tmp_path):
    path = tmp_path / "sizes.json"
    other = {"another card, triton 3.6.0": {"sliding_window 4 bytes 128 dims": [16, 16, 2, 1]}}
    path.write_text(json.dumps(other))
    assert read_sizes(triton_autotune.Tuner(path, distance_from_best)) == BEST
    assert json.loads(path.read_text()).items() >= other.items()


def test_sizes_that_fail_are_passed_over():
    def time_of(call):
        if TABLE[KEY][0] == BEST[0]:
            raise RuntimeError("out of resource: shared memory")
        return distance_from_best(call)

    assert read_sizes(triton_autotune.Tuner(None, time_of)) == (32, *BEST[1:])


def test_a_small_gain_changes_nothing():
    before = TABLE[KEY]
    assert read_sizes(triton_autotune.Tuner(None, lambda _: 1.0 if TABLE[KEY] == before else 0.99)) == before


@pytest.mark.parametrize(("asked", "tuners"), [(None, 0), ("0", 0), ("", 0), ("1", 1), ("folder/sizes.json", 1)])
def test_the_environment_decides(asked, tuners, monkeypatch):
    monkeypatch.delenv("HYSPARSE_AUTOTUNE", raising=False)
    if asked is not None:
        monkeypatch.setenv("HYSPARSE_AUTOTUNE", asked)
    attention_hysparse._load_kernels()
    assert len(triton_common._TUNERS) == tuners


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("HYSPARSE_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match=r"HYSPARSE_AUTOTUNE.*'yes'"):
        attention_hysparse._load_kernels()


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_of_something_else_is_refused_and_left(content, monkeypatch, tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text(content)
    monkeypatch.setenv("HYSPARSE_AUTOTUNE", str(path))
    with pytest.raises(ValueError, match=r"sizes\.json \(HYSPARSE_AUTOTUNE\) must hold launch sizes as JSON"):
        attention_hysparse._load_kernels()
    assert path.read_text() == content


def test_a_wrong_value_is_no_failure_of_a_kernel(monkeypatch):
    monkeypatch.setenv("HYSPARSE_AUTOTUNE", "yes")
    operations = dispatch_hysparse.Operations({"name": lambda states: states}, attention_hysparse._load_kernels)
    monkeypatch.setattr(dispatch_hysparse, "_on_device", lambda requested, device: "triton")
    with pytest.raises(ValueError, match="HYSPARSE_AUTOTUNE"):
        operations.run("auto", "name", torch.zeros(1))


@pytest.mark.parametrize("name", triton_autotune._TABLES)
def test_each_trial_reads_its_table(name, monkeypatch):
    searched = triton_autotune._TABLES[name]
    assert len(searched.places) == len(searched.table[KEY])
    monkeypatch.setattr(triton_autotune, "_LENGTHS", {2: 64, 4: 64})
    monkeypatch.setattr(triton_autotune, "_BLOCK_SIZE", 16)
    monkeypatch.setattr(triton_autotune, "_N_SELECTED", 2)
    query, _, value = make_states(8, heads=1)
    read = []
    trial = triton_autotune._trial(searched, query, value)
    triton_common.use_tuner(lambda table, *_: read.append(table))
    trial()
    assert any(table is searched.table for table in read)


@pytest.mark.gpu
def test_a_process_that_searches_gives_the_same_results(tmp_path):
    step = """
import torch
from hysparse_hf.modeling.attention_hysparse import sliding_window_attention
generator = torch.Generator().manual_seed(0)
states = [torch.randn(1, 2, 70, 64, generator=generator).cuda().bfloat16() for _ in range(3)]
print(sliding_window_attention(*states, window=9, backend="triton").float().sum().item())
"""
    printed = [
        subprocess.run(
            [sys.executable, "-c", step],
            env={**os.environ, "HYSPARSE_AUTOTUNE": asked},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for asked in ("0", str(tmp_path / "sizes.json"))
    ]
    assert float(printed[0]) == pytest.approx(float(printed[1]), abs=0.5)
    assert torch.cuda.get_device_name() in (tmp_path / "sizes.json").read_text()
    assert DEVICE == "cuda"
