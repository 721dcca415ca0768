"""Gradients of softmax attention over a causal band: the whole past (full attention) or a window of it.

    dv_s = sum over t of p[t, s] do_t
    ds   = p * (do v - delta),      delta_t = do_t o_t - (gradient of lse_t)
    dq_t = scaling * sum over s of ds[t, s] k_s,      dk_s = scaling * sum over t of ds[t, s] q_t

One kernel runs over tiles of queries and makes dq, one over tiles of keys and makes dk and dv. Each sum has one owner
and one order, so results repeat bitwise.
"""

import torch

from .triton_common import (
    KERNEL_LOG2E,
    LOG2E,
    add_product,
    cdiv,
    key_descriptor,
    launch_sizes,
    load_keys,
    load_rows,
    load_terms,
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
    tile_rows,
    tl,
    triton,
)


# (bytes per element, padded head dimension at most) -> (BLOCK_M, BLOCK_N, warps, stages), for the whole past and for
# a window of it. Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-29; the others only keep within a card's memory.
LAUNCH_DQ = {
    (2, 128): (128, 64, 8, 3),
    (2, 256): (64, 32, 4, 2),
    (4, 128): (32, 32, 4, 1),
    (4, 256): (16, 32, 4, 1),
}
LAUNCH_DKDV = {
    (2, 128): (64, 128, 8, 2),
    (2, 256): (32, 64, 4, 1),
    (4, 128): (32, 32, 4, 1),
    (4, 256): (16, 32, 4, 1),
}
LAUNCH_WINDOW_DQ = {**LAUNCH_DQ, (2, 128): (64, 32, 4, 2)}
LAUNCH_WINDOW_DKDV = {**LAUNCH_DKDV, (2, 128): (32, 64, 4, 3)}


@triton.jit
def add_dq(p, dp, delta, acc, mean, exact, mass, k, one, HAS_SINK: tl.constexpr, PRECISION: tl.constexpr):
    """Add what one tile of keys gives, from its probabilities and their gradients."""
    if HAS_SINK or PRECISION == "ieee":
        # The output as stored is rounded; a sink's gradient sums that over all rows, so it takes the unrounded one.
        exact += tl.sum(p * dp, 1)
    if PRECISION == "ieee":
        mass += tl.sum(p, 1)
        mean = add_product(mean, p, k, one, PRECISION)
    ds = p * (dp - delta[:, None])
    return add_product(acc, ds.to(k.dtype), k, one, PRECISION), mean, exact, mass


