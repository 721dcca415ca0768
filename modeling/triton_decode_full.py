"""Full attention of few new tokens over a long past, with the choice of blocks: two kernels, one pass over the keys.

In the first each program takes a run of whole blocks of one row and KV head; it leaves the run's maximum, mass and
sum, and every block's score. The second combines the runs in their order and, in programs beside those, chooses the
blocks. How long a run is follows from the row's own length, on the device; how many there are, from shapes alone.
The specification is `full_attention_with_oracle` of the reference; gradients are the prefill kernels' business.
"""

import math

import torch

from .rows_hysparse import Rows
from .triton_block_topk import store_highest
from .triton_common import (
    LN2,
    LOG2E,
    LOWEST,
    OP_NAMESPACE,
    add_product,
    cdiv,
    key_descriptor,
    launch_sizes,
    load_keys,
    load_rows,
    may_fuse,
    named_strides,
    new_output,
    next_power_of_2,
    online_softmax,
    padded_dim,
    precision_of,
    query_rows,
    tile_rows,
    tl,
    triton,
)
from .triton_decode_common import first_owned, first_seen, row_tuple, share_of
from .triton_layer_common import is_bare


# (bytes per element, padded head dimension at most) -> (BLOCK_N, warps, stages). Two bytes, 128: NVIDIA H200, triton
# 3.6, 2026-11-30; the others only keep within a card's memory.
LAUNCH = {
    (2, 128): (64, 4, 3),
    (2, 256): (64, 4, 2),
    (4, 128): (32, 4, 2),
    (4, 256): (32, 4, 1),
}
# Rows of a program at most, unless one query's group is larger.
_MOST_ROWS = 64
# Programs to divide the work among: enough to fill a card of 132 multiprocessors, few enough to combine.
_PROGRAMS = 264
# Scores that one program of the second kernel holds in registers.
_HELD_SCORES = 16384


@triton.jit
def _block_scores(s, scale, SUM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Score of each block of a tile (or of the part of a block that the tile is), `(rows, blocks)`."""
    M: tl.constexpr = s.shape[0]
    N: tl.constexpr = s.shape[1]
    PARTS: tl.constexpr = N // BLOCK_SIZE if N > BLOCK_SIZE else 1
    blocks = s.reshape(M, PARTS, N // PARTS)
    highest = tl.max(blocks, 2) * scale
    score = highest
    if SUM:
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        score = tl.log2(tl.sum(tl.exp2(blocks * scale - safe[:, :, None]), 2)) + safe
    return score, tl.max(highest, 1)


@triton.jit
def _joined_scores(before, score, SUM: tl.constexpr):
    """Score of a block from those of two parts of it."""
    larger = tl.maximum(before, score)
    if SUM:
        safe = tl.where(larger == -float("inf"), 0.0, larger)
        larger = tl.log2(tl.exp2(before - safe) + tl.exp2(score - safe)) + safe
    return larger


@triton.jit
def _attend_tile(
    s,
    v,
    column,
    first,
    m_i,
    l_i,
    acc,
    carried,
    score_ptrs,
    valid,
    num_blocks,
    scale,
    one,
    BLOCK_SIZE: tl.constexpr,
    SCORES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take one tile of logits into the softmax, and store the scores of its blocks."""
    BLOCK_N: tl.constexpr = s.shape[1]
    if SCORES > 0:
        score, row_max = _block_scores(s, scale, SCORES == 2, BLOCK_SIZE)
        if BLOCK_SIZE > BLOCK_N:
            is_fresh = (column - first) % BLOCK_SIZE == 0
            score = _joined_scores(tl.where(is_fresh, -float("inf"), carried), score, SCORES == 2)
            carried = score
        blocks = (column - first) // BLOCK_SIZE + tl.arange(0, score.shape[1])
        mask = valid[:, None] & (blocks < num_blocks)[None, :]
        tl.store(score_ptrs[:, None] + blocks[None, :], score, mask=mask)
    else:
        row_max = tl.max(s, 1) * scale
    p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, row_max, scale, None)
    acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)
    return m_i, l_i, acc, carried


