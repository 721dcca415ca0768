"""A sparse layer's attention as a whole: selected blocks and a window of its own, each with sinks, added under gates.

    o_t = sigmoid(g_t) * blocks(q_t, k, v) + sigmoid(g'_t) * window(q'_t, k', v')

The specification is `sparse_layer_attention` of the reference. The window's kernel leaves its output to that of the
blocks, which passes both through their gates and adds them; where gradients are wanted, both are kept ungated besides.
The backward pass splits the gradient between branches and gates, and hands each branch's part to that branch's own
kernels. Not supported: what either branch does not support.
"""

import torch

from .rows_hysparse import Rows
from .triton_band_backward import band_backward
from .triton_block_sparse import as_choices, blocks_forward, new_layouts
from .triton_block_sparse_backward import block_sparse_backward
from .triton_common import OP_NAMESPACE, check_block_size, check_supported, new_output
from .triton_decode_common import takes_decode
from .triton_decode_sparse import decode_sparse_layer
from .triton_gates import gates_backward
from .triton_selection_layouts import SelectionLayouts, check_layouts, inverse_lists
from .triton_sliding_window import window_forward


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
    output = new_output(query, value.shape[3])
    near = window_forward(
        window_query, window_key, window_value, sink_local, window_start, window_first, window, scaling
    )
    far = _branch_results(query, value, keep)
    blocks_forward(
        query,
        key,
        value,
        indices,
        sink_global,
        SelectionLayouts(starts, masks, counts),
        query_start,
        block_size,
        scaling,
        results=far if keep else (None, None),
        layer=(output, near[0]),
        gates=(gate_global, gate_local),
    )
    return output, *far, *(near if keep else _branch_results(query, value, keep))


def _branch_results(query: torch.Tensor, value: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised output and log-sum-exp of a branch, empty where nobody needs them."""
    lse = query.new_empty(query.shape[:3] if keep else 0, dtype=torch.float32)
    return new_output(query, value.shape[3]) if keep else query.new_empty(0), lse


@_sparse_layer_forward.register_fake
def _(query, key, value, *others):
    far, near = (_branch_results(query, value, others[-1]) for _ in range(2))
    return new_output(query, value.shape[3]), *far, *near


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
