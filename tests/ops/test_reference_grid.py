"""The reference of every operation on the shapes that kernels get wrong, gradients apart from outputs.

The loops of `naive` are the oracle; kernels are then compared with the reference at the same shapes on a card.
"""

import naive
import pytest
import torch

from helpers import assert_within_reference_error
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
)


LENGTH, BLOCK = 11, 4


def sink_of(states):
    return torch.linspace(-1, 1, states[0].shape[1], dtype=states[0].dtype)


def operations(states, block=BLOCK):
    """Each operation with its loops, as functions of query, key and value; every query lists two blocks."""
    kv_heads, length = states[1].shape[1], states[0].shape[2]
    generator = torch.Generator().manual_seed(2)
    indices = torch.randint(-1, -(-length // block), (1, kv_heads, length, 2), generator=generator, dtype=torch.int32)
    sparse = {"block_size": block, "sink": sink_of(states)}
    window = {"window": 3, "sink": sink_of(states)}
    return {
        "full": (
            lambda *parts: full_attention_with_oracle(*parts, block_size=block, n_selected=2, backend="reference")[0],
            lambda *parts: naive.full_attention(*parts),
        ),
        "block_sparse": (
            lambda *parts: block_sparse_attention(*parts, indices, backend="reference", **sparse),
            lambda *parts: naive.block_sparse_attention(*parts, indices, **sparse),
        ),
        "window": (
            lambda *parts: sliding_window_attention(*parts, backend="reference", **window),
            lambda *parts: naive.sliding_window_attention(*parts, **window),
        ),
    }


def gradients(output, states):
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    return torch.autograd.grad((output * direction).sum(), states)


def check(operation, states, block=BLOCK):
    states = [part.requires_grad_() for part in states]
    reference, loops = operations(states, block)[operation]
    output, expected = reference(*states), loops(*states)[0]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-11)
    wanted = gradients(expected, states)
    for name, grad, want in zip(("query", "key", "value"), gradients(output, states), wanted, strict=True):
        assert (want != 0).any()
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-11, msg=lambda m, n=name: f"gradient of {n}: {m}")


every_operation = pytest.mark.parametrize("operation", ["full", "block_sparse", "window"])


@every_operation
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_groups_C01_C12(operation, group):
    check(operation, naive.random_states(LENGTH, heads=2 * group, kv_heads=2, head_dim=8))


@every_operation
@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 128, 192, 256])
def test_head_dims_C03_C12(operation, head_dim):
    v_head_dim = 128 if head_dim == 192 else head_dim
    check(operation, naive.random_states(LENGTH, heads=2, head_dim=head_dim, v_head_dim=v_head_dim))


@every_operation
@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("beyond", [-1, 1])
def test_lengths_around_three_blocks_C10_C12(operation, block, beyond):
    check(operation, naive.random_states(3 * block + beyond, heads=2), block)


def low_precision(operation, dtype):
    """Gradients of one operation in `dtype`: of the reference, of plain attention, and of the loops in float64."""
    states = [
        part.to(dtype).requires_grad_() for part in naive.random_states(LENGTH, heads=6, kv_heads=2, head_dim=24)
    ]
    promoted = [part.detach().double().requires_grad_() for part in states]
    wanted, *_, shares = operations(promoted)[operation][1](*promoted)
    sink = None if operation == "full" else sink_of(states)
    plain, _ = naive.plain_attention(*states, shares > 0, sink=sink)
    output = operations(states)[operation][0](*states)
    return zip(gradients(output, states), gradients(plain, states), gradients(wanted, promoted), strict=True)


@every_operation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_gradients_are_within_the_error_of_plain_torch_C12(operation, dtype):
    for name, three in zip(("query", "key", "value"), low_precision(operation, dtype), strict=True):
        assert_within_reference_error(*three, name=f"gradient of {name}")


@every_operation
def test_float32_gradients_are_within_1e_5_of_float64_C12(operation):
    for grad, _, want in low_precision(operation, torch.float32):
        assert grad.dtype == torch.float32
        assert (grad - want).abs().max() <= 1e-5 * max(1.0, want.abs().max())
