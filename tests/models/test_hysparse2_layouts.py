"""A row of the second generation gives the same logits alone, padded anywhere, packed, in chunks, and with a cache."""

import pytest
import torch
from models.tiny import (
    CACHE_NAMES,
    assert_same_logits,
    draw_ids,
    logits_alone,
    padded_mask,
    run_in_chunks,
    spread,
)
from models.tiny2 import MODELS, over_models, tiny_model

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import cache_of


LENGTHS = (33, 50, 41)
TOTAL = 56
DOCUMENTS = (20, 30, 1, 9)

switches = over_models()
paddings = pytest.mark.parametrize("padding", ["left", "right", "holes"])


def rows_of(lengths=LENGTHS, seed=3):
    return [draw_ids(1, length, seed + row)[0] for row, length in enumerate(lengths)]


def assert_rows_equal_alone(model, logits, rows, mask):
    for row, tokens in enumerate(rows):
        assert_same_logits(logits[row][mask[row].bool()], logits_alone(model, tokens))


@switches
@torch.no_grad()
def test_padded_rows_equal_the_row_alone(switch):
    model = tiny_model(torch.float64, **MODELS[switch])
    rows = rows_of()
    for padding in ("left", "right", "holes"):
        mask = padded_mask(padding, LENGTHS, TOTAL)
        logits = model(spread(rows, mask), attention_mask=mask).logits
        assert logits.isfinite().all()
        assert_rows_equal_alone(model, logits, rows, mask)


@paddings
@switches
def test_padded_rows_in_chunks_equal_the_row_alone(switch, padding):
    model = tiny_model(torch.float64, **MODELS[switch])
    rows, mask = rows_of(), padded_mask(padding, LENGTHS, TOTAL)
    logits, _ = run_in_chunks(model, spread(rows, mask), (11, 1, 2, 3, 7, *[1] * 6, 26), mask)
    assert logits.isfinite().all()
    assert_rows_equal_alone(model, logits, rows, mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@switches
def test_A07_several_new_tokens_on_a_filled_cache(switch, dtype):
    model = tiny_model(dtype, **MODELS[switch])
    ids = draw_ids(2, 48)
    expected = torch.stack([logits_alone(model, row) for row in ids])
    for chunks in ((11, 1, 2, 3, 7, 24), (5, 6, 37)):
        logits, _ = run_in_chunks(model, ids, chunks)
        assert_same_logits(logits, expected)


@pytest.mark.parametrize("name", CACHE_NAMES)
@switches
def test_A07_one_token_at_a_time(switch, name):
    model = tiny_model(torch.float64, **MODELS[switch])
    ids = draw_ids(1, 40)
    logits, cache = run_in_chunks(model, ids, [1] * 40, name=name)
    assert cache.get_seq_length() == 40
    assert_same_logits(logits[0], logits_alone(model, ids[0]))


@pytest.mark.parametrize("padding", [None, "left", "holes"])
@switches
@torch.no_grad()
def test_a_cache_of_fixed_length_equals_the_row_alone(switch, padding):
    model = tiny_model(torch.float64, **MODELS[switch])
    rows, mask = rows_of(), None if padding is None else padded_mask(padding, LENGTHS, TOTAL)
    ids = torch.stack([row[:33] for row in rows]) if mask is None else spread(rows, mask)
    length = ids.shape[1]
    chunks = (20, 1, 5, *[1] * (length - 26))
    logits, _ = run_in_chunks(model, ids, chunks, mask, cache=HySparseCache(model.config, max_cache_len=64))
    whole = torch.ones(3, length) if mask is None else mask
    assert_rows_equal_alone(model, logits, [row[:33] for row in rows] if mask is None else rows, whole)


@switches
@torch.no_grad()
def test_B01_use_cache_changes_neither_logits_nor_loss(switch):
    model = tiny_model(torch.float64, **MODELS[switch])
    ids = draw_ids(2, 40)
    mask = padded_mask("left", (40, 29), 40)
    for arguments in ({}, {"attention_mask": mask}, {"labels": ids}, {"attention_mask": mask, "labels": ids}):
        off = model(ids, use_cache=False, **arguments)
        on = model(ids, use_cache=True, **arguments)
        assert cache_of(off) is None
        assert cache_of(on).get_seq_length() == 40
        assert_same_logits(on.logits, off.logits)
        if "labels" in arguments:
            assert abs(on.loss - off.loss) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@switches
@torch.no_grad()
def test_F12_packed_documents_equal_the_document_alone(switch, dtype):
    model = tiny_model(dtype, **MODELS[switch])
    rows = rows_of(DOCUMENTS)
    ids = torch.cat(rows)[None]
    expected = torch.cat([logits_alone(model, row) for row in rows])
    positions = {"position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None]}
    bounds = {"cu_seq_lens_q": torch.tensor([0, *DOCUMENTS]).cumsum(0).int()}
    for arguments in (positions, bounds, {**positions, **bounds}):
        output = model(ids, use_cache=True, **arguments)
        assert cache_of(output) is None
        assert_same_logits(output.logits[0], expected)


@switches
@torch.no_grad()
def test_a_causal_4d_mask_equals_no_mask(switch):
    model = tiny_model(torch.float64, **MODELS[switch])
    ids = draw_ids(2, 40)
    whole = model(ids, use_cache=False).logits
    cache, pieces, done = None, [], 0
    for size in (15, 1, 20, 4):
        mask = torch.ones(size, done + size, dtype=torch.bool).tril(done)[None, None].expand(2, -1, -1, -1)
        output = model(ids[:, done : done + size], attention_mask=mask, use_cache=True, cache=cache)
        cache, done = cache_of(output), done + size
        pieces.append(output.logits)
    assert_same_logits(torch.cat(pieces, dim=1), whole)


# Rows of the known faults


def test_A09_first_layer_is_a_window_layer():
    """T2 begins with one: lengths and masks must not be read from its window."""
    model = tiny_model(torch.float64)
    assert model.config.layer_plan[0] == "window"
    ids = draw_ids(2, 23)
    logits, cache = run_in_chunks(model, ids, [10] + [1] * 13)
    assert cache.get_seq_length() == 23
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8])
def test_A10_prompt_length_near_the_window(length):
    model = tiny_model(torch.float64)
    ids = draw_ids(2, length + 4)
    logits, _ = run_in_chunks(model, ids, [length, 1, 1, 1, 1])
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@switches
@torch.no_grad()
def test_A13_a_prefill_longer_than_the_window_sees_no_future_token(switch):
    model = tiny_model(**MODELS[switch])
    ids = draw_ids(1, 40)
    other = ids.clone()
    other[0, 30] = 2 if ids[0, 30] != 2 else 3
    one, two = (model(tokens, use_cache=True).logits[0] for tokens in (ids, other))
    assert one.isfinite().all()
    assert torch.equal(one[:30], two[:30])
    assert not torch.equal(one[30], two[30])


