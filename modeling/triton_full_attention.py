"""Causal softmax attention that also chooses key blocks (the oracle), for prefill and training.

    p_h[t, s]   = exp(q_t k_s * scaling - lse_h[t]),    o_t = sum over s of p_h[t, s] v_s
    S[t, i]     = max over heads h of the KV group, max over s in block i, of p_h[t, s]
    indices[t]  = the n_selected blocks of highest S[t], ids ascending, ties to the lower id

The specification is `full_attention_with_oracle` of the reference. The attention kernel stores the maximum logit (or
log-sum-exp) of each row and block; queries go in chunks, so that this scratch is bounded whatever the length.
Not supported: a caller's own visibility mask; block sizes that are no power of two from 16 to 1024.
"""

import torch

from .rows_hysparse import Rows
from .triton_band_backward import band_backward
from .triton_block_topk import block_topk
from .triton_common import (
    LN2,
    LOG2E,
    LOWEST,
    OP_NAMESPACE,
    add_product,
    cdiv,
    check_block_size,
    check_supported,
    finish_softmax,
    key_descriptor,
    launch_sizes,
    load_keys,
    load_rows,
    may_fuse,
    named_strides,
    new_output,
    online_softmax,
    padded_dim,
    precision_of,
    query_places,
    query_rows,
    row_arguments,
    store_rows,
    tile_rows,
    tl,
    triton,
)
from .triton_decode_common import takes_decode
from .triton_decode_full import decode_full_attention


# (bytes per element, padded head dimension at most) -> (BLOCK_M, BLOCK_N at most, warps, stages), without and with
# scores, whose storing synchronises the warps of a program. Two bytes, 128: NVIDIA H200, triton 3.6, 2026-11-30; the
# others only keep within a card's memory.
LAUNCH = {
    (2, 128): (128, 128, 8, 3),
    (2, 256): (64, 64, 4, 2),
    (4, 128): (32, 32, 4, 2),
    (4, 256): (32, 32, 4, 1),
}
LAUNCH_SCORES = {**LAUNCH, (2, 128): (64, 64, 4, 3)}

# Upper bound of the block scores held at once.
SCRATCH_BYTES = 512 * 1024 * 1024


@triton.jit
def _store_scores(
    s, scale, row_max, carried, store_ptr, stored, column, begin, SUM: tl.constexpr, SPLIT: tl.constexpr
):
    """Store each row's score of the block that this tile (or, with SPLIT, a part of it) belongs to."""
    score = row_max
    if SUM:
        safe = tl.where(row_max == -float("inf"), 0.0, row_max)
        score = tl.log2(tl.sum(tl.exp2(s * scale - safe[:, None]), 1)) + safe
    if SPLIT > 1:
        tile_columns: tl.constexpr = s.shape[1]
        fresh = (column - begin) % (SPLIT * tile_columns) == 0
        before = tl.where(fresh, -float("inf"), carried)
        if SUM:
            larger = tl.maximum(before, score)
            safe = tl.where(larger == -float("inf"), 0.0, larger)
            score = tl.log2(tl.exp2(before - safe) + tl.exp2(score - safe)) + safe
        else:
            score = tl.maximum(before, score)
    tl.store(store_ptr, score, mask=stored)
    return score