@triton.jit
def finish_dq(
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
    HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scale the sums of a row. In float32 the rounding of its two terms would be the largest error of all.

    That of the log-sum-exp is one factor of the row's probabilities, which with the sink's share must sum to 1. That
    of `delta` is its distance from the probabilities' own sum. Both are mended here, and stored for dk and dv.
    """
    if PRECISION == "ieee":
        if HAS_SINK:
            sink = tl.load(sink_ptr + heads, mask=valid, other=0.0).to(tl.float32) * KERNEL_LOG2E
            mass += tl.exp2(sink - total)
        share = 1 / tl.where(mass == 0, 1.0, mass)
        exact *= share
        refined = exact - tl.load(refine_ptr + row, mask=valid, other=0.0)
        acc = (acc + (delta - refined)[:, None] * mean) * share[:, None]
        tl.store(terms_ptr + row * 2 + 1, refined, mask=valid)
        tl.store(refine_ptr + row, share, mask=valid)
    return acc * scaling, exact


@triton.jit
def load_refined(terms_ptr, refine_ptr, row, valid, PRECISION: tl.constexpr):
    """Both terms of each row, as `finish_dq` left them, and the factor of its probabilities."""
    total, delta = load_terms(terms_ptr, row, valid)
    share = 1.0
    if PRECISION == "ieee":
        share = tl.load(refine_ptr + row, mask=valid, other=0.0)
    return total, delta, share


@triton.jit
def _dq_step(
    q,
    grad,
    total,
    delta,
    acc,
    mean,
    exact,
    mass,
    k,
    v,
    visible,
    scale,
    one,
    MASKED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the gradients of a tile of query rows; rows with `total` +inf add nothing."""
    s = tl.dot(q, k.T, input_precision=PRECISION)
    p = tl.exp2(s * scale - total[:, None])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(grad, v.T, input_precision=PRECISION)
    if MASKED:
        dp = tl.where(visible, dp, 0.0)
    return add_dq(p, dp, delta, acc, mean, exact, mass, k, one, HAS_SINK, PRECISION)


@triton.jit
def _band_dq_kernel(
    q_ptr,
    key_desc,
    value_desc,
    grad_ptr,
    terms_ptr,
    refine_ptr,
    dq_ptr,
    sink_ptr,
    sink_term_ptr,
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
    window,
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
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of one tile of queries times its group; the last queries see most keys and come first."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
    heads = kv_head * GROUP + group_head
    owned, first = query_places(
        start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, gap, HAS_START, HAS_FIRST
    )
    lowest = first
    if HAS_WINDOW:
        lowest = tl.maximum(first, owned - window + 1)
    begin = tl.min(tl.where(valid, lowest, 2147483647), 0)
    end = tl.max(owned, 0) + 1
    # Where all rows begin at one column, tiles before the first row's own column need no mask.
    all_see = tl.min(tl.where(valid, owned, 2147483647), 0) + 1
    if tl.max(tl.where(valid, lowest, 0), 0) > begin:
        all_see = begin
    plain_end = begin + tl.maximum(all_see - begin, 0) // BLOCK_N * BLOCK_N

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
    for column in tl.range(begin, plain_end, BLOCK_N):
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        acc, mean, exact, mass = _dq_step(
            q, grad, total, delta, acc, mean, exact, mass, k, v, None, scale, one, False, HAS_SINK, PRECISION
        )
    for column in tl.range(plain_end, end, BLOCK_N):
        columns = column + tl.arange(0, BLOCK_N)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        if HAS_START:
            k = tl.where((columns < end)[:, None], k, 0.0)
        visible = (columns[None, :] <= owned[:, None]) & (columns[None, :] >= lowest[:, None])
        acc, mean, exact, mass = _dq_step(
            q, grad, total, delta, acc, mean, exact, mass, k, v, visible, scale, one, True, HAS_SINK, PRECISION
        )
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


@triton.jit
def _dkdv_step(
    q, grad, total, delta, share, dk, dv, k, v, visible, scale, one, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Add one tile of query rows to the gradients of a tile of keys; rows with `total` +inf add nothing."""
    s = tl.dot(k, q.T, input_precision=PRECISION)
    p = tl.exp2(s * scale - total[None, :])
    if PRECISION == "ieee":
        p *= share[None, :]
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dv = add_product(dv, p.to(grad.dtype), grad, one, PRECISION)
    dp = tl.dot(v, grad.T, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    dk = add_product(dk, ds.to(q.dtype), q, one, PRECISION)
    return dk, dv


@triton.jit
def _band_dkdv_kernel(
    q_ptr,
    key_desc,
    value_desc,
    grad_ptr,
    terms_ptr,
    refine_ptr,
    dk_ptr,
    dv_ptr,
    start_ptr,
    first_ptr,
    ends_ptr,
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
    window,
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
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of one tile of keys: the tiles of queries around the diagonal under a mask, then those behind it."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    column = tl.program_id(0) * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    start = kv_len - q_len
    if HAS_START:
        start = tl.load(start_ptr + batch).to(tl.int32)
    tile_begin = tl.maximum(column - start, 0) // TILE_Q
    step_end = q_len
    if HAS_WINDOW:
        step_end = tl.minimum(q_len, column + BLOCK_N - 1 + window - start)
    if HAS_FIRST:
        step_end = tl.minimum(step_end, tl.load(ends_ptr + batch * tl.num_programs(0) + tl.program_id(0)))
    tile_end = tl.maximum(tile_begin, tl.cdiv(tl.maximum(step_end, 0), TILE_Q))
    plain_begin = tile_end
    if not HAS_WINDOW and not HAS_FIRST:
        plain_begin = tl.cdiv(tl.maximum(column + BLOCK_N - 1 - start, 0), TILE_Q)
        plain_begin = tl.minimum(tl.maximum(plain_begin, tile_begin), tile_end)

    k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
    v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    grad_base = grad_ptr + batch.to(tl.int64) * stride_gb
    for tile in tl.range(tile_begin, plain_begin):
        steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
        heads = kv_head * GROUP + group_head
        q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
        grad = load_rows(grad_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV)
        row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
        total, delta, share = load_refined(terms_ptr, refine_ptr, row, valid, PRECISION)
        owned, lowest = query_places(
            start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, start, HAS_START, HAS_FIRST
        )
        if HAS_WINDOW:
            lowest = tl.maximum(lowest, owned - window + 1)
        visible = (columns[:, None] <= owned[None, :]) & (columns[:, None] >= lowest[None, :])
        dk, dv = _dkdv_step(q, grad, total, delta, share, dk, dv, k, v, visible, scale, one, True, PRECISION)
    for tile in tl.range(plain_begin, tile_end):
        steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
        heads = kv_head * GROUP + group_head
        q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
        grad = load_rows(grad_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV)
        row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
        total, delta, share = load_refined(terms_ptr, refine_ptr, row, valid, PRECISION)
        dk, dv = _dkdv_step(q, grad, total, delta, share, dk, dv, k, v, None, scale, one, False, PRECISION)
    store_key_gradient(dk_ptr, dk * scaling, batch * KV_HEADS + kv_head, columns, kv_len, HEAD_DIM, BLOCK_D)
    store_key_gradient(dv_ptr, dv, batch * KV_HEADS + kv_head, columns, kv_len, V_DIM, BLOCK_DV)


@triton.jit
def store_key_gradient(base_ptr, states, row, columns, kv_len, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store `(BLOCK_N, BLOCK_D)` into a contiguous `(batch * kv_heads, kv_len, DIM)`."""
    dims = tl.arange(0, BLOCK_D)
    offsets = (row.to(tl.int64) * kv_len + columns) * DIM
    mask = (columns < kv_len)[:, None] & (dims < DIM)[None, :]
    tl.store(base_ptr + offsets[:, None] + dims[None, :], states.to(base_ptr.dtype.element_ty), mask=mask)


def _last_readers(
    first_key: torch.Tensor | None, batch: int, q_len: int, kv_len: int, block_n: int
) -> torch.Tensor | None:
    """One past the last query whose document begins at or before each tile of keys: `(batch, tiles)`, int32."""
    if first_key is None:
        return None
    # The least beginning from a query on never falls, whatever the order of the documents.
    least = first_key.expand(batch, q_len).flip(-1).cummin(-1).values.flip(-1).contiguous()
    last_columns = torch.arange(block_n - 1, kv_len + block_n - 1, block_n, device=first_key.device)
    return torch.searchsorted(least, last_columns.to(least.dtype).expand(batch, -1).contiguous(), right=True).int()


def band_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    window: int | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients `(dq, dk, dv, dsink)` of attention over the last `window` tokens, or over the whole past for None."""
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
        "window": window or 0,
        "scale": scaling * LOG2E,
        "scaling": scaling,
        "one": 1.0,
        "GROUP": group,
        "HEAD_DIM": dim,
        "BLOCK_D": padded_dim(dim),
        "V_DIM": v_dim,
        "BLOCK_DV": padded_dim(v_dim),
        "HAS_WINDOW": window is not None,
        "PRECISION": precision_of(query),
    }
    table_dq, table_dkdv = (LAUNCH_DQ, LAUNCH_DKDV) if window is None else (LAUNCH_WINDOW_DQ, LAUNCH_WINDOW_DKDV)
    most_m, block_n, warps, stages = launch_sizes(table_dq, query, value)
    block_m, tile_q = tile_rows(q_len, group, most_m)
    with torch.cuda.device_of(query):
        _band_dq_kernel[(cdiv(q_len, tile_q), batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            grad_output,
            terms,
            refine,
            dq,
            sink,
            sink_terms,
            stride_dqb=dq.stride(0),
            stride_dqh=dq.stride(1),
            stride_dqm=dq.stride(2),
            stride_dqd=dq.stride(3),
            gap=kv_len - q_len,
            TILE_Q=tile_q,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            HAS_SINK=sink is not None,
            num_warps=warps if block_m >= 64 else 4,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
            **common,
        )
        most_m, block_n, warps, stages = launch_sizes(table_dkdv, query, value)
        block_m, tile_q = tile_rows(q_len, group, most_m)
        _band_dkdv_kernel[(cdiv(kv_len, block_n), batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            grad_output,
            terms,
            refine,
            dk,
            dv,
            ends_ptr=_last_readers(first_key, batch, q_len, kv_len, block_n),
            kv_len=kv_len,
            TILE_Q=tile_q,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
            **common,
        )
    return dq, dk, dv, sink_gradient(sink_terms, sink)
