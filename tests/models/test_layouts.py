"""A row gives the same logits alone, padded anywhere, packed, in chunks, with and without a cache."""

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

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import cache_of


LENGTHS = (33, 50, 41)
TOTAL = 56
DTYPES = {"float64": torch.float64, "float32": torch.float32}

switches = pytest.mark.parametrize("switch", SWITCHES)
paddings = pytest.mark.parametrize("padding", ["left", "right", "holes"])
dtypes = pytest.mark.parametrize("dtype", DTYPES)
cache_names = pytest.mark.parametrize("name", CACHE_NAMES)


def rows_of(lengths=LENGTHS, seed=3):
    return [draw_ids(1, length, seed + row)[0] for row, length in enumerate(lengths)]


def assert_rows_equal_alone(model, logits, rows, mask):
    for row, tokens in enumerate(rows):
        assert_same_logits(logits[row][mask[row].bool()], logits_alone(model, tokens))


@paddings
@switches
@torch.no_grad()
def test_padded_rows_equal_the_row_alone(switch, padding):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    rows, mask = rows_of(), padded_mask(padding, LENGTHS, TOTAL)
    logits = model(spread(rows, mask), attention_mask=mask).logits
    assert logits.isfinite().all()
    assert_rows_equal_alone(model, logits, rows, mask)


@switches
@torch.no_grad()
def test_padded_rows_in_float32_equal_the_row_alone(switch):
    model = tiny_model(**SWITCHES[switch])
    rows, mask = rows_of(), padded_mask("holes", LENGTHS, TOTAL)
    assert_rows_equal_alone(model, model(spread(rows, mask), attention_mask=mask).logits, rows, mask)


@paddings
@switches
def test_padded_rows_in_chunks_equal_the_row_alone(switch, padding):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    rows, mask = rows_of(), padded_mask(padding, LENGTHS, TOTAL)
    for chunks in ((30, 26), (11, 1, 2, 3, 7, *[1] * 6, 26)):
        logits, _ = run_in_chunks(model, spread(rows, mask), chunks, mask)
        assert logits.isfinite().all()
        assert_rows_equal_alone(model, logits, rows, mask)


@paddings
def test_padded_rows_one_token_at_a_time_equal_the_row_alone(padding):
    model = tiny_model(torch.float64)
    rows, mask = rows_of(), padded_mask(padding, LENGTHS, TOTAL)
    logits, _ = run_in_chunks(model, spread(rows, mask), [1] * TOTAL, mask)
    assert_rows_equal_alone(model, logits, rows, mask)


@dtypes
@switches
def test_A07_several_new_tokens_on_a_filled_cache(switch, dtype):
    model = tiny_model(DTYPES[dtype], **SWITCHES[switch])
    ids = draw_ids(2, 48)
    expected = torch.stack([logits_alone(model, row) for row in ids])
    for chunks in ((11, 1, 2, 3, 7, 24), (30, 18), (5, 6, 37)):
        logits, _ = run_in_chunks(model, ids, chunks)
        assert_same_logits(logits, expected)


@cache_names
@switches
def test_A07_one_token_at_a_time(switch, name):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids = draw_ids(1, 40)
    logits, cache = run_in_chunks(model, ids, [1] * 40, name=name)
    assert cache.get_seq_length() == 40
    assert_same_logits(logits[0], logits_alone(model, ids[0]))


@paddings
def test_a_mask_of_ones_behind_an_unmasked_prefill_changes_nothing(padding):
    model = tiny_model(torch.float64)
    lengths = (20, 14, 17)
    mask = torch.cat([torch.ones(3, 12, dtype=torch.long), padded_mask(padding, lengths, 24)], dim=1)
    rows = rows_of([length + 12 for length in lengths])
    ids = spread(rows, mask)
    first, cache = run_in_chunks(model, ids[:, :12], [12])
    second, _ = run_in_chunks(model, ids[:, 12:], [9, 1, 14], mask, cache=cache)
    assert_rows_equal_alone(model, torch.cat([first, second], dim=1), rows, mask)


def test_new_tokens_without_a_mask_behind_padded_ones_are_all_visible():
    model = tiny_model(torch.float64)
    mask = torch.cat([padded_mask("left", (9, 20, 13), 20), torch.ones(3, 21, dtype=torch.long)], dim=1)
    rows = rows_of((30, 41, 34))
    ids = spread(rows, mask)
    first, cache = run_in_chunks(model, ids[:, :20], [20], mask[:, :20])
    second, _ = run_in_chunks(model, ids[:, 20:], [8, 1, 1, 11], cache=cache)
    assert_rows_equal_alone(model, torch.cat([first, second], dim=1), rows, mask)


