"""Two forms of one selection, built once from the indices and shared by all sparse layers that reuse them.

Tile unions, for attention by tiles of neighbouring queries: every block that any query of the tile chose, once, by its
first column in ascending order, with a bit mask of the queries that chose it.
Inverse lists, for the gradients of keys: for every block of key columns, who chose it, in the order of the queries.

-1 may stand anywhere in the indices, a repeated id counts once, and ids past a query's own block choose nothing.
Nothing here waits for the device, and nothing depends on the order in which programs run.
"""

from typing import NamedTuple

import torch

from .triton_common import OP_NAMESPACE, cdiv, next_power_of_2, query_places, row_arguments, tl, triton


# Bits of a mask, and a bound on the choices that one program sorts.
MOST_QUERIES = 32
_MOST_CANDIDATES = 2048


class SelectionLayouts(NamedTuple):
    """Tensors that describe one selection to the block-sparse kernels.

    Args:
        starts (`torch.Tensor`): int32 `(batch * kv_heads, tiles, candidates)`: each block's first column, ascending.
        masks (`torch.Tensor`): int32, like `starts`: bit i is set where query i of the tile chose the block.
        counts (`torch.Tensor`): int32 `(batch * kv_heads, tiles, 2)`: blocks that all queries see whole; all blocks.
        queries (`torch.Tensor`): int32: for each choice (two where documents begin anywhere), sorted by the block of
            columns it touches, the query step that made it.
        begins (`torch.Tensor`): int32, like `queries`: the first column of the block it chose; empty where blocks of
            columns and chosen blocks are the same.
        offsets (`torch.Tensor`): int64 `(batch * kv_heads * blocks + 1,)`: where each block's choices begin.
    """

    starts: torch.Tensor
    masks: torch.Tensor
    counts: torch.Tensor
    queries: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def check_layouts(layouts: SelectionLayouts, query: torch.Tensor, indices: torch.Tensor) -> None:
    """Raise ValueError for layouts that cannot be those of `indices`, by their shapes."""
    rows, tiles, candidates = layouts[0].shape
    batch, kv_heads, q_len, n_selected = indices.shape
    tile_q, rest = divmod(candidates, max(1, n_selected))
    if rows != batch * kv_heads or rest or not tile_q or tiles != cdiv(q_len, tile_q):
        raise ValueError(
            f"`layouts` must be made by `selection_layouts` for these `indices` {tuple(indices.shape)}, got unions of "
            f"shape {tuple(layouts[0].shape)}."
        )


