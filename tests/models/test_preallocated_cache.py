"""`HySparseCache(config, max_cache_len=n)`: what a growing cache gives, in buffers that never move."""

import pytest
import torch
from models import tiny, tiny2
from models.cache_runs import padded_or_not, rows_and_mask
from models.generations import FAST, both_generations, case
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
from torch.nn.functional import cosine_similarity

from hysparse_hf import measure_cache_bytes, predict_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT


switches = pytest.mark.parametrize("switch", SWITCHES)
LENGTHS = (41, 30)


def tensors_of(cache):
    """Every tensor that the cache holds on to."""
    buffers = [buffer for layer in cache.layers for buffer in getattr(layer, "_buffers", None) or ()]
    return [*buffers, cache.row_counts, cache.row_lost, cache.length, cache.removed]


def assert_continues(model, cache, ids, mask, new=(5, 1, 1, 9)):
    more = draw_ids(len(ids), sum(new), seed=9)
    whole = torch.cat([mask, torch.ones_like(more)], dim=1)
    logits, _ = run_in_chunks(model, more, new, whole, cache=cache)
    for row in range(len(ids)):
        tokens = torch.cat([ids[row], more[row]])[whole[row].bool()]
        assert_same_logits(logits[row], logits_alone(model, tokens)[-sum(new) :])


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
@padded_or_not
@torch.no_grad()
def test_a_step_may_come_in_another_number_format(max_cache_len, padded):
    """A prompt under autocast, then steps outside it, or the other way round: the cache keeps its first format."""
    # Every block is read, so that rounding cannot change a selection.
    model = tiny_model(oracle_budget=64)
    ids, mask = rows_and_mask(padded)
    ids = spread(ids, mask)
    plain = model(ids, attention_mask=mask, use_cache=False).logits
    for first in (True, False):
        cache = HySparseCache(model.config, max_cache_len=max_cache_len)
        pieces = []
        for part, lowered in ((slice(0, 34), first), (slice(34, 35), not first), (slice(35, 41), not first)):
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                pieces.append(model(ids[:, part], attention_mask=mask[:, : part.stop], cache=cache).logits.float())
        logits = torch.cat(pieces, dim=1)[:, 34:]
        assert cosine_similarity(logits, plain[:, 34:].float(), dim=-1).min() > 0.97


# Right at every length


@pytest.mark.parametrize(
    ("generation", "switch", "given", "padding"),
    [case(tiny, switch, "once", "left") for switch in tiny.SWITCHES]
    + [
        case(generation, "default", *rest)
        for generation in (tiny, tiny2)
        for rest in (("always", "left"), ("once", None))
    ]
    + [
        case(tiny2, switch, "once", "left", marks=() if switch in FAST else pytest.mark.slow)
        for switch in tiny2.MODELS
    ],
)
def test_chunks_and_steps_equal_each_row_alone(generation, switch, given, padding):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    rows, mask = rows_and_mask(padding)
    ids = spread(rows, mask)
    cache = HySparseCache(model.config, max_cache_len=48)
    with torch.no_grad():
        done, logits = 0, []
        for size in (13, 1, 1, 8, 1, 17):
            part = mask[:, : done + size] if given == "always" or not done or not bool(mask[:, done:].all()) else None
            step = model(ids[:, done : done + size], attention_mask=part, **{CACHE_ARGUMENT: cache}).logits
            logits.append(step)
            done += size
    assert int(cache.get_seq_length()) == 41
    for row, tokens in enumerate(rows):
        assert_same_logits(torch.cat(logits, dim=1)[row][mask[row].bool()], logits_alone(model, tokens))


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@both_generations
def test_masks_of_the_new_tokens_alone(generation, kind):
    """The cache knows its rows, so a mask need not be of what is cached."""
    model = generation.tiny_model(torch.float64)
    mask = padded_mask(kind, LENGTHS, 41)
    rows = [draw_ids(1, length, seed=length)[0] for length in LENGTHS]
    ids, cache, done, logits = spread(rows, mask), HySparseCache(model.config, max_cache_len=41), 0, []
    with torch.no_grad():
        for size in (14, 1, 6, 1, 1, 18):
            new = slice(done, done + size)
            logits.append(model(ids[:, new], attention_mask=mask[:, new], cache=cache).logits)
            done += size
    for row, tokens in enumerate(rows):
        assert_same_logits(torch.cat(logits, dim=1)[row][mask[row].bool()], logits_alone(model, tokens))