@triton.jit(do_not_specialize=["gap", "num_blocks"])
def _decode_full_kernel(
    q_ptr,
    key_desc,
    value_desc,
    acc_ptr,
    mass_ptr,
    scores_ptr,
    rows,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    KV_HEADS,
    q_len,
    gap,
    num_blocks,
    scale,
    one,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCORES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of a row for a tile of its queries, which see the row from the same column on."""
    UNIT: tl.constexpr = max(BLOCK_N, BLOCK_SIZE)
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    head_row = tl.program_id(1)
    batch = head_row // KV_HEADS
    kv_head = head_row % KV_HEADS
    tile = tl.program_id(2)
    start = first_owned(rows, batch, gap)
    first = first_seen(rows, batch, tile * TILE_Q)
    share = share_of(start + q_len - first, splits, UNIT)
    begin = first + split * share
    if begin >= start + q_len:
        return
    steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
    owned = tl.where(valid, start + steps, -1)
    end = tl.minimum(begin + share, start + tl.minimum(q_len, (tile + 1) * TILE_Q))
    # Up to here every row sees every key.
    plain = tl.minimum(end, start + tile * TILE_Q + 1)
    plain_end = begin + tl.maximum(plain - begin, 0) // BLOCK_N * BLOCK_N
    heads = kv_head * GROUP + group_head
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
    query_row = (head_row.to(tl.int64) * q_len + steps) * GROUP + group_head
    score_ptrs = scores_ptr + query_row * num_blocks
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    carried = tl.full((BLOCK_M, 1), -float("inf"), tl.float32)
    for column in tl.range(begin, plain_end, BLOCK_N):
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        m_i, l_i, acc, carried = _attend_tile(
            s,
            v,
            column,
            first,
            m_i,
            l_i,
            acc,
            carried,
            score_ptrs,
            valid,
            num_blocks,
            scale,
            one,
            BLOCK_SIZE,
            SCORES,
            PRECISION,
        )
    for column in tl.range(plain_end, end, BLOCK_N, num_stages=1):
        columns = column + tl.arange(0, BLOCK_N)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        # Past a row's end the cache may hold anything, and 0 * NaN is NaN.
        v = tl.where((columns < end)[:, None], v, 0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(columns[None, :] <= owned[:, None], s, -float("inf"))
        m_i, l_i, acc, carried = _attend_tile(
            s,
            v,
            column,
            first,
            m_i,
            l_i,
            acc,
            carried,
            score_ptrs,
            valid,
            num_blocks,
            scale,
            one,
            BLOCK_SIZE,
            SCORES,
            PRECISION,
        )
    part = query_row * splits + split
    tl.store(mass_ptr + part * 2, m_i, mask=valid)
    tl.store(mass_ptr + part * 2 + 1, l_i, mask=valid)
    dims = tl.arange(0, BLOCK_DV)
    tl.store(acc_ptr + part[:, None] * V_DIM + dims[None, :], acc, mask=valid[:, None] & (dims < V_DIM)[None, :])


@triton.jit
def _load_masses(mass_ptr, query_rows, splits, used, SPLITS: tl.constexpr):
    """Maximum, and mass relative to it, of each part of some query rows `(rows, SPLITS)`."""
    parts = tl.arange(0, SPLITS)
    ptrs = mass_ptr + (query_rows[:, None] * splits + parts[None, :]) * 2
    mask = (parts < used)[None, :] & (query_rows >= 0)[:, None]
    return tl.load(ptrs, mask=mask, other=LOWEST), tl.load(ptrs + 1, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["gap", "num_blocks", "splits"])
def _decode_full_finish_kernel(
    acc_ptr,
    mass_ptr,
    scores_ptr,
    out_ptr,
    lse_ptr,
    indices_ptr,
    rows,
    stride_ob,
    stride_oh,
    stride_om,
    KV_HEADS,
    q_len,
    gap,
    num_blocks,
    splits,
    forced_first,
    forced_local,
    n_selected,
    log_group,
    ln2,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    SELECTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """One query of one KV head: its output for one head of the group, or, in the first program, its blocks."""
    row = tl.program_id(0)
    head_row = row // q_len
    step = row % q_len
    batch = head_row // KV_HEADS
    start = first_owned(rows, batch, gap)
    first = first_seen(rows, batch, step // TILE_Q * TILE_Q)
    share = share_of(start + q_len - first, splits, UNIT)
    used = tl.maximum(start + q_len - first + share - 1, 0) // share
    query_row = row.to(tl.int64) * GROUP
    if SELECTED > 0 and tl.program_id(1) == 0:
        ids = tl.arange(0, BLOCKS)
        last = (start + step - first) // BLOCK_SIZE
        visible = (ids <= last) & (tl.zeros_like(ids) + start + step >= first)
        score = tl.full((BLOCKS,), -float("inf"), tl.float32)
        mass = tl.zeros((BLOCKS,), tl.float32)
        for begin in tl.range(0, GROUP, HEADS):
            heads = begin + tl.arange(0, HEADS)
            exists = heads < GROUP
            m_i, l_i = _load_masses(mass_ptr, tl.where(exists, query_row + heads, -1), splits, used, SPLITS)
            highest = tl.max(m_i, 1)
            total = tl.sum(tl.exp2(m_i - highest[:, None]) * l_i, 1)
            lse = highest + tl.log2(tl.where(total == 0, 1.0, total))
            ptrs = scores_ptr + (query_row + heads)[:, None] * num_blocks + ids[None, :]
            part = tl.load(ptrs, mask=exists[:, None] & visible[None, :], other=-float("inf")) - lse[:, None]
            larger = tl.maximum(score, tl.max(part, 0))
            if MEAN:
                safe = tl.where(larger == -float("inf"), 0.0, larger)
                mass = mass * tl.exp2(score - safe) + tl.sum(tl.exp2(part - safe[None, :]), 0)
            score = larger
        if MEAN:
            score = score + tl.log2(mass) - log_group
        forced = (ids < forced_first) | (ids > last - forced_local)
        score = tl.where(forced & (score > -float("inf")), float("inf"), score)
        base = indices_ptr + row.to(tl.int64) * n_selected + tl.zeros((1,), tl.int64)
        every = tl.full((1,), 1, tl.int1)
        store_highest(score[None, :], base, every, n_selected, SELECTED)
        return

    head = tl.program_id(1) - min(SELECTED, 1)
    query_row += head
    m_i, l_i = _load_masses(mass_ptr, query_row + tl.zeros((1,), tl.int64), splits, used, SPLITS)
    highest = tl.max(m_i)
    total = tl.sum(tl.exp2(m_i - highest) * l_i)
    dims = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for begin in tl.range(0, used, CHUNK):
        part = begin + tl.arange(0, CHUNK)
        exists = part < used
        place = query_row * splits + part
        weight = tl.exp2(tl.load(mass_ptr + place * 2, mask=exists, other=LOWEST) - highest)
        ptrs = acc_ptr + place[:, None] * V_DIM + dims[None, :]
        sums = tl.load(ptrs, mask=exists[:, None] & (dims < V_DIM)[None, :], other=0.0)
        acc += tl.sum(sums * weight[:, None], 0)
    is_empty = total == 0
    safe = tl.where(is_empty, 1.0, total)
    kv_head = head_row % KV_HEADS
    out_base = out_ptr + batch.to(tl.int64) * stride_ob + step.to(tl.int64) * stride_om
    out_ptrs = out_base + (kv_head * GROUP + head).to(tl.int64) * stride_oh + dims
    tl.store(out_ptrs, (acc / safe).to(out_ptr.dtype.element_ty), mask=dims < V_DIM)
    lse_row = (batch * KV_HEADS * GROUP + kv_head * GROUP + head).to(tl.int64) * q_len + step
    tl.store(lse_ptr + lse_row, tl.where(is_empty, -float("inf"), (highest + tl.log2(safe)) * ln2))


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    n_selected: int,
    scaling: float,
    block_reduction: str,
    head_reduction: str,
    forced_first_blocks: int,
    forced_local_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    group = heads // kv_heads
    output, lse, indices = _results(query, key, value, n_selected)
    block_n, warps, stages = launch_sizes(LAUNCH, query, value)
    if not n_selected:
        block_size = block_n
    unit = max(block_n, block_size)
    # Queries of several documents see the row from different columns, so each is a tile of its own.
    most_queries = 1 if first_key is not None and first_key.shape[1] > 1 else None
    block_m, tile_q = tile_rows(q_len, group, _MOST_ROWS, most_queries)
    tiles = cdiv(q_len, tile_q)
    splits = max(1, min(cdiv(kv_len, unit), _PROGRAMS // (batch * kv_heads * tiles)))
    num_blocks = cdiv(kv_len, block_size)
    rows = batch * heads * q_len
    acc, mass, scores = (
        torch.empty(size, dtype=torch.float32, device=query.device)
        for size in (rows * splits * v_dim, rows * splits * 2, rows * num_blocks if n_selected else 0)
    )
    blocks = max(128, next_power_of_2(num_blocks)) if n_selected else 1
    shared = {
        "rows": row_tuple(query_start, first_key, batch, q_len),
        "KV_HEADS": kv_heads,
        "q_len": q_len,
        "gap": kv_len - q_len,
        "num_blocks": num_blocks,
        "GROUP": group,
        "TILE_Q": tile_q,
        "V_DIM": v_dim,
        "BLOCK_DV": padded_dim(v_dim),
        "BLOCK_SIZE": block_size,
        "enable_fp_fusion": may_fuse(query),
    }
    with torch.cuda.device_of(query):
        _decode_full_kernel[(splits, batch * kv_heads, tiles)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            acc,
            mass,
            scores,
            **named_strides("q", query),
            scale=scaling * LOG2E,
            one=1.0,
            HEAD_DIM=dim,
            BLOCK_D=padded_dim(dim),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SCORES=(1 if block_reduction == "max" else 2) if n_selected else 0,
            PRECISION=precision_of(query),
            num_warps=warps,
            num_stages=stages,
            **shared,
        )
        _decode_full_finish_kernel[(batch * kv_heads * q_len, group + (n_selected > 0))](
            acc,
            mass,
            scores,
            output,
            lse,
            indices,
            stride_ob=output.stride(0),
            stride_oh=output.stride(1),
            stride_om=output.stride(2),
            splits=splits,
            forced_first=forced_first_blocks,
            forced_local=forced_local_blocks,
            n_selected=n_selected,
            log_group=math.log2(group),
            ln2=LN2,
            UNIT=unit,
            SPLITS=max(16, next_power_of_2(splits)),
            CHUNK=32,
            BLOCKS=blocks,
            HEADS=max(1, min(next_power_of_2(group), _HELD_SCORES // blocks)),
            SELECTED=next_power_of_2(n_selected) if n_selected else 0,
            MEAN=head_reduction == "mean",
            num_warps=4 if blocks <= 1024 else 8,
            **shared,
        )
    return output, lse, indices


_decode_full = torch.library.custom_op(f"{OP_NAMESPACE}::decode_full", _launch, mutates_args=())


def _results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n_selected: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised output, log-sum-exp and indices."""
    return (
        new_output(query, value.shape[-1]),
        query.new_empty(query.shape[:3], dtype=torch.float32),
        query.new_empty((query.shape[0], key.shape[1], query.shape[2], n_selected), dtype=torch.int32),
    )


@_decode_full.register_fake
def _(query, key, value, query_start, first_key, block_size, n_selected, *options):
    return _results(query, key, value, n_selected)


def decode_full_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    n_selected: int,
    scaling: float,
    rows: Rows,
    block_reduction: str,
    head_reduction: str,
    forced_first_blocks: int,
    forced_local_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
    """`full_attention_with_oracle` of a checked call with few queries: `(output, lse, indices, None)`."""
    call = _launch if is_bare(query, key, value) else _decode_full
    output, lse, indices = call(
        query,
        key,
        value,
        rows.query_start,
        rows.first_key,
        block_size,
        n_selected,
        float(scaling),
        block_reduction,
        head_reduction,
        forced_first_blocks,
        forced_local_blocks,
    )
    return output, lse, indices if n_selected else None, None
