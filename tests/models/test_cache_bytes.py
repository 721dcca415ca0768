"""What a cache costs: the formula of the specification, predicted and measured."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from models.cache_runs import append, padded_or_not
from models.generations import KINDS
from models.tiny import SWITCHES, draw_ids, padded_mask, run_in_chunks, tiny_config, tiny_model

from hysparse_hf import HySparseConfig, measure_cache_bytes, predict_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.cache_layers_hysparse import PAGE, WINDOW_SLACK


switches = pytest.mark.parametrize("switch", SWITCHES)


def formula(config, batch, length, itemsize, slack=WINDOW_SLACK):
    """Section 5 of the specification."""
    full, window = config.cache_plan.count("full"), config.cache_plan.count("window")
    columns = full * length + window * min(length, config.sliding_window + slack)
    return batch * config.num_key_value_heads * (config.head_dim + config.v_head_dim) * itemsize * columns


def test_the_switches_cache_what_the_specification_says():
    plans = {switch: tiny_config(**settings).cache_plan for switch, settings in SWITCHES.items()}
    repeated = {name: plan[:3] for name, plan in plans.items() if plan[:3] == plan[3:]}
    assert repeated["default"] == repeated["merged_own"] == repeated["own_oracle"] == ["full", "window", "window"]
    assert repeated["no_window"] == repeated["shared_window"] == repeated["merged_shared"] == ["full", "none", "none"]
    assert repeated["own_kv"] == repeated["own_kv_no_window"] == repeated["dense"] == ["full"] * 3
    assert plans["window_layers"] == ["window", "full", "window", "window", "full", "window"]


@padded_or_not
@pytest.mark.parametrize("length", [1, 6, 37, 38, 39, 60])
@switches
def test_used_bytes_equal_the_formula(switch, length, padded):
    model = tiny_model(**SWITCHES[switch])
    mask = padded_mask("left", (length, length // 2), length) if padded else None
    _, cache = run_in_chunks(model, draw_ids(2, length), [length], mask)
    used = formula(model.config, 2, length, 4)
    assert measure_cache_bytes(cache)["used"] == used
    assert predict_cache_bytes(model.config, 2, length, torch.float32)["used"] == used
    assert predict_cache_bytes(model.config, 2, length, torch.float32)["allocated"] >= used


@pytest.mark.parametrize(
    "switch", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in SWITCHES]
)
def test_used_and_allocated_bytes_after_a_prefill_and_a_thousand_steps(switch):
    config = tiny_config(**SWITCHES[switch])
    cache = HySparseCache(config)
    token = 2 * config.num_key_value_heads * (config.head_dim + config.v_head_dim) * 4
    layers = sum(kind != "none" for kind in config.cache_plan)
    lengths = [5000] + [1] * 1000
    for count, size in enumerate(lengths):
        append(cache, config, 2, size)
        if count in (0, 1, 500, 1000):
            length = 5000 + count
            measured, predicted = measure_cache_bytes(cache), predict_cache_bytes(config, 2, length, torch.float32)
            assert measured["used"] == predicted["used"] == formula(config, 2, length, 4)
            assert measured["full"] + measured["window"] == measured["used"]
            assert {name: measured[name] for name in ("full", "window")} == {
                name: predicted[name] for name in ("full", "window")
            }
            assert measured["used"] <= measured["allocated"] <= predicted["allocated"]
            assert measured["allocated"] <= 1.25 * measured["used"] + layers * PAGE * token


def test_a_prompt_is_not_held_on_to_by_window_layers():
    """A view of the last tokens would keep the storage of the whole prompt alive."""
    model = tiny_model()
    for padded in (False, True):
        mask = padded_mask("left", (400, 300), 400) if padded else None
        _, cache = run_in_chunks(model, draw_ids(2, 400), [400], mask)
        measured = measure_cache_bytes(cache)
        page = 2 * 2 * (24 + 24) * 4 * PAGE
        assert measured["allocated"] <= 1.25 * measured["used"] + 6 * page


def test_measured_bytes_count_storages_not_views():
    config = tiny_config(window_branch="none")
    cache = HySparseCache(config)
    append(cache, config, 1, 100)
    one = measure_cache_bytes(cache)
    cache.layers[3].keys, cache.layers[3].values = cache.layers[0].keys, cache.layers[0].values
    cache.layers[3]._buffers = cache.layers[0]._buffers
    two = measure_cache_bytes(cache)
    assert two["used"] == one["used"]
    assert two["allocated"] * 2 == one["allocated"]


def test_an_empty_cache_holds_nothing():
    nothing = {"full": 0, "window": 0, "pending": 0, "used": 0, "allocated": 0}
    assert measure_cache_bytes(HySparseCache(tiny_config())) == nothing
    assert predict_cache_bytes(tiny_config(), 3, 0, torch.bfloat16) == nothing


def test_bytes_are_counted_by_attributes_not_classes():
    class Foreign:
        model_type = "hysparse"

    for name in ("cache_plan", "num_key_value_heads", "head_dim", "v_head_dim", "sliding_window"):
        setattr(Foreign, name, getattr(tiny_config(), name))
    expected = predict_cache_bytes(tiny_config(), 2, 50, torch.float32)
    assert predict_cache_bytes(Foreign(), 2, 50, torch.float32) == expected
    assert predict_cache_bytes(Foreign(), 2, 50, "float32") == expected
    assert predict_cache_bytes(Foreign(), 2, 50, "torch.float32") == expected


@pytest.mark.parametrize("dtype", ["bf16", "nn", None])
def test_bytes_of_what_is_no_dtype_are_an_error(dtype):
    with pytest.raises(ValueError, match="`dtype` must be a torch.dtype or its name"):
        predict_cache_bytes(tiny_config(), 2, 50, dtype)


def test_a_configuration_without_a_cache_plan_is_an_error():
    with pytest.raises(ValueError, match="cache_plan"):
        predict_cache_bytes(object(), 1, 1, torch.float32)
    with pytest.raises(ValueError, match="at least 0"):
        predict_cache_bytes(tiny_config(), 1, -1, torch.float32)


def paper_config(plan, **settings):
    widths = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}
    return HySparseConfig(num_hidden_layers=49, layer_plan=plan, hidden_size=2048, **widths, **settings)


def test_worked_number_49_layers_with_5_full_cache_a_tenth():
    sparse = HySparseConfig(num_hidden_layers=49, sparse_layers_per_full=11)
    dense = HySparseConfig(num_hidden_layers=49, sparse_layers_per_full=11, dense=True)
    assert [i for i, kind in enumerate(sparse.layer_plan) if kind == "full"] == [0, 12, 24, 36, 48]
    length = 1_048_576
    ours, theirs = (predict_cache_bytes(config, 1, length, torch.bfloat16) for config in (sparse, dense))
    assert theirs["used"] / ours["full"] == pytest.approx(9.8, abs=1e-12)
    assert 9.7 < theirs["used"] / ours["used"] < 9.8


@pytest.mark.parametrize(
    ("full", "kind", "gigabytes"), [(5, "sparse", 6.718), (9, "window", 12.086)], ids=["hysparse", "hybrid_swa"]
)
def test_worked_number_of_the_paper_at_one_million_tokens_in_fp8(full, kind, gigabytes):
    others = 49 - full
    config = paper_config(["full"] * full + [kind] * others)
    used = predict_cache_bytes(config, 1, 1_048_576, torch.float8_e4m3fn, slack=0)["used"]
    assert used == full * 4 * 320 * 1_048_576 + others * 128 * 1280
    assert round(used / 1e9, 3) == gigabytes


REAL_GROWTH = """
    import gc, json, psutil, torch
    from hysparse_hf import HySparseCache, HySparseConfig, HySparseForCausalLM, measure_cache_bytes

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = HySparseConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, layer_plan=["full", "sparse"],
        num_attention_heads=2, num_key_value_heads=2, head_dim=1024, oracle_budget=256, eos_token_id=None,
        max_position_embeddings=8192,
    )
    model = HySparseForCausalLM(config).eval()
    process = psutil.Process()

    def resident():
        gc.collect()
        return process.memory_info().rss

    @torch.no_grad()
    def feed(cache, length):
        return model(torch.randint(61, (1, length)), cache=cache, logits_to_keep=1)

    warm = HySparseCache(config)  # what first calls allocate for themselves is not the cache's
    feed(warm, 1200), feed(warm, 1)
    del warm
    cache, rows = HySparseCache(config), []
    before = resident()
    feed(cache, 1200)
    rows.append((resident() - before, measure_cache_bytes(cache)))
    for _ in range(25):  # past the first prompt's room
        feed(cache, 16)
    rows.append((resident() - before, measure_cache_bytes(cache)))
    print(json.dumps(rows))
"""


def test_bytes_agree_with_the_growth_of_the_process():
    pytest.importorskip("psutil")
    # Freed blocks go back to the system at once, so that what stays resident is what is held.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL_GROWTH)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    noise = 4e6
    for growth, measured in json.loads(result.stdout.splitlines()[-1]):
        assert measured["used"] > 5 * noise
        # Room that nothing was written to yet is not resident.
        assert measured["used"] - noise <= growth <= measured["allocated"] + noise
