"""Caches filled by hand or by a model, and the check that they go on right; imported as `models.cache_runs`."""

import pytest
import torch
from models.tiny import assert_same_logits, draw_ids, logits_alone, padded_mask, run_in_chunks


padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])


def rows_and_mask(padded, total=41):
    """Ids of two rows, the second of them shorter if `padded`, and the mask `(2, total)` that pads it on the left."""
    lengths = (total, 30) if padded else (total, total)
    rows = [draw_ids(1, length, seed=length + row)[0] for row, length in enumerate(lengths)]
    return rows, padded_mask("left", lengths, total)


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
    more = draw_ids(len(ids), sum(new), seed=seed).to(ids.device)
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
