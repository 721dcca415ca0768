"""Every group size and head dimension of the support list, by name of the back end: outputs and all gradients."""

import pytest
import torch
from kernel_checks import DEVICE, compare, make_states

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
    sparse_layer_attention,
)


pytest.importorskip("triton")

GROUPS = [*range(1, 17), 64]
HEAD_DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
# The tests of each operation hold others of these; together they take a minute in the interpreter.
EACH_TIME = {2, 6, (128, 128), (192, 128)}


def listed(shapes):
    """The shapes as parameters, slow but for a few."""
    return [shape if shape in EACH_TIME else pytest.param(shape, marks=pytest.mark.slow) for shape in shapes]


def call(backend, kv_heads, q_len):
    """All operations on one set of states; the sparse layer takes its gates' logits from the window's output."""
    indices = torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE).expand(1, kv_heads, q_len, 2)

    def attend(query, key, value, sink):
        options = {"block_size": 16, "backend": backend}
        full, *_ = full_attention_with_oracle(query, key, value, n_selected=1, **options)
        near = sliding_window_attention(query, key, value, window=5, sink=sink, backend=backend)
        far = block_sparse_attention(query, key, value, indices, sink=sink, window=3, **options)
        layer = sparse_layer_attention(
            query,
            key,
            value,
            indices,
            query,
            key,
            value,
            window=5,
            gate_global=near,
            gate_local=near,
            sink_global=sink,
            sink_local=sink,
            **options,
        )
        return full, near, far, layer

    return attend


def check(heads, kv_heads, dims=(16, 16), q_len=3):
    states = make_states(
        q_len, 24, heads=heads, kv_heads=kv_heads, head_dim=dims[0], v_head_dim=dims[1], sink=True, seed=3
    )
    compare(call("triton", kv_heads, q_len), call("reference", kv_heads, q_len), states)


@pytest.mark.parametrize("group", listed(GROUPS))
def test_groups_C01(group):
    kv_heads = 1 if group > 3 else 4
    check(group * kv_heads, kv_heads)


@pytest.mark.parametrize("dims", listed(HEAD_DIMS), ids=str)
def test_head_dims_C12(dims):
    check(heads=4, kv_heads=2, dims=dims, q_len=6)
