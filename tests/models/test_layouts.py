"""A row gives the same logits alone, padded anywhere, in chunks, with and without a cache."""

import pytest
import torch
from models import tiny, tiny2
from models.generations import FAST, KINDS, both_generations, case, over_settings
from models.tiny import (
    assert_same_logits,
    draw_ids,
    logits_alone,
    padded_mask,
    run_in_chunks,
    spread,
    tiny_config,
)

from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


LENGTHS = (33, 50, 41)
TOTAL = 56
DTYPES = {"float64": torch.float64, "float32": torch.float32}

every_setting = over_settings()
paddings = pytest.mark.parametrize("padding", ["left", "right", "holes"])


def rows_of(lengths=LENGTHS, seed=3):
    return [draw_ids(1, length, seed + row)[0] for row, length in enumerate(lengths)]


def assert_rows_equal_alone(model, logits, rows, mask):
    for row, tokens in enumerate(rows):
        assert_same_logits(logits[row][mask[row].bool()], logits_alone(model, tokens))


@every_setting
@torch.no_grad()
def test_padded_rows_equal_the_row_alone(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    rows = rows_of()
    alone = [logits_alone(model, tokens) for tokens in rows]
    for padding in ("left", "right", "holes"):
        mask = padded_mask(padding, LENGTHS, TOTAL)
        logits = model(spread(rows, mask), attention_mask=mask).logits
        assert logits.isfinite().all()
        for row, expected in enumerate(alone):
            assert_same_logits(logits[row][mask[row].bool()], expected)


@over_settings(second=("default",))
@torch.no_grad()
def test_padded_rows_in_float32_equal_the_row_alone(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    rows, mask = rows_of(), padded_mask("holes", LENGTHS, TOTAL)
    assert_rows_equal_alone(model, model(spread(rows, mask), attention_mask=mask).logits, rows, mask)


@pytest.mark.parametrize(
    ("generation", "switch", "padding"),
    [case(of, "default", padding) for of in (tiny, tiny2) for padding in ("left", "right")]
    + [case(tiny, name, "holes") for name in tiny.MODELS]
    + [case(tiny2, name, "holes", marks=() if name in FAST else pytest.mark.slow) for name in tiny2.MODELS],
)
def test_padded_rows_in_chunks_equal_the_row_alone(generation, switch, padding):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    rows, mask = rows_of(), padded_mask(padding, LENGTHS, TOTAL)
    logits, _ = run_in_chunks(model, spread(rows, mask), (11, 1, 2, 3, 7, *[1] * 6, 26), mask)
    assert logits.isfinite().all()
    assert_rows_equal_alone(model, logits, rows, mask)


@paddings
@both_generations
def test_padded_rows_one_token_at_a_time_equal_the_row_alone(generation, padding):
    model = generation.tiny_model(torch.float64)
    rows, mask = rows_of(), padded_mask(padding, LENGTHS, TOTAL)
    logits, _ = run_in_chunks(model, spread(rows, mask), [1] * TOTAL, mask)
    assert_rows_equal_alone(model, logits, rows, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@every_setting
def test_A07_several_new_tokens_on_a_filled_cache(generation, switch, dtype):
    model = generation.tiny_model(DTYPES[dtype], **generation.MODELS[switch])
    ids = draw_ids(2, 48)
    expected = torch.stack([logits_alone(model, row) for row in ids])
    for chunks in ((11, 1, 2, 3, 7, 24), (30, 18), (5, 6, 37))[: 3 if dtype == "float64" else 1]:
        logits, _ = run_in_chunks(model, ids, chunks)
        assert_same_logits(logits, expected)


@over_settings(first_fast=KINDS)
def test_A07_one_token_at_a_time(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    ids = draw_ids(1, 40)
    logits, cache = run_in_chunks(model, ids, [1] * 40, name=CACHE_ARGUMENT)
    assert cache.get_seq_length() == 40
    assert_same_logits(logits[0], logits_alone(model, ids[0]))


@paddings
@both_generations
def test_a_mask_of_ones_behind_an_unmasked_prefill_changes_nothing(generation, padding):
    model = generation.tiny_model(torch.float64)
    lengths = (20, 14, 17)
    mask = torch.cat([torch.ones(3, 12, dtype=torch.long), padded_mask(padding, lengths, 24)], dim=1)
    rows = rows_of([length + 12 for length in lengths])
    ids = spread(rows, mask)
    first, cache = run_in_chunks(model, ids[:, :12], [12])
    second, _ = run_in_chunks(model, ids[:, 12:], [9, 1, 14], mask, cache=cache)
    assert_rows_equal_alone(model, torch.cat([first, second], dim=1), rows, mask)


@both_generations
def test_new_tokens_without_a_mask_behind_padded_ones_are_all_visible(generation):
    model = generation.tiny_model(torch.float64)
    mask = torch.cat([padded_mask("left", (9, 20, 13), 20), torch.ones(3, 21, dtype=torch.long)], dim=1)
    rows = rows_of((30, 41, 34))
    ids = spread(rows, mask)
    first, cache = run_in_chunks(model, ids[:, :20], [20], mask[:, :20])
    second, _ = run_in_chunks(model, ids[:, 20:], [8, 1, 1, 11], cache=cache)
    assert_rows_equal_alone(model, torch.cat([first, second], dim=1), rows, mask)


@pytest.mark.parametrize("chunks", [(44,), (30, 14), (20, *[1] * 24)], ids=["whole", "two", "decode"])
@both_generations
def test_a_row_of_nothing_but_padding_stays_finite_and_apart(generation, chunks):
    model = generation.tiny_model(torch.float64)
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


@every_setting
@torch.no_grad()
def test_B01_use_cache_changes_neither_logits_nor_loss(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
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


# Rows of the known faults


@both_generations
def test_A09_first_layer_is_a_window_layer(generation):
    """Lengths and masks must not be read from its window; T2 begins with one of itself."""
    steps = 13  # far past the window of 6
    plan = {"layer_plan": ["window", "window", "full", "sparse", "window", "full"]} if generation is tiny else {}
    model = generation.tiny_model(torch.float64, **plan)
    assert model.config.layer_plan[0] == "window"
    ids = draw_ids(2, 10 + steps)
    logits, cache = run_in_chunks(model, ids, [10] + [1] * steps)
    assert cache.get_seq_length() == 10 + steps
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8])
@both_generations
def test_A10_prompt_length_near_the_window(generation, length):
    model = generation.tiny_model(torch.float64)
    ids = draw_ids(2, length + 4)
    logits, _ = run_in_chunks(model, ids, [length, 1, 1, 1, 1])
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@every_setting
@torch.no_grad()
def test_A13_a_prefill_longer_than_the_window_sees_no_future_token(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    ids = draw_ids(1, 40)
    other = ids.clone()
    other[0, 30] = 2 if ids[0, 30] != 2 else 3
    one, two = (model(tokens, use_cache=True).logits[0] for tokens in (ids, other))
    assert one.isfinite().all()
    assert torch.equal(one[:30], two[:30])
    assert not torch.equal(one[30], two[30])


@both_generations
@torch.no_grad()
def test_A16_padding_counts_in_a_batch_of_one(generation):
    model = generation.tiny_model()
    tokens = draw_ids(1, 37)[0]
    mask = padded_mask("left", (37,), 40)
    logits = model(spread([tokens], mask), attention_mask=mask).logits[0, -1]
    assert_same_logits(logits, logits_alone(model, tokens)[-1])


@pytest.mark.parametrize("pads", [1, 31, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@both_generations
@torch.no_grad()
def test_A17_left_padding_is_finite_everywhere(generation, pads, dtype):
    model = generation.tiny_model(dtype)
    rows = rows_of((40, 40 + pads))
    mask = padded_mask("left", (40, 40 + pads), 40 + pads)
    assert model(spread(rows, mask), attention_mask=mask, logits_to_keep=1).logits.isfinite().all()
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


@both_generations
@torch.no_grad()
def test_attention_maps_and_indices_say_nothing_of_padding(generation):
    model = generation.tiny_model(torch.float64)
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


@both_generations
@torch.no_grad()
def test_content_positions_are_the_default_rotary_positions(generation):
    """Given positions rotate; they neither move blocks nor windows."""
    model = generation.tiny_model(torch.float64)
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
