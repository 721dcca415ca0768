"""How a row of few new tokens is finished: the parts that programs leave, their combination, sinks and gates."""

from .triton_common import KERNEL_LOG2E, LOWEST, load_rows, store_rows, tl, triton
from .triton_gates import gate_value


@triton.jit
def store_part(scratch, part, state, group_head, valid, V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Store the maximum, mass and sum that a program found for heads of a group, from row `part` of the scratch on."""
    dims = tl.arange(0, BLOCK_DV)
    place = part + group_head
    tl.store(scratch[1] + place * 2, state[0], mask=valid)
    tl.store(scratch[1] + place * 2 + 1, state[1], mask=valid)
    tl.store(
        scratch[0] + place[:, None] * V_DIM + dims[None, :], state[2], mask=valid[:, None] & (dims < V_DIM)[None, :]
    )


@triton.jit
def combine_parts(
    scratch,
    part,
    group_head,
    valid,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Maximum, mass and sum of some heads of a group over `COUNT` programs' parts, from row `part` of the scratch on.

    Parts are asked for several at a time and added one after another: each value is summed in one thread's register,
    and no sum goes across threads.
    """
    TOGETHER: tl.constexpr = min(16, max(1, COUNT))
    dims = tl.arange(0, BLOCK_DV)
    m_i = tl.full(group_head.shape, LOWEST, tl.float32)
    l_i = tl.zeros(group_head.shape, tl.float32)
    acc = tl.zeros((group_head.shape[0], BLOCK_DV), tl.float32)
    for first in tl.range(0, COUNT, TOGETHER):
        m_new = m_i
        for number in tl.static_range(TOGETHER):
            place = part + (first + number) * GROUP + group_head
            m_new = tl.maximum(m_new, tl.load(scratch[1] + place * 2, valid & (first + number < COUNT), LOWEST))
        alpha = tl.exp2(m_i - m_new)
        m_i = m_new
        l_i *= alpha
        acc *= alpha[:, None]
        for number in tl.static_range(TOGETHER):
            place = part + (first + number) * GROUP + group_head
            exists = valid & (first + number < COUNT)
            weight = tl.exp2(tl.load(scratch[1] + place * 2, exists, LOWEST) - m_i)
            l_i += tl.load(scratch[1] + place * 2 + 1, exists, 0.0) * weight
            rows = scratch[0] + place[:, None] * V_DIM + dims[None, :]
            acc += tl.load(rows, exists[:, None] & (dims < V_DIM)[None, :], 0.0) * weight[:, None]
    return m_i, l_i, acc


@triton.jit
def load_factors(sink_ptr, gate_ptr, strides, batch, step, heads, valid, V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):
    """A branch's sinks in base 2 and its gates' logits, zeros in place of what there is not.

    `strides` of a gate end with the elements'; 0 where a head has one gate for all of them.
    """
    sink = tl.zeros_like(heads).to(tl.float32)
    gate = sink[:, None]
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + heads, mask=valid, other=0.0).to(tl.float32) * KERNEL_LOG2E
    if gate_ptr is not None:
        base = gate_ptr + batch.to(tl.int64) * strides[0] + step.to(tl.int64) * strides[2]
        gate = load_rows(base, heads * 0, heads, valid, strides[1], 0, strides[3], V_DIM, BLOCK_DV)
    return sink, gate


@triton.jit
def _branch_output(state, factors, HAS_SINK: tl.constexpr, HAS_GATE: tl.constexpr):
    """A branch's output under its gate, and its log-sum-exp in base 2; a row without keys gives 0 and -inf."""
    m_i, l_i, acc = state
    empty = l_i == 0
    safe = tl.where(empty, 1.0, l_i)
    lse = m_i + tl.log2(safe)
    share = 1 / safe
    if HAS_SINK:
        share = share / (1 + tl.exp2(factors[0] - lse))
    out = acc * share[:, None]
    if HAS_GATE:
        out *= gate_value(factors[1])
    return out, tl.where(empty, -float("inf"), lse)


@triton.jit
def store_output(
    far,
    near,
    sinks,
    gates,
    far_factors,
    near_factors,
    out_base,
    lse_base,
    stride_oh,
    q_len,
    heads,
    valid,
    ln2,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Normalise what there is of the two branches, gate and add them, store; the lse of a branch that is alone too."""
    if far is None:
        out, lse = _branch_output(near, near_factors, sinks[1] is not None, gates[1] is not None)
    else:
        out, lse = _branch_output(far, far_factors, sinks[0] is not None, gates[0] is not None)
        if near is not None:
            out += _branch_output(near, near_factors, sinks[1] is not None, gates[1] is not None)[0]
    store_rows(out_base, out, heads * 0, heads, valid, stride_oh, 0, 1, V_DIM, BLOCK_DV)
    if far is None or near is None:
        tl.store(lse_base + heads.to(tl.int64) * q_len, lse * ln2, mask=valid)
