"""Attention of few new tokens to selected blocks, to a window, or to both under gates, in one kernel.

    o_t = sigmoid(g_t) * blocks(q_t, k, v) + sigmoid(g'_t) * window(q'_t, k', v')

Each query of each KV head is a row of its own. A row's keys are divided among programs, or one program takes them all
where there are rows enough to fill the card; the program that finishes last combines the parts, in their order. The
specifications are `sparse_layer_attention`, `block_sparse_attention` and `sliding_window_attention` of the reference;
gradients are the prefill kernels' business.
"""

import torch

from .rows_hysparse import Rows
from .triton_common import (
    LN2,
    LOG2E,
    LOWEST,
    OP_NAMESPACE,
    add_product,
    cdiv,
    launch_sizes,
    load_rows,
    may_fuse,
    new_output,
    next_power_of_2,
    online_softmax,
    padded_dim,
    precision_of,
    tl,
    triton,
)
from .triton_decode_common import first_owned, first_seen, load_columns, row_tuple
from .triton_decode_finish import combine_parts, load_factors, store_output, store_part
from .triton_layer_common import is_bare


# (bytes per element, padded head dimension at most) -> (columns per tile at most, warps, stages). Two bytes, 128:
# NVIDIA H200, triton 3.6, 2026-12-01; the others only keep within a card's memory.
LAUNCH = {
    (2, 128): (64, 2, 2),
    (2, 256): (64, 4, 2),
    (4, 128): (64, 4, 2),
    (4, 256): (32, 4, 2),
}
# Programs to divide the rows among: enough to fill a card of 132 multiprocessors.
_PROGRAMS = 528
# Parts of a row's window, or of its blocks, that are combined at most.
_MOST_PARTS = 64
# Elements of the output that are combined at once, by heads: what its threads hold of them in registers.
_HELD_ELEMENTS = 1024


