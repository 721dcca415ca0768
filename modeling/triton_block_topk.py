"""Choose key blocks from stored block scores: reduce over the group's heads, then the highest, ties to the lower id.

    score[t, i] = max over heads h of (block_h[t, i] - lse_h[t]),  or the log of the mean probability
    chosen[t]   = the n_selected highest of those visible, ids ascending, then -1

The specification is `select_blocks` of the selection rules. The n-th highest score is found by bisection on its bits,
so the result depends on neither the tile shape nor the order of arrival.
"""

import math

import torch

from .triton_common import cdiv, next_power_of_2, query_places, row_arguments, tl, triton


_LOWEST_KEY = tl.constexpr(-2147483648)
_HIGHEST_KEY = tl.constexpr(2147483647)

# Queries of a program, whose neighbouring scores fill a sector of memory, and scores that it holds in registers.
# NVIDIA H200, triton 3.6, 2026-12-01.
_MOST_QUERIES = 8
_PROGRAM_SCORES = 8192


@triton.jit
def store_highest(score, row_ptrs, valid, n_selected, SELECTED: tl.constexpr):
    """Store the ids of each row's highest scores at `row_ptrs`: ascending, ties to the lower id, then -1.

    A score of -inf or NaN is not chosen.
    """
    seen = score > -float("inf")
    # Both zeros are one value, as they are to a comparison of floats.
    score = tl.where(score == 0.0, 0.0, score)
    key = score.to(tl.int32, bitcast=True)
    key = tl.where(key < 0, key ^ _HIGHEST_KEY, key)
    key = tl.where(seen, key, _LOWEST_KEY)

    low = tl.min(tl.where(key == _LOWEST_KEY, _HIGHEST_KEY, key), 1)
    high = tl.max(key, 1)
    high = tl.where(tl.sum((key > _LOWEST_KEY).to(tl.int32), 1) <= n_selected, low, high)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = (low | high) - ((low ^ high) >> 1)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        is_open = low < high
        low = tl.where(is_open & (count >= n_selected), middle, low)
        # Exactly enough at or above: no finer cut would choose otherwise.
        high = tl.where(is_open & (count == n_selected), middle, high)
        high = tl.where(is_open & (count < n_selected), middle - 1, high)

    chosen = key >= low[:, None]
    if tl.max(tl.sum(chosen.to(tl.int32), 1), 0) > n_selected:
        above = key > low[:, None]
        equal = key == low[:, None]
        room = n_selected - tl.sum(above.to(tl.int32), 1)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= room[:, None]))
    _store_ids(chosen, row_ptrs, valid, n_selected, SELECTED)


@triton.jit
def _ones(word):
    """Bits that are set in each word of 32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word + (word >> 8) + (word >> 16) + (word >> 24)) & 63


@triton.jit
def _store_ids(chosen, row_ptrs, valid, n_selected, SELECTED: tl.constexpr):
    """Store the ids of the chosen blocks of each row, ascending, then -1.

    Each slot finds its id in the row's bits: the word that holds it, then the half of the word, and so on.
    """
    ROWS: tl.constexpr = chosen.shape[0]
    BLOCKS: tl.constexpr = chosen.shape[1]
    BITS: tl.constexpr = min(32, BLOCKS)
    WORDS: tl.constexpr = BLOCKS // BITS
    bits = chosen.to(tl.int32) << (tl.arange(0, BLOCKS) % BITS)[None, :]
    words = tl.sum(tl.reshape(bits, (ROWS, WORDS, BITS)), 2)
    ends = tl.cumsum(_ones(words), 1)
    SLOTS: tl.constexpr = min(16, SELECTED)
    for begin in tl.range(0, SELECTED, SLOTS):
        slots = (begin + tl.arange(0, SLOTS))[None, :]
        number = tl.sum((ends[:, :, None] <= slots[:, None, :]).to(tl.int32), 1)
        exists = number < WORDS
        number = tl.where(exists, number, 0)
        word = tl.gather(words, number, 1)
        place = slots - tl.gather(ends, number, 1) + _ones(word)
        id = number * BITS
        for halving in tl.static_range(5):
            width = 16 >> halving
            below = _ones(word & ((1 << width) - 1))
            upper = place >= below
            place = tl.where(upper, place - below, place)
            id = tl.where(upper, id + width, id)
            word = tl.where(upper, word >> width, word)
        tl.store(row_ptrs[:, None] + slots, tl.where(exists, id, -1), mask=valid[:, None] & (slots < n_selected))


# `chunk_len` is not specialised, and so not known to be even: else a thread would take four neighbouring queries for
# the sake of wide loads, which the masks rule out, and a row's scores would lie scattered over all threads.
@triton.jit(do_not_specialize=["chunk_len"])
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
    scores_ptr += row.to(tl.int64) * num_blocks * GROUP * chunk_len
    score = tl.full((QUERIES, BLOCKS), -float("inf"), tl.float32)
    mass = tl.zeros((QUERIES, BLOCKS), tl.float32)
    for head in tl.range(GROUP):
        lse_row = (row * GROUP + head).to(tl.int64) * q_len
        lse = tl.load(lse_ptr + lse_row + steps, mask=valid, other=0.0)
        place = (ids * GROUP + head)[None, :] * chunk_len + (steps - step_begin)[:, None]
        part = tl.load(scores_ptr + place, mask=visible, other=-float("inf")) - lse[:, None]
        larger = tl.maximum(score, part)
        if MEAN:
            safe = tl.where(larger == -float("inf"), 0.0, larger)
            mass = mass * tl.exp2(score - safe) + tl.exp2(part - safe)
        score = larger
    if MEAN:
        score = score + tl.log2(mass) - log_group
    forced = (ids[None, :] < forced_first) | (ids[None, :] > last[:, None] - forced_local)
    score = tl.where(forced & (score > -float("inf")), float("inf"), score)
    row_ptrs = indices_ptr + (row.to(tl.int64) * q_len + steps) * n_selected
    store_highest(score, row_ptrs, valid, n_selected, SELECTED)


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
    blocks = next_power_of_2(num_blocks)
    queries = min(_MOST_QUERIES, max(1, _PROGRAM_SCORES // blocks))
    held = queries * blocks
    # 32 scores a thread, 64 where that takes more than four warps, and more where that takes more than 16.
    warps = max(1, min(held // 1024, max(4, held // 2048), 16))
    with torch.cuda.device_of(scores):
        _block_topk_kernel[(cdiv(steps[1] - steps[0], queries), batch * kv_heads)](
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
            SELECTED=next_power_of_2(n_selected),
            MEAN=head_reduction == "mean",
            num_warps=warps,
        )