@triton.jit
def _full_attention_fwd_kernel(
    q_ptr,
    key_desc,
    value_desc,
    out_ptr,
    lse_ptr,
    scores_ptr,
    start_ptr,
    first_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    step_begin,
    chunk_len,
    num_blocks,
    scale,
    one,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries times its group against their past, document by document where documents are packed."""
    batch = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    # The last queries see most keys; begun first, they leave no long tail.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    steps, group_head, valid = query_rows(
        tile + step_begin // TILE_Q, tl.minimum(q_len, step_begin + chunk_len), TILE_Q, GROUP, BLOCK_M
    )
    heads = kv_head * GROUP + group_head
    owned, first = query_places(
        start_ptr, first_ptr, stride_fb, stride_fm, batch, steps, valid, gap, HAS_START, HAS_FIRST
    )
    q_base = q_ptr + batch.to(tl.int64) * stride_qb
    q = load_rows(q_base, steps, heads, valid, stride_qh, stride_qm, stride_qd, HEAD_DIM, BLOCK_D)
    score_row = (batch * KV_HEADS + kv_head).to(tl.int64) * num_blocks * GROUP
    score_ptrs = scores_ptr + (score_row + group_head) * chunk_len + (steps - step_begin)
    score_step = tl.cast(chunk_len * GROUP, tl.int64)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    carried = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N

    # Blocks count from a document's first column, so each document of the tile has a pass of its own.
    begin = tl.min(tl.where(valid, first, 2147483647), 0)
    last_begin = tl.max(tl.where(valid, first, 0), 0)
    while begin <= last_begin:
        here = valid & (first == begin)
        end = tl.max(tl.where(here, owned, -1), 0) + 1
        all_see = tl.min(tl.where(valid, tl.where(here, owned, -1), 2147483647), 0) + 1
        plain_end = begin + tl.maximum(all_see - begin, 0) // BLOCK_N * BLOCK_N
        for column in tl.range(begin, plain_end, BLOCK_N):
            k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
            v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            row_max = tl.max(s, 1) * scale
            if SCORES > 0:
                place = score_ptrs + (column - begin) // BLOCK_SIZE * score_step
                carried = _store_scores(s, scale, row_max, carried, place, here, column, begin, SCORES == 2, SPLIT)
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, row_max, scale, None)
            acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)
        for column in tl.range(plain_end, end, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            k = load_keys(key_desc, batch, kv_head, column, BLOCK_N, BLOCK_D)
            v = load_keys(value_desc, batch, kv_head, column, BLOCK_N, BLOCK_DV)
            if HAS_START:
                # Past a short row's end the cache may hold anything, and 0 * NaN is NaN.
                v = tl.where((columns < end)[:, None], v, 0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            s = tl.where((columns[None, :] <= owned[:, None]) & here[:, None], s, -float("inf"))
            row_max = tl.max(s, 1) * scale
            if SCORES > 0:
                place = score_ptrs + (column - begin) // BLOCK_SIZE * score_step
                carried = _store_scores(s, scale, row_max, carried, place, here, column, begin, SCORES == 2, SPLIT)
            p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, row_max, scale, here)
            acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)
        begin = tl.min(tl.where(valid & (first > begin), first, 2147483647), 0)

    out, lse = finish_softmax(m_i, l_i, acc, None, heads, valid, False)
    out_base = out_ptr + batch.to(tl.int64) * stride_ob
    store_rows(out_base, out, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV)
    row = (batch * KV_HEADS * GROUP + heads).to(tl.int64)
    tl.store(lse_ptr + row * q_len + steps, lse, mask=valid)


def _query_chunks(q_len: int, gap: int, step: int, bytes_per_block: int, block_size: int):
    """Successive `(start, stop, blocks)` whose scores fit into the scratch; lengths are multiples of `step`."""
    start = 0
    while start < q_len:
        # A chunk that ends at the last query needs the most blocks; one that ends earlier fits all the more.
        blocks = cdiv(gap + q_len, block_size)
        length = max(step, SCRATCH_BYTES // (bytes_per_block * blocks) // step * step)
        stop = min(q_len, start + length)
        yield start, stop, cdiv(gap + stop, block_size)
        start = stop


@torch.library.custom_op(f"{OP_NAMESPACE}::full_attention_forward", mutates_args=())
def _full_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    n_selected: int,
    scaling: float,
    block_reduction: str,
    head_reduction: str,
    forced_first_blocks: int,
    forced_local_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len, v_dim = value.shape[1:]
    group = heads // kv_heads
    gap = kv_len - q_len
    output = new_output(query, v_dim)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    indices = torch.empty((batch, kv_heads, q_len, n_selected), dtype=torch.int32, device=query.device)
    table = LAUNCH_SCORES if n_selected else LAUNCH
    most_m, most_n, warps, stages = launch_sizes(table, query, value)
    block_m, tile_q = tile_rows(q_len, group, most_m)
    block_n = min(most_n, block_size) if n_selected else most_n
    if not n_selected:
        block_size = block_n
    descriptors = key_descriptor(key, block_n), key_descriptor(value, block_n)
    chunks = [(0, q_len, 0)]
    scratch = None
    if n_selected:
        chunks = list(_query_chunks(q_len, gap, tile_q, 4 * batch * heads, block_size))
        size = max((stop - start) * blocks for start, stop, blocks in chunks) * batch * heads
        scratch = torch.empty(size, dtype=torch.float32, device=query.device)
    for start, stop, blocks in chunks:
        with torch.cuda.device_of(query):
            _full_attention_fwd_kernel[(cdiv(stop - start, tile_q), batch * kv_heads)](
                query,
                *descriptors,
                output,
                lse,
                scratch if scratch is not None else lse,
                **named_strides("q", query),
                **named_strides("o", output),
                **row_arguments(query_start, first_key, batch, q_len),
                KV_HEADS=kv_heads,
                q_len=q_len,
                gap=gap,
                step_begin=start,
                chunk_len=stop - start,
                num_blocks=blocks,
                scale=scaling * LOG2E,
                one=1.0,
                GROUP=group,
                TILE_Q=tile_q,
                HEAD_DIM=dim,
                BLOCK_D=padded_dim(dim),
                V_DIM=v_dim,
                BLOCK_DV=padded_dim(v_dim),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_SIZE=block_size,
                SCORES=(1 if block_reduction == "max" else 2) if n_selected else 0,
                PRECISION=precision_of(query),
                num_warps=warps if block_m >= 64 else 4,
                num_stages=stages,
                enable_fp_fusion=may_fuse(query),
            )
        if n_selected:
            shape = (batch * kv_heads, blocks, group, stop - start)
            block_topk(
                scratch[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape),
                lse,
                indices,
                query_start,
                first_key,
                gap=gap,
                steps=(start, stop),
                block_size=block_size,
                head_reduction=head_reduction,
                forced=(forced_first_blocks, forced_local_blocks),
            )
    return output, lse, indices


@_full_attention_forward.register_fake
def _(query, key, value, query_start, first_key, block_size, n_selected, *options):
    batch, _, q_len, _ = query.shape
    return (
        new_output(query, value.shape[-1]),
        query.new_empty(query.shape[:3], dtype=torch.float32),
        query.new_empty((batch, key.shape[1], q_len, n_selected), dtype=torch.int32),
    )


@torch.library.custom_op(f"{OP_NAMESPACE}::full_attention_backward", mutates_args=())
def _full_attention_backward(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if query_start is None and first_key is None and _cudnn_takes(query, key, value, grad_lse):
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_output,
            query,
            key,
            value,
            output,
            lse[..., None] * LN2,
            nothing,
            nothing,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            True,
            scale=scaling,
        )
    return band_backward(
        grad_output, grad_lse, query, key, value, output, lse, None, query_start, first_key, None, scaling
    )[:3]


def _cudnn_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_lse: torch.Tensor | None) -> bool:
    """Whether the library's gradient serves; it is a third faster than the kernels here and not bitwise repeatable."""
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and grad_lse is None
        and query.dtype != torch.float32
        and query.shape[2] == key.shape[2]
        and query.shape[3] == value.shape[3]
        and query.shape[3] in (64, 128)
        and all(states.stride(3) == 1 for states in (query, key, value))
    )


