"""Where each query stands: padding, packed documents and cached prefixes, described without host synchronisation.

Inside the attention layers the tokens of a row are *compact*: visible tokens first, in order, padding behind them.
A cached key then stands at the column that equals its content position, whatever padding came between, and causality
alone hides padding. What is left to describe is one offset per row, and where packed documents begin.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Rows:
    """Which key columns each query sees. Query `i` of row `b` owns column `query_start[b] + i`.

    Visible are the columns from `first_key` to the query's own. Block ids count from `first_key`.

    Args:
        query_start (`torch.Tensor`, *optional*): `(batch,)`, integer: the key column owned by the row's first query;
            at most `kv_len - q_len`, which is also the default.
        first_key (`torch.Tensor`, *optional*): `(batch, q_len)` or `(batch, 1)`, integer: the first column of the
            query's document (packing), or of the row (left padding). Default 0.
        visibility (`torch.Tensor`, *optional*): `(batch, 1 or heads, q_len, kv_len)`, bool: a caller's own mask. It
            replaces causality, and blocks and windows count slots. Reference back end only.
        query_columns (`torch.Tensor`, *optional*): `(batch or 1, q_len)`, integer: the key column owned by each query,
            where queries are not neighbours; in place of `query_start`. Reference back end only.
    Source: HySparse (arXiv:2602.03560) has no padding; the rule "blocks count a document's own tokens" is ours.
    """

    query_start: torch.Tensor | None = None
    first_key: torch.Tensor | None = None
    visibility: torch.Tensor | None = None
    query_columns: torch.Tensor | None = None

    @staticmethod
    def from_padding(padding: torch.Tensor) -> "Rows":
        """Left-padded rows: `padding` `(batch,)` counts the padded columns in front of each row."""
        return Rows(first_key=padding[:, None])

    @staticmethod
    def from_cu_seqlens(cu_seqlens: torch.Tensor, length: int) -> "Rows":
        """Documents packed into one row of `length` tokens; `cu_seqlens` `(documents + 1,)` as FlashAttention's."""
        columns = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        document = torch.searchsorted(cu_seqlens, columns, right=True) - 1
        return Rows(first_key=cu_seqlens[document][None].long())

    @staticmethod
    def from_position_ids(position_ids: torch.Tensor) -> "Rows":
        """Documents packed into rows; a document begins where `position_ids` `(batch, length)` does not increase."""
        columns = torch.arange(position_ids.shape[-1], device=position_ids.device)
        begins = torch.zeros_like(position_ids)
        begins[:, 1:] = torch.where(position_ids[:, 1:] <= position_ids[:, :-1], columns[1:], 0)
        return Rows(first_key=torch.cummax(begins, dim=-1).values)

    def owned_columns(self, start: int, stop: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        """Key column owned by each of the queries `start:stop`, shape `(batch or 1, stop - start)`."""
        if self.query_columns is not None:
            return self.query_columns[:, start:stop]
        steps = torch.arange(start, stop, device=device)
        if self.query_start is None:
            return (steps + kv_len - q_len)[None]
        return self.query_start[:, None] + steps

    def first_columns(self, start: int, stop: int) -> torch.Tensor | None:
        """First visible column of the queries `start:stop`, shape `(batch, stop - start or 1)`, or None for 0."""
        if self.first_key is None or self.first_key.shape[1] == 1:
            return self.first_key
        return self.first_key[:, start:stop]


PLAIN_ROWS = Rows()


@dataclass(frozen=True)
class TokenLayout:
    """How the new tokens of one forward call stand in their rows; built once, read by every layer.

    Args:
        positions (`torch.Tensor`): `(batch or 1, q_len)`: content position of each new token, in slot order, or in the
            compact order of `of_last`.
        rows (`Rows`): for attention over keys that are stored by content position. It has no default: some versions of
            torch.compile cannot hold an object as a field's default.
        past (`int`): columns before those of the new tokens: slots cached, or all other room of a pre-allocated cache.
        order (`torch.Tensor`, *optional*): `(batch, q_len)`: slot of the i-th compact token; None keeps slots.
        place (`torch.Tensor`, *optional*): `(batch, q_len)`: the inverse, compact index of the token in each slot.
        visible (`torch.Tensor`, *optional*): `(batch, slots)`, bool, of cached and new slots.
        past_counts, new_counts (`torch.Tensor`, *optional*): `(batch,)`: visible tokens cached and arriving.
        skipped (`int`): new slots that are not among these, since they ended at an earlier layer: of each row the
            first, and of a row of few tokens only padding.
    """

    positions: torch.Tensor
    rows: Rows
    past: int = 0
    order: torch.Tensor | None = None
    place: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    past_counts: torch.Tensor | None = None
    new_counts: torch.Tensor | None = None
    skipped: int = 0

    def compact(self, states: torch.Tensor) -> torch.Tensor:
        """Bring `(batch, heads, q_len, ...)` from slot order into compact order."""
        return states if self.order is None else _take(states, self.order)

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """Bring `(batch, heads, q_len, ...)` from compact order back into slot order."""
        return states if self.place is None else _take(states, self.place)

    def restore_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention maps `(batch, heads, q_len, columns)` from compact order into slots, 0 at padding."""
        weights = self.restore(weights)
        if self.visible is None:
            return weights
        column = (self.visible.cumsum(-1) - 1).clamp(min=0)[:, None, None]
        weights = weights.gather(-1, column.expand(*weights.shape[:3], -1))
        return weights * self.visible[:, None, None]

    def window_rows(self, kv_len: int) -> Rows:
        """Rows for attention over the `kv_len` columns that a window layer's cache returns: its past, then the new."""
        if self.rows.visibility is not None:
            return replace(self.rows, visibility=self.rows.visibility[..., -kv_len:])
        stored = kv_len - self.positions.shape[-1]
        if self.past_counts is None or not stored:
            return self.rows if self.rows.query_start is None else replace(self.rows, query_start=None)
        return Rows(first_key=(stored - self.past_counts).clamp(min=0)[:, None])

    def window_in_history(self, weights: torch.Tensor) -> torch.Tensor:
        """Maps over a window cache's columns `(batch, heads, q_len, kv_len)`, placed among all content columns."""
        q_len, kv_len = weights.shape[2:]
        history = weights.new_zeros(*weights.shape[:3], self.past + q_len)
        start = torch.full_like(self.positions[:, :1], self.past) if self.past_counts is None else self.past_counts
        columns = start.view(-1, 1) - (kv_len - q_len) + torch.arange(kv_len, device=weights.device)
        columns = columns.clamp(min=0)[:, None, None]
        return history.scatter_add(-1, columns.expand_as(weights), weights)

    def kept(self, slots: torch.Tensor, are_last: bool) -> "TokenLayout":
        """Layout of some of the new tokens as queries, over the keys of all tokens.

        Args:
            slots (`torch.Tensor`): `(n,)`, which of the new slots, the same in every row.
            are_last (`bool`): they are the last ones, in order; rows then are as any back end takes them.
        """
        place = slots[None] if self.place is None else self.place[:, slots]
        order = None
        if are_last and self.place is not None:
            order = torch.argsort(place, dim=-1)
            place = place.gather(1, order)
        start, first = self.rows.query_start, self.rows.first_key
        if first is not None and first.shape[1] > 1:
            rows = max(len(first), len(place))
            first = first.expand(rows, -1).gather(1, place.expand(rows, -1))
        columns = None
        if not are_last:
            start, columns = None, (self.past if start is None else start[:, None]) + place
        elif order is not None or start is not None:
            # The tokens among the last slots are neighbours in their row, and padding stands behind them.
            start = (self.past if start is None else start) + place[:, 0]
        visibility = None if self.rows.visibility is None else self.rows.visibility[:, :, slots]
        return TokenLayout(
            positions=self.positions[:, slots],
            past=self.past,
            rows=Rows(query_start=start, first_key=first, visibility=visibility, query_columns=columns),
            order=order,
            place=None if order is None else torch.argsort(order, dim=-1),
        )

    def of_last(self, count: int) -> tuple["TokenLayout", torch.Tensor]:
        """Layout of each row's last `count` tokens, in compact order, over the keys of all; and their slots.

        Slots `(batch or 1, count)` count the new ones. Rows of fewer tokens give their padding, too. Layouts of packed
        documents and of a caller's visibility have no such part.
        """
        skipped = self.positions.shape[-1] - count
        begin: Any = skipped
        start: Any = self.rows.query_start
        counts = self.new_counts
        places = torch.arange(count, device=self.positions.device)
        if self.order is None:
            slots = (skipped + places)[None]
            positions = self.positions[:, skipped:]
            counts = None if counts is None else torch.full_like(counts, count)
        else:
            begin = (counts - count).clamp(min=0)
            slots = self.order.gather(1, begin[:, None] + places)
            positions = self.positions.gather(1, slots)
            counts = counts - begin
            start = self.past if start is None else start
        layout = TokenLayout(
            positions=positions,
            rows=Rows(query_start=None if start is None else start + begin),
            past=self.past + skipped,
            past_counts=None if self.past_counts is None else self.past_counts + begin,
            new_counts=counts,
            skipped=skipped,
        )
        return layout, slots

    def hide_padding(self, indices: torch.Tensor) -> torch.Tensor:
        """Indices `(batch, kv_heads, q_len, n)` in slot order, with -1 where the query is padding."""
        if self.new_counts is None:
            return indices
        place = torch.zeros_like(self.positions) if self.place is None else self.place
        return torch.where((place < self.new_counts[:, None])[:, None, :, None], indices, -1)

    def to(self, device: torch.device, non_blocking: bool = False) -> "TokenLayout":
        """The same layout on another device (layers of one model may stand on several)."""
        if self.positions.device == torch.device(device):
            return self

        def move(tensor):
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        rows = Rows(**{part.name: move(getattr(self.rows, part.name)) for part in fields(Rows)})
        names = ("positions", "order", "place", "visible", "past_counts", "new_counts")
        return replace(self, rows=rows, **{name: move(getattr(self, name)) for name in names})


def _take(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    index = order.view(order.shape[0], 1, -1, *([1] * (states.dim() - 3)))
    return states.gather(2, index.expand(-1, states.shape[1], -1, *states.shape[3:]))


def layout_of_mask(attention_mask: torch.Tensor, q_len: int, past_counts: torch.Tensor | None = None) -> TokenLayout:
    """Layout of rows with padding anywhere: left, right, or holes between turns.

    Args:
        attention_mask (`torch.Tensor`): `(batch, past + q_len)`, nonzero where a token is visible.
        q_len (`int`): how many of the last columns are new.
        past_counts (`torch.Tensor`, *optional*): `(batch,)`, visible tokens cached, where the mask is of the new ones
            alone; attention maps then keep a column per content position.
    """
    visible = attention_mask.bool()
    new = visible[:, -q_len:]
    past = visible.shape[1] - q_len
    is_whole = past_counts is None
    if is_whole:
        past_counts = visible[:, :past].sum(-1)
    positions = (past_counts[:, None] + new.cumsum(-1) - 1).clamp(min=0)
    # One new token has one place; sorting would only cost a launch.
    order = torch.argsort((~new).long(), dim=-1, stable=True) if q_len > 1 else None
    return TokenLayout(
        positions=positions,
        past=past,
        rows=PLAIN_ROWS if is_whole and not past else Rows(query_start=past_counts),
        order=order,
        place=None if order is None else torch.argsort(order, dim=-1),
        visible=visible if is_whole else None,
        past_counts=past_counts,
        new_counts=new.sum(-1),
    )


def layout_of_length(past: int, q_len: int, device: torch.device, rows: Rows = PLAIN_ROWS) -> TokenLayout:
    """Layout of rows without padding: `q_len` new tokens behind `past` cached ones."""
    columns = torch.arange(past, past + q_len, device=device)[None]
    positions = columns if rows.first_key is None else columns - rows.first_key
    return TokenLayout(positions=positions, past=past, rows=rows)


def packed_rows(
    position_ids: torch.Tensor | None, cu_seqlens: torch.Tensor | None, q_len: int, masked: TokenLayout | None
) -> Rows | None:
    """Rows as packed documents, where `cu_seq_lens_q` or several `position_ids` may say so; else None.

    Args:
        masked (`TokenLayout`, *optional*): of a mask; documents then begin among the visible tokens.
    """
    if cu_seqlens is not None:
        return Rows.from_cu_seqlens(cu_seqlens, q_len)
    if position_ids is None or q_len == 1:
        return None
    if masked is None:
        return Rows.from_position_ids(position_ids)
    if masked.order is None:
        return None
    documents = Rows.from_position_ids(position_ids.expand_as(masked.order).gather(1, masked.order))
    is_token = torch.arange(q_len, device=masked.order.device) < masked.new_counts[:, None]
    return Rows(first_key=torch.where(is_token, documents.first_key, 0))
