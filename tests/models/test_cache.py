"""What the cache holds, how it grows, and that every operation on it acts on all of its parts."""

import json
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from models.tiny import (
    CACHE_NAMES,
    SWITCHES,
    assert_same_logits,
    draw_ids,
    logits_alone,
    padded_mask,
    run_in_chunks,
    spread,
    tiny_config,
    tiny_model,
)

from hysparse_hf import HySparseConfig, measure_cache_bytes, predict_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.cache_layers_hysparse import PAGE, WINDOW_SLACK
from hysparse_hf.modeling.compat_transformers import cache_of
from hysparse_hf.modeling.rows_hysparse import layout_of_mask


switches = pytest.mark.parametrize("switch", SWITCHES)
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])


def states_of(config, batch, length, seed=0):
    """Synthetic keys and values of one layer."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.num_key_value_heads, length)
    return (
        torch.randn(*shape, config.head_dim, generator=generator),
        torch.randn(*shape, config.v_head_dim, generator=generator),
    )


@torch.no_grad()
def append(cache, config, batch, length, **kwargs):
    for index, kind in enumerate(config.cache_plan):
        if kind != "none":
            cache.update(*states_of(config, batch, length), index, **kwargs)


def storages_of(cache):
    """Data pointer of what each layer's keys stand in."""
    return [None if layer.keys is None else layer.keys.untyped_storage().data_ptr() for layer in cache.layers]


def filled(model, padded=False, length=40, batch=3):
    """Ids, mask and a cache that holds `length` slots of three rows, filled in three pieces."""
    mask = padded_mask("left", (length, length - 9, length - 4)[:batch], length) if padded else None
    ids = draw_ids(batch, length)
    if mask is not None:
        ids = ids * mask
    _, cache = run_in_chunks(model, ids, [length - 4, 1, 3], mask)
    return ids, mask, cache


def continues_right(model, ids, mask, cache, new=(5, 1, 1), seed=9, pass_mask=True):
    """More tokens on the cache give what each row gives alone; without a mask the cache knows its rows itself."""
    more = draw_ids(len(ids), sum(new), seed=seed)
    longer = torch.cat([ids, more], dim=1)
    whole = torch.ones_like(longer)
    if mask is not None:
        whole[:, : ids.shape[1]] = mask
    passed = whole if pass_mask and mask is not None else None
    logits, cache = run_in_chunks(model, more, new, passed, cache=cache)
    for row in range(len(ids)):
        tokens = longer[row][whole[row].bool()]
        assert_same_logits(logits[row], logits_alone(model, tokens)[-more.shape[1] :])
    return longer, None if mask is None else whole


# Bytes


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


@switches
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
    nothing = {"full": 0, "window": 0, "used": 0, "allocated": 0}
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
    for _ in range(1000):
        feed(cache, 1)
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


# Growth


@padded_or_not
def test_few_reallocations_over_4096_appended_tokens(padded):
    config = tiny_config()
    cache = HySparseCache(config)
    append(cache, config, 2, 50)
    changes = [0] * len(config.cache_plan)
    last = storages_of(cache)
    states = states_of(config, 2, 1)
    with torch.no_grad():
        for step in range(4096):
            layout = layout_of_mask(torch.ones(2, 51 + step), 1) if padded else None
            for index in range(6):
                cache.update(*states, index, layout=layout)
            now = storages_of(cache)
            for index, (a, b) in enumerate(zip(last, now, strict=True)):
                changes[index] += a != b
            last = now
    assert cache.get_seq_length() == 4146
    # With a mask, rows of a window move by different counts, and each step makes a new window of the same size.
    counted = [changes[index] for index in ((0, 3) if padded else range(6))]
    assert max(counted) <= 20
    assert changes[0] > 0


def test_growth_appending_under_no_grad_after_inference_mode():
    model = tiny_model()
    ids = draw_ids(1, 40)
    for prefill in (3, 30):
        with torch.inference_mode():
            cache = cache_of(model(ids[:, :prefill], use_cache=True))
            model(ids[:, prefill : prefill + 1], cache=cache)
        logits, _ = run_in_chunks(model, ids[:, prefill + 1 :], [1, 1, 5, 40 - prefill - 8], cache=cache)
        assert_same_logits(logits[0], logits_alone(model, ids[0])[prefill + 1 :])


