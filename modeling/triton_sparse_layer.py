"""A sparse layer's attention as a whole: selected blocks and a window of its own, each with sinks, added under gates.

    o_t = sigmoid(g_t) * blocks(q_t, k, v) + sigmoid(g'_t) * window(q'_t, k', v')

The specification is `sparse_layer_attention` of the reference. One program attends both branches for its tile of
queries, the window first, so that neither branch's output leaves the chip; where gradients are wanted, both are stored
ungated besides. The backward pass splits the gradient between branches and gates, and hands each branch's part to that
branch's own kernels. Not supported: what either branch does not support.
"""

import torch

from .rows_hysparse import Rows
from .triton_band_backward import band_backward
from .triton_block_sparse import as_choices, attend_blocks, new_layouts
from .triton_block_sparse_backward import block_sparse_backward
from .triton_common import (
    LOG2E,
    OP_NAMESPACE,
    check_block_size,
    check_supported,
    finish_softmax,
    key_descriptor,
    launch_sizes,
    load_rows,
    may_fuse,
    new_output,
    padded_dim,
    precision_of,
    query_places,
    query_rows,
    row_arguments,
    store_rows,
    tl,
    triton,
)
from .triton_decode_common import takes_decode
from .triton_decode_sparse import decode_sparse_layer
from .triton_gates import gate_value, gates_backward, load_gate, named_strides
from .triton_selection_layouts import SelectionLayouts, check_layouts, inverse_lists
from .triton_sliding_window import attend_window


# (bytes per element, padded head dimension at most) -> for the blocks (BLOCK_N at most, warps, stages), for the window
# (BLOCK_N, stages); the rows are those of the layout's tiles. Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-30; the
# others only keep within a card's memory.
LAUNCH = {
    (2, 128): (64, 4, 3, 64, 2),
    (2, 256): (64, 4, 2, 32, 2),
    (4, 128): (32, 4, 2, 32, 1),
    (4, 256): (32, 4, 1, 32, 1),
}


