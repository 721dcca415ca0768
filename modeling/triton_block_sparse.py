"""Softmax attention over selected key blocks, with sinks.

    p[t, s] = exp(q_t k_s * scaling - m) / (sum over s + exp(sink - m)),   s in a block that t chose, s <= t
    o_t     = sum over s of p[t, s] v_s
    lse_t   = log of the sum over s, without the sink

The specification is `block_sparse_attention` of the reference. A program takes a tile of neighbouring queries times
their group over the union of their blocks. Not supported: a caller's own visibility mask; block sizes that are no
power of two from 16 to 1024. `window`, one softmax with the last tokens, is put together by the public operation.
"""

import torch

from .rows_hysparse import Rows
from .triton_block_sparse_backward import block_sparse_backward
from .triton_common import (
    LN2,
    LOG2E,
    LOWEST,
    OP_NAMESPACE,
    add_product,
    check_block_size,
    check_supported,
    finish_softmax,
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
    query_places,
    query_rows,
    store_rows,
    tile_rows,
    tl,
    triton,
)
from .triton_decode_common import takes_decode
from .triton_decode_sparse import decode_blocks
from .triton_gates import pass_gate
from .triton_selection_layouts import (
    SelectionLayouts,
    check_layouts,
    inverse_lists,
    most_tile_queries,
    tile_unions,
)


# (bytes per element, padded head dimension at most) -> (BLOCK_M, BLOCK_N at most, warps, stages).
# Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-29; the others only keep within a card's memory.
LAUNCH = {
    (2, 128): (64, 64, 4, 3),
    (2, 256): (64, 64, 4, 2),
    (4, 128): (32, 32, 4, 2),
    (4, 256): (32, 32, 4, 1),
}