@pytest.mark.parametrize("length", range(4, 9))
def test_A10_A11_around_the_window(length):
    """Before the window is full nothing but tokens is attended, and nothing is lost when it fills."""
    model = tiny_model(torch.float64)
    ids = draw_ids(2, length + 4)
    logits, _ = run_in_chunks(model, ids, [length, 1, 1, 1, 1], cache=HySparseCache(model.config, max_cache_len=100))
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@torch.no_grad()
def test_maps_and_indices_equal_those_of_a_growing_cache():
    model = tiny_model(torch.float64, window_branch="merged_own").eval()
    model.set_attn_implementation("eager")
    rows, mask = rows_and_mask(padded=True)
    ids = spread(rows, mask)
    outputs = []
    for cache in (HySparseCache(model.config), HySparseCache(model.config, max_cache_len=64)):
        run_in_chunks(model, ids[:, :35], [30, 5], mask, cache=cache)
        asked = {"output_attentions": True, "output_selected_indices": True}
        outputs.append(model(ids[:, 35:], attention_mask=mask, cache=cache, **asked))
    growing, fixed = outputs
    for ours, theirs in zip(fixed.selected_indices, growing.selected_indices, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(fixed.attentions, growing.attentions, strict=True):
        assert_same_logits(ours, theirs)


# Addresses


@padded_or_not
def test_nothing_moves_once_it_is_allocated(padded):
    model = tiny_model(torch.float64)
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    cache = HySparseCache(model.config, max_cache_len=80)
    with torch.inference_mode():
        run_in_chunks(model, ids, [41], mask, cache=cache)
    held = tensors_of(cache)
    addresses = [tensor.data_ptr() for tensor in held]
    assert_continues(model, cache, ids, mask)
    cache.crop(-16)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_continues(model, cache, ids[[1, 0]], mask[[1, 0]])
    cache.reset()
    assert_continues(model, cache, ids[:, :0], mask[:, :0])
    assert [tensor.data_ptr() for tensor in held] == addresses
    assert all(a is b for a, b in zip(tensors_of(cache), held, strict=True))


def test_allocation_ahead_of_the_first_token():
    model = tiny_model(torch.float64, v_head_dim=40)
    cache = HySparseCache(model.config, max_cache_len=64)
    assert not cache.is_initialized
    cache.early_initialization(2, 2, 24, torch.float64, torch.device("cpu"))
    held = tensors_of(cache)
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    assert cache.layers[0].values.shape == (2, 2, 64, 40)
    rows, mask = rows_and_mask(padded=True)
    ids = spread(rows, mask)
    run_in_chunks(model, ids, [41], mask, cache=cache)
    assert_continues(model, cache, ids, mask)
    assert all(a is b for a, b in zip(tensors_of(cache), held, strict=True))


def test_what_the_library_asks_of_a_static_cache():
    config = tiny_config()
    cache = HySparseCache(config, max_cache_len=50)
    assert cache.is_compileable
    assert not HySparseCache(config).is_compileable
    assert cache.max_cache_len == cache.get_max_length() == 50
    assert HySparseCache(config).max_cache_len is None
    assert cache.get_mask_sizes(7, 0) == cache.get_mask_sizes(7, 1) == (7, 0)
    model = tiny_model()
    run_in_chunks(model, draw_ids(2, 9), [9], cache=cache)
    assert isinstance(cache.get_seq_length(), torch.Tensor)
    seen = {}
    update = cache.update

    def recording(key, value, layer_idx, **kwargs):
        announced = cache.get_mask_sizes(key.shape[2], layer_idx)[0]
        states = update(key, value, layer_idx, **kwargs)
        seen[layer_idx] = (announced, states[0].shape[2], states[1].shape[2])
        return states

    cache.update = recording
    run_in_chunks(model, draw_ids(2, 3), [3], cache=cache)
    assert [seen[index] for index in range(3)] == [(50, 50, 50), (8, 8, 8), (8, 8, 8)]


@switches
def test_bytes_are_predicted_exactly(switch):
    model = tiny_model(**SWITCHES[switch])
    cache = HySparseCache(model.config, max_cache_len=64)
    for length in (20, 21, 60):
        run_in_chunks(
            model,
            draw_ids(2, length - int(cache.get_seq_length())),
            [length - int(cache.get_seq_length())],
            cache=cache,
        )
        measured = measure_cache_bytes(cache)
        assert measured == predict_cache_bytes(model.config, 2, length, torch.float32, max_cache_len=64)
        assert measured["used"] == predict_cache_bytes(model.config, 2, length, torch.float32)["used"]


def test_bytes_of_more_than_fits_are_an_error():
    with pytest.raises(ValueError, match="`length` must be at most `max_cache_len`"):
        predict_cache_bytes(tiny_config(), 2, 65, torch.float32, max_cache_len=64)


# Refusals


@padded_or_not
def test_more_than_fits_is_refused_before_anything_is_written(padded):
    model = tiny_model(torch.float64)
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    cache = HySparseCache(model.config, max_cache_len=57)
    with pytest.raises(ValueError, match="`max_cache_len` = 57 tokens and holds 0, got 58"):
        run_in_chunks(model, draw_ids(2, 58), [58], cache=cache)
    run_in_chunks(model, ids, [41], mask, cache=cache)
    held = [tensor.clone() for tensor in tensors_of(cache)]
    for size in (17, 20):
        whole = torch.cat([mask, torch.ones(2, size, dtype=torch.long)], dim=1)
        with pytest.raises(ValueError, match="`max_cache_len` = 57 tokens and holds 41"):
            run_in_chunks(model, draw_ids(2, size), [size], whole, cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), held, strict=True))
    assert_continues(model, cache, ids, mask)
    with pytest.raises(ValueError, match="holds 57, got 1 more"):
        run_in_chunks(model, draw_ids(2, 1), [1], cache=cache)