@torch.no_grad()
def test_A16_padding_counts_in_a_batch_of_one():
    model = tiny_model()
    tokens = draw_ids(1, 37)[0]
    mask = padded_mask("left", (37,), 40)
    logits = model(spread([tokens], mask), attention_mask=mask, logits_to_keep=1).logits[0, -1]
    assert_same_logits(logits, logits_alone(model, tokens)[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pads", [1, 31, 33])
@torch.no_grad()
def test_A17_left_padding_is_finite_everywhere(pads, dtype):
    model = tiny_model(dtype)
    rows = rows_of((40, 40 + pads))
    mask = padded_mask("left", (40, 40 + pads), 40 + pads)
    for kept in (0, 1, pads + 40):
        logits = model(spread(rows, mask), attention_mask=mask, logits_to_keep=kept).logits
        assert logits.isfinite().all()
    if dtype == torch.float32:
        assert_rows_equal_alone(model, logits, rows, mask)


@torch.no_grad()
def test_a_row_of_nothing_but_padding_stays_finite_and_apart():
    model = tiny_model(torch.float64)
    rows = rows_of((0, 44, 31))
    mask = padded_mask("left", (0, 44, 31), 44)
    logits, cache = run_in_chunks(model, spread(rows, mask), (20, *[1] * 24), mask)
    assert logits.isfinite().all()
    assert_rows_equal_alone(model, logits[1:], rows[1:], mask[1:])
    late = draw_ids(3, 9, seed=8)
    mask = torch.cat([mask, torch.ones(3, 9, dtype=torch.long)], dim=1)
    logits, _ = run_in_chunks(model, late, [5, 1, 3], mask, cache=cache)
    assert_same_logits(logits[0], logits_alone(model, late[0]))
