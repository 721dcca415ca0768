"""A sparse layer's attention as one operation, beside its block-sparse part and beside its parts one by one."""

from collections.abc import Iterator
from functools import partial

import torch
from bench_block_sparse import attend as attend_blocks
from bench_window import attend as attend_window
from checks import gradients_are_right, outputs_are_right
from registry import (
    BLOCK_SIZE,
    CHECK_LENGTH,
    SHAPES,
    WINDOW,
    Baselines,
    Row,
    backward_ms,
    index_set,
    make_states,
    median_ms,
)

from hysparse_hf.modeling.attention_hysparse import selection_layouts, sparse_layer_attention


def attend(query, key, value, indices, gate_global, gate_local, *, sink, backend="triton", rows=None, **options):
    """The public operation, with one set of states for both branches."""
    return sparse_layer_attention(
        query,
        key,
        value,
        indices,
        query,
        key,
        value,
        block_size=BLOCK_SIZE,
        window=WINDOW,
        gate_global=gate_global,
        gate_local=gate_local,
        sink_global=sink,
        sink_local=sink,
        rows=rows,
        window_rows=rows,
        backend=backend,
        **options,
    )


def checked(query, key, value, indices, **options):
    """The same with gates that a check can cut like the queries."""
    return attend(query, key, value, indices, query, -query, **options)


def one_by_one(query, key, value, indices, gate_global, gate_local, *, sink, **options):
    """Two kernels, and the gates as operations of torch."""
    far = attend_blocks(query, key, value, indices, sink=sink, **options)
    near = attend_window(query, key, value, sink=sink)
    return torch.sigmoid(gate_global) * far + torch.sigmoid(gate_local) * near


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one shape and length; the layouts' time is in the rows of `block_sparse`."""
    heads, kv_heads = SHAPES[shape]
    states = make_states(shape, n)
    sink = torch.randn(heads, device="cuda")
    indices = index_set("correlated", kv_heads, n)
    gates = [torch.randn_like(states[0]) for _ in range(2)]
    options = {"sink": sink, "layouts": selection_layouts(*states, indices, block_size=BLOCK_SIZE, backend="triton")}
    kernel, reference = partial(checked, sink=sink), partial(checked, sink=sink, backend="reference")

    right = outputs_are_right(lambda *parts: kernel(*parts, indices), reference, states, indices)
    ms = median_ms(lambda: attend(*states, indices, *gates, **options))
    part = median_ms(lambda: attend_blocks(*states, indices, **options))
    parts = median_ms(lambda: one_by_one(*states, indices, *gates, **options))
    yield Row("sparse_layer", "forward", shape, n, ms, "its block-sparse part", part, right, "correlated")
    yield Row("sparse_layer", "forward", shape, n, ms, "one by one", parts, right, "correlated")

    few = make_states(shape, CHECK_LENGTH)
    right = gradients_are_right(kernel, reference, few, index_set("correlated", kv_heads, CHECK_LENGTH))
    grad = torch.randn_like(states[0])
    inputs = [*states, *gates]

    def backward(call):
        return backward_ms(lambda q, k, v, *logits: call(q, k, v, indices, *logits, **options), inputs, grad)

    yield Row(
        "sparse_layer", "backward", shape, n, backward(attend), "one by one", backward(one_by_one), right, "correlated"
    )