@pytest.mark.parametrize("chunks", [(44,), (30, 14), (20, *[1] * 24)], ids=["whole", "two", "decode"])
def test_a_row_of_nothing_but_padding_stays_finite_and_apart(chunks):
    model = tiny_model(torch.float64)
    rows = rows_of((0, 44, 31))
    mask = padded_mask("left", (0, 44, 31), 44)
    logits, cache = run_in_chunks(model, spread(rows, mask), chunks, mask)
    assert logits.isfinite().all()
    assert_rows_equal_alone(model, logits[1:], rows[1:], mask[1:])
    # The empty row begins with its first visible token.
    late = draw_ids(3, 9, seed=8)
    mask = torch.cat([mask, torch.ones(3, 9, dtype=torch.long)], dim=1)
    logits, _ = run_in_chunks(model, late, [5, 1, 3], mask, cache=cache)
    assert_same_logits(logits[0], logits_alone(model, late[0]))
    assert_same_logits(logits[1], logits_alone(model, torch.cat([rows[1], late[1]]))[44:])


@switches
@torch.no_grad()
def test_B01_use_cache_changes_neither_logits_nor_loss(switch):
    model = tiny_model(torch.float64, **SWITCHES[switch])
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


# Packing


DOCUMENTS = (20, 30, 1, 9)


def packed(seed=3):
    rows = rows_of(DOCUMENTS, seed)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    return rows, torch.cat(rows)[None], {"position_ids": positions}, {"cu_seq_lens_q": cu_seqlens}


@dtypes
@switches
@torch.no_grad()
def test_packed_documents_equal_the_document_alone(switch, dtype):
    model = tiny_model(DTYPES[dtype], **SWITCHES[switch])
    rows, ids, positions, cu_seqlens = packed()
    expected = torch.cat([logits_alone(model, row) for row in rows])
    for arguments in (positions, cu_seqlens, {**positions, **cu_seqlens}):
        assert_same_logits(model(ids, use_cache=False, **arguments).logits[0], expected)


@torch.no_grad()
def test_packed_rows_of_a_batch_have_documents_of_their_own():
    model = tiny_model(torch.float64)
    lengths = ((20, 25), (9, 30, 6))
    rows = [rows_of(row, seed=10 * number) for number, row in enumerate(lengths)]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    logits = model(ids, position_ids=positions).logits
    for row, documents in enumerate(rows):
        assert_same_logits(logits[row], torch.cat([logits_alone(model, tokens) for tokens in documents]))


@pytest.mark.parametrize("by", [2, 3], ids=["position_ids", "cu_seq_lens"])
@torch.no_grad()
def test_packed_input_makes_no_cache(by):
    assert cache_of(tiny_model()(packed()[1], use_cache=True, **packed()[by])) is None


@cache_names
@pytest.mark.parametrize("by", [2, 3], ids=["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@torch.no_grad()
def test_packed_input_with_a_cache_is_an_error(filled, by, name):
    model = tiny_model()
    cache = HySparseCache(model.config)
    if filled:
        model(draw_ids(1, 5), **{name: cache})
    with pytest.raises(ValueError, match="packed documents"):
        model(packed()[1], **packed()[by], **{name: cache})
    assert cache.get_seq_length() == (5 if filled else 0)


# 4-D masks


def causal_4d(q_len, kv_len, dtype=torch.bool):
    visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)[None, None]
    if dtype == torch.bool:
        return visible
    return torch.zeros(1, 1, q_len, kv_len, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float64, torch.float32], ids=str)
@switches
@torch.no_grad()
def test_a_causal_4d_mask_equals_no_mask(switch, mask_dtype):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids = draw_ids(2, 40)
    logits = model(ids, attention_mask=causal_4d(40, 40, mask_dtype).expand(2, -1, -1, -1), use_cache=False).logits
    assert_same_logits(logits, model(ids, use_cache=False).logits)