def test_growth_with_gradients_after_inference_mode():
    model = tiny_model()
    ids = draw_ids(1, 40)
    with torch.inference_mode():
        _, cache = run_in_chunks(model, ids[:, :30], [28, 1, 1])
    output = model(ids[:, 30:], cache=cache)
    output.logits.sum().backward()
    assert_same_logits(output.logits[0].detach(), logits_alone(model, ids[0])[30:])


@padded_or_not
def test_growth_two_forwards_with_gradients_on_one_cache(padded):
    """The gradients are those of one forward over everything."""
    model = tiny_model(torch.float64)
    ids = draw_ids(2, 30)
    mask = padded_mask("left", (30, 22), 30) if padded else torch.ones(2, 30, dtype=torch.long)
    weights = torch.randn(2, 30, 61, dtype=torch.float64) * mask[..., None]

    def gradients(chunks):
        model.zero_grad()
        cache, done, total = HySparseCache(model.config), 0, 0.0
        for size in chunks:
            part = mask[:, : done + size] if padded else None
            logits = model(ids[:, done : done + size], attention_mask=part, cache=cache).logits
            total = total + (logits * weights[:, done : done + size]).sum()
            done += size
        total.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    whole, pieces = gradients([30]), gradients([12, 1, 1, 16])
    for name, gradient in whole.items():
        torch.testing.assert_close(pieces[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


def test_growth_appending_without_gradients_leaves_an_earlier_backward_intact():
    model = tiny_model(torch.float64)
    ids = draw_ids(1, 30)
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
        model(ids[:, 10:12], cache=cache)
    loss = model(ids[:, 12:20], cache=cache).logits.square().sum()
    run_in_chunks(model, ids[:, 20:], [1, 1, 8], cache=cache)
    loss.backward()
    taken = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :12], cache=cache)
    model(ids[:, 12:20], cache=cache).logits.square().sum().backward()
    for a, b in zip(taken, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-9, rtol=1e-9)


def test_growth_a_kept_view_shows_new_tokens_after_crop_and_append():
    """The documented aliasing: views are of the buffer, which is written in place."""
    config = tiny_config()
    cache = HySparseCache(config)
    append(cache, config, 1, 20)
    view = cache.layers[0].keys
    copied = view.clone()
    append(cache, config, 1, 3)
    assert torch.equal(view, copied)
    cache.crop(-6)
    append(cache, config, 1, 5)
    assert torch.equal(view[:, :, :17], copied[:, :, :17])
    assert not torch.equal(view[:, :, 17:], copied[:, :, 17:])


# Crop


@padded_or_not
@pytest.mark.parametrize("removed", [0, 1, 5, 30])
@switches
def test_crop_removes_the_last_tokens(switch, removed, padded):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids, mask, cache = filled(model, padded)
    cache.crop(-removed)
    assert cache.get_seq_length() == 40 - removed
    left = 40 - removed
    continues_right(model, ids[:, :left], None if mask is None else mask[:, :left], cache)


@padded_or_not
def test_crop_again_and_again_within_the_slack(padded):
    model = tiny_model(torch.float64)
    ids, mask, cache = filled(model, padded)
    for removed, new in ((3, (2, 1)), (4, (6,)), (2, (1, 1, 1)), (9, (7, 7))):
        cache.crop(-removed)
        left = ids.shape[1] - removed
        kept_mask = None if mask is None else mask[:, :left]
        ids, mask = continues_right(model, ids[:, :left], kept_mask, cache, new, seed=removed)


@padded_or_not
def test_crop_twice_before_the_next_token(padded):
    model = tiny_model(torch.float64)
    ids, mask, cache = filled(model, padded)
    cache.crop(-3)
    cache.crop(0)
    cache.crop(-4)
    continues_right(model, ids[:, :33], None if mask is None else mask[:, :33], cache)


@padded_or_not
def test_crop_of_everything_starts_anew(padded):
    model = tiny_model(torch.float64)
    ids, mask, cache = filled(model, padded, length=20)
    cache.crop(-20)
    assert cache.get_seq_length() == 0
    fresh = draw_ids(3, 15, seed=4)
    ones = torch.ones_like(fresh) if padded else None
    logits, _ = run_in_chunks(model, fresh, [9, 1, 5], ones, cache=cache)
    for row in range(3):
        assert_same_logits(logits[row], logits_alone(model, fresh[row]))