@_full_attention_backward.register_fake
def _(grad_output, grad_lse, query, key, value, output, lse, query_start, first_key, scaling):
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_for_backward(ctx, inputs, output):
    query, key, value, query_start, first_key, *_ = inputs
    ctx.scaling = inputs[7]
    out, lse, indices = output
    ctx.mark_non_differentiable(indices)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, query_start, first_key)


def _backward(ctx, grad_output, grad_lse, _):
    # Read once: under checkpointing a second reading would run the forward pass again.
    saved = ctx.saved_tensors
    grad_output = torch.zeros_like(saved[3]) if grad_output is None else grad_output
    grads = _full_attention_backward(grad_output, grad_lse, *saved, ctx.scaling)
    return *grads, *(None,) * 9


_full_attention_forward.register_autograd(_backward, setup_context=_keep_for_backward)


def full_attention_with_oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    n_selected: int,
    scaling: float,
    rows: Rows,
    block_reduction: str = "max",
    head_reduction: str = "max",
    forced_first_blocks: int = 0,
    forced_local_blocks: int = 0,
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
    """Causal softmax attention that also chooses key blocks: `(output, lse, indices, None)`.

    Raises:
        NotImplementedError: the reference can do it and this cannot.
    """
    check_supported(query, key, value, scaling=scaling, rows=rows, return_weights=return_weights)
    if n_selected:
        check_block_size(block_size)
    if takes_decode(query, key, value):
        return decode_full_attention(
            query,
            key,
            value,
            block_size=block_size,
            n_selected=n_selected,
            scaling=scaling,
            rows=rows,
            block_reduction=block_reduction,
            head_reduction=head_reduction,
            forced_first_blocks=forced_first_blocks,
            forced_local_blocks=forced_local_blocks,
        )
    output, lse, indices = _full_attention_forward(
        query,
        key,
        value,
        rows.query_start,
        rows.first_key,
        block_size,
        n_selected,
        float(scaling),
        block_reduction,
        head_reduction,
        forced_first_blocks,
        forced_local_blocks,
    )
    return output, lse * LN2, indices if n_selected else None, None
