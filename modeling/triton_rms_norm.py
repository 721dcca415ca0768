"""Root mean square normalisation over the last dimension, forward and backward.

    r = rsqrt(mean(x^2) + eps),      y = w * low(x * r),      low rounds to the dtype of x
    dx = r * (g - x * r * mean(g * x * r))  with  g = w * dy,      dw = sum over rows of dy * low(x * r)

Imitates `reference_layers_hysparse.rms_norm`; the backward pass keeps g in float32. A program holds whole rows, up to
`MOST_WIDTH` values each; r is computed again in the backward pass, from the row that it reads anyway.
"""

import functools

import torch

from .triton_common import OP_NAMESPACE, cdiv, load_rows, padded_dim, refuse, store_rows, tl, triton
from .triton_layer_common import check_tensors, is_bare


MOST_WIDTH = 16384

# Values that a program holds at a time, and its warps.
_FORWARD = (4096, 4)
_BACKWARD = (4096, 8)
# Programs of the backward pass per processor of the card: at a width of 4096, 80 registers in each of 256 threads let
# three run at once. Each sums its rows' terms of dw in one order.
_PROGRAMS = 3


@triton.jit
def _normalise(states, eps, WIDTH: tl.constexpr):
    """Normalised rows and their factor, float32."""
    wide = states.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    return wide * factor, factor