@triton.jit
def _block_sparse_fwd_kernel(
    q_ptr,
    key_desc,
    value_desc,
    out_ptr,
    lse_ptr,
    layer,
    gates,
    gate_strides,
    near_gate_strides,
    sink_ptr,
    starts_ptr,
    masks_ptr,
    counts_ptr,
    start_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    KV_HEADS,
    q_len,
    gap,
    candidates,
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
    HAS_START: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HEADWISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries times its group over the union of its blocks; a sparse layer's window is added, under gates.

    The branch's own output and log-sum-exp are stored where there is place for them, the layer's sum likewise.
    """
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
    heads = kv_head * GROUP + group_head
    owned, _ = query_places(start_ptr, None, 0, 0, batch, steps, valid, gap, HAS_START, False)
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
    unit = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    starts_ptr += unit * candidates
    masks_ptr += unit * candidates
    counts_ptr += unit * 2
    bit = steps - tile * TILE_Q

    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    n_whole = tl.load(counts_ptr) * SPLIT
    n_all = tl.load(counts_ptr + 1) * SPLIT
    n_clean = n_all
    if HAS_START:
        n_clean = n_whole
    # Loaded one turn ahead, the list's entries do not delay the keys that they name.
    next_start = tl.load(starts_ptr)
    next_chosen = tl.load(masks_ptr)
    for entry in tl.range(0, n_clean):
        column = next_start + entry % SPLIT * BLOCK_N
        on = valid & (((next_chosen >> bit) & 1) != 0)
        following = tl.minimum((entry + 1) // SPLIT, candidates - 1)
        next_start = tl.load(starts_ptr + following)
        next_chosen = tl.load(masks_ptr + following)
        k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
        v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if not HAS_START and entry >= n_whole:
            s = tl.where(column + tl.arange(0, BLOCK_N)[None, :] <= owned[:, None], s, -float("inf"))
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, tl.max(s, 1) * scale, scale, on)
        acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)
    if HAS_START:
        last = tl.max(owned, 0)
        for entry in tl.range(n_whole, n_all):
            column = tl.load(starts_ptr + entry // SPLIT) + entry % SPLIT * BLOCK_N
            columns = column + tl.arange(0, BLOCK_N)
            on = valid & (((tl.load(masks_ptr + entry // SPLIT) >> bit) & 1) != 0)
            k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
            v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
            # Past a short row's end the cache may hold anything, and 0 * NaN is NaN.
            v = tl.where((columns <= last)[:, None], v, 0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            s = tl.where(columns[None, :] <= owned[:, None], s, -float("inf"))
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, tl.max(s, 1) * scale, scale, on)
            acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)

    out, lse = finish_softmax(m_i, l_i, acc, sink_ptr, heads, valid, HAS_SINK)
    offset = batch.to(tl.int64) * stride_ob
    if out_ptr is not None:
        store_rows(out_ptr + offset, out, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
        row = (batch * KV_HEADS * GROUP + heads).to(tl.int64)
        tl.store(lse_ptr + row * q_len + steps, lse, mask=valid)
    if layer[0] is not None:
        near = load_rows(layer[1] + offset, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
        near = near.to(tl.float32)
        out = pass_gate(out, gates[0], gate_strides, batch, steps, heads, valid, HEADWISE, V_DIM, BLOCK_DV)
        out += pass_gate(near, gates[1], near_gate_strides, batch, steps, heads, valid, HEADWISE, V_DIM, BLOCK_DV)
        store_rows(layer[0] + offset, out, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)


def blocks_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    layouts: SelectionLayouts,
    query_start: torch.Tensor | None,
    block_size: int,
    scaling: float,
    *,
    results: tuple[torch.Tensor | None, torch.Tensor | None],
    layer: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    gates: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Fill `results`, the output and log-sum-exp in base 2 of a checked call, where they are.

    `layer` is a sparse layer's output to fill and its window's output, which lie in memory as `new_output` lays them;
    `gates` are the logits that the blocks and the window pass before they are added.
    """
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    group = heads // kv_heads
    filled = results[0] if layer[0] is None else layer[0]
    _, block_n, warps, stages = launch_sizes(LAUNCH, query, value)
    block_n = min(block_n, block_size)
    tile_q = layouts.starts.shape[2] // indices.shape[3]
    block_m = max(16, next_power_of_2(tile_q * group))
    with torch.cuda.device_of(query):
        _block_sparse_fwd_kernel[(layouts.starts.shape[1], batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            *results,
            layer,
            gates,
            *(None if gate is None else gate.stride() for gate in gates),
            sink,
            layouts.starts,
            layouts.masks,
            layouts.counts,
            **named_strides("q", query),
            **named_strides("o", filled),
            start_ptr=query_start,
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=kv_len - q_len,
            candidates=layouts.starts.shape[2],
            scale=scaling * LOG2E,
            one=1.0,
            GROUP=group,
            TILE_Q=tile_q,
            HEAD_DIM=dim,
            BLOCK_D=padded_dim(dim),
            V_DIM=v_dim,
            BLOCK_DV=padded_dim(v_dim),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_SIZE=block_size,
            HAS_START=query_start is not None,
            HAS_SINK=sink is not None,
            HEADWISE=gates[0] is not None and gates[0].shape[3] != v_dim,
            PRECISION=precision_of(query),
            num_warps=warps if block_m >= 128 else 4,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
        )


@torch.library.custom_op(f"{OP_NAMESPACE}::block_sparse_forward", mutates_args=())
def _block_sparse_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    starts: torch.Tensor,
    masks: torch.Tensor,
    counts: torch.Tensor,
    queries: torch.Tensor | None,
    begins: torch.Tensor | None,
    offsets: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = new_output(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)
    layouts = SelectionLayouts(starts, masks, counts)
    blocks_forward(query, key, value, indices, sink, layouts, query_start, block_size, scaling, results=results)
    return results


@_block_sparse_forward.register_fake
def _(query, key, value, *others):
    return new_output(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{OP_NAMESPACE}::block_sparse_backward", mutates_args=())
def _block_sparse_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    starts: torch.Tensor,
    masks: torch.Tensor,
    counts: torch.Tensor,
    queries: torch.Tensor | None,
    begins: torch.Tensor | None,
    offsets: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if queries is None:
        queries, begins, offsets = inverse_lists(indices, query_start, first_key, block_size, key.shape[2])
    layouts = SelectionLayouts(starts, masks, counts, queries, begins, offsets)
    return block_sparse_backward(
        grad_output,
        grad_lse,
        query,
        key,
        value,
        output,
        lse,
        sink,
        layouts,
        starts.shape[2] // indices.shape[3],
        query_start,
        first_key,
        block_size,
        scaling,
    )


@_block_sparse_backward.register_fake
def _(grad_output, grad_lse, query, key, value, output, lse, indices, sink, *others):
    grad_sink = torch.empty_like(sink) if sink is not None else query.new_empty(0, dtype=torch.float32)
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape), grad_sink


def _keep_for_backward(ctx, inputs, output):
    query, key, value, indices, sink, *layouts, query_start, first_key, ctx.block_size, ctx.scaling = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, indices, sink, *layouts, query_start, first_key)


def _backward(ctx, grad_output, grad_lse):
    saved = ctx.saved_tensors
    grad_output = torch.zeros_like(saved[3]) if grad_output is None else grad_output
    grads = _block_sparse_backward(grad_output, grad_lse, *saved, ctx.block_size, ctx.scaling)
    return *grads[:3], None, grads[3] if saved[6] is not None else None, *(None,) * 10


_block_sparse_forward.register_autograd(_backward, setup_context=_keep_for_backward)


def selection_layouts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    rows: Rows,
    for_backward: bool,
) -> SelectionLayouts | None:
    """What the kernels read in place of `indices`, for layers of equal shapes that share a selection.

    None where few queries go to kernels that read the indices themselves.

    Raises:
        NotImplementedError: a block size, a length or a mask that the kernels do not take.
    """
    if takes_decode(query, key, value):
        return None
    return new_layouts(query, key, value, indices, block_size=block_size, rows=rows, for_backward=for_backward)


