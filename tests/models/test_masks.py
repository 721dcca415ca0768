"""Masks `(batch, heads, q_len, kv_len)`, boolean or added to the logits, and masks that do not fit."""

import pytest
import torch
from models.generations import over_settings
from models.tiny import assert_same_logits, draw_ids, padded_mask, run_in_chunks, tiny_model

from hysparse_hf.modeling.compat_transformers import cache_of


def causal_4d(q_len, kv_len, dtype=torch.bool):
    visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)[None, None]
    if dtype == torch.bool:
        return visible
    return torch.zeros(1, 1, q_len, kv_len, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@over_settings()
@torch.no_grad()
def test_a_causal_4d_mask_equals_no_mask(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    ids = draw_ids(2, 40)
    expected = model(ids, use_cache=False).logits
    for dtype in (torch.bool, torch.float64, torch.float32):
        mask = causal_4d(40, 40, dtype).expand(2, -1, -1, -1)
        assert_same_logits(model(ids, attention_mask=mask, use_cache=False).logits, expected)


@over_settings()
@torch.no_grad()
def test_a_causal_4d_mask_over_a_filled_cache_equals_no_mask(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    ids = draw_ids(2, 40)
    cache, pieces, done = None, [], 0
    for size in (15, 1, 20, 4):
        mask = causal_4d(size, done + size).expand(2, -1, -1, -1)
        output = model(ids[:, done : done + size], attention_mask=mask, use_cache=True, cache=cache)
        cache, done = cache_of(output), done + size
        pieces.append(output.logits)
    assert_same_logits(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


@over_settings()
@torch.no_grad()
def test_a_4d_mask_hides_what_it_says(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
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
