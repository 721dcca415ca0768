"""Gated linear unit with the SiLU, forward and backward.

    y = low(s * g) * u,  s = sigmoid(g),      du = dy * s * g,      dg = dy * u * s * (1 + g * (1 - s))

`low` rounds to the dtype of g. Imitates `reference_layers_hysparse.swiglu`; the backward pass rounds only its results.
"""

import torch

from .triton_common import OP_NAMESPACE, cdiv, refuse, tl, triton
from .triton_layer_common import check_tensors, is_bare


# Values of a program, and its warps.
_BLOCK, _WARPS = 2048, 4


@triton.jit
def _part_of_row(width, BLOCK: tl.constexpr):
    """Row of a program, its places in the row, and which of them exist."""
    parts = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    dims = (tl.program_id(0) % parts).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, dims, dims < width


@triton.jit
def _load(base_ptr, row, dims, mask, stride_m, stride_d):
    return tl.load(base_ptr + row * stride_m + dims * stride_d, mask=mask, other=0.0)


@triton.jit
def _swiglu_fwd_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gm, stride_gd, stride_um, stride_ud, width, BLOCK: tl.constexpr
):
    row, dims, mask = _part_of_row(width, BLOCK)
    low = _load(gate_ptr, row, dims, mask, stride_gm, stride_gd)
    gate = low.to(tl.float32)
    up = _load(up_ptr, row, dims, mask, stride_um, stride_ud).to(tl.float32)
    out = (gate * tl.sigmoid(gate)).to(low.dtype).to(tl.float32) * up
    tl.store(out_ptr + row * width + dims, out.to(low.dtype), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    stride_dm,
    stride_dd,
    stride_gm,
    stride_gd,
    stride_um,
    stride_ud,
    width,
    BLOCK: tl.constexpr,
):
    row, dims, mask = _part_of_row(width, BLOCK)
    grad = _load(grad_ptr, row, dims, mask, stride_dm, stride_dd).to(tl.float32)
    low = _load(gate_ptr, row, dims, mask, stride_gm, stride_gd)
    gate = low.to(tl.float32)
    up = _load(up_ptr, row, dims, mask, stride_um, stride_ud).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = grad * up * share * (1 + gate * (1 - share))
    place = row * width + dims
    tl.store(grad_gate_ptr + place, grad_gate.to(low.dtype), mask=mask)
    tl.store(grad_up_ptr + place, (grad * share * gate).to(low.dtype), mask=mask)


def _launch(kernel, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """Fill `outputs`, dense and of the inputs' common shape."""
    count = outputs[0].numel()
    if not count:
        return
    if all(tensor.is_contiguous() for tensor in inputs):
        width, strides = count, (0, 1) * len(inputs)
    else:
        width = inputs[0].shape[-1]
        # A copy where strides allow no matrix of rows.
        inputs = tuple(tensor.reshape(-1, width) for tensor in inputs)
        strides = tuple(step for tensor in inputs for step in tensor.stride())
    with torch.cuda.device_of(outputs[0]):
        kernel[(count // width * cdiv(width, _BLOCK),)](
            *inputs,
            *outputs,
            *strides,
            width,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=outputs[0].dtype != torch.float32,
        )


def _new_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised and dense."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _launch_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    output = _new_like(gate)
    _launch(_swiglu_fwd_kernel, (gate, up), (output,))
    return output


@torch.library.custom_op(f"{OP_NAMESPACE}::swiglu_forward", mutates_args=())
def _swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _launch_forward(gate, up)


@_swiglu_forward.register_fake
def _(gate, up):
    return _new_like(gate)


@torch.library.custom_op(f"{OP_NAMESPACE}::swiglu_backward", mutates_args=())
def _swiglu_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grads = _new_like(gate), _new_like(up)
    _launch(_swiglu_bwd_kernel, (grad_output, gate, up), grads)
    return grads


@_swiglu_backward.register_fake
def _(grad_output, gate, up):
    return _new_like(gate), _new_like(up)


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_output):
    return _swiglu_backward(grad_output, *ctx.saved_tensors)


_swiglu_forward.register_autograd(_backward, setup_context=_keep_for_backward)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `layers_hysparse.swiglu`.

    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_tensors(gate, up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        refuse(
            f"a gate and a state of one shape and dtype, got {tuple(gate.shape)} of {gate.dtype} and "
            f"{tuple(up.shape)} of {up.dtype}"
        )
    call = _launch_forward if is_bare(gate, up) else _swiglu_forward
    return call(gate, up)
