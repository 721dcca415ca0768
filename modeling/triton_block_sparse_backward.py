"""Gradients of attention over selected key blocks; the equations are those of the band's backward.

dq comes from the tiles of queries over the union of their blocks, dk and dv from each block's own list of the queries
that chose it. Each sum has one owner and one order, so results repeat bitwise.
"""

import torch

from .triton_band_backward import dkdv_step, dq_step, store_key_gradient
from .triton_common import (
    LOG2E,
    key_descriptor,
    launch_sizes,
    load_keys,
    load_rows,
    may_fuse,
    padded_dim,
    precision_of,
    query_places,
    query_rows,
    row_arguments,
    row_terms,
    sink_gradient,
    store_rows,
    store_sink_term,
    tl,
    triton,
)
from .triton_selection_layouts import SelectionLayouts


# (bytes per element, padded head dimension at most) -> (BLOCK_M, BLOCK_N at most, warps, stages); the rows of dq are
# those of the layout's tiles. Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-29.
_LAUNCH_DQ = {
    (2, 128): (64, 64, 4, 2),
    (2, 256): (64, 32, 4, 2),
    (4, 128): (32, 32, 4, 1),
    (4, 256): (32, 16, 4, 1),
}
_LAUNCH_DKDV = {
    (2, 128): (64, 64, 4, 3),
    (2, 256): (32, 64, 4, 1),
    (4, 128): (32, 32, 4, 1),
    (4, 256): (16, 32, 4, 1),
}


