"""Rotary embedding of queries or keys, forward and backward in one kernel.

    y1 = x1 * cos1 - x2 * sin1,      y2 = x2 * cos2 + x1 * sin2        on both halves of the rotary width
    dx1 = dy1 * cos1 + dy2 * sin2,   dx2 = dy2 * cos2 - dy1 * sin1     which is the same with sines swapped and negated

Imitates `reference_layers_hysparse.rotate`. Cosines and sines get no gradient.
"""

import functools

import torch

from .triton_common import OP_NAMESPACE, cdiv, load_rows, padded_dim, refuse, store_rows, tl, triton
from .triton_layer_common import check_tensors, is_bare


# Values of one half of the rotary width that a program holds, and its warps.
_HALF_VALUES, _WARPS = 2048, 4


@triton.jit
def _product(states, factor):
    """Product in the wider of two dtypes, as torch rounds it; then float32."""
    product = states.to(tl.float32) * factor.to(tl.float32)
    if states.dtype == factor.dtype:
        product = product.to(states.dtype).to(tl.float32)
    return product


@triton.jit
def _rotary_kernel(
    states_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    stride_sb,
    stride_sh,
    stride_sm,
    stride_sd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_cb,
    stride_cm,
    HEADS,
    length,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OPPOSITE: tl.constexpr,
):
    """Some pairs of token and head of one batch row, the heads of a token side by side."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    steps, heads = rows // HEADS, rows % HEADS
    valid = steps < length
    states_ptr += batch * stride_sb
    out_ptr += batch * stride_ob
    cos_ptr += batch * stride_cb
    sin_ptr += batch * stride_cb
    second_ptr = states_ptr + HALF * stride_sd
    first = load_rows(states_ptr, steps, heads, valid, stride_sh, stride_sm, stride_sd, HALF, BLOCK_HALF)
    second = load_rows(second_ptr, steps, heads, valid, stride_sh, stride_sm, stride_sd, HALF, BLOCK_HALF)
    cos_first = load_rows(cos_ptr, steps, heads, valid, 0, stride_cm, 1, HALF, BLOCK_HALF)
    cos_second = load_rows(cos_ptr + HALF, steps, heads, valid, 0, stride_cm, 1, HALF, BLOCK_HALF)
    sin_first = load_rows(sin_ptr, steps, heads, valid, 0, stride_cm, 1, HALF, BLOCK_HALF)
    sin_second = load_rows(sin_ptr + HALF, steps, heads, valid, 0, stride_cm, 1, HALF, BLOCK_HALF)
    if OPPOSITE:
        turned_first = _product(first, cos_first) + _product(second, sin_second)
        turned_second = _product(second, cos_second) - _product(first, sin_first)
    else:
        turned_first = _product(first, cos_first) - _product(second, sin_first)
        turned_second = _product(second, cos_second) + _product(first, sin_second)
    store_rows(out_ptr, turned_first, steps, heads, valid, stride_oh, stride_om, stride_od, HALF, BLOCK_HALF)
    out_ptr += HALF * stride_od
    store_rows(out_ptr, turned_second, steps, heads, valid, stride_oh, stride_om, stride_od, HALF, BLOCK_HALF)
    if REST:
        out_ptr += HALF * stride_od
        second_ptr += HALF * stride_sd
        rest = load_rows(second_ptr, steps, heads, valid, stride_sh, stride_sm, stride_sd, REST, BLOCK_REST)
        store_rows(out_ptr, rest, steps, heads, valid, stride_oh, stride_om, stride_od, REST, BLOCK_REST)


def _new_output(states: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the heads of a token side by side in memory."""
    batch, heads, length, dim = states.shape
    return states.new_empty((batch, length, heads, dim)).transpose(1, 2)


@functools.cache
def _tile(dim: int, width: int, pairs: int) -> dict[str, int]:
    """Launch sizes: as many pairs of token and head as the program holds, or fewer where there are no more."""
    half, rest = width // 2, dim - width
    block_half = padded_dim(half)
    return {
        "HALF": half,
        "BLOCK_HALF": block_half,
        "REST": rest,
        "BLOCK_REST": padded_dim(rest) if rest else 1,
        "BLOCK_M": min(max(1, _HALF_VALUES // block_half), padded_dim(pairs)),
        "num_warps": _WARPS,
    }


def _launch(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, opposite: bool) -> torch.Tensor:
    batch, heads, length, dim = states.shape
    # The sizes know no more pairs than fill a program.
    tile = _tile(dim, cos.shape[-1], min(heads * length, _HALF_VALUES))
    output = _new_output(states)
    cos, sin = cos.contiguous(), sin.contiguous()
    if output.numel():
        with torch.cuda.device_of(states):
            _rotary_kernel[(cdiv(heads * length, tile["BLOCK_M"]), batch)](
                states,
                cos,
                sin,
                output,
                *states.stride(),
                *output.stride(),
                cos.stride(0) if len(cos) > 1 else 0,
                cos.stride(1),
                heads,
                length,
                OPPOSITE=opposite,
                **tile,
                enable_fp_fusion=False,
            )
    return output


@torch.library.custom_op(f"{OP_NAMESPACE}::rotary", mutates_args=())
def _rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, opposite: bool) -> torch.Tensor:
    return _launch(states, cos, sin, opposite)


@_rotary.register_fake
def _(states, cos, sin, opposite):
    return _new_output(states)


def _keep_for_backward(ctx, inputs, output):
    _, cos, sin, ctx.opposite = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad_output):
    cos, sin = ctx.saved_tensors
    return _rotary(grad_output, cos, sin, not ctx.opposite), None, None, None


_rotary.register_autograd(_backward, setup_context=_keep_for_backward)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `layers_hysparse.rotate`; the result has the memory order that the projections leave.

    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_tensors(states, cos, sin)
    batch, _, length, dim = states.shape
    width = cos.shape[-1]
    rule = None
    if cos.shape != sin.shape or cos.shape not in ((batch, length, width), (1, length, width)):
        rule = f"cosines and sines (batch or 1, length, width), got {tuple(cos.shape)} and {tuple(sin.shape)}"
    elif width % 2 or not 2 <= width <= dim <= 1024 or cos.dtype != sin.dtype:
        rule = f"an even rotary width up to a head dimension of 1024 or less, got {width} of {dim}"
    elif batch > 65535:
        rule = f"at most 65535 batch rows, got {batch}"
    elif cos.requires_grad or sin.requires_grad:
        rule = "cosines and sines that need no gradient"
    refuse(rule)
    call = _launch if is_bare(states) else _rotary
    return call(states, cos, sin, False)
