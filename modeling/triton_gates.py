"""Gates of a sparse layer: how a program passes states through them, and the gradients.

    do_branch = sigmoid(g) * do,      dg = do * o_branch * sigmoid(g) * (1 - sigmoid(g))

Gates stand per head or per element; per head, dg is the sum over the elements.
"""

import torch

from .triton_common import (
    KERNEL_LOG2E,
    cdiv,
    load_rows,
    may_fuse,
    named_strides,
    new_output,
    padded_dim,
    store_rows,
    tl,
    triton,
)


@triton.jit
def load_gate(
    base_ptr,
    steps,
    heads,
    valid,
    stride_h,
    stride_m,
    stride_d,
    HEADWISE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Logit of each row's gate: `(rows, 1)` for one value per head, else `(rows, BLOCK_DV)`."""
    if HEADWISE:
        logit = load_rows(base_ptr, steps, heads, valid, stride_h, stride_m, stride_d, 1, 1)
    else:
        logit = load_rows(base_ptr, steps, heads, valid, stride_h, stride_m, stride_d, V_DIM, BLOCK_DV)
    return logit


@triton.jit
def gate_value(logit):
    """Sigmoid of the logits, float32."""
    if logit.dtype == tl.float32:
        gate = tl.sigmoid(logit)
    else:
        # A reciprocal root, squared, takes half the instructions of a division and is exact to 20 bits.
        root = tl.rsqrt(1 + tl.exp2(logit.to(tl.float32) * -KERNEL_LOG2E))
        gate = root * root
    return gate


@triton.jit
def pass_gate(
    states,
    gate_ptr,
    strides,
    batch,
    steps,
    heads,
    valid,
    HEADWISE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The float32 states of some rows times their gates; as they are where there is no gate."""
    if gate_ptr is not None:
        base = gate_ptr + batch.to(tl.int64) * strides[0]
        logit = load_gate(base, steps, heads, valid, strides[1], strides[2], strides[3], HEADWISE, V_DIM, BLOCK_DV)
        states *= gate_value(logit)
    return states


@triton.jit
def _gate_gradient(
    out_ptr,
    gate_ptr,
    grad,
    grad_out_ptr,
    grad_gate_ptr,
    offset,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_oh,
    stride_om,
    stride_od,
    batch,
    steps,
    heads,
    valid,
    place,
    HEADWISE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One branch: the gradient of its output before the gate, and that of the gate's logit."""
    out = load_rows(out_ptr + offset, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
    gate_base = gate_ptr + batch.to(tl.int64) * stride_gb
    logit = load_gate(gate_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, HEADWISE, V_DIM, BLOCK_DV)
    gate = gate_value(logit)
    store_rows(
        grad_out_ptr + offset, grad * gate, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV
    )
    slope = grad * out.to(tl.float32)
    if HEADWISE:
        slope = tl.sum(slope, 1)[:, None]
        tl.store(grad_gate_ptr + place[:, None], slope * gate * (1 - gate), mask=valid[:, None])
    else:
        slope = slope * gate * (1 - gate)
        store_rows(
            grad_gate_ptr + offset, slope, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV
        )


@triton.jit
def _gates_bwd_kernel(
    grad_ptr,
    blocks_out_ptr,
    window_out_ptr,
    gate_ptr,
    window_gate_ptr,
    grad_blocks_ptr,
    grad_window_ptr,
    grad_gate_ptr,
    grad_window_gate_ptr,
    stride_db,
    stride_dh,
    stride_dm,
    stride_dd,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    stride_vb,
    stride_vh,
    stride_vm,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    HEADS,
    q_len,
    HEADWISE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Gradients that pass the gates, for a few queries of one head."""
    batch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    steps = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = tl.zeros_like(steps) + head
    valid = steps < q_len
    offset = batch.to(tl.int64) * stride_ob
    place = (batch.to(tl.int64) * q_len + steps) * HEADS + head
    grad_base = grad_ptr + batch.to(tl.int64) * stride_db
    grad = load_rows(grad_base, steps, heads, valid, stride_dh, stride_dm, stride_dd, V_DIM, BLOCK_DV).to(tl.float32)
    _gate_gradient(
        blocks_out_ptr,
        gate_ptr,
        grad,
        grad_blocks_ptr,
        grad_gate_ptr,
        offset,
        stride_gb,
        stride_gh,
        stride_gm,
        stride_gd,
        stride_oh,
        stride_om,
        stride_od,
        batch,
        steps,
        heads,
        valid,
        place,
        HEADWISE,
        V_DIM,
        BLOCK_DV,
    )
    _gate_gradient(
        window_out_ptr,
        window_gate_ptr,
        grad,
        grad_window_ptr,
        grad_window_gate_ptr,
        offset,
        stride_vb,
        stride_vh,
        stride_vm,
        stride_vd,
        stride_oh,
        stride_om,
        stride_od,
        batch,
        steps,
        heads,
        valid,
        place,
        HEADWISE,
        V_DIM,
        BLOCK_DV,
    )


def gates_backward(
    grad_output: torch.Tensor,
    blocks_output: torch.Tensor,
    window_output: torch.Tensor,
    gate_global: torch.Tensor,
    gate_local: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of both branches' outputs before the gates, and of both gates' logits."""
    batch, heads, q_len, v_dim = blocks_output.shape
    grads = torch.empty_like(blocks_output), torch.empty_like(blocks_output)
    gates = new_output(gate_global, gate_global.shape[3]), new_output(gate_local, gate_local.shape[3])
    with torch.cuda.device_of(grad_output):
        _gates_bwd_kernel[(cdiv(q_len, 32), batch * heads)](
            grad_output,
            blocks_output,
            window_output,
            gate_global,
            gate_local,
            *grads,
            *gates,
            **named_strides("d", grad_output),
            **named_strides("g", gate_global),
            **named_strides("v", gate_local),
            **named_strides("o", blocks_output),
            HEADS=heads,
            q_len=q_len,
            HEADWISE=gate_global.shape[3] != v_dim,
            V_DIM=v_dim,
            BLOCK_DV=padded_dim(v_dim),
            BLOCK_M=32,
            num_warps=4,
            enable_fp_fusion=may_fuse(grad_output),
        )
    return grads, gates