@triton.jit
def _sparse_layer_fwd_kernel(
    q_ptr,
    key_desc,
    value_desc,
    window_q_ptr,
    window_key_desc,
    window_value_desc,
    gate_ptr,
    window_gate_ptr,
    sink_ptr,
    window_sink_ptr,
    out_ptr,
    blocks_out_ptr,
    blocks_lse_ptr,
    window_out_ptr,
    window_lse_ptr,
    starts_ptr,
    masks_ptr,
    counts_ptr,
    start_ptr,
    window_start_ptr,
    window_first_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_wb,
    stride_wh,
    stride_wm,
    stride_wd,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_vb,
    stride_vh,
    stride_vm,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    window_gap,
    window,
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
    WINDOW_N: tl.constexpr,
    WINDOW_STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_START: tl.constexpr,
    WINDOW_HAS_START: tl.constexpr,
    WINDOW_HAS_FIRST: tl.constexpr,
    HAS_SINK: tl.constexpr,
    WINDOW_HAS_SINK: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HEADWISE: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Both branches of one tile of queries times its group, gated and added."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    steps, group_head, valid = query_rows(tile, q_len, TILE_Q, GROUP, BLOCK_M)
    heads = kv_head * GROUP + group_head
    row = (batch * KV_HEADS * GROUP + heads).to(tl.int64) * q_len + steps
    out_offset = batch.to(tl.int64) * stride_ob

    # All rows are asked for before any is needed: what waits for memory here would wait alone later.
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
    q_base = window_q_ptr + batch.to(tl.int64) * stride_wb
    window_q = load_rows(q_base, steps, heads, valid, stride_wh, stride_wm, stride_wd, HEAD_DIM, BLOCK_D)
    if HAS_GATES:
        gate_base = gate_ptr + batch.to(tl.int64) * stride_gb
        gate = load_gate(gate_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, HEADWISE, V_DIM, BLOCK_DV)
        gate_base = window_gate_ptr + batch.to(tl.int64) * stride_vb
        near_gate = load_gate(
            gate_base, steps, heads, valid, stride_vh, stride_vm, stride_vd, HEADWISE, V_DIM, BLOCK_DV
        )

    owned, first = query_places(
        window_start_ptr,
        window_first_ptr,
        stride_fb,
        stride_fm,
        batch,
        steps,
        valid,
        window_gap,
        WINDOW_HAS_START,
        WINDOW_HAS_FIRST,
    )
    m_i, l_i, acc = attend_window(
        window_q,
        window_key_desc,
        window_value_desc,
        batch,
        kv_head,
        owned,
        first,
        valid,
        window,
        scale,
        one,
        BLOCK_D,
        BLOCK_DV,
        BLOCK_M,
        WINDOW_N,
        WINDOW_STAGES,
        WINDOW_HAS_START,
        PRECISION,
    )
    near, lse = finish_softmax(m_i, l_i, acc, window_sink_ptr, heads, valid, WINDOW_HAS_SINK)
    if KEEP:
        kept = window_out_ptr + out_offset
        store_rows(kept, near, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
        tl.store(window_lse_ptr + row, lse, mask=valid)
    if HAS_GATES:
        near *= gate_value(near_gate)

    owned, _ = query_places(start_ptr, None, 0, 0, batch, steps, valid, gap, HAS_START, False)
    unit = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    m_i, l_i, acc = attend_blocks(
        q,
        key_desc,
        value_desc,
        starts_ptr + unit * candidates,
        masks_ptr + unit * candidates,
        counts_ptr + unit * 2,
        candidates,
        batch,
        kv_head,
        steps - tile * TILE_Q,
        owned,
        valid,
        scale,
        one,
        BLOCK_D,
        BLOCK_DV,
        BLOCK_M,
        BLOCK_N,
        BLOCK_SIZE,
        HAS_START,
        PRECISION,
    )
    out, lse = finish_softmax(m_i, l_i, acc, sink_ptr, heads, valid, HAS_SINK)
    if KEEP:
        kept = blocks_out_ptr + out_offset
        store_rows(kept, out, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
        tl.store(blocks_lse_ptr + row, lse, mask=valid)
    if HAS_GATES:
        out *= gate_value(gate)
    out_base = out_ptr + out_offset
    store_rows(out_base, out + near, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)


@torch.library.custom_op(f"{OP_NAMESPACE}::sparse_layer_forward", mutates_args=())
def _sparse_layer_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    window_query: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    gate_global: torch.Tensor | None,
    gate_local: torch.Tensor | None,
    sink_global: torch.Tensor | None,
    sink_local: torch.Tensor | None,
    starts: torch.Tensor,
    masks: torch.Tensor,
    counts: torch.Tensor,
    queries: torch.Tensor | None,
    begins: torch.Tensor | None,
    offsets: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    window_start: torch.Tensor | None,
    window_first: torch.Tensor | None,
    block_size: int,
    window: int,
    scaling: float,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    group = heads // kv_heads
    output = new_output(query, v_dim)
    kept = _branch_results(query, v_dim, keep)
    block_n, warps, stages, window_n, window_stages = launch_sizes(LAUNCH, query, value)
    block_n = min(block_n, block_size)
    tile_q = starts.shape[2] // indices.shape[3]
    near = row_arguments(window_start, window_first, batch, q_len)
    with torch.cuda.device_of(query):
        _sparse_layer_fwd_kernel[(starts.shape[1], batch * kv_heads)](
            query,
            key_descriptor(key, block_n),
            key_descriptor(value, block_n),
            window_query,
            key_descriptor(window_key, window_n),
            key_descriptor(window_value, window_n),
            gate_global,
            gate_local,
            sink_global,
            sink_local,
            output,
            *kept,
            starts,
            masks,
            counts,
            query_start,
            near["start_ptr"],
            near["first_ptr"],
            **named_strides("q", query),
            **named_strides("w", window_query),
            **named_strides("g", gate_global),
            **named_strides("v", gate_local),
            **named_strides("o", output),
            stride_fb=near["stride_fb"],
            stride_fm=near["stride_fm"],
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=kv_len - q_len,
            window_gap=window_key.shape[2] - q_len,
            window=window,
            candidates=starts.shape[2],
            scale=scaling * LOG2E,
            one=1.0,
            GROUP=group,
            TILE_Q=tile_q,
            HEAD_DIM=dim,
            BLOCK_D=padded_dim(dim),
            V_DIM=v_dim,
            BLOCK_DV=padded_dim(v_dim),
            BLOCK_M=max(16, triton.next_power_of_2(tile_q * group)),
            BLOCK_N=block_n,
            WINDOW_N=window_n,
            WINDOW_STAGES=window_stages,
            BLOCK_SIZE=block_size,
            HAS_START=query_start is not None,
            WINDOW_HAS_START=near["HAS_START"],
            WINDOW_HAS_FIRST=near["HAS_FIRST"],
            HAS_SINK=sink_global is not None,
            WINDOW_HAS_SINK=sink_local is not None,
            HAS_GATES=gate_global is not None,
            HEADWISE=gate_global is not None and gate_global.shape[3] != v_dim,
            KEEP=keep,
            PRECISION=precision_of(query),
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=may_fuse(query),
        )
    return output, *kept


def _branch_results(
    query: torch.Tensor, v_dim: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised output and log-sum-exp of both branches, empty where nobody needs them."""
    lse = torch.empty(query.shape[:3] if keep else 0, dtype=torch.float32, device=query.device)
    output = new_output(query, v_dim) if keep else query.new_empty(0)
    return output, lse, torch.empty_like(output), torch.empty_like(lse)


@_sparse_layer_forward.register_fake
def _(query, key, value, *others):
    v_dim = value.shape[-1]
    return new_output(query, v_dim), *_branch_results(query, v_dim, others[-1])


@torch.library.custom_op(f"{OP_NAMESPACE}::sparse_layer_backward", mutates_args=())
def _sparse_layer_backward(
    grad_output: torch.Tensor,
    blocks_output: torch.Tensor,
    blocks_lse: torch.Tensor,
    window_output: torch.Tensor,
    window_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    window_query: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    gate_global: torch.Tensor | None,
    gate_local: torch.Tensor | None,
    sink_global: torch.Tensor | None,
    sink_local: torch.Tensor | None,
    starts: torch.Tensor,
    masks: torch.Tensor,
    counts: torch.Tensor,
    queries: torch.Tensor | None,
    begins: torch.Tensor | None,
    offsets: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    window_start: torch.Tensor | None,
    window_first: torch.Tensor | None,
    block_size: int,
    window: int,
    scaling: float,
) -> list[torch.Tensor]:
    grads, gates = (grad_output, grad_output), (query.new_empty(0), query.new_empty(0))
    if gate_global is not None:
        grads, gates = gates_backward(grad_output, blocks_output, window_output, gate_global, gate_local)
    lists = (queries, begins, offsets)
    if queries is None:
        lists = inverse_lists(indices, query_start, first_key, block_size, key.shape[2])
    far = block_sparse_backward(
        grads[0],
        None,
        query,
        key,
        value,
        blocks_output,
        blocks_lse,
        sink_global,
        SelectionLayouts(starts, masks, counts, *lists),
        starts.shape[2] // indices.shape[3],
        query_start,
        first_key,
        block_size,
        scaling,
    )
    near = band_backward(
        grads[1],
        None,
        window_query,
        window_key,
        window_value,
        window_output,
        window_lse,
        sink_local,
        window_start,
        window_first,
        window,
        scaling,
    )
    return [*far[:3], *near[:3], *gates, far[3], near[3]]


@_sparse_layer_backward.register_fake
def _(grad_output, blocks_output, blocks_lse, window_output, window_lse, query, key, value, indices, *others):
    window_query, window_key, window_value, *optional = others[:7]
    grads = [
        torch.empty_like(query),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        torch.empty_like(window_query),
        window_key.new_empty(window_key.shape),
        window_value.new_empty(window_value.shape),
    ]
    gates, sinks = optional[:2], optional[2:]
    grads += [query.new_empty(0) if gate is None else new_output(gate, gate.shape[3]) for gate in gates]
    lone = query.new_empty(0, dtype=torch.float32)
    return grads + [lone.clone() if sink is None else torch.empty_like(sink) for sink in sinks]


def _keep_for_backward(ctx, inputs, output):
    *tensors, ctx.block_size, ctx.window, ctx.scaling, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], *tensors)


def _backward(ctx, grad_output, *_):
    saved = ctx.saved_tensors
    if grad_output is None:
        return (None,) * 25
    *states, gate_global, gate_local, sink_global, sink_local = _sparse_layer_backward(
        grad_output, *saved, ctx.block_size, ctx.window, ctx.scaling
    )
    grads = (gate_global, gate_local, sink_global, sink_local)
    given = saved[11:15]
    optional = [grad if tensor is not None else None for grad, tensor in zip(grads, given, strict=True)]
    return *states[:3], None, *states[3:], *optional, *(None,) * 14


_sparse_layer_forward.register_autograd(_backward, setup_context=_keep_for_backward)


def sparse_layer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    window_query: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    *,
    block_size: int,
    window: int,
    scaling: float,
    rows: Rows,
    window_rows: Rows,
    gate_global: torch.Tensor | None = None,
    gate_local: torch.Tensor | None = None,
    sink_global: torch.Tensor | None = None,
    sink_local: torch.Tensor | None = None,
    layouts: SelectionLayouts | None = None,
) -> tuple[torch.Tensor]:
    """Both branches of a sparse layer, gated and added: `(output,)`.

    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_supported(query, key, value, scaling=scaling, rows=rows)
    check_supported(window_query, window_key, window_value, scaling=scaling, rows=window_rows)
    if window_query.dtype != query.dtype or window_key.shape[1] != key.shape[1]:
        raise NotImplementedError(
            "the Triton kernels take both branches in one dtype and with equally many KV heads, got "
            f"{query.dtype} with {key.shape[1]} and {window_query.dtype} with {window_key.shape[1]}; "
            "use backend='reference'."
        )
    tensors = (query, key, value, window_query, window_key, window_value)
    optional = (gate_global, gate_local, sink_global, sink_local)
    window = min(window, window_key.shape[2])
    if takes_decode(*tensors, *optional):
        check_block_size(block_size)
        return decode_sparse_layer(
            *tensors[:3],
            as_choices(indices),
            *tensors[3:],
            optional[:2],
            optional[2:],
            block_size=block_size,
            window=window,
            scaling=scaling,
            rows=rows,
            window_rows=window_rows,
        )
    if layouts is None:
        layouts = new_layouts(query, key, value, indices, block_size=block_size, rows=rows, for_backward=False)
    else:
        check_layouts(layouts, query, indices)
    keep = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (*tensors, *optional))
    output, *_ = _sparse_layer_forward(
        query,
        key,
        value,
        as_choices(indices),
        window_query,
        window_key,
        window_value,
        *optional,
        *layouts,
        rows.query_start,
        rows.first_key,
        window_rows.query_start,
        window_rows.first_key,
        block_size,
        window,
        float(scaling),
        keep,
    )
    return (output,)
