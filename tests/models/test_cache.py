"""What crop, masks that change, and moves and copies of rows do to a growing cache: all of its parts, or none."""

import pickle

import pytest
import torch
from models.cache_runs import continues_right, filled, padded_or_not
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

from hysparse_hf import measure_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.cache_layers_hysparse import WINDOW_SLACK


switches = pytest.mark.parametrize("switch", SWITCHES)


def some_slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


# Crop


@padded_or_not
@pytest.mark.parametrize(
    ("switch", "removed"),
    [*(("default", removed) for removed in (0, 1, 5, 30)), *((name, 5) for name in SWITCHES if name != "default")],
)
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
def test_A05_crop_says_how_many_tokens_to_remove_on_every_version(padded):
    model = tiny_model(torch.float64)
    ids, mask, cache = filled(model, padded)
    # Once the number of tokens to keep; keeping five of forty, or none, would go unnoticed.
    with pytest.raises(ValueError, match="to keep n tokens pass n - 40"):
        cache.crop(5)
    cache.crop(0)
    assert cache.get_seq_length() == 40
    continues_right(model, ids, mask, cache.fork())
    cache.crop(-2)
    assert cache.get_seq_length() == 38
    continues_right(model, ids[:, :38], None if mask is None else mask[:, :38], cache)


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
@pytest.mark.parametrize("switch", ["default", "window_layers", *some_slow("no_window", "own_kv")])
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


# Padding and the window


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("max_cache_len", [None, 80], ids=["growing", "fixed"])
def test_padding_longer_than_the_ring_leaves_a_short_rows_window(max_cache_len, kind):
    model = tiny_model(torch.float64)
    mask = padded_mask(kind, (60, 15), 60)
    ids = spread([draw_ids(1, length, seed=length)[0] for length in (60, 15)], mask)
    cache = HySparseCache(model.config, max_cache_len=max_cache_len)
    run_in_chunks(model, ids, [60], mask, cache=cache)
    continues_right(model, ids, mask, cache)


@pytest.mark.parametrize("max_cache_len", [None, 80], ids=["growing", "fixed"])
def test_a_hidden_token_of_a_single_step_takes_one_column_of_the_slack(max_cache_len):
    model = tiny_model(torch.float64)
    mask = torch.ones(2, 51, dtype=torch.long)
    mask[0, 50] = 0
    ids = draw_ids(2, 51) * mask
    cache = HySparseCache(model.config, max_cache_len=max_cache_len)
    run_in_chunks(model, ids, [50, 1], mask, cache=cache)
    with pytest.raises(RuntimeError, match="at most 32 tokens"):
        cache.crop(-(WINDOW_SLACK + 1))
    cache.crop(-WINDOW_SLACK)
    continues_right(model, ids[:, :19], mask[:, :19], cache)


# Reorder, repeat, select, reset, copies


@padded_or_not
@pytest.mark.parametrize("cropped", [3, *some_slow(0)])
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