@triton.jit
def _chosen_block(indices_ptr, slot, first, owned, BLOCK_SIZE: tl.constexpr, N_SELECTED: tl.constexpr):
    """First column of a listed block, the last that the query sees of it (-1: none), and whether the block counts.

    The latter waits for comparisons that the keys need not wait for.
    """
    SLOTS: tl.constexpr = min(64, triton.next_power_of_2(N_SELECTED))
    id = tl.load(indices_ptr + slot)
    # Before it is multiplied: an id past the query's own block chooses nothing, however large.
    exists = (id >= 0) & (owned >= first) & (id <= (owned - first) // BLOCK_SIZE)
    column = first + tl.where(exists, id, 0) * BLOCK_SIZE
    repeated = 0
    for earlier in tl.static_range(0, N_SELECTED, SLOTS):
        others = earlier + tl.arange(0, SLOTS)
        listed = tl.load(indices_ptr + others, mask=others < slot, other=-1)
        repeated = tl.maximum(repeated, tl.max((listed == id).to(tl.int32), 0))
    return column, tl.where(exists, owned, -1), repeated == 0


@triton.jit
def _branch(states, strides, rows, gap, batch, kv_head, step):
    """Where a branch's query, keys and values begin, the strides of heads, queries and columns, and what is seen."""
    batch = batch.to(tl.int64)
    head = kv_head.to(tl.int64)
    q_base = states[0] + batch * strides[0] + step.to(tl.int64) * strides[2]
    k_base = states[1] + batch * strides[3] + head * strides[4]
    v_base = states[2] + batch * strides[6] + head * strides[7]
    owned = first_owned(rows, batch, gap) + step
    return q_base, k_base, v_base, strides[1], strides[5], strides[8], owned, first_seen(rows, batch, step)


@triton.jit
def _attend_part(
    far,
    near,
    indices_ptr,
    is_near,
    begin,
    end,
    window,
    kv_head,
    scale,
    one,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Maximum, mass and sum of a query's heads over a run of the listed blocks' columns, or of the window's.

    Of the two branches, as `_branch` describes them, one may be None; else `is_near` says which: one loop serves both.
    """
    GROUP: tl.constexpr = SHAPE[0]
    BLOCK_D: tl.constexpr = SHAPE[2]
    BLOCK_DV: tl.constexpr = SHAPE[4]
    BLOCK_M: tl.constexpr = SHAPE[5]
    TILE: tl.constexpr = TILES[0]
    if near is None:
        q_base, k_base, v_base, q_step, k_step, v_step, _, _ = far
    else:
        q_base, k_base, v_base, q_step, k_step, v_step, _, _ = near
        if far is not None:
            q_base = tl.where(is_near, q_base, far[0])
            k_base = tl.where(is_near, k_base, far[1])
            v_base = tl.where(is_near, v_base, far[2])
            q_step = tl.where(is_near, q_step, far[3])
            k_step = tl.where(is_near, k_step, far[4])
            v_step = tl.where(is_near, v_step, far[5])
    group_head = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + group_head
    q = load_rows(q_base, heads * 0, heads, group_head < GROUP, q_step, 0, 1, SHAPE[1], BLOCK_D)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for place in tl.range(begin, end, TILE):
        if far is not None:
            column, last, counts = _chosen_block(
                indices_ptr, tl.where(is_near, 0, place // TILES[1]), far[7], far[6], TILES[1], TILES[2]
            )
            column += place % TILES[1]
            lowest = column
        if near is not None:
            near_column = near[6] - window + 1 + place
            if far is None:
                column, lowest, last, counts = near_column, near[7], near[6], True
            else:
                column = tl.where(is_near, near_column, column)
                lowest = tl.where(is_near, near[7], lowest)
                last = tl.where(is_near, near[6], last)
                counts = is_near | counts
        columns = column + tl.arange(0, TILE)
        seen = (columns >= lowest) & (columns <= last)
        k = load_columns(k_base, columns, seen, k_step, SHAPE[1], BLOCK_D)
        v = load_columns(v_base, columns, seen, v_step, SHAPE[3], BLOCK_DV)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where((seen & counts)[None, :], s, -float("inf"))
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, tl.max(s, 1) * scale, scale, None)
        acc = add_product(acc * alpha[:, None], p.to(v.dtype), v, one, PRECISION)
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["gap", "window_gap"])
def _decode_sparse_kernel(
    far_states,
    far_strides,
    far_rows,
    near_states,
    near_strides,
    near_rows,
    indices_ptr,
    sinks,
    gates,
    gate_strides,
    near_gate_strides,
    out_ptr,
    lse_ptr,
    out_strides,
    scratch,
    KV_HEADS,
    q_len,
    gap,
    window_gap,
    window,
    share,
    scale,
    one,
    ln2,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NEAR: tl.constexpr,
    FINISH_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row: the first `NEAR` programs divide the window, the others the blocks, `share` columns each."""
    GROUP: tl.constexpr = SHAPE[0]
    V_DIM: tl.constexpr = SHAPE[3]
    BLOCK_DV: tl.constexpr = SHAPE[4]
    BLOCK_M: tl.constexpr = SHAPE[5]
    N_SELECTED: tl.constexpr = TILES[2]
    program = tl.program_id(0)
    row = tl.program_id(1)
    head_row = row // q_len
    step = row % q_len
    batch = head_row // KV_HEADS
    kv_head = head_row % KV_HEADS
    far, near = None, None
    if far_states[0] is not None:
        far = _branch(far_states, far_strides, far_rows, gap, batch, kv_head, step)
        indices_ptr += row.to(tl.int64) * N_SELECTED
    if near_states[0] is not None:
        near = _branch(near_states, near_strides, near_rows, window_gap, batch, kv_head, step)
    out_base = out_ptr + batch.to(tl.int64) * out_strides[0] + step.to(tl.int64) * out_strides[2]
    lse_base = lse_ptr + (batch * KV_HEADS * GROUP).to(tl.int64) * q_len + step
    if FINISH_M >= GROUP:
        # Asked for ahead of the keys, to arrive with them.
        group_head = tl.arange(0, FINISH_M)
        valid = group_head < GROUP
        heads = kv_head * GROUP + group_head
        far_factors = load_factors(sinks[0], gates[0], gate_strides, batch, step, heads, valid, V_DIM, BLOCK_DV)
        near_factors = load_factors(sinks[1], gates[1], near_gate_strides, batch, step, heads, valid, V_DIM, BLOCK_DV)

    if PROGRAMS == 1:
        far_state, near_state = None, None
        if near is not None:
            near_state = _attend_part(
                None, near, indices_ptr, True, 0, window, window, kv_head, scale, one, SHAPE, TILES, PRECISION
            )
        if far is not None:
            far_state = _attend_part(
                far,
                None,
                indices_ptr,
                False,
                0,
                N_SELECTED * TILES[1],
                window,
                kv_head,
                scale,
                one,
                SHAPE,
                TILES,
                PRECISION,
            )
        store_output(
            far_state,
            near_state,
            sinks,
            gates,
            far_factors,
            near_factors,
            out_base,
            lse_base,
            out_strides[1],
            q_len,
            heads,
            valid,
            ln2,
            V_DIM,
            BLOCK_DV,
        )
        return

    is_near = program < NEAR
    begin = tl.where(is_near, program, program - NEAR) * share
    end = tl.minimum(begin + share, tl.where(is_near, window, N_SELECTED * TILES[1]))
    state = _attend_part(
        far, near, indices_ptr, is_near, begin, end, window, kv_head, scale, one, SHAPE, TILES, PRECISION
    )
    part = row.to(tl.int64) * PROGRAMS * GROUP
    rows = tl.arange(0, BLOCK_M)
    store_part(scratch, part + program * GROUP, state, rows, rows < GROUP, V_DIM, BLOCK_DV)
    # All of this program's stores before its arrival, all of the others' before what follows.
    tl.debug_barrier()
    if tl.atomic_add(scratch[2] + row, 1, sem="acq_rel") != PROGRAMS - 1:
        return
    for some in tl.range(0, GROUP, FINISH_M):
        far_state, near_state = None, None
        if FINISH_M < GROUP:
            group_head = some + tl.arange(0, FINISH_M)
            valid = group_head < GROUP
            heads = kv_head * GROUP + group_head
            far_factors = load_factors(sinks[0], gates[0], gate_strides, batch, step, heads, valid, V_DIM, BLOCK_DV)
            near_factors = load_factors(
                sinks[1], gates[1], near_gate_strides, batch, step, heads, valid, V_DIM, BLOCK_DV
            )

        if near is not None:
            near_state = combine_parts(scratch, part, group_head, valid, NEAR, GROUP, V_DIM, BLOCK_DV)
        if far is not None:
            far_part = part + NEAR * GROUP
            far_state = combine_parts(scratch, far_part, group_head, valid, PROGRAMS - NEAR, GROUP, V_DIM, BLOCK_DV)
        store_output(
            far_state,
            near_state,
            sinks,
            gates,
            far_factors,
            near_factors,
            out_base,
            lse_base,
            out_strides[1],
            q_len,
            heads,
            valid,
            ln2,
            V_DIM,
            BLOCK_DV,
        )


def _launch(
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    indices: torch.Tensor | None,
    window_query: torch.Tensor | None,
    window_key: torch.Tensor | None,
    window_value: torch.Tensor | None,
    gate_global: torch.Tensor | None,
    gate_local: torch.Tensor | None,
    sink_global: torch.Tensor | None,
    sink_local: torch.Tensor | None,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    window_start: torch.Tensor | None,
    window_first: torch.Tensor | None,
    block_size: int,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    far = [_dense(states) for states in (query, key, value)]
    near = [_dense(states) for states in (window_query, window_key, window_value)]
    a_query, _, a_value = far if window_query is None else near
    batch, heads, q_len, dim = a_query.shape
    kv_heads, v_dim = a_value.shape[1], a_value.shape[3]
    group = heads // kv_heads
    rows = batch * kv_heads * q_len
    n_selected = 0 if indices is None else indices.shape[3]
    window = 0 if window_query is None else window
    tile, warps, stages = launch_sizes(LAUNCH, a_query, a_value)
    if indices is not None:
        tile = min(tile, block_size)
    n_near, n_far, share = _division(rows, window, n_selected * block_size, tile)
    programs = n_near + n_far
    finish_m = padded_dim(group)
    if programs > 1:
        finish_m = min(next_power_of_2(group), _HELD_ELEMENTS // padded_dim(v_dim))
    output, lse = _results(a_query, a_value, query is not None and window_query is not None)
    sizes = (rows * group * programs * v_dim, rows * group * programs * 2) if programs > 1 else (0, 0)
    scratch = [torch.empty(size, dtype=torch.float32, device=output.device) for size in sizes]
    arrived = torch.zeros(rows if programs > 1 else 0, dtype=torch.int32, device=output.device)
    with torch.cuda.device_of(output):
        _decode_sparse_kernel[(programs, rows)](
            tuple(far),
            _strides(*far),
            row_tuple(query_start, first_key, batch, q_len),
            tuple(near),
            _strides(*near),
            row_tuple(window_start, window_first, batch, q_len),
            indices.contiguous() if indices is not None else None,
            (sink_global, sink_local),
            (gate_global, gate_local),
            _gate_strides(gate_global, v_dim),
            _gate_strides(gate_local, v_dim),
            output,
            lse,
            output.stride()[:3],
            (*scratch, arrived),
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=0 if key is None else key.shape[2] - q_len,
            window_gap=0 if window_key is None else window_key.shape[2] - q_len,
            window=window,
            share=share,
            scale=scaling * LOG2E,
            one=1.0,
            ln2=LN2,
            SHAPE=(group, dim, padded_dim(dim), v_dim, padded_dim(v_dim), padded_dim(group)),
            TILES=(tile, block_size, n_selected),
            PROGRAMS=programs,
            NEAR=n_near,
            FINISH_M=finish_m,
            PRECISION=precision_of(output),
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=may_fuse(output),
        )
    return output, lse


_decode_sparse = torch.library.custom_op(f"{OP_NAMESPACE}::decode_sparse", _launch, mutates_args=())


def _division(rows: int, window: int, columns: int, tile: int) -> tuple[int, int, int]:
    """Programs per row for the window and for the blocks, and columns for each; one for all where rows are many."""
    tiles = cdiv(window, tile), cdiv(columns, tile)
    most = min(_PROGRAMS // rows, sum(tiles))
    if most < 2:
        return 0, 1, max(window, columns)
    each = max(cdiv(sum(tiles), most), cdiv(max(tiles), _MOST_PARTS))
    near, far = (cdiv(count, each) for count in tiles)
    if near + far > most:
        # By one, since both were rounded up: the least larger share that saves a program.
        each = min(cdiv(count, part - 1) for count, part in zip(tiles, (near, far), strict=True) if part > 1)
        near, far = (cdiv(count, each) for count in tiles)
    return (near, far, each * tile) if near + far > 1 else (0, 1, max(window, columns))


def _dense(states: torch.Tensor | None) -> torch.Tensor | None:
    """The states, copied where neighbouring elements of a head are not neighbours in memory."""
    return states if states is None or states.stride(3) == 1 else states.contiguous()


def _strides(*states: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of rows, heads and columns of a branch's query, keys and values."""
    return tuple(step for part in states for step in ((0, 0, 0) if part is None else part.stride()[:3]))


def _gate_strides(gate: torch.Tensor | None, v_dim: int) -> tuple[int, ...]:
    """Strides of a gate's logits; a head that has one for all elements repeats it."""
    if gate is None:
        return (0, 0, 0, 0)
    return gate.expand(-1, -1, -1, v_dim).stride()


def _results(query: torch.Tensor, value: torch.Tensor, is_whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised output and log-sum-exp; the latter is empty where two branches are added."""
    return new_output(query, value.shape[-1]), query.new_empty(0 if is_whole else query.shape[:3], dtype=torch.float32)


@_decode_sparse.register_fake
def _(query, key, value, indices, window_query, window_key, window_value, *others):
    if window_query is None:
        return _results(query, value, False)
    return _results(window_query, window_value, query is not None)


def decode_sparse_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    window_query: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    gates: tuple[torch.Tensor | None, torch.Tensor | None],
    sinks: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    block_size: int,
    window: int,
    scaling: float,
    rows: Rows,
    window_rows: Rows,
) -> tuple[torch.Tensor]:
    """`sparse_layer_attention` of a checked call with few queries: `(output,)`."""
    states = (query, key, value, indices, window_query, window_key, window_value, *gates, *sinks)
    places = (rows.query_start, rows.first_key, window_rows.query_start, window_rows.first_key)
    call = _launch if is_bare(*states) else _decode_sparse
    output, _ = call(*states, *places, block_size, window, float(scaling))
    return (output,)


def decode_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    block_size: int,
    scaling: float,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """`block_sparse_attention` of a checked call with few queries: `(output, lse, None)`."""
    states = (query, key, value, indices, None, None, None, None, None, sink, None)
    places = (rows.query_start, rows.first_key, None, None)
    call = _launch if is_bare(*states) else _decode_sparse
    return *call(*states, *places, block_size, 0, float(scaling)), None


def decode_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    window: int,
    scaling: float,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """`sliding_window_attention` of a checked call with few queries: `(output, lse, None)`."""
    states = (None, None, None, None, query, key, value, None, None, None, sink)
    places = (None, None, rows.query_start, rows.first_key)
    block_size = 16  # Of no blocks.
    call = _launch if is_bare(*states) else _decode_sparse
    return *call(*states, *places, block_size, window, float(scaling)), None
