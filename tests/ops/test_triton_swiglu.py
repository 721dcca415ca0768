"""SwiGLU, Triton back end: outputs and gradients by error budget against the reference in float64."""

import pytest
import torch
from kernel_checks import DEVICE, compare, evaluate

from hysparse_hf.modeling.layers_hysparse import swiglu


pytest.importorskip("triton")


def call(backend):
    return lambda gate, up: (swiglu(gate, up, backend=backend),)


def make(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [(3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype) for _ in range(2)]


def check(states):
    return compare(call("triton"), call("reference"), states)


def assert_equal(one, other):
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1,), (3, 64), (2, 7, 100), (1, 3, 2049)], ids=str)
def test_shapes(shape):
    check(make(*shape))


def test_float16():
    check(make(2, 9, 72, dtype=torch.float16))


def test_large_gates():
    gate, up = make(2, 40)
    check([gate * 60, up])


def test_strided_states():
    gate, up = make(2, 6, 40)
    expected = evaluate(call("triton"), [gate, up])
    fused = torch.cat([gate, up], -1)
    loose = (
        [fused[..., :40], fused[..., 40:]],
        [torch.stack([part, part], -1)[..., 0] for part in (gate, up)],
        [gate, up.transpose(0, 1).contiguous().transpose(0, 1)],
    )
    for states in loose:
        assert_equal(evaluate(call("triton"), states), expected)


def test_a_gradient_that_is_no_dense_tensor():
    states = [part.requires_grad_() for part in make(2, 6, 48)]
    gradient = torch.randn(2, 6, 1, device=DEVICE).expand(2, 6, 48)
    grads = [
        torch.autograd.grad(call("triton")(*states)[0], states, part) for part in (gradient, gradient.contiguous())
    ]
    assert_equal(*grads)


def test_no_rows():
    assert [part.shape for part in evaluate(call("triton"), make(2, 0, 64))] == [(2, 0, 64)] * 3


def test_unequal_states_are_refused_by_name():
    gate, up = make(2, 8)
    for other in (up.half(), up[:1]):
        with pytest.raises(NotImplementedError, match="a gate and a state of one shape and dtype"):
            call("triton")(gate, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [128, 1536, 11008])
def test_widths_on_the_card(width, dtype):
    check(make(1, 300, width, dtype=dtype))


@pytest.mark.gpu
def test_more_than_int32_values():
    gate, up = (part.expand(2**16 + 1, -1) for part in make(1, 2**15, dtype=torch.bfloat16))
    output = call("triton")(gate.contiguous(), up.contiguous())[0]
    assert torch.equal(output, output[:1].expand_as(output))
    torch.testing.assert_close(output[:1], call("reference")(gate[:1], up[:1])[0])


@pytest.mark.parametrize("watched", [False, True], ids=["bare", "autograd"])
def test_a_launch_alone_gives_what_the_operation_gives(watched):
    states = [part.requires_grad_(watched) for part in make(2, 40)]
    output = call("triton")(*states)[0]
    assert output.requires_grad == watched
    with torch.no_grad():
        assert_equal([output.detach()], call("triton")(*states))
