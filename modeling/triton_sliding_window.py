"""Causal sliding-window attention with sinks.

    p[t, s] = exp(q_t k_s * scaling - m) / (sum over s + exp(sink - m)),  t - window < s <= t,  s in t's document
    o_t     = sum over s of p[t, s] v_s
    lse_t   = log of the sum over s, without the sink

The specification is `sliding_window_attention` of the reference. Not supported: a caller's own visibility mask.
"""

import torch

from .rows_hysparse import Rows
from .triton_band_backward import band_backward
from .triton_common import (
    LN2,
    LOG2E,
    LOWEST,
    OP_NAMESPACE,
    add_product,
    cdiv,
    check_supported,
    finish_softmax,
    key_descriptor,
    launch_sizes,
    load_keys,
    load_rows,
    may_fuse,
    named_strides,
    new_output,
    online_softmax,
    padded_dim,
    precision_of,
    query_places,
    query_rows,
    row_arguments,
    store_rows,
    tile_rows,
    tl,
    triton,
)
from .triton_decode_common import takes_decode
from .triton_decode_sparse import decode_window


# (bytes per element, padded head dimension at most) -> (BLOCK_M, BLOCK_N, warps, stages).
# Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-29; the others only keep within a card's memory.
LAUNCH = {
    (2, 128): (64, 32, 4, 2),
    (2, 256): (64, 64, 4, 2),
    (4, 128): (32, 32, 4, 2),
    (4, 256): (32, 32, 4, 1),
}


@triton.jit
def _sliding_window_fwd_kernel(
    q_ptr,
    key_desc,
    value_desc,
    out_ptr,
    lse_ptr,
    sink_ptr,
    start_ptr,
    first_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    window,
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
    STAGES: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries times its group against the keys that any of them sees."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    steps, group_head, valid = query_rows(tl.program_id(0), q_len, TILE_Q, GROUP, BLOCK_M)
    heads = kv_head * GROUP + group_head
    owned, first = query_places(
        start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, gap, HAS_START, HAS_FIRST
    )
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)

    lowest = tl.maximum(first, owned - window + 1)
    begin = tl.min(tl.where(valid, lowest, 2147483647), 0)
    end = tl.max(owned, 0) + 1
    # Between these two columns every row sees every key.
    plain_begin = tl.max(tl.where(valid, lowest, 0), 0)
    plain_end = tl.min(tl.where(valid, owned, 2147483647), 0) + 1
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for column in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        columns = column + tl.arange(0, BLOCK_N)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        if HAS_START:
            # Past a short row's end the cache may hold anything, and 0 * NaN is NaN.
            v = tl.where((columns < end)[:, None], v, 0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if (column < plain_begin) | (column + BLOCK_N > plain_end):
            visible = (columns[None, :] <= owned[:, None]) & (columns[None, :] >= lowest[:, None])
            s = tl.where(visible, s, -float("inf"))
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, tl.max(s, 1) * scale, scale, valid)
        acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)

    out, lse = finish_softmax(m_i, l_i, acc, sink_ptr, heads, valid, HAS_SINK)
    out_base = out_ptr + batch.to(tl.int64) * stride_ob
    store_rows(out_base, out, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
    row = (batch * KV_HEADS * GROUP + heads).to(tl.int64)
    tl.store(lse_ptr + row * q_len + steps, lse, mask=valid)


def window_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in base 2 of a checked call."""
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    output = new_output(query, v_dim)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    most_m, block_n, warps, stages = launch_sizes(LAUNCH, query, value)
    block_m, tile_q = tile_rows(q_len, heads // kv_heads, most_m)
    with torch.cuda.device_of(query):
        _sliding_window_fwd_kernel[(cdiv(q_len, tile_q), batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            output,
            lse,
            sink,
            **named_strides("q", query),
            **named_strides("o", output),
            **row_arguments(query_start, first_key, batch, q_len),
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=kv_len - q_len,
            window=window,
            scale=scaling * LOG2E,
            one=1.0,
            GROUP=heads // kv_heads,
            TILE_Q=tile_q,
            HEAD_DIM=dim,
            BLOCK_D=padded_dim(dim),
            V_DIM=v_dim,
            BLOCK_DV=padded_dim(v_dim),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGES=stages,
            HAS_SINK=sink is not None,
            PRECISION=precision_of(query),
            num_warps=warps if block_m >= 64 else 4,
            enable_fp_fusion=may_fuse(query),
        )
    return output, lse


_sliding_window_forward = torch.library.custom_op(
    f"{OP_NAMESPACE}::sliding_window_forward", window_forward, mutates_args=()
)


@_sliding_window_forward.register_fake
def _(query, key, value, sink, query_start, first_key, window, scaling):
    return new_output(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{OP_NAMESPACE}::sliding_window_backward", mutates_args=())
def _sliding_window_backward(
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
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return band_backward(
        grad_output, grad_lse, query, key, value, output, lse, sink, query_start, first_key, window, scaling
    )


@_sliding_window_backward.register_fake
def _(grad_output, grad_lse, query, key, value, output, lse, sink, query_start, first_key, window, scaling):
    grad_sink = torch.empty_like(sink) if sink is not None else query.new_empty(0, dtype=torch.float32)
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape), grad_sink


def _keep_for_backward(ctx, inputs, output):
    query, key, value, sink, query_start, first_key, ctx.window, ctx.scaling = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, sink, query_start, first_key)


def _backward(ctx, grad_output, grad_lse):
    *states, sink, query_start, first_key = ctx.saved_tensors
    grad_output = torch.zeros_like(states[3]) if grad_output is None else grad_output
    grads = _sliding_window_backward(
        grad_output, grad_lse, *states, sink, query_start, first_key, ctx.window, ctx.scaling
    )
    return *grads[:3], grads[3] if sink is not None else None, None, None, None, None


_sliding_window_forward.register_autograd(_backward, setup_context=_keep_for_backward)


def sliding_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int,
    scaling: float,
    rows: Rows,
    sink: torch.Tensor | None = None,
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Softmax over the last `window` tokens of the query's document, its own included: `(output, lse, None)`.

    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_supported(query, key, value, scaling=scaling, rows=rows, return_weights=return_weights)
    # A wider window changes nothing, and the kernel's arithmetic on columns stays far from the ends of int32.
    window = min(window, key.shape[2])
    if takes_decode(query, key, value, sink):
        return decode_window(query, key, value, sink, window=window, scaling=scaling, rows=rows)
    output, lse = _sliding_window_forward(
        query, key, value, sink, rows.query_start, rows.first_key, window, float(scaling)
    )
    return output, lse * LN2, None
