"""Gradients of attention over selected key blocks; the equations are those of the band's backward.

dq comes from the tiles of queries over the union of their blocks, dk and dv from each block's own list of the queries
that chose it, a long one piece by piece. Each sum has one owner and one order, so results repeat bitwise.
"""

import torch

from .triton_band_backward import add_dq, finish_dq, load_refined, store_key_gradient
from .triton_common import (
    LOG2E,
    add_product,
    cdiv,
    key_descriptor,
    launch_sizes,
    load_keys,
    load_rows,
    load_terms,
    may_fuse,
    next_power_of_2,
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
from .triton_list_pieces import add_pieces, cut_lists, piece_of, sums_of
from .triton_selection_layouts import SelectionLayouts


# (bytes per element, padded head dimension at most) -> (BLOCK_M, BLOCK_N at most, warps, stages); the rows of dq are
# those of the layout's tiles. Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-30.
LAUNCH_DQ = {
    (2, 128): (64, 64, 4, 2),
    (2, 256): (64, 32, 4, 2),
    (4, 128): (32, 32, 4, 1),
    (4, 256): (32, 16, 4, 1),
}
LAUNCH_DKDV = {
    (2, 128): (32, 64, 4, 5),
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
    terms_ptr,
    refine_ptr,
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
    total, delta = load_terms(terms_ptr, row, valid)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    mean = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    exact = tl.zeros((BLOCK_M,), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    unit = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    starts_ptr += unit * candidates
    masks_ptr += unit * candidates
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    n_whole = tl.load(counts_ptr + unit * 2) * SPLIT
    n_all = tl.load(counts_ptr + unit * 2 + 1) * SPLIT
    n_clean = n_all
    if HAS_START:
        n_clean = n_whole
    # Loaded one turn ahead, the list's entries do not delay the keys that they name.
    next_start = tl.load(starts_ptr)
    next_chosen = tl.load(masks_ptr)
    for entry in tl.range(0, n_clean):
        column = next_start + entry % SPLIT * BLOCK_N
        # Subtracting +inf turns a whole row off at no cost per element.
        shift = tl.where(((next_chosen >> bit) & 1) != 0, total, float("inf"))
        following = tl.minimum((entry + 1) // SPLIT, candidates - 1)
        next_start = tl.load(starts_ptr + following)
        next_chosen = tl.load(masks_ptr + following)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - shift[:, None])
        dp = tl.dot(grad, v.T, input_precision=PRECISION)
        if not HAS_START and entry >= n_whole:
            # After both products: a branch between them would keep the exponentials from running beside the second.
            p = tl.where(column + tl.arange(0, BLOCK_N)[None, :] <= owned[:, None], p, 0.0)
        acc, mean, exact, mass = add_dq(p, dp, delta, acc, mean, exact, mass, k, one, HAS_SINK, PRECISION)
    if HAS_START:
        last = tl.max(owned, 0)
        for entry in tl.range(n_whole, n_all):
            column = tl.load(starts_ptr + entry // SPLIT) + entry % SPLIT * BLOCK_N
            columns = column + tl.arange(0, BLOCK_N)
            shift = tl.where(((tl.load(masks_ptr + entry // SPLIT) >> bit) & 1) != 0, total, float("inf"))
            k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
            v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
            # Past a short row's end the cache may hold anything, and 0 * NaN is NaN.
            k = tl.where((columns <= last)[:, None], k, 0.0)
            visible = columns[None, :] <= owned[:, None]
            p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - shift[:, None])
            p = tl.where(visible, p, 0.0)
            dp = tl.where(visible, tl.dot(grad, v.T, input_precision=PRECISION), 0.0)
            acc, mean, exact, mass = add_dq(p, dp, delta, acc, mean, exact, mass, k, one, HAS_SINK, PRECISION)
    dq_base = dq_ptr + batch.to(tl.int64) * stride_dqb
    acc, exact = finish_dq(
        acc,
        mean,
        exact,
        mass,
        total,
        delta,
        terms_ptr,
        refine_ptr,
        row,
        sink_ptr,
        heads,
        valid,
        scaling,
        HAS_SINK,
        PRECISION,
    )
    store_rows(dq_base, acc, steps, heads, valid, stride_dqh, stride_dqm, stride_dqd, HEAD_DIM, BLOCK_D)
    if HAS_SINK:
        store_sink_term(sink_ptr, sink_term_ptr, row, heads, valid, total, exact)


@triton.jit(do_not_specialize=["num_blocks", "piece", "cuts"])
def _block_sparse_dkdv_kernel(
    q_ptr,
    key_desc,
    value_desc,
    grad_ptr,
    terms_ptr,
    refine_ptr,
    dk_ptr,
    dv_ptr,
    sums_ptr,
    queries_ptr,
    begins_ptr,
    offsets_ptr,
    cut_lists_ptr,
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
    piece,
    cuts,
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
    HAS_PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of one block of key columns (or a part of one) from the queries that chose it, a few at a time.

    The first programs take what stands behind each cut, where the list is long, the others the lists up to there.
    """
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    part = tl.program_id(0) % SPLIT
    slot = tl.program_id(0) // SPLIT
    unit = slot
    if HAS_PIECES:
        unit, slot, skipped = piece_of(offsets_ptr, cut_lists_ptr, slot, piece, cuts)
        if skipped:
            return
    begin = tl.load(offsets_ptr + unit)
    end = tl.load(offsets_ptr + unit + 1)
    # Places in the list itself: those of this program.
    first = 0
    length = (end - begin).to(tl.int32)
    is_long = length > 2 * piece
    if HAS_PIECES and is_long:
        number = (begin // piece).to(tl.int32)
        if slot < cuts:
            number = slot + 1
            first = (number.to(tl.int64) * piece - begin).to(tl.int32)
        length = tl.minimum(length, ((number + 1).to(tl.int64) * piece - begin).to(tl.int32))
    batch = unit // num_blocks // KV_HEADS
    kv_head = unit // num_blocks % KV_HEADS
    column = unit % num_blocks * BLOCK_SIZE + part * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    queries_ptr += begin
    k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
    v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    grad_base = grad_ptr + batch.to(tl.int64) * stride_gb
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows % GROUP
    start = kv_len - q_len
    if HAS_START:
        start = tl.load(start_ptr + batch).to(tl.int32)
    # The list runs in the order of the queries, and at most BLOCK_SIZE of them own a column of this block.
    n_masked = BLOCK_SIZE
    if HAS_FIRST:
        n_masked = length
    for entry in tl.range(first, length, TILE_Q):
        # Rows past the end repeat the last query: what they load exists, and `load_terms` turns them off.
        place = entry + tl.minimum(rows // GROUP, TILE_Q - 1)
        valid = (rows // GROUP < TILE_Q) & (place < length)
        place = tl.minimum(place, length - 1)
        steps = tl.load(queries_ptr + place)
        q = load_rows(q_base, steps, heads, None, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
        grad = load_rows(grad_base, steps, heads, None, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV)
        row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
        total, delta, share = load_refined(terms_ptr, refine_ptr, row, valid, PRECISION)
        p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale - total[None, :])
        if PRECISION == "ieee":
            p *= share[None, :]
        if entry < n_masked:
            visible = columns[:, None] <= (start + steps)[None, :]
            if HAS_FIRST:
                inside = columns[:, None] - tl.load(begins_ptr + begin + place)[None, :]
                visible = visible & (inside >= 0) & (inside < BLOCK_SIZE)
            p = tl.where(visible, p, 0.0)
        dv = add_product(dv, p.to(grad.dtype), grad, one, PRECISION)
        ds = p * (tl.dot(v, grad.T, input_precision=PRECISION) - delta[None, :])
        if HAS_START and entry < n_masked:
            # Past a short row's end the cache may hold anything, and 0 * NaN is NaN.
            ds = tl.where(columns[:, None] <= (start + steps)[None, :], ds, 0.0)
        dk = add_product(dk, ds.to(q.dtype), q, one, PRECISION)
    if HAS_PIECES and is_long:
        keys, values = sums_of(sums_ptr, slot, part * BLOCK_N, BLOCK_N, BLOCK_SIZE, BLOCK_D, BLOCK_DV)
        tl.store(keys, dk)
        tl.store(values, dv)
    else:
        row = unit // num_blocks
        store_key_gradient(dk_ptr, dk * scaling, row, columns, kv_len, HEAD_DIM, BLOCK_D)
        store_key_gradient(dv_ptr, dv, row, columns, kv_len, V_DIM, BLOCK_DV)


def block_sparse_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    layouts: SelectionLayouts,
    tile_q: int,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients `(dq, dk, dv, dsink)` of attention over the blocks that `layouts`, of tiles of `tile_q`, describes."""
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    group = heads // kv_heads
    terms, refine = row_terms(output, grad_output, lse, grad_lse, sink)
    sink_terms = torch.empty_like(lse) if sink is not None else lse
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
    _, block_n, warps, stages = launch_sizes(LAUNCH_DQ, query, value)
    block_n = min(block_n, block_size)
    block_m = max(16, next_power_of_2(tile_q * group))
    with torch.cuda.device_of(query):
        _block_sparse_dq_kernel[(layouts.starts.shape[1], batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            grad_output,
            terms,
            refine,
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
        block_m, block_n, warps, stages = launch_sizes(LAUNCH_DKDV, query, value)
        block_m = max(block_m, next_power_of_2(group))
        block_n = min(block_n, block_size)
        num_blocks = cdiv(kv_len, block_size)
        num_lists = batch * kv_heads * num_blocks
        pieces = cut_lists(layouts, q_len, group, block_size, padded_dim(dim) + padded_dim(v_dim))
        _block_sparse_dkdv_kernel[((pieces.cuts + num_lists) * (block_size // block_n),)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            grad_output,
            terms,
            refine,
            dk,
            dv,
            pieces.sums,
            layouts.queries,
            layouts.begins,
            layouts.offsets,
            pieces.lists,
            kv_len=kv_len,
            num_blocks=num_blocks,
            piece=pieces.length,
            cuts=pieces.cuts,
            TILE_Q=block_m // group,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            HAS_PIECES=pieces.sums is not None,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
            **common,
        )
        add_pieces(pieces, layouts, dk, dv, block_size, scaling)
    return dq, dk, dv, sink_gradient(sink_terms, sink)