@triton.jit
def _tile_union_kernel(
    index_ptr,
    starts_ptr,
    masks_ptr,
    counts_ptr,
    start_ptr,
    first_ptr,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    TILE_Q: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Union of one tile: its choices sorted by block and query, each run of equal blocks joined into one."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    number = tl.arange(0, CANDIDATES)
    query = number // CHOICES
    steps = tile * TILE_Q + query
    valid = (query < TILE_Q) & (steps < q_len)
    owned, first = query_places(
        start_ptr, first_ptr, stride_fb, stride_fm, row // KV_HEADS, steps, valid, gap, HAS_START, HAS_FIRST
    )
    place = (row.to(tl.int64) * q_len + steps) * CHOICES + number % CHOICES
    block = tl.load(index_ptr + place, mask=valid, other=-1)
    chosen = (block >= 0) & (owned >= first) & (block <= (owned - first) // BLOCK_SIZE)
    key = (first + tl.where(chosen, block, 0) * BLOCK_SIZE) * 32 + query
    key = tl.sort(tl.where(chosen, key, 2147483647))
    chosen = key != 2147483647
    start = key >> 5
    before = tl.gather(start, tl.maximum(number - 1, 0), 0)
    new = chosen & ((number == 0) | (start != before))
    slot = tl.cumsum(new.to(tl.int32), 0) - 1
    unit = row.to(tl.int64) * tl.num_programs(0) + tile
    base = unit * (TILE_Q * CHOICES)
    tl.store(starts_ptr + base + slot, start, mask=new)
    # Bits only join, so the order in which they arrive does not show.
    tl.atomic_or(masks_ptr + base + slot, 1 << (key & 31), mask=chosen, sem="relaxed")
    # Sorted by first column, the blocks that end before the first query's own column stand in front.
    whole = new & (start + BLOCK_SIZE - 1 <= tl.min(tl.where(valid, owned, 2147483647), 0))
    tl.store(counts_ptr + unit * 2, tl.sum(whole.to(tl.int32), 0))
    tl.store(counts_ptr + unit * 2 + 1, tl.sum(new.to(tl.int32), 0))


@triton.jit
def _choice_blocks_kernel(
    index_ptr,
    keys_ptr,
    start_ptr,
    first_ptr,
    stride_fb,
    stride_fm,
    KV_HEADS,
    q_len,
    gap,
    num_blocks,
    CHOICES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Number of the block of columns that each choice touches; two where documents shift the blocks off the grid."""
    row = tl.program_id(1)
    steps = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    valid = steps < q_len
    owned, first = query_places(
        start_ptr, first_ptr, stride_fb, stride_fm, row // KV_HEADS, steps, valid, gap, HAS_START, HAS_FIRST
    )
    columns = tl.arange(0, PADDED)
    base = (row.to(tl.int64) * q_len + steps) * CHOICES
    inside = valid[:, None] & (columns < CHOICES)[None, :]
    block = tl.load(index_ptr + base[:, None] + columns[None, :], mask=inside, other=-1)
    chosen = (block >= 0) & (owned >= first)[:, None] & (block <= ((owned - first) // BLOCK_SIZE)[:, None])
    for column in tl.range(0, CHOICES):
        other = tl.load(index_ptr + base + column, mask=valid, other=-1)
        chosen = chosen & ((block != other[:, None]) | (columns <= column)[None, :])
    start = first[:, None] + tl.where(chosen, block, 0) * BLOCK_SIZE
    nobody = tl.num_programs(1) * num_blocks
    key = tl.where(chosen, row * num_blocks + start // BLOCK_SIZE, nobody)
    if HAS_FIRST:
        place = (base[:, None] + columns[None, :]) * 2
        tl.store(keys_ptr + place, key, mask=inside)
        border = (start // BLOCK_SIZE + 1) * BLOCK_SIZE
        second = chosen & (border < start + BLOCK_SIZE) & (border <= owned[:, None])
        tl.store(keys_ptr + place + 1, tl.where(second, key + 1, nobody), mask=inside)
    else:
        tl.store(keys_ptr + base[:, None] + columns[None, :], key, mask=inside)


@torch.library.custom_op(f"{OP_NAMESPACE}::tile_unions", mutates_args=())
def tile_unions(
    indices: torch.Tensor,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    tile_q: int,
    block_size: int,
    kv_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(starts, masks, counts)` of `SelectionLayouts` for tiles of `tile_q` queries."""
    batch, kv_heads, q_len, choices = indices.shape
    tiles = cdiv(q_len, tile_q)
    starts = torch.empty((batch * kv_heads, tiles, tile_q * choices), dtype=torch.int32, device=indices.device)
    masks = torch.zeros_like(starts)
    counts = torch.empty((batch * kv_heads, tiles, 2), dtype=torch.int32, device=indices.device)
    candidates = next_power_of_2(tile_q * choices)
    with torch.cuda.device_of(indices):
        _tile_union_kernel[(tiles, batch * kv_heads)](
            indices.contiguous(),
            starts,
            masks,
            counts,
            **row_arguments(query_start, first_key, batch, q_len),
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=kv_len - q_len,
            TILE_Q=tile_q,
            CHOICES=choices,
            BLOCK_SIZE=block_size,
            CANDIDATES=candidates,
            num_warps=max(1, min(8, candidates // 256)),
        )
    return starts, masks, counts


@tile_unions.register_fake
def _(indices, query_start, first_key, tile_q, block_size, kv_len):
    batch, kv_heads, q_len, choices = indices.shape
    tiles = (q_len + tile_q - 1) // tile_q
    starts = indices.new_empty((batch * kv_heads, tiles, tile_q * choices), dtype=torch.int32)
    counts = indices.new_empty((batch * kv_heads, tiles, 2), dtype=torch.int32)
    return starts, torch.empty_like(starts), counts


@torch.library.custom_op(f"{OP_NAMESPACE}::inverse_lists", mutates_args=())
def inverse_lists(
    indices: torch.Tensor,
    query_start: torch.Tensor | None,
    first_key: torch.Tensor | None,
    block_size: int,
    kv_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(queries, begins, offsets)` of `SelectionLayouts`."""
    batch, kv_heads, q_len, choices = indices.shape
    num_blocks = cdiv(kv_len, block_size)
    touched = 1 if first_key is None else 2
    keys = torch.empty(batch * kv_heads * q_len * choices * touched, dtype=torch.int32, device=indices.device)
    padded = next_power_of_2(choices)
    at_once = max(1, 1024 // padded)
    with torch.cuda.device_of(indices):
        _choice_blocks_kernel[(cdiv(q_len, at_once), batch * kv_heads)](
            indices.contiguous(),
            keys,
            **row_arguments(query_start, first_key, batch, q_len),
            KV_HEADS=kv_heads,
            q_len=q_len,
            gap=kv_len - q_len,
            num_blocks=num_blocks,
            CHOICES=choices,
            BLOCK_SIZE=block_size,
            PADDED=padded,
            QUERIES=at_once,
            num_warps=4,
        )
    # A stable sort keeps each block's choices in the order of the queries, which fixes the order of the sums.
    keys, order = torch.sort(keys, stable=True)
    blocks = torch.arange(batch * kv_heads * num_blocks + 1, dtype=torch.int32, device=indices.device)
    place = order // touched
    queries = (place // choices % q_len).int()
    begins = queries.new_empty(0)
    if first_key is not None:
        first = first_key.expand(batch, q_len).repeat_interleave(kv_heads, 0).flatten()
        begins = (first[place // choices] + indices.flatten()[place] * block_size).int()
    return queries, begins, torch.searchsorted(keys, blocks)


@inverse_lists.register_fake
def _(indices, query_start, first_key, block_size, kv_len):
    batch, kv_heads, q_len, choices = indices.shape
    touched = 1 if first_key is None else 2
    num_blocks = (kv_len + block_size - 1) // block_size
    queries = indices.new_empty(batch * kv_heads * q_len * choices * touched, dtype=torch.int32)
    begins = queries.new_empty(0 if first_key is None else queries.numel())
    return queries, begins, indices.new_empty(batch * kv_heads * num_blocks + 1, dtype=torch.int64)


def most_tile_queries(choices: int) -> int:
    """Queries that one tile may hold: its masks have 32 bits, and one program sorts its choices."""
    return max(1, min(MOST_QUERIES, _MOST_CANDIDATES // max(choices, 1)))