@padded_or_not
def test_crop_past_the_slack_is_an_error_that_loses_nothing(padded):
    model = tiny_model(torch.float64)
    ids, mask, cache = filled(model, padded, length=80)
    held = measure_cache_bytes(cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-(WINDOW_SLACK + 2))
    assert measure_cache_bytes(cache) == held
    continues_right(model, ids, mask, cache)


@padded_or_not
@pytest.mark.parametrize("tokens", [5, -41])
def test_crop_by_a_wrong_number_is_an_error(tokens, padded):
    _, _, cache = filled(tiny_model(), padded)
    with pytest.raises(ValueError, match="number of tokens to remove"):
        cache.crop(tokens)
    assert cache.get_seq_length() == 40


@padded_or_not
@switches
def test_A02_single_tokens_without_a_crop_between_them(switch, padded):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    lengths = (10, 7)
    mask = torch.cat([padded_mask("left", lengths, 10), torch.ones(2, 20, dtype=torch.long)], dim=1)
    rows = [draw_ids(1, length + 20, seed=length)[0] for length in lengths]
    if not padded:
        mask, rows = torch.ones_like(mask), list(draw_ids(2, 30))
    ids = spread(rows, mask)
    cache = HySparseCache(model.config)
    cache.activate_past_recording()
    seen = {}

    def record(update):
        def recording(key, value, layer_idx, *args, **kwargs):
            announced = cache.get_mask_sizes(key.shape[2], layer_idx)[0]
            keys, values = update(key, value, layer_idx, *args, **kwargs)
            seen.setdefault(layer_idx, []).append((announced, keys.shape[2], values.shape[2]))
            return keys, values

        return recording

    cache.update = record(cache.update)
    given = mask if padded else None
    first, _ = run_in_chunks(model, ids[:, :15], [10, 1, 1, 1, 1, 1], given, cache=cache)
    cache.crop(-3)
    second, _ = run_in_chunks(model, ids[:, 12:], [1, 4, 1, 12], given, cache=cache)
    assert all(announced == keys == values for calls in seen.values() for announced, keys, values in calls)
    assert sorted(seen) == [index for index, kind in enumerate(model.config.cache_plan) if kind != "none"]
    for row, tokens in enumerate(rows):
        alone = logits_alone(model, tokens)
        assert_same_logits(first[row][mask[row, :15].bool()], alone[: len(tokens) - 15])
        assert_same_logits(second[row], alone[len(tokens) - 18 :])


@padded_or_not
def test_recorded_window_layers_shrink_at_crop(padded):
    """`crop(0)` after each burst keeps window layers at their size."""
    model = tiny_model(torch.float64)
    mask = padded_mask("left", (80, 70), 80) if padded else None
    ids = draw_ids(2, 80)
    cache = HySparseCache(model.config)
    cache.activate_past_recording()
    run_in_chunks(model, ids, [80], mask, cache=cache)
    assert cache.layers[1].keys.shape[2] == 80
    cache.crop(0)
    assert cache.layers[1].keys.shape[2] == 6 + WINDOW_SLACK
    ids = ids if mask is None else ids * mask
    ids, mask = continues_right(model, ids, mask, cache, new=(4, 4))
    cache.crop(-2)
    continues_right(model, ids[:, :-2], None if mask is None else mask[:, :-2], cache, new=(3, 1))
    cache.crop(0)
    assert cache.layers[1].keys.shape[2] <= 6 + WINDOW_SLACK


# A mask that changes for cached tokens


@padded_or_not
@pytest.mark.parametrize("hidden", [(3, 0, 8), (32, 1, 0)], ids=["few", "slack"])
@pytest.mark.parametrize("new", [(5, 1, 1), (1, 1, 5)], ids=["several", "single"])
@pytest.mark.parametrize("switch", ["default", "no_window", "own_kv", "window_layers"])
def test_a_mask_may_take_out_the_end_of_a_cached_row(switch, new, hidden, padded):
    """As after a batch in which some rows ended early and were filled up."""
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids, mask, cache = filled(model, padded, length=60)
    mask = torch.ones_like(ids) if mask is None else mask.clone()
    for row, count in enumerate(hidden):
        mask[row, 60 - count :] = 0
    ids, mask = continues_right(model, ids, mask, cache, new)
    continues_right(model, ids, mask, cache)


