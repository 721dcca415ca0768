"""RMS norm, Triton back end: outputs and gradients by error budget against the reference in float64."""

import pytest
import torch
from kernel_checks import DEVICE, compare, evaluate

from hysparse_hf.modeling.layers_hysparse import rms_norm


pytest.importorskip("triton")


def call(backend, eps=1e-6):
    return lambda states, weight: (rms_norm(states, weight, eps, backend=backend),)


def make(*shape, dtype=torch.float32, weight_dtype=None):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    weight = (1 + torch.randn(shape[-1], generator=generator) / 4).to(DEVICE, weight_dtype or dtype)
    return [states, weight]


def check(states):
    return compare(call("triton"), call("reference"), states)


def assert_equal(one, other):
    """Bitwise in the interpreter; a card adds the values of a row in an order that depends on their strides."""
    tolerance = 2e-6 if DEVICE == "cuda" else 0
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(40,), (3, 64), (2, 7, 100), (1, 9, 5, 128), (1, 3, 5000)], ids=str)
def test_shapes(shape):
    check(make(*shape))


def test_more_rows_than_the_programs_take_at_once():
    check(make(2, 301, 64))


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32], ids=str)
def test_float16_and_the_dtype_of_the_weight(weight_dtype):
    output, *_ = check(make(2, 9, 72, dtype=torch.float16, weight_dtype=weight_dtype))
    assert output.dtype == weight_dtype


def test_values_are_rounded_before_the_weight():
    states = make(1, 50, 64, dtype=torch.float16)
    equal = call("triton")(*states)[0] == call("reference")(*states)[0]
    # Sums in another order turn a rounding here and there; left out, the rounding would turn one value in four.
    assert equal.float().mean() > 0.99


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e15])
def test_eps_and_large_values(scale):
    states, weight = make(1, 5, 64)
    check([states * scale, weight])


def test_strided_states():
    states, weight = make(2, 6, 4, 48)
    expected = evaluate(call("triton"), [states, weight])
    loose = [
        torch.cat([states, states], -1)[..., :48],
        torch.stack([states, states], -1)[..., 0],
        states.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([states, states], 1)[:, :6],
    ]
    for tensor in loose:
        assert not tensor.is_contiguous()
        assert_equal(evaluate(call("triton"), [tensor, weight]), expected)


def test_a_gradient_that_is_no_dense_tensor():
    states, weight = (tensor.requires_grad_() for tensor in make(2, 6, 48))
    gradient = torch.randn(2, 6, 1, device=DEVICE).expand(2, 6, 48)
    grads = [
        torch.autograd.grad(call("triton")(states, weight)[0], (states, weight), part)
        for part in (gradient, gradient.contiguous())
    ]
    assert_equal(*grads)


def test_a_weight_that_learns_nothing_gets_no_gradient():
    states, weight = make(1, 5, 64)
    states.requires_grad_()
    (alone,) = torch.autograd.grad(call("triton")(states, weight)[0].square().sum(), states)
    weight.requires_grad_()
    both = torch.autograd.grad(call("triton")(states, weight)[0].square().sum(), (states, weight))
    assert_equal([alone], both[:1])


def test_no_rows():
    states, weight = make(2, 0, 64)
    output, *grads = evaluate(call("triton"), [states, weight])
    assert output.shape == states.shape
    assert_equal(grads, [states, torch.zeros_like(weight)])


def test_rows_that_fit_no_program_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="a norm over at most 16384 values"):
        call("triton")(*make(1, 16385))


def test_tensors_of_a_kind_of_their_own_are_refused_by_name():
    class Distributed(torch.Tensor):
        pass

    states, weight = make(1, 5, 64)
    with pytest.raises(NotImplementedError, match="plain tensors, got Distributed"):
        call("triton")(states.as_subclass(Distributed), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [128, 576, 4096, 5120, 16384])
def test_widths_on_the_card(width, dtype):
    check(make(1, 700, width, dtype=dtype))
    check(make(1, 70, width, dtype=dtype, weight_dtype=torch.float32))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 40, 64), torch.float32), pytest.param((1, 9000, 4096), torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
def test_gradients_repeat_bit_for_bit(shape, dtype):
    states = make(*shape, dtype=dtype)
    assert_equal(evaluate(call("triton"), states), evaluate(call("triton"), states))


@pytest.mark.gpu
def test_offsets_beyond_int32():
    rows, stride = 2100, 2**20
    storage = torch.zeros(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    far = storage.as_strided((1, rows, 64), (rows * stride, stride, 1))
    near, weight = make(1, rows, 64, dtype=torch.bfloat16)
    far.copy_(near)
    assert_equal(evaluate(call("triton"), [far, weight]), evaluate(call("triton"), [near, weight]))