@triton.jit
def _load_weight(weight_ptr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    return tl.load(weight_ptr + dims, mask=dims < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rms_norm_fwd_kernel(
    states_ptr,
    weight_ptr,
    out_ptr,
    stride_so,
    stride_si,
    stride_sd,
    n_rows,
    inner,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A few rows; row `r` stands at `(r // inner, r % inner)`, and in the output at `r`."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < n_rows
    states = load_rows(states_ptr, rows % inner, rows // inner, valid, stride_so, stride_si, stride_sd, WIDTH, BLOCK_D)
    normed, _ = _normalise(states, eps, WIDTH)
    out = normed.to(states.dtype).to(tl.float32) * _load_weight(weight_ptr, WIDTH, BLOCK_D)
    store_rows(out_ptr, out, rows, tl.zeros_like(rows), valid, 0, WIDTH, 1, WIDTH, BLOCK_D)


@triton.jit
def _rms_norm_bwd_kernel(
    grad_ptr,
    states_ptr,
    weight_ptr,
    grad_states_ptr,
    partial_ptr,
    stride_go,
    stride_gi,
    stride_gd,
    stride_so,
    stride_si,
    stride_sd,
    n_rows,
    inner,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WEIGHT_GRAD: tl.constexpr,
):
    """Every so many tiles of rows: their gradient, and the sum of their terms of the weight's."""
    weight = _load_weight(weight_ptr, WIDTH, BLOCK_D)
    partial = tl.zeros((BLOCK_D,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = rows < n_rows
        outer, within = rows // inner, rows % inner
        states = load_rows(states_ptr, within, outer, valid, stride_so, stride_si, stride_sd, WIDTH, BLOCK_D)
        grad = load_rows(grad_ptr, within, outer, valid, stride_go, stride_gi, stride_gd, WIDTH, BLOCK_D)
        grad = grad.to(tl.float32)
        normed, factor = _normalise(states, eps, WIDTH)
        if HAS_WEIGHT_GRAD:
            partial += tl.sum(grad * normed.to(states.dtype).to(tl.float32), 0)
        grad = grad * weight
        mean = tl.sum(grad * normed, 1)[:, None] / WIDTH
        grad_states = factor * (grad - normed * mean)
        store_rows(grad_states_ptr, grad_states, rows, tl.zeros_like(rows), valid, 0, WIDTH, 1, WIDTH, BLOCK_D)
    if HAS_WEIGHT_GRAD:
        dims = tl.arange(0, BLOCK_D)
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * WIDTH + dims, partial, mask=dims < WIDTH)


def _as_rows(states: torch.Tensor) -> torch.Tensor:
    """`(outer, inner, width)`; a copy where strides do not allow a view."""
    if states.dim() == 3:
        return states
    return (
        states.reshape(-1, states.shape[-2], states.shape[-1])
        if states.dim() > 3
        else states.reshape(1, -1, states.shape[-1])
    )


@functools.cache
def _tile(width: int, sizes: tuple[int, int]) -> dict[str, int]:
    """Launch sizes of a row's width: as many rows as the program holds, and warps for one row that is wider."""
    values, warps = sizes
    block_d = padded_dim(width)
    return {
        "WIDTH": width,
        "BLOCK_D": block_d,
        "BLOCK_M": max(1, values // block_d),
        "num_warps": min(16, warps * max(1, block_d // values)),
    }


def _launch_forward(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    output = _new_like(states, torch.promote_types(states.dtype, weight.dtype))
    rows = _as_rows(states)
    outer, inner, width = rows.shape
    tile = _tile(width, _FORWARD)
    if outer * inner:
        with torch.cuda.device_of(states):
            _rms_norm_fwd_kernel[(cdiv(outer * inner, tile["BLOCK_M"]),)](
                rows,
                weight.contiguous(),
                output,
                *rows.stride(),
                outer * inner,
                inner,
                eps,
                **tile,
                enable_fp_fusion=False,
            )
    return output


def _new_like(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised, of the shape of `states`, its last dimensions dense."""
    return torch.empty_like(states, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{OP_NAMESPACE}::rms_norm_forward", mutates_args=())
def _rms_norm_forward(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch_forward(states, weight, eps)


@_rms_norm_forward.register_fake
def _(states, weight, eps):
    return _new_like(states, torch.promote_types(states.dtype, weight.dtype))


@torch.library.custom_op(f"{OP_NAMESPACE}::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad_output: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, eps: float, has_weight_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_states = _new_like(states, states.dtype)
    grad_rows, rows = _as_rows(grad_output), _as_rows(states)
    outer, inner, width = rows.shape
    tile = _tile(width, _BACKWARD)
    programs = min(cdiv(outer * inner, tile["BLOCK_M"]), _PROGRAMS * _processors(states.device))
    partial = torch.empty((programs if has_weight_grad else 0, width), dtype=torch.float32, device=states.device)
    if programs:
        with torch.cuda.device_of(states):
            _rms_norm_bwd_kernel[(programs,)](
                grad_rows,
                rows,
                weight.contiguous(),
                grad_states,
                partial,
                *grad_rows.stride(),
                *rows.stride(),
                outer * inner,
                inner,
                eps,
                HAS_WEIGHT_GRAD=has_weight_grad,
                **tile,
                enable_fp_fusion=rows.dtype != torch.float32,
            )
    return grad_states, partial.sum(0).to(weight.dtype) if has_weight_grad else weight.new_empty(0)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@_rms_norm_backward.register_fake
def _(grad_output, states, weight, eps, has_weight_grad):
    return _new_like(states, states.dtype), weight.new_empty(weight.shape if has_weight_grad else 0)


def _keep_for_backward(ctx, inputs, output):
    states, weight, ctx.eps = inputs
    ctx.save_for_backward(states, weight)


def _backward(ctx, grad_output):
    states, weight = ctx.saved_tensors
    has_weight_grad = ctx.needs_input_grad[1]
    grad_states, grad_weight = _rms_norm_backward(grad_output, states, weight, ctx.eps, has_weight_grad)
    return grad_states, grad_weight if has_weight_grad else None, None


_rms_norm_forward.register_autograd(_backward, setup_context=_keep_for_backward)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """See `layers_hysparse.rms_norm`.

    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_tensors(states, weight)
    if weight.shape != states.shape[-1:] or weight.shape[0] > MOST_WIDTH:
        refuse(
            f"a norm over at most {MOST_WIDTH} values with a weight for each, got {tuple(states.shape)} and "
            f"{tuple(weight.shape)}"
        )
    call = _launch_forward if is_bare(states, weight) else _rms_norm_forward
    return call(states, weight, eps)
