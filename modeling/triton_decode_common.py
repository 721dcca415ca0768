"""What the kernels for few new tokens share: which calls they take, and how they divide a row among programs.

Their arguments come in tuples, one for the states of a branch, one for their strides, one for the row's offsets; what
is not there is None.
"""

import torch

from .triton_common import MOST_GRID_ROWS, tl, triton


# Queries per row that the decode kernels take; more go to the prefill kernels.
MOST_DECODE_QUERIES = 16


def takes_decode(query: torch.Tensor, key: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a call is one of few new tokens behind cached ones that nothing is differentiated through."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if not query.numel() or q_len > MOST_DECODE_QUERIES or kv_len <= q_len:
        return False
    if query.shape[0] * key.shape[1] * q_len > MOST_GRID_ROWS:
        return False
    tensors = (query, key, *others)
    return not (torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors))


def row_tuple(query_start: torch.Tensor | None, first_key: torch.Tensor | None, batch: int, q_len: int) -> tuple:
    """`(query_start, first_key, its strides)` as the kernels take them."""
    if first_key is None:
        return query_start, None, 0, 0
    first = first_key.expand(batch, q_len)
    return query_start, first, *first.stride()


@triton.jit
def first_owned(rows, batch, gap):
    """Column that the row's first query owns."""
    start = gap
    if rows[0] is not None:
        start = tl.load(rows[0] + batch).to(tl.int32)
    return start


@triton.jit
def first_seen(rows, batch, step):
    """First column that a query sees."""
    first = 0
    if rows[1] is not None:
        first = tl.load(rows[1] + batch.to(tl.int64) * rows[2] + step.to(tl.int64) * rows[3]).to(tl.int32)
    return first


@triton.jit
def share_of(length, splits, UNIT: tl.constexpr):
    """Columns per split of a row of `length` columns: whole units, so that the row's own length decides."""
    return (tl.maximum(length, 1) + splits * UNIT - 1) // (splits * UNIT) * UNIT


@triton.jit
def load_columns(base_ptr, columns, exists, stride_n, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load `(columns, BLOCK_D)` keys or values; zero where none exists: what lies there may be anything."""
    dims = tl.arange(0, BLOCK_D)
    mask = exists[:, None]
    if DIM != BLOCK_D:
        mask = mask & (dims < DIM)[None, :]
    offsets = columns.to(tl.int64) * stride_n
    return tl.load(base_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
