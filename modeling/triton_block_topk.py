"""Choose key blocks from stored block scores: reduce over the group's heads, then the highest, ties to the lower id.

    score[t, i] = max over heads h of (block_h[t, i] - lse_h[t]),  or the log of the mean probability
    chosen[t]   = the n_selected highest of those visible, ids ascending, then -1

The specification is `select_blocks` of the selection rules. The n-th highest score is found by bisection on its bits,
so the result depends on neither the tile shape nor the order of arrival.
"""

import math

import torch

from .triton_common import query_places, row_arguments, tl, triton


_LOWEST_KEY = tl.constexpr(-2147483648)
_HIGHEST_KEY = tl.constexpr(2147483647)

# Scores that one warp holds in registers. A warp has its queries for itself, so that no reduction crosses warps; eight
# neighbouring queries fill a sector of memory.
_WARP_SCORES = 2048
_MOST_WARPS = 8
# A program is as wide as all blocks, or half or a quarter where its queries see no more: few variants to compile.
_WIDTHS = (4, 2, 1)


@triton.jit
def store_highest(score, visible, row_ptrs, valid, n_selected, SELECTED: tl.constexpr):
    """Store the ids of each row's highest visible scores at `row_ptrs`: ascending, ties to the lower id, then -1."""
    ROWS: tl.constexpr = score.shape[0]
    ids = tl.arange(0, score.shape[1])
    # Both zeros are one value, as they are to a comparison of floats.
    score = tl.where(score == 0.0, 0.0, score)
    key = score.to(tl.int32, bitcast=True)
    key = tl.where(key < 0, key ^ _HIGHEST_KEY, key)
    key = tl.where(visible, key, _LOWEST_KEY)

    low = tl.min(tl.where(visible, key, _HIGHEST_KEY), 1)
    high = tl.max(key, 1)
    high = tl.where(tl.sum(visible.to(tl.int32), 1) <= n_selected, low, high)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = (low | high) - ((low ^ high) >> 1)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        is_open = low < high
        low = tl.where(is_open & (count >= n_selected), middle, low)
        # Exactly enough at or above: no finer cut would choose otherwise.
        high = tl.where(is_open & (count == n_selected), middle, high)
        high = tl.where(is_open & (count < n_selected), middle - 1, high)

    chosen = visible & (key >= low[:, None])
    if tl.max(tl.sum(chosen.to(tl.int32), 1), 0) > n_selected:
        above = visible & (key > low[:, None])
        equal = visible & (key == low[:, None])
        room = n_selected - tl.sum(above.to(tl.int32), 1)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= room[:, None]))
    slot = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(row_ptrs[:, None] + slot, ids[None, :] + tl.zeros_like(slot), mask=chosen)
    slots = tl.arange(0, SELECTED)
    missing = (slots[None, :] >= tl.sum(chosen.to(tl.int32), 1)[:, None]) & (slots < n_selected)[None, :]
    tl.store(
        row_ptrs[:, None] + slots[None, :], tl.full((ROWS, SELECTED), -1, tl.int32), mask=missing & valid[:, None]
    )


@triton.jit
def _block_topk_kernel(
    scores_ptr,
    lse_ptr,
    indices_ptr,
    start_ptr,
    first_ptr,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    step_begin,
    step_end,
    chunk_len,
    num_blocks,
    forced_first,
    forced_local,
    n_selected,
    log_group,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SELECTED: tl.constexpr,
    MEAN: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Indices of a few queries of one KV head; all their scores are in registers at once."""
    row = tl.program_id(1)
    batch = row // KV_HEADS
    steps = step_begin + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    valid = steps < step_end
    ids = tl.arange(0, BLOCKS)
    owned, first = query_places(
        start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, gap, HAS_START, HAS_FIRST
    )
    last = (owned - first) // BLOCK_SIZE
    visible = (ids[None, :] <= last[:, None]) & (owned >= first)[:, None]
    block = (row.to(tl.int64) * num_blocks + ids) * GROUP
    score = tl.full((QUERIES, BLOCKS), -float("inf"), tl.float32)
    mass = tl.zeros((QUERIES, BLOCKS), tl.float32)
    for head in tl.range(GROUP):
        lse_row = (row * GROUP + head).to(tl.int64) * q_len
        lse = tl.load(lse_ptr + lse_row + steps, mask=valid, other=0.0)
        place = (block + head)[None, :] * chunk_len + (steps - step_begin)[:, None]
        part = tl.load(scores_ptr + place, mask=visible, other=-float("inf")) - lse[:, None]
        larger = tl.maximum(score, part)
        if MEAN:
            safe = tl.where(larger == -float("inf"), 0.0, larger)
            mass = mass * tl.exp2(score - safe) + tl.exp2(part - safe)
        score = larger
    visible = visible & (score > -float("inf"))
    if MEAN:
        score = score + tl.log2(mass) - log_group
    forced = (ids[None, :] < forced_first) | (ids[None, :] > last[:, None] - forced_local)
    score = tl.where(forced, float("inf"), score)
    row_ptrs = indices_ptr + (row.to(tl.int64) * q_len + steps) * n_selected
    store_highest(score, visible, row_ptrs, valid, n_selected, SELECTED)


def block_topk(
    scores: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    *,
    gap: int,
    steps: tuple[int, int],
    block_size: int,
    head_reduction: str,
    forced: tuple[int, int],
) -> None:
    """Fill the rows of the queries `steps` in `indices` `(batch, kv_heads, q_len, n_selected)`.

    Args:
        scores (`torch.Tensor`): `(batch * kv_heads, blocks, group, chunk)`, float32, base 2, not yet normalised.
        lse (`torch.Tensor`): `(batch, heads, q_len)`, base 2.
    """
    batch, kv_heads, q_len, n_selected = indices.shape
    _, num_blocks, group, chunk = scores.shape
    width = triton.next_power_of_2(num_blocks)
    seen = triton.cdiv(steps[1] + gap, block_size)
    blocks = next(width // part for part in _WIDTHS if width % part == 0 and width // part >= min(seen, num_blocks))
    per_warp = max(1, _WARP_SCORES // blocks)
    warps = _MOST_WARPS if per_warp == 1 else 4
    queries = min(16, warps * per_warp)
    with torch.cuda.device_of(scores):
        _block_topk_kernel[(triton.cdiv(steps[1] - steps[0], queries), batch * kv_heads)](
            scores,
            lse,
            indices,
            **row_arguments(query_start, first_key, batch, q_len),
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=gap,
            step_begin=steps[0],
            step_end=steps[1],
            chunk_len=chunk,
            num_blocks=num_blocks,
            forced_first=forced[0],
            forced_local=forced[1],
            n_selected=n_selected,
            log_group=math.log2(group),
            GROUP=group,
            BLOCK_SIZE=block_size,
            QUERIES=queries,
            BLOCKS=blocks,
            SELECTED=triton.next_power_of_2(n_selected),
            MEAN=head_reduction == "mean",
            num_warps=warps,
        )
