"""Two processes on one machine: data parallel, fully sharded and tensor parallel training equal one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


WORKER = Path(__file__).with_name("distributed_worker.py")
RANKS = pytest.mark.parametrize("rank", [0, 1])
GENERATIONS = pytest.mark.parametrize("generation", ["T1", "T2"])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Per rank what the checks of `distributed_worker.py` returned, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    # Two processes of the CPU: gloo, and no card that a device mesh would rather take.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        for rank in (0, 1)
    ]
    try:
        printed = [worker.communicate(timeout=400)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(printed)[-5000:]
    return {"printed": printed, "ranks": [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]}


def outcome(seen, rank, generation, name):
    result = seen["ranks"][rank][f"{generation}-{name}"]
    assert "failure" not in result, result["failure"]
    return result


@GENERATIONS
@RANKS
@pytest.mark.parametrize("name", ["ddp", "ddp-checkpointing"])
def test_data_parallel_needs_no_search_for_unused_parameters(seen, rank, generation, name):
    result = outcome(seen, rank, generation, name)
    assert result["missing"] == []
    assert result["worst"] < 1e-10


@GENERATIONS
@RANKS
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-reentrant", "fsdp2-not-reentrant", "fsdp2-library"])
def test_fully_sharded_gradients_survive_rebuilt_arguments_B03(seen, rank, generation, name):
    result = outcome(seen, rank, generation, name)
    assert result["missing"] == []
    assert result["worst"] < 1e-10


@GENERATIONS
@RANKS
def test_fully_sharded_mixed_precision_computes_what_a_bfloat16_model_does_B03(seen, rank, generation):
    found = outcome(seen, rank, generation, "fsdp2-mixed-precision")
    assert found == {"equal": True, "dtypes": ["torch.float32"]}


FIRST = ("wide_values", "window_layers", "headwise_full_gate", "experts")
SECOND = ("wide_values", "two_bridges", "own_kv", "experts")
settings = pytest.mark.parametrize(
    ("generation", "name"), [*(("T1", name) for name in FIRST), *(("T2", name) for name in SECOND)]
)


@RANKS
class TestTensorParallel:
    @settings
    def test_equals_one_process(self, seen, rank, generation, name):
        result = outcome(seen, rank, generation, f"tp-{name}")
        assert result["missing"] == []
        assert result["worst"] < 1e-10
        assert result["logits"] < 1e-10
        assert result["tokens"]

    @settings
    def test_each_rank_selects_for_its_own_kv_groups(self, seen, rank, generation, name):
        assert outcome(seen, rank, generation, f"tp-{name}")["own_groups"]

    @settings
    def test_only_norms_and_routers_stay_whole(self, seen, rank, generation, name):
        kept = outcome(seen, rank, generation, f"tp-{name}")["whole"]
        assert kept
        assert [key for key in kept if not re.search(r"norm|mlp\.gate\.|shared_expert_gate", key)] == []

    @settings
    def test_saves_whole_tensors_F11(self, seen, rank, generation, name):
        saved = outcome(seen, rank, generation, f"tp-{name}")["saved"]
        if name == "experts" and torch.__version__.startswith("2.11."):
            # The library's own models of experts fail alike: this release gathers no packed projection.
            assert "_StridedShard" in saved
            pytest.xfail("torch 2.11 does not save experts under tensor parallelism; 2.13 does")
        assert saved is True

    @GENERATIONS
    def test_kv_heads_that_do_not_divide_are_refused(self, seen, rank, generation):
        error = outcome(seen, rank, generation, "tp-one-kv-head")["error"]
        assert "`num_key_value_heads` (1) must be a multiple" in error

    def test_no_rule_of_the_plan_is_left_over(self, seen, rank):
        assert "match nothing" not in seen["printed"][rank]
