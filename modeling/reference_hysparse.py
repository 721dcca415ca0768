"""Every operation in plain torch: the specification that the kernels imitate. Any float dtype, any device.

Queries are taken in chunks against all the keys they may see, with a mask; memory is bounded by the chunk, not by
the square of the length. Scores and the softmax state are float32 (float64 for float64 inputs), and probabilities
are rounded to the value dtype before they meet the values, as in the kernels. Logits are kept in base 2, as there:
`exp2` is also three to ten times faster than `exp` on a CPU.
"""

import math
from collections.abc import Callable, Iterator

import torch

from .rows_hysparse import Rows
from .selection_hysparse import chosen_blocks, reduce_blocks, reduce_heads, select_blocks, select_tokens


# Scores held at once, in elements. On two CPU cores 2M (8 MB of float32) ran fastest at 8,192 tokens.
CHUNK_ELEMENTS = 2 * 1024 * 1024
LN2 = math.log(2)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Causal softmax attention that also chooses key blocks; `n_selected=0` chooses none.

    Returns:
        `(output, lse, indices, weights)`; the last two are None when not asked for.
    Source: HySparse (arXiv:2602.03560), section 3.2 and equation 3.
    """

    def select(scores: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        forced = {"forced_first_blocks": forced_first_blocks, "forced_local_blocks": forced_local_blocks}
        return select_blocks(scores, position // block_size, n_selected, **forced)

    return _attend_and_choose(
        (query, key, value),
        select if n_selected else None,
        block_size=block_size,
        block_reduction=block_reduction,
        head_reduction=head_reduction,
        scaling=scaling,
        rows=rows,
        return_weights=return_weights,
    )


def full_attention_with_token_oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    n_selected: int,
    window: int,
    scaling: float,
    rows: Rows,
    head_reduction: str = "max",
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Causal softmax attention that also chooses single tokens before its window; `n_selected=0` chooses none.

    Returns:
        `(output, lse, indices, weights)`; the last two are None when not asked for.
    Source: HySparse2 (arXiv:2609.26368), token-level selection.
    """

    def select(scores: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return select_tokens(scores, position, n_selected, window)

    return _attend_and_choose(
        (query, key, value),
        select if n_selected else None,
        block_size=1,
        block_reduction="max",
        head_reduction=head_reduction,
        scaling=scaling,
        rows=rows,
        return_weights=return_weights,
    )


def _attend_and_choose(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
    *,
    block_size: int,
    block_reduction: str,
    head_reduction: str,
    scaling: float,
    rows: Rows,
    return_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Full attention; `select` makes indices of each KV head's scores and each query's position in its document."""
    query, key, value = states
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    pieces = _Pieces(return_weights, kv_len)
    indices = []
    for start, stop in _chunks(q_len, batch * heads * kv_len):
        limit = _last_visible(rows, stop, q_len, kv_len)
        visible = visible_keys(rows, start, stop, q_len, kv_len, 0, limit, query.device)
        logits = _masked_logits(query[:, :, start:stop], key[:, :, :limit], visible, scaling)
        output, lse, weights = _softmax(logits, value[:, :, :limit], None, return_weights)
        pieces.add(output, lse, weights, 0)
        if select is not None:
            columns = _document_columns(logits.detach(), rows, start, stop)
            if block_reduction == "max":
                scores = reduce_blocks(columns, block_size, "max") * LN2
            else:
                scores = reduce_blocks(columns * LN2, block_size, block_reduction)
            # A row that sees nothing has lse -inf; its scores are -inf already.
            scores = scores - lse.detach().nan_to_num(neginf=0.0).unflatten(1, (kv_heads, -1))[..., None]
            owned = rows.owned_columns(start, stop, q_len, kv_len, query.device)
            first = rows.first_columns(start, stop)
            indices.append(select(reduce_heads(scores, head_reduction), owned if first is None else owned - first))
    output, lse, weights = pieces.join(query.dtype)
    return output, lse, torch.cat(indices, dim=2) if select is not None else None, weights


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    scaling: float,
    rows: Rows,
    sink: torch.Tensor | None = None,
    window: int = 0,
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Softmax over the selected blocks, and over the last `window` tokens in the same softmax.

    Returns:
        `(output, lse, weights)`; lse excludes the sink.
    Source: HySparse (arXiv:2602.03560), section 3.3; `window` is control experiment 10.
    """
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    num_blocks = math.ceil(kv_len / block_size)
    pieces = _Pieces(return_weights, kv_len)
    for start, stop in _chunks(q_len, batch * heads * kv_len):
        limit = _last_visible(rows, stop, q_len, kv_len)
        visible = visible_keys(rows, start, stop, q_len, kv_len, 0, limit, query.device)
        chosen = chosen_blocks(indices[:, :, start:stop], num_blocks)
        first = rows.first_columns(start, stop)
        columns = torch.arange(limit, device=query.device)
        if first is None:
            chosen = chosen.repeat_interleave(block_size, dim=-1)[..., :limit]
        else:
            block = ((columns - first[..., None]) // block_size).clamp(min=0)
            chosen = chosen.gather(-1, block[:, None].expand(*chosen.shape[:3], -1))
        if window:
            owned = rows.owned_columns(start, stop, q_len, kv_len, query.device)
            chosen = chosen | (columns > owned[..., None] - window)[:, None]
        if visible.shape[1] > 1:
            # A caller's own mask per head; the choice is per KV head.
            chosen = chosen.repeat_interleave(heads // key.shape[1], dim=1)
        logits = _masked_logits(query[:, :, start:stop], key[:, :, :limit], visible & chosen, scaling)
        pieces.add(*_softmax(logits, value[:, :, :limit], sink, return_weights), 0)
    return pieces.join(query.dtype)


def token_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    window: int,
    scaling: float,
    rows: Rows,
    sink: torch.Tensor | None = None,
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One softmax over the last `window` tokens and the selected ones: selected blocks of one token each.

    Returns:
        `(output, lse, weights)`; lse excludes the sink.
    Source: HySparse2 (arXiv:2609.26368), token-level selection.
    """
    return block_sparse_attention(
        query,
        key,
        value,
        indices,
        block_size=1,
        window=window,
        scaling=scaling,
        rows=rows,
        sink=sink,
        return_weights=return_weights,
    )


def sliding_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int,
    scaling: float,
    rows: Rows,
    sink: torch.Tensor | None = None,
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Softmax over the last `window` tokens of the query's document, its own included.

    Returns:
        `(output, lse, weights)`; lse excludes the sink.
    Source: HySparse (arXiv:2602.03560), section 3.3.
    """
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    # Only where no row has an offset of its own is the band of keys known without looking at the data.
    banded = rows.query_start is None and rows.query_columns is None
    width = min(kv_len, 2 * window) if banded else kv_len
    pieces = _Pieces(return_weights, kv_len)
    for start, stop in _chunks(q_len, batch * heads * width, at_most=max(window, 64) if banded else None):
        limit = _last_visible(rows, stop, q_len, kv_len)
        # At least one column, which a window of 0 then hides: reductions need something to reduce.
        lowest = max(0, min(kv_len - q_len + start - window + 1, limit - 1)) if banded else 0
        visible = visible_keys(rows, start, stop, q_len, kv_len, lowest, limit, query.device)
        owned = rows.owned_columns(start, stop, q_len, kv_len, query.device)
        near = torch.arange(lowest, limit, device=query.device) > owned[..., None] - window
        keys, values = key[:, :, lowest:limit], value[:, :, lowest:limit]
        logits = _masked_logits(query[:, :, start:stop], keys, visible & near[:, None], scaling)
        pieces.add(*_softmax(logits, values, sink, return_weights), lowest)
    return pieces.join(query.dtype)


def sparse_layer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    window_query: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    *,
    block_size: int,
    window: int,
    scaling: float,
    rows: Rows,
    window_rows: Rows,
    gate_global: torch.Tensor | None = None,
    gate_local: torch.Tensor | None = None,
    sink_global: torch.Tensor | None = None,
    sink_local: torch.Tensor | None = None,
) -> tuple[torch.Tensor]:
    """Selected blocks and a window, each under its gate, added: `(output,)`; gates and sum are taken in float32.

    Source: HySparse (arXiv:2602.03560), section 3.3.
    """
    far = block_sparse_attention(
        query, key, value, indices, block_size=block_size, scaling=scaling, rows=rows, sink=sink_global
    )[0]
    near = sliding_window_attention(
        window_query, window_key, window_value, window=window, scaling=scaling, rows=window_rows, sink=sink_local
    )[0]
    branches = [branch.to(_state_dtype(query)) for branch in (far, near)]
    if gate_global is not None and gate_local is not None:
        gates = (gate_global, gate_local)
        branches = [branch * torch.sigmoid(gate.to(branch)) for branch, gate in zip(branches, gates, strict=True)]
    return ((branches[0] + branches[1]).to(query.dtype),)


def visible_keys(
    rows: Rows, start: int, stop: int, q_len: int, kv_len: int, lowest: int, limit: int, device: torch.device
) -> torch.Tensor:
    """Which columns of `lowest:limit` the queries `start:stop` see, bool `(batch or 1, 1 or heads, q, columns)`."""
    if rows.visibility is not None:
        return rows.visibility[:, :, start:stop, lowest:limit]
    columns = torch.arange(lowest, limit, device=device)
    visible = columns <= rows.owned_columns(start, stop, q_len, kv_len, device)[..., None]
    first = rows.first_columns(start, stop)
    if first is not None:
        visible = visible & (columns >= first[..., None])
    return visible[:, None]


class _Pieces:
    """Outputs of successive query chunks, joined once."""

    def __init__(self, return_weights: bool, kv_len: int):
        self.return_weights = return_weights
        self.kv_len = kv_len
        self.outputs: list[torch.Tensor] = []
        self.lses: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def add(self, output: torch.Tensor, lse: torch.Tensor, weights: torch.Tensor | None, lowest: int) -> None:
        self.outputs.append(output)
        self.lses.append(lse)
        if weights is not None:
            behind = self.kv_len - lowest - weights.shape[-1]
            self.weights.append(torch.nn.functional.pad(weights, (lowest, behind)))

    def join(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weights = torch.cat(self.weights, dim=2) if self.return_weights else None
        return torch.cat(self.outputs, dim=2).to(dtype), torch.cat(self.lses, dim=2), weights


def _chunks(q_len: int, elements_per_query: int, at_most: int | None = None) -> Iterator[tuple[int, int]]:
    length = max(1, CHUNK_ELEMENTS // max(elements_per_query, 1))
    if at_most is not None:
        length = min(length, at_most)
    for start in range(0, q_len, length):
        yield start, min(start + length, q_len)


def _last_visible(rows: Rows, stop: int, q_len: int, kv_len: int) -> int:
    """One past the last column that any of the queries before `stop` may see."""
    is_ordered = rows.visibility is None and rows.query_columns is None
    return kv_len - q_len + stop if is_ordered else kv_len


def _state_dtype(states: torch.Tensor) -> torch.dtype:
    return torch.float64 if states.dtype == torch.float64 else torch.float32


def _masked_logits(query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor, scaling: float) -> torch.Tensor:
    """Scaled scores in base 2, `(batch, kv_heads, group, q_len, columns)`, `-inf` where not visible."""
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    group = heads // kv_heads
    dtype = _state_dtype(query)
    # The group's heads join the query axis: one product per KV head, and no copy of the keys.
    grouped = query.to(dtype).reshape(batch, kv_heads, group * q_len, dim)
    products = grouped @ key.to(dtype).transpose(-1, -2)
    # Scaled after the product, as in the kernels: a rounded factor inside the sum would untie equal scores.
    logits = products.mul_(scaling / LN2).view(batch, kv_heads, group, q_len, kv_len)
    if visible.shape[1] == heads and heads != kv_heads:
        visible = visible.unflatten(1, (kv_heads, -1))
    else:
        visible = visible[:, :, None]
    return logits.masked_fill_(~visible, -math.inf)


def _softmax(
    logits: torch.Tensor, value: torch.Tensor, sink: torch.Tensor | None, return_weights: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attend with base-2 logits `(batch, kv_heads, group, q_len, columns)`; a row without keys gives 0."""
    batch, kv_heads, group, q_len, columns = logits.shape
    largest = logits.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    exponentials = torch.exp2(logits - largest)
    mass = exponentials.sum(-1, keepdim=True)
    lse = torch.where(mass == 0, -math.inf, (largest + torch.log2(_nonzero(mass))) * LN2)
    share = 1 / _nonzero(mass)
    if sink is not None:
        # The sink's term in the denominator is one more factor: mass / (mass + exp(sink)).
        finite = lse.masked_fill(mass == 0, 0.0)
        share = share * torch.sigmoid(finite - sink.to(lse.dtype).view(1, kv_heads, group, 1, 1))
    rounded = exponentials.to(value.dtype).to(logits.dtype).reshape(batch, kv_heads, group * q_len, columns)
    output = (rounded @ value.to(logits.dtype)).view(batch, kv_heads, group, q_len, value.shape[-1]) * share
    weights = (exponentials * share).flatten(1, 2) if return_weights else None
    return output.flatten(1, 2), lse.squeeze(-1).flatten(1, 2), weights


def _nonzero(denominator: torch.Tensor) -> torch.Tensor:
    return torch.where(denominator == 0, 1.0, denominator)


def _document_columns(logits: torch.Tensor, rows: Rows, start: int, stop: int) -> torch.Tensor:
    """Shift each query's logits so that column 0 is the first token of its document."""
    first = rows.first_columns(start, stop)
    if first is None:
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device) + first[..., None]
    inside = columns < logits.shape[-1]
    index = columns.clamp(max=logits.shape[-1] - 1)[:, None, None]
    shifted = logits.gather(-1, index.expand(*logits.shape[:4], -1))
    return shifted.masked_fill(~inside[:, None, None], -math.inf)
