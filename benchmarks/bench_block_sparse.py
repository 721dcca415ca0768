"""Block-sparse attention with sinks: layouts, forward, backward, and the sparse layer around it."""

from collections.abc import Iterator
from functools import partial

import torch
from bench_window import attend as attend_window
from checks import gradients_are_right, outputs_are_right
from registry import (
    BLOCK_SIZE,
    CHECK_LENGTH,
    SHAPES,
    SHARING_LAYERS,
    Baselines,
    Row,
    backward_ms,
    index_set,
    make_states,
    median_ms,
)

from hysparse_hf.modeling.attention_hysparse import block_sparse_attention
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS
from hysparse_hf.modeling.triton_block_sparse import block_sparse_attention as block_sparse_kernel
from hysparse_hf.modeling.triton_block_sparse import selection_layouts


def attend(query, key, value, indices, *, sink, backend="triton", **options):
    """The public operation."""
    return block_sparse_attention(
        query, key, value, indices, block_size=BLOCK_SIZE, sink=sink, backend=backend, **options
    )


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one shape and length, for correlated and for random choices."""
    for kind in ("correlated", "random"):
        yield from measure_set(shape, n, baselines, kind)


def measure_set(shape: str, n: int, baselines: Baselines, kind: str) -> Iterator[Row]:
    """Rows of one index set; each sparse layer bears its share of the layouts."""
    heads, kv_heads = SHAPES[shape]
    states = make_states(shape, n)
    sink = torch.randn(heads, device="cuda")
    grad = torch.randn_like(states[0])
    kernel = partial(attend, sink=sink)
    reference = partial(attend, sink=sink, backend="reference")
    indices = index_set(kind, kv_heads, n)
    options = {"block_size": BLOCK_SIZE, "rows": PLAIN_ROWS}
    unions = median_ms(lambda: selection_layouts(*states, indices, for_backward=False, **options))
    all_layouts = median_ms(lambda: selection_layouts(*states, indices, for_backward=True, **options))
    layouts = selection_layouts(*states, indices, for_backward=True, **options)
    union = layouts.counts[..., 1].float().mean().item()
    extra = {"sharing_layers": SHARING_LAYERS, "mean_union": round(union, 1), "block_size": BLOCK_SIZE}

    right = outputs_are_right(lambda *parts: kernel(*parts, indices), reference, states, indices)
    yield Row("layouts", "forward", shape, n, unions, "none", None, right, kind)
    yield Row("layouts", "forward+backward", shape, n, all_layouts, "none", None, right, kind)

    def layer(query, key, value):
        shared = {"scaling": query.shape[-1] ** -0.5, "sink": sink, "layouts": layouts, **options}
        return block_sparse_kernel(query, key, value, indices, **shared)[0]

    alone = median_ms(lambda: layer(*states))
    ms = alone + unions / SHARING_LAYERS
    dense = baselines.dense(shape, n, "forward")
    yield Row("block_sparse", "forward", shape, n, ms, "cudnn dense", dense, right, kind, extra)

    few = make_states(shape, CHECK_LENGTH)
    right = gradients_are_right(kernel, reference, few, index_set(kind, kv_heads, CHECK_LENGTH))
    ms = backward_ms(layer, states, grad) + (all_layouts - unions) / SHARING_LAYERS
    dense = baselines.dense(shape, n, "backward")
    yield Row("block_sparse", "backward", shape, n, ms, "cudnn dense", dense, right, kind, extra)

    if kind == "correlated":
        gates = [torch.randn(1, n, heads * grad.shape[-1], device="cuda", dtype=grad.dtype) for _ in range(2)]

        def sparse_layer():
            branches = layer(*states), attend_window(*states, sink=sink)
            merged = [branch.transpose(1, 2).flatten(2) for branch in branches]
            return merged[0] * torch.sigmoid(gates[0]) + merged[1] * torch.sigmoid(gates[1])

        ms = median_ms(sparse_layer)
        yield Row("sparse_layer", "forward", shape, n, ms, "its block-sparse part", alone, right, kind)
