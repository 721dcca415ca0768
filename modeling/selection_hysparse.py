"""From scores to indices: the rules every back end shares.

Scores are logarithms of probabilities: `block maximum - lse` of one head, then reduced over the heads of a KV group.
Ties go to the lower id. An index row lists the chosen ids in ascending order, then -1.
"""

import math

import torch


def reduce_blocks(logits: torch.Tensor, block_size: int, reduction: str) -> torch.Tensor:
    """Reduce the logits inside each block of keys: `(..., keys)` to `(..., blocks)`; the last block may be short.

    Args:
        logits (`torch.Tensor`): scaled scores, `-inf` where a key is not visible.
        block_size (`int`): keys per block.
        reduction (`str`): `"max"` keeps the largest logit, `"sum"` the log of the summed exponentials.
    Source: HySparse (arXiv:2602.03560), equation 3 (whose Algorithm 1 omits the exponential).
    """
    keys = logits.shape[-1]
    whole = keys // block_size * block_size
    parts = [logits[..., :whole].unflatten(-1, (-1, block_size))] if whole else []
    if whole < keys:
        parts.append(logits[..., None, whole:])
    reduce = torch.amax if reduction == "max" else torch.logsumexp
    return torch.cat([reduce(part, -1) for part in parts], dim=-1)


def reduce_heads(scores: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce normalised log scores over the heads of a KV group: `(batch, kv_heads, group, ...)` to one per group.

    Args:
        scores (`torch.Tensor`): per head, each already divided by its own denominator.
        reduction (`str`): `"max"`, or `"mean"` of the probabilities (their log is returned).
    """
    if reduction == "max":
        return scores.amax(2)
    return torch.logsumexp(scores, 2) - math.log(scores.shape[2])


def select_blocks(
    scores: torch.Tensor,
    last_block: torch.Tensor,
    n_selected: int,
    *,
    forced_first_blocks: int = 0,
    forced_local_blocks: int = 0,
) -> torch.Tensor:
    """Choose the blocks with the highest scores among those a query sees.

    Args:
        scores (`torch.Tensor`): `(batch, kv_heads, q_len, blocks)`, log scores; `-inf` where a block is not seen.
        last_block (`torch.Tensor`): `(batch or 1, q_len)`: the block of the query's own token.
        n_selected (`int`): ids per index row.
        forced_first_blocks, forced_local_blocks (`int`): always chosen where visible, counted inside `n_selected`.
    Returns:
        `torch.Tensor`: int32 `(batch, kv_heads, q_len, n_selected)`, ascending ids, then -1.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    last = last_block[:, None, :, None]
    visible = scores > -math.inf
    forced = (ids < forced_first_blocks) | (ids > last - forced_local_blocks)
    scores = scores.masked_fill(forced & visible, math.inf)
    # A stable descending sort keeps the lower id first among equals; top-k promises no order of ties.
    chosen = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :n_selected]
    return pack_ids(chosen, visible.gather(-1, chosen), n_selected)


def select_tokens(scores: torch.Tensor, position: torch.Tensor, n_selected: int, window: int) -> torch.Tensor:
    """Choose the tokens with the highest scores among those a query sees before its window.

    No row is sorted: the score at the cut is found, what lies above it is chosen, and among equals at the cut the
    lowest ids fill the rest.

    Args:
        scores (`torch.Tensor`): `(batch, kv_heads, q_len, tokens)`, log scores; `-inf` where a token is not seen.
        position (`torch.Tensor`): `(batch or 1, q_len)`: the query's own place among the tokens.
        n_selected (`int`): ids per index row.
        window (`int`): tokens up to the query's own that are read anyway and not listed; 0 for none.
    Returns:
        `torch.Tensor`: int32 `(batch, kv_heads, q_len, n_selected)`, ascending ids, then -1.
    Source: HySparse2 (arXiv:2609.26368), token-level selection; ties go to the lower id.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    own = position[:, None, :, None]
    scores = scores.masked_fill((ids > own - window) & (ids <= own), -math.inf)
    width = min(n_selected, scores.shape[-1])
    cut = torch.topk(scores, width, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > cut
    at_cut = (scores == cut) & (cut > -math.inf)
    chosen = above | (at_cut & (at_cut.cumsum(-1) <= width - above.sum(-1, keepdim=True)))
    # Each chosen id goes to its rank, the others to a column behind the row.
    place = torch.where(chosen, chosen.cumsum(-1) - 1, n_selected)
    rows = torch.full((*scores.shape[:-1], n_selected + 1), -1, dtype=torch.int32, device=scores.device)
    return rows.scatter_(-1, place, ids.to(torch.int32).expand_as(place))[..., :n_selected]


def pack_ids(ids: torch.Tensor, valid: torch.Tensor, width: int) -> torch.Tensor:
    """Index rows in their one form: valid ids ascending, then -1, `width` columns, int32."""
    beyond = torch.iinfo(torch.int32).max
    ids = torch.where(valid, ids, beyond).sort(-1).values
    ids = torch.where(ids == beyond, -1, ids).to(torch.int32)
    missing = width - ids.shape[-1]
    return torch.nn.functional.pad(ids, (0, missing), value=-1) if missing > 0 else ids


def chosen_blocks(indices: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Index rows as a mask: `(batch, kv_heads, q_len, n)` to bool `(batch, kv_heads, q_len, num_blocks)`.

    -1 may stand anywhere, ids past the end choose nothing, and a repeated id counts once.
    """
    slots = torch.where((indices >= 0) & (indices < num_blocks), indices, num_blocks).long()
    mask = torch.zeros(*indices.shape[:-1], num_blocks + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, slots, True)[..., :num_blocks]
