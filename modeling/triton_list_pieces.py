"""Long lists of choices, cut into pieces, so that no program has much more to sum than the others.

In many heads of a trained model nearly every query chooses the first block, and no other list is as long. The array of
all lists is cut at multiples of a length. Of a list longer than two such lengths, what stands behind each cut is
summed by a program of its own, and so is what stands before the first one; `add_pieces` adds the sums in their order.
Where lists and cuts are is known on the device alone, so there is a program for every cut, and those of short lists
end at once.

Cuts depend on all rows of a batch. So the rounding of a row's dk and dv does, in long texts.
"""

from typing import NamedTuple

import torch

from .triton_band_backward import store_key_gradient
from .triton_common import cdiv, padded_dim, tl, triton
from .triton_selection_layouts import SelectionLayouts


# From one cut to the next are at least so many rows (queries times their group), so that sums are cheap beside
# products; and one call makes at most so many cuts, in blocks of 64: 512 bytes per dimension of keys and values each.
# A list of no more than two parts in so many of all choices holds nothing up.
PIECE_ROWS = 4096
MOST_CUTS = 1024
# Columns of a block per program that adds.
ROWS = 16


class ListPieces(NamedTuple):
    """How the lists of one call are cut.

    Args:
        length (`int`): choices from one cut to the next.
        cuts (`int`): how many cuts there are; 0 where no list can be long.
        lists (`torch.Tensor`): int32 `(cuts,)`: the list that holds the place of each cut, the last one for what lies
            past the end of all.
        sums (`torch.Tensor`): float32 `(2, cuts, block_size, width)`, uninitialised: sums of what stands behind each
            cut, then of what stands before the first cut of a list; dk's columns of a block, then dv's.
    """

    length: int
    cuts: int
    lists: torch.Tensor | None = None
    sums: torch.Tensor | None = None


@triton.jit
def piece_of(offsets_ptr, cut_lists_ptr, number, piece, cuts):
    """`(list, slot, whether nothing is to do)` of a program: first one per cut, then one per list.

    A cut's program sums into the slot of its number; the first piece of a long list, which begins before the list's
    first cut, into the slot of that cut behind all of those.
    """
    is_list = number >= cuts
    unit = tl.load(cut_lists_ptr + number, mask=number < cuts, other=0)
    unit = tl.where(is_list, number - cuts, unit)
    begin = tl.load(offsets_ptr + unit)
    end = tl.load(offsets_ptr + unit + 1)
    place = (number + 1).to(tl.int64) * piece
    is_idle = (end - begin <= 2 * piece) | (place <= begin) | (place >= end)
    slot = tl.where(is_list, cuts + (begin // piece).to(tl.int32), number)
    return unit, slot, is_idle & (number < cuts)


@triton.jit
def sums_of(
    sums_ptr,
    slot,
    first,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Where a slot keeps the sums for keys and for values of some of its block's columns."""
    rows = first + tl.arange(0, ROWS)[:, None]
    base = sums_ptr + slot.to(tl.int64) * BLOCK_SIZE * (BLOCK_D + BLOCK_DV)
    values = base + BLOCK_SIZE * BLOCK_D + rows * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :]
    return base + rows * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], values


@triton.jit(do_not_specialize=["num_blocks", "piece", "cuts"])
def _add_pieces_kernel(
    sums_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    cut_lists_ptr,
    kv_len,
    num_blocks,
    piece,
    cuts,
    scaling,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dk and dv of some columns of the block whose long list this cut is the first of, from the sums of its pieces."""
    number = tl.program_id(0)
    unit, slot, skipped = piece_of(offsets_ptr, cut_lists_ptr, number, piece, cuts)
    begin = tl.load(offsets_ptr + unit)
    if skipped | (begin // piece != number):
        return
    first = tl.program_id(1) * ROWS
    keys, values = sums_of(sums_ptr, cuts + number, first, ROWS, BLOCK_SIZE, BLOCK_D, BLOCK_DV)
    dk, dv = tl.load(keys), tl.load(values)
    more = ((tl.load(offsets_ptr + unit + 1) - 1) // piece).to(tl.int32) - number
    for further in tl.range(0, more):
        keys, values = sums_of(sums_ptr, number + further, first, ROWS, BLOCK_SIZE, BLOCK_D, BLOCK_DV)
        dk += tl.load(keys)
        dv += tl.load(values)
    columns = unit % num_blocks * BLOCK_SIZE + first + tl.arange(0, ROWS)
    row = unit // num_blocks
    store_key_gradient(dk_ptr, dk * scaling, row, columns, kv_len, HEAD_DIM, BLOCK_D)
    store_key_gradient(dv_ptr, dv, row, columns, kv_len, V_DIM, BLOCK_DV)


def cut_lists(layouts: SelectionLayouts, q_len: int, group: int, block_size: int, width: int) -> ListPieces:
    """Cut the lists of a call; `width` is that of a key's and a value's tile together."""
    choices = layouts.queries.numel()
    length = max(cdiv(PIECE_ROWS, group), cdiv(choices, MOST_CUTS * 64 // block_size))
    # A query stands in a list once, or twice where documents begin anywhere.
    longest = q_len * (2 if layouts.begins.numel() else 1)
    if not choices or longest <= 2 * length:
        return ListPieces(length, 0)
    cuts, device = (choices - 1) // length, layouts.queries.device
    places = torch.arange(length, (cuts + 1) * length, length, device=device)
    lists = torch.searchsorted(layouts.offsets, places, right=True) - 1
    sums = torch.empty((2, cuts, block_size, width), dtype=torch.float32, device=device)
    return ListPieces(length, cuts, lists.clamp(max=layouts.offsets.numel() - 2).int(), sums)


def add_pieces(
    pieces: ListPieces,
    layouts: SelectionLayouts,
    dk: torch.Tensor,
    dv: torch.Tensor,
    block_size: int,
    scaling: float,
) -> None:
    """Write the gradients of the blocks whose lists are long into `dk` and `dv`."""
    if not pieces.cuts:
        return
    kv_len, dim, v_dim = *dk.shape[2:], dv.shape[3]
    _add_pieces_kernel[(pieces.cuts, block_size // ROWS)](
        pieces.sums,
        dk,
        dv,
        layouts.offsets,
        pieces.lists,
        kv_len=kv_len,
        num_blocks=cdiv(kv_len, block_size),
        piece=pieces.length,
        cuts=pieces.cuts,
        scaling=scaling,
        HEAD_DIM=dim,
        BLOCK_D=padded_dim(dim),
        V_DIM=v_dim,
        BLOCK_DV=padded_dim(v_dim),
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        num_warps=4,
    )