def new_layouts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    rows: Rows,
    for_backward: bool,
) -> SelectionLayouts:
    """Build what the kernels for many queries read in place of `indices`; errors as in `selection_layouts`."""
    check_block_size(block_size)
    if key.shape[2] > 2**26 or rows.visibility is not None or rows.query_columns is not None:
        raise NotImplementedError(
            f"the Triton kernels take up to 2**26 keys, got {key.shape[2]}, and `rows` without `visibility` and "
            "`query_columns`; use backend='reference'."
        )
    indices = as_choices(indices)
    kv_len = key.shape[2]
    most_m = launch_sizes(LAUNCH, query, value)[0]
    group = query.shape[1] // key.shape[1]
    _, tile_q = tile_rows(query.shape[2], group, most_m, most_tile_queries(indices.shape[3]))
    unions = tile_unions(indices, rows.query_start, rows.first_key, tile_q, block_size, kv_len)
    if not for_backward:
        return SelectionLayouts(*unions)
    return SelectionLayouts(*unions, *inverse_lists(indices, rows.query_start, rows.first_key, block_size, kv_len))


def as_choices(indices: torch.Tensor) -> torch.Tensor:
    """The indices as the kernels take them: int32, at least one per query."""
    if indices.shape[3] == 0:
        indices = torch.nn.functional.pad(indices, (0, 1), value=-1)
    if indices.dtype == torch.int32:
        return indices
    # An id past the end chooses nothing, and its lower half might.
    return indices.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    scaling: float,
    rows: Rows,
    sink: torch.Tensor | None = None,
    return_weights: bool = False,
    layouts: SelectionLayouts | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Softmax over the selected blocks: `(output, lse, None)`; lse excludes the sink.

    Args:
        layouts (`SelectionLayouts`, *optional*): of these `indices`; built here otherwise.
    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_supported(query, key, value, scaling=scaling, rows=rows, return_weights=return_weights)
    if takes_decode(query, key, value, sink):
        check_block_size(block_size)
        choices = as_choices(indices)
        return decode_blocks(query, key, value, choices, sink, block_size=block_size, scaling=scaling, rows=rows)
    if layouts is None:
        layouts = new_layouts(query, key, value, indices, block_size=block_size, rows=rows, for_backward=False)
    else:
        check_layouts(layouts, query, indices)
    output, lse = _block_sparse_forward(
        query,
        key,
        value,
        as_choices(indices),
        sink,
        *layouts,
        rows.query_start,
        rows.first_key,
        block_size,
        float(scaling),
    )
    return output, lse * LN2, None