@pytest.mark.parametrize("length", [0, -3])
def test_a_length_that_is_not_positive_is_an_error(length):
    with pytest.raises(ValueError, match="`max_cache_len` must be at least 1"):
        HySparseCache(tiny_config(), max_cache_len=length)


def test_offloading_buffers_that_must_stay_is_an_error():
    with pytest.raises(ValueError, match="got both; leave out one"):
        HySparseCache(tiny_config(), max_cache_len=8, offloading=True)


def test_the_length_of_one_layer_is_an_error():
    cache = HySparseCache(tiny_config(), max_cache_len=20)
    with pytest.raises(NotImplementedError, match=r"ask `cache\.get_seq_length\(\)`"):
        cache.layers[0].get_seq_length()


def test_gradients_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="require gradients"):
        model(draw_ids(1, 5), cache=HySparseCache(model.config, max_cache_len=9))
    model.requires_grad_(False)
    model(draw_ids(1, 5), cache=HySparseCache(model.config, max_cache_len=9))


@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_4d_masks_are_refused_behind_cached_tokens(name):
    model = tiny_model()
    cache = HySparseCache(model.config, max_cache_len=30)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    ids = draw_ids(1, 20)
    logits = model(ids[:, :15], attention_mask=mask[:, :, :15, :15], **{name: cache}).logits[0]
    assert_same_logits(logits, logits_alone(model, ids[0])[:15])
    with pytest.raises(ValueError, match="pre-allocated"):
        model(ids[:, 15:], attention_mask=mask[:, :, 15:], **{name: cache})