@switches
@torch.no_grad()
def test_a_causal_4d_mask_over_a_filled_cache_equals_no_mask(switch):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids = draw_ids(2, 40)
    cache, pieces, done = None, [], 0
    for size in (15, 1, 20, 4):
        mask = causal_4d(size, done + size).expand(2, -1, -1, -1)
        output = model(ids[:, done : done + size], attention_mask=mask, use_cache=True, cache=cache)
        cache, done = cache_of(output), done + size
        pieces.append(output.logits)
    assert_same_logits(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


@switches
@torch.no_grad()
def test_a_4d_mask_hides_what_it_says(switch):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids = draw_ids(1, 40)
    mask = causal_4d(40, 40).clone()
    mask[..., 13:, 12] = False
    other = ids.clone()
    other[0, 12] = 2 if ids[0, 12] != 2 else 3
    one, two = (model(tokens, attention_mask=mask, use_cache=False).logits[0] for tokens in (ids, other))
    assert torch.equal(one[13:], two[13:])
    assert not torch.equal(one[12], two[12])


@torch.no_grad()
def test_a_4d_mask_may_differ_between_heads():
    model = tiny_model(torch.float64)
    ids = draw_ids(1, 30)
    mask = causal_4d(30, 30).repeat(1, 4, 1, 1)
    same = model(ids, attention_mask=mask, use_cache=False).logits
    assert_same_logits(same, model(ids, use_cache=False).logits)
    mask[:, 2, 10:, 4] = False
    assert (model(ids, attention_mask=mask, use_cache=False).logits - same).abs().max() > 1e-4


@torch.no_grad()
def test_a_4d_mask_behind_padded_rows_in_a_cache_is_an_error():
    model = tiny_model()
    mask = padded_mask("left", (6, 10), 10)
    _, cache = run_in_chunks(model, draw_ids(2, 10), [10], mask)
    with pytest.raises(ValueError, match="attention_mask"):
        model(draw_ids(2, 3), attention_mask=causal_4d(3, 13).expand(2, -1, -1, -1), cache=cache)


@pytest.mark.parametrize("length", [9, 11, 3])
@torch.no_grad()
def test_a_mask_of_the_wrong_length_is_an_error(length):
    model = tiny_model()
    _, cache = run_in_chunks(model, draw_ids(1, 7), [7])
    with pytest.raises(ValueError, match="mask of all tokens, cached ones included"):
        model(draw_ids(1, 3), attention_mask=torch.ones(1, length), cache=cache)


# Rows of the known faults


def test_A09_first_layer_is_a_window_layer():
    steps = 13  # far past the window of 6
    model = tiny_model(torch.float64, layer_plan=["window", "window", "full", "sparse", "window", "full"])
    ids = draw_ids(2, 10 + steps)
    logits, cache = run_in_chunks(model, ids, [10] + [1] * steps)
    assert cache.get_seq_length() == 10 + steps
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
    model = tiny_model(**SWITCHES[switch])
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
    logits = model(spread([tokens], mask), attention_mask=mask).logits[0, -1]
    assert_same_logits(logits, logits_alone(model, tokens)[-1])


@pytest.mark.parametrize("pads", [1, 31, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_A17_left_padding_is_finite_everywhere(pads, dtype):
    model = tiny_model(dtype)
    rows = rows_of((40, 40 + pads))
    mask = padded_mask("left", (40, 40 + pads), 40 + pads)
    logits = model(spread(rows, mask), attention_mask=mask).logits
    assert logits.isfinite().all()
    if dtype == torch.float32:
        assert_rows_equal_alone(model, logits, rows, mask)
        return
    # Rounding may turn a near tie in the selection, so low precision is judged by the bulk of the positions.
    alone = logits_alone(model, rows[0]).float().log_softmax(-1)
    padded = logits[0, pads:].float().log_softmax(-1)
    divergence = (alone.exp() * (alone - padded)).sum(-1)
    assert divergence.median() < 1e-2


@torch.no_grad()
def test_attention_maps_and_indices_say_nothing_of_padding():
    model = tiny_model(torch.float64)
    rows, mask = rows_of(), padded_mask("holes", LENGTHS, TOTAL)
    output = model(spread(rows, mask), attention_mask=mask, output_attentions=True, output_selected_indices=True)
    for row, tokens in enumerate(rows):
        visible = mask[row].bool()
        alone = model(tokens[None], output_attentions=True, output_selected_indices=True)
        for padded, expected in zip(output.selected_indices, alone.selected_indices, strict=True):
            assert torch.equal(padded[row][:, visible], expected[0])
            assert (padded[row][:, ~visible] == -1).all()
        for padded, expected in zip(output.attentions, alone.attentions, strict=True):
            torch.testing.assert_close(padded[row][:, visible][:, :, visible], expected[0], atol=1e-10, rtol=0)
            assert not padded[row][:, :, ~visible].any()


@torch.no_grad()
def test_content_positions_are_the_default_rotary_positions():
    """Given positions rotate; they neither move blocks nor windows."""
    model = tiny_model(torch.float64)
    rows, mask = rows_of(), padded_mask("left", LENGTHS, TOTAL)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids = spread(rows, mask)
    given = model(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(given, model(ids, attention_mask=mask).logits)
    # Rotary embedding is relative: a common offset changes only what float32 cosines round.
    moved = model(ids, attention_mask=mask, position_ids=positions + 17).logits
    assert (moved - given)[mask.bool()].abs().max() < 1e-3


def test_the_plan_of_T1_is_what_the_tests_assume():
    config = tiny_config()
    assert config.donor_plan == [None, 0, 0, None, 3, 3]
    assert config.cache_plan == ["full", "window", "window"] * 2
