"""Rotary embedding, Triton back end: bit-equal to the reference, gradients by error budget."""

import pytest
import torch
from kernel_checks import DEVICE, compare, evaluate

from hysparse_hf.modeling.layers_hysparse import rotate


pytest.importorskip("triton")


def angles(batch, length, width, dtype=torch.float32):
    turns = torch.randn(batch, length, width // 2, generator=torch.Generator().manual_seed(1))
    turns = torch.cat((turns, turns), -1)
    return turns.cos().to(DEVICE, dtype), turns.sin().to(DEVICE, dtype)


def call(backend, rotation):
    def turn(states):
        parts = [part.double() if states.dtype == torch.float64 else part for part in rotation]
        return (rotate(states, tuple(parts), backend=backend),)

    return turn


def make(batch, heads, length, dim, dtype=torch.float32):
    """States as a projection leaves them: the heads of a token side by side in memory."""
    states = torch.randn(batch, length, heads, dim, generator=torch.Generator().manual_seed(0))
    return states.to(DEVICE, dtype).transpose(1, 2)


def check(states, rotation):
    """Outputs are equal bit for bit: both round each product, then the sum."""
    actual = compare(call("triton", rotation), call("reference", rotation), [states])
    expected = call("reference", rotation)(states)[0]
    torch.testing.assert_close(actual[0], expected, rtol=0, atol=0)
    return actual


@pytest.mark.parametrize("length", [1, 63, 65])
def test_lengths(length):
    check(make(2, 3, length, 32), angles(2, length, 32))


@pytest.mark.parametrize(("dim", "width"), [(80, 80), (40, 20), (24, 8), (16, 2)], ids=str)
def test_head_dims_and_rotary_widths(dim, width):
    states = make(1, 5, 9, dim)
    output, *_ = check(states, angles(1, 9, width))
    assert torch.equal(output[..., width:], states[..., width:])


def test_one_rotation_for_all_rows():
    check(make(3, 2, 9, 32), angles(1, 9, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_float16_and_the_dtype_of_the_cosines(dtype):
    output, *_ = check(make(1, 4, 30, 32, torch.float16), angles(1, 30, 32, dtype))
    assert output.dtype == torch.float16


def test_halves_that_turn_by_different_angles():
    rotation = angles(1, 9, 64)
    rotation = tuple(part[..., 16:48].contiguous() * torch.linspace(1, 2, 32, device=DEVICE) for part in rotation)
    check(make(1, 2, 9, 32), rotation)


def test_result_has_the_memory_order_of_the_projection():
    states = make(2, 3, 9, 32)
    assert call("triton", angles(2, 9, 32))(states)[0].stride() == states.stride()


def test_strided_states_and_rotations():
    states, rotation = make(2, 4, 9, 32), angles(2, 9, 32)
    expected = evaluate(call("triton", rotation), [states])
    loose = [
        states.contiguous(),
        torch.stack([states, states], -1)[..., 0],
        torch.cat([states, states], 2)[:, :, :9],
        torch.cat([states, states], -1)[..., 32:],
    ]
    spread = tuple(torch.stack([part, part], -1)[..., 0] for part in rotation)
    for tensor in loose:
        for x, y in zip(evaluate(call("triton", spread), [tensor]), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_what_is_turned_back_is_what_was():
    states = make(1, 3, 20, 32).requires_grad_()
    turned = call("triton", angles(1, 20, 32))(states)[0]
    (back,) = torch.autograd.grad(turned, states, turned)
    torch.testing.assert_close(back, states.detach())


def test_no_tokens():
    states = make(2, 3, 0, 32)
    assert [part.shape for part in evaluate(call("triton", angles(2, 0, 32)), [states])] == [states.shape] * 2


def test_what_the_kernel_does_not_take_is_refused_by_name():
    states = make(1, 2, 9, 32)
    for rotation, words in (
        (angles(1, 8, 32), r"\(batch or 1, length, width\)"),
        (angles(1, 9, 64), "an even rotary width up to a head dimension"),
        ([part.requires_grad_() for part in angles(1, 9, 32)], "need no gradient"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            rotate(states, rotation, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_listed_head_dims_on_the_card(dim, dtype):
    states = make(2, 9, 300, dim, dtype)
    check(states, angles(2, 300, dim, dtype))
    check(states, angles(1, 300, dim // 2, torch.float32))


@pytest.mark.gpu
def test_offsets_beyond_int32():
    length, stride = 2100, 2**20
    storage = torch.zeros(length * stride, dtype=torch.bfloat16, device=DEVICE)
    far = storage.as_strided((1, 1, length, 64), (length * stride, length * stride, stride, 1))
    near, rotation = make(1, 1, length, 64, torch.bfloat16), angles(1, length, 64, torch.bfloat16)
    far.copy_(near)
    for x, y in zip(*(evaluate(call("triton", rotation), [states]) for states in (far, near)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