@padded_or_not
@torch.no_grad()
def test_a_mask_that_takes_out_more_than_the_slack_is_an_error(padded):
    model = tiny_model()
    ids, mask, cache = filled(model, padded, length=60)
    mask = torch.cat([torch.ones_like(ids) if mask is None else mask, torch.ones(3, 4, dtype=torch.long)], dim=1)
    mask[0, 60 - WINDOW_SLACK - 3 : 60] = 0
    with pytest.raises(ValueError, match="must show the cached tokens"):
        model(draw_ids(3, 4), attention_mask=mask, cache=cache)
    assert cache.get_seq_length() == 60


@torch.no_grad()
def test_a_mask_that_shows_what_was_padding_is_an_error():
    model = tiny_model()
    _, _, cache = filled(model, padded=True)
    with pytest.raises(ValueError, match="must show the cached tokens"):
        model(draw_ids(3, 4), attention_mask=torch.ones(3, 44, dtype=torch.long), cache=cache)


# Reorder, repeat, select, reset, copies


@padded_or_not
@pytest.mark.parametrize("cropped", [0, 3])
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([1, 2]), [1, 2]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
    ],
    ids=["reorder", "repeat", "select", "select_by_mask"],
)
@pytest.mark.parametrize("switch", ["default", "no_window", "own_kv", "window_layers"])
def test_rows_of_the_cache_move_together(switch, method, argument, rows, cropped, padded):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids, mask, cache = filled(model, padded)
    cache.crop(-cropped)
    ids = ids[:, : 40 - cropped]
    mask = None if mask is None else mask[:, : 40 - cropped]
    getattr(cache, method)(argument)
    mask = None if mask is None else mask[rows]
    twin = cache.fork()
    continues_right(model, ids[rows], mask, cache)
    continues_right(model, ids[rows], mask, twin, pass_mask=False)


@padded_or_not
def test_reset_forgets_everything(padded):
    model = tiny_model(torch.float64)
    _, _, cache = filled(model, padded)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert measure_cache_bytes(cache)["allocated"] == 0
    ids = draw_ids(2, 30, seed=6)
    logits, _ = run_in_chunks(model, ids, [20, 1, 9], cache=cache)
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@padded_or_not
@pytest.mark.parametrize(
    "copy_of", [HySparseCache.fork, lambda c: pickle.loads(pickle.dumps(c))], ids=["fork", "pickle"]
)
@pytest.mark.parametrize("switch", ["default", "no_window", "own_kv"])
def test_copies_are_independent_and_no_larger(switch, copy_of, padded):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids, mask, cache = filled(model, padded)
    cache.crop(-2)
    ids, mask = ids[:, :38], None if mask is None else mask[:, :38]
    twin = copy_of(cache)
    assert measure_cache_bytes(twin)["used"] == measure_cache_bytes(cache)["used"]
    assert measure_cache_bytes(twin)["allocated"] <= measure_cache_bytes(cache)["allocated"]
    continues_right(model, ids, mask, cache, seed=1)
    continues_right(model, ids, mask, twin, seed=2)


def test_a_copy_made_in_inference_mode_continues_outside():
    model = tiny_model(torch.float64)
    with torch.inference_mode():
        ids, mask, cache = filled(model)
        twin = cache.fork()
    continues_right(model, ids, mask, twin)
    continues_right(model, ids, mask, cache)


@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_another_batch_size_is_an_error(name):
    model = tiny_model()
    _, cache = run_in_chunks(model, draw_ids(2, 10), [10])
    with pytest.raises(ValueError, match="batch, kv_heads"):
        model(draw_ids(3, 2), **{name: cache})


def test_a_cache_of_another_model_is_an_error():
    cache = HySparseCache(tiny_config(layer_plan=["full", "sparse"]))
    with pytest.raises(ValueError, match="one layer per model layer"):
        tiny_model()(draw_ids(1, 3), cache=cache)


@switches
def test_the_cache_has_one_layer_per_model_layer(switch):
    model = tiny_model(**SWITCHES[switch])
    _, cache = run_in_chunks(model, draw_ids(2, 12), [12])
    assert len(cache) == model.config.num_hidden_layers
    for layer, kind in zip(cache.layers, model.config.cache_plan, strict=True):
        if kind != "none":
            assert layer.keys.shape == (2, 2, 12, model.config.head_dim)
            assert layer.values.shape == (2, 2, 12, model.config.v_head_dim)