@triton.jit
def _block_sparse_dq_kernel(
    q_ptr,
    key_desc,
    value_desc,
    grad_ptr,
    total_ptr,
    delta_ptr,
    dq_ptr,
    sink_ptr,
    sink_term_ptr,
    starts_ptr,
    masks_ptr,
    counts_ptr,
    start_ptr,
    first_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_dqd,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    candidates,
    scale,
    scaling,
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
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of one tile of queries times its group over the union of its blocks."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
    bit = steps - tile * TILE_Q
    heads = kv_head * GROUP + group_head
    owned, _ = query_places(start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, gap, HAS_START, False)
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    grad_base = grad_ptr + batch.to(tl.int64) * stride_gb
    q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
    grad = load_rows(grad_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV)
    row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
    total = tl.load(total_ptr + row, mask=valid, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=valid, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    exact = tl.zeros((BLOCK_M,), tl.float32)
    unit = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    n_whole = tl.load(counts_ptr + unit * 2)
    n_all = tl.load(counts_ptr + unit * 2 + 1)
    starts_ptr += unit * candidates
    masks_ptr += unit * candidates
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    # Loaded one turn ahead, the list's entries do not delay the keys that they name.
    next_start = tl.load(starts_ptr)
    next_chosen = tl.load(masks_ptr)
    for entry in tl.range(0, n_whole * SPLIT):
        column = next_start + entry % SPLIT * BLOCK_N
        chosen = next_chosen
        following = tl.minimum((entry + 1) // SPLIT, candidates - 1)
        next_start = tl.load(starts_ptr + following)
        next_chosen = tl.load(masks_ptr + following)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        # Subtracting +inf turns a whole row off at no cost per element.
        shift = tl.where(((chosen >> bit) & 1) != 0, total, float("inf"))
        acc, exact = dq_step(q, grad, shift, delta, acc, exact, k, v, None, scale, one, False, HAS_SINK, PRECISION)
    for entry in tl.range(n_whole * SPLIT, n_all * SPLIT):
        column = tl.load(starts_ptr + entry // SPLIT) + entry % SPLIT * BLOCK_N
        chosen = tl.load(masks_ptr + entry // SPLIT)
        columns = column + tl.arange(0, BLOCK_N)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        if HAS_START:
            k = tl.where((columns <= tl.max(owned, 0))[:, None], k, 0.0)
        shift = tl.where(((chosen >> bit) & 1) != 0, total, float("inf"))
        visible = columns[None, :] <= owned[:, None]
        acc, exact = dq_step(q, grad, shift, delta, acc, exact, k, v, visible, scale, one, True, HAS_SINK, PRECISION)
    dq_base = dq_ptr + batch.to(tl.int64) * stride_dqb
    store_rows(dq_base, acc * scaling, steps, heads, valid, stride_dqh, stride_dqm, stride_dqd, HEAD_DIM, BLOCK_D)
    if HAS_SINK:
        store_sink_term(sink_ptr, sink_term_ptr, row, heads, valid, total, exact)


@triton.jit
def _block_sparse_dkdv_kernel(
    q_ptr,
    key_desc,
    value_desc,
    grad_ptr,
    total_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    index_ptr,
    choices_ptr,
    offsets_ptr,
    start_ptr,
    first_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    kv_len,
    num_blocks,
    scale,
    scaling,
    one,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    CHOICES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of one block of key columns (or a part of one) from the queries that chose it, a few at a time."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    TOUCHED: tl.constexpr = 2 if HAS_FIRST else 1
    column = tl.program_id(0) * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    begin = tl.load(offsets_ptr + tl.program_id(1) * num_blocks + tl.program_id(0) // SPLIT)
    end = tl.load(offsets_ptr + tl.program_id(1) * num_blocks + tl.program_id(0) // SPLIT + 1)
    per_row = tl.cast(q_len, tl.int64) * (CHOICES * TOUCHED)
    k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
    v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    grad_base = grad_ptr + batch.to(tl.int64) * stride_gb
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows % GROUP
    plain_begin = end
    if not HAS_FIRST:
        # The list runs in the order of the queries, and at most BLOCK_SIZE of them own a column of this block.
        plain_begin = tl.minimum(end, begin + tl.cdiv(BLOCK_SIZE, TILE_Q) * TILE_Q)
    for entry in tl.range(begin, plain_begin, TILE_Q):
        place = entry + rows // GROUP
        valid = (rows // GROUP < TILE_Q) & (place < end)
        choice = tl.load(choices_ptr + place, mask=valid, other=0) - tl.program_id(1) * per_row
        steps = tl.where(valid, choice // (CHOICES * TOUCHED), 0).to(tl.int32)
        q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
        grad = load_rows(grad_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV)
        row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
        total = tl.load(total_ptr + row, mask=valid, other=float("inf"))
        delta = tl.load(delta_ptr + row, mask=valid, other=0.0)
        owned, first = query_places(
            start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, kv_len - q_len, HAS_START, HAS_FIRST
        )
        visible = columns[:, None] <= owned[None, :]
        if HAS_FIRST:
            index = tl.program_id(1) * tl.cast(q_len, tl.int64) * CHOICES + choice // TOUCHED
            block_start = first + tl.load(index_ptr + index, mask=valid, other=0) * BLOCK_SIZE
            inside = columns[:, None] - block_start[None, :]
            visible = visible & (inside >= 0) & (inside < BLOCK_SIZE)
        dk, dv = dkdv_step(q, grad, total, delta, dk, dv, k, v, visible, scale, one, True, PRECISION)
    for entry in tl.range(plain_begin, end, TILE_Q):
        place = entry + rows // GROUP
        valid = (rows // GROUP < TILE_Q) & (place < end)
        choice = tl.load(choices_ptr + place, mask=valid, other=0) - tl.program_id(1) * per_row
        steps = tl.where(valid, choice // (CHOICES * TOUCHED), 0).to(tl.int32)
        q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
        grad = load_rows(grad_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV)
        row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
        total = tl.load(total_ptr + row, mask=valid, other=float("inf"))
        delta = tl.load(delta_ptr + row, mask=valid, other=0.0)
        dk, dv = dkdv_step(q, grad, total, delta, dk, dv, k, v, None, scale, one, False, PRECISION)
    store_key_gradient(dk_ptr, dk * scaling, tl.program_id(1), columns, kv_len, HEAD_DIM, BLOCK_D)
    store_key_gradient(dv_ptr, dv, tl.program_id(1), columns, kv_len, V_DIM, BLOCK_DV)


def block_sparse_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    layouts: SelectionLayouts,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients `(dq, dk, dv, dsink)` of attention over the blocks that `layouts` describes."""
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    group, choices = heads // kv_heads, indices.shape[3]
    total, delta = row_terms(output, grad_output, lse, grad_lse, sink)
    sink_terms = torch.empty_like(total) if sink is not None else total
    dq = torch.empty_like(query)
    dk, dv = key.new_empty(key.shape), value.new_empty(value.shape)
    common = {
        **dict(zip(("stride_qb", "stride_qh", "stride_qm", "stride_qd"), query.stride(), strict=True)),
        **dict(zip(("stride_gb", "stride_gh", "stride_gm", "stride_gd"), grad_output.stride(), strict=True)),
        **row_arguments(query_start, first_key, batch, q_len),
        "KV_HEADS": kv_heads,
        "q_len": q_len,
        "scale": scaling * LOG2E,
        "scaling": scaling,
        "one": 1.0,
        "GROUP": group,
        "HEAD_DIM": dim,
        "BLOCK_D": padded_dim(dim),
        "V_DIM": v_dim,
        "BLOCK_DV": padded_dim(v_dim),
        "BLOCK_SIZE": block_size,
        "PRECISION": precision_of(query),
    }
    _, block_n, warps, stages = launch_sizes(_LAUNCH_DQ, query, value)
    block_n = min(block_n, block_size)
    tile_q = layouts.starts.shape[2] // choices
    block_m = max(16, triton.next_power_of_2(tile_q * group))
    with torch.cuda.device_of(query):
        _block_sparse_dq_kernel[(layouts.starts.shape[1], batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            grad_output,
            total,
            delta,
            dq,
            sink,
            sink_terms,
            layouts.starts,
            layouts.masks,
            layouts.counts,
            stride_dqb=dq.stride(0),
            stride_dqh=dq.stride(1),
            stride_dqm=dq.stride(2),
            stride_dqd=dq.stride(3),
            gap=kv_len - q_len,
            candidates=layouts.starts.shape[2],
            TILE_Q=tile_q,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            HAS_SINK=sink is not None,
            num_warps=warps if block_m >= 128 else 4,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
            **common,
        )
        block_m, block_n, warps, stages = launch_sizes(_LAUNCH_DKDV, query, value)
        block_m = max(block_m, triton.next_power_of_2(group))
        block_n = min(block_n, block_size)
        num_blocks = triton.cdiv(kv_len, block_size)
        _block_sparse_dkdv_kernel[(num_blocks * (block_size // block_n), batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            grad_output,
            total,
            delta,
            dk,
            dv,
            indices.contiguous(),
            layouts.choices,
            layouts.offsets,
            kv_len=kv_len,
            num_blocks=num_blocks,
            TILE_Q=block_m // group,
            CHOICES=choices,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
            **common,
        )
    return dq, dk, dv, sink_gradient(sink_terms, sink)
