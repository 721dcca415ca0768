"""What a growing cache holds for one layer: all tokens, in buffers with room, or the last ones, in a ring.

Keys stand at the column of their content position (see `rows_hysparse`), so padding costs no columns of its own and
blocks of the oracle are aligned in every row. Buffers are written in place; a `cat` per token would copy the whole
history at every step.
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from .cache_columns_hysparse import (
    appended,
    check_batch,
    columns_of,
    is_frozen,
    ring_positions,
    ring_read,
    ring_write,
    with_room,
    write_columns,
)
from .rows_hysparse import TokenLayout


# Capacity is a multiple of this many tokens.
PAGE = 128
# Tokens kept beyond the window, to undo that many without recording.
WINDOW_SLACK = 32

States = tuple[torch.Tensor, torch.Tensor]


class StoredLayer(CacheLayerMixin):
    """Base of the layers that hold keys and values: `keys` and `values` are the part of the buffers in use."""

    device: torch.device

    def __init__(self):
        super().__init__()
        self._buffers: States | None = None

    def _show(self, length: int) -> None:
        """Let `keys` and `values` be the first `length` columns of the buffers."""
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def __getstate__(self) -> dict:
        """For pickle and copy: what is shown is left out, since it is a view that would be stored in full again."""
        state = dict(self.__dict__)
        if self._buffers is not None:
            state["keys"] = state["values"] = None
            state["shown"] = self.keys.shape[2]
        return state

    def __setstate__(self, state: dict) -> None:
        shown = state.pop("shown", None)
        self.__dict__.update(state)
        if shown is not None:
            self._show(shown)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise for rows without padding, and change nothing."""
        check_crop_count(tokens_to_remove, self.get_seq_length())

    def crop(self, tokens_to_remove: int, row_counts: torch.Tensor | None = None, removed: int = 0) -> None:
        """Forget the last tokens; must have been checked.

        Args:
            tokens_to_remove (`int`): 0 or negative.
            row_counts (`torch.Tensor`, *optional*): `(batch,)`, tokens of padded rows before the crop.
            removed (`int`): slots cropped since then, these included.
        """

    def reset(self) -> None:
        self.keys = self.values = self._buffers = None
        self.is_initialized = False

    def _transform(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `change` to the batch dimension or the device of everything held, spare room included."""
        if not self.is_initialized:
            return
        if self._buffers is None:
            self.keys, self.values = change(self.keys), change(self.values)
        else:
            length = self.keys.shape[2]
            self._buffers = (change(self._buffers[0]), change(self._buffers[1]))
            self._show(length)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._transform(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._transform(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._transform(lambda states: states[indices.to(states.device)])

    def offload(self) -> None:
        self._transform(lambda states: states.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._transform(lambda states: states.to(self.device, non_blocking=True))


class GrowingLayer(StoredLayer):
    """Keys and values of every token, in buffers with room to grow by a quarter at a time."""

    is_croppable = True
    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout | None = None, **kwargs
    ) -> States:
        """Append compact `(batch, kv_heads, new, dim)` states and return all, one column per content position."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_batch(self.keys, key_states)
        columns = None if layout is None else layout.rows.query_start
        total = self.keys.shape[2] + key_states.shape[2]
        if torch.is_grad_enabled():
            # Attention saves these tensors for its backward; writing into them later would break it.
            self._buffers = None
            self.keys = appended(self.keys, key_states, columns)
            self.values = appended(self.values, value_states, columns)
            return self.keys, self.values
        if self._buffers is None or self._buffers[0].shape[2] < total or is_frozen(self._buffers[0]):
            room = capacity_for(total)
            self._buffers = (with_room(self.keys, room), with_room(self.values, room))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if columns is None:
                buffer[:, :, total - new.shape[2] : total] = new
            else:
                write_columns(buffer, new, columns)
        self._show(total)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int, row_counts: torch.Tensor | None = None, removed: int = 0) -> None:
        length = self.keys.shape[2] + tokens_to_remove
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class WindowLayer(StoredLayer):
    """Keys and values of the last `sliding_window + slack` tokens, in a ring.

    The token of content position `p` stands in column `p % size`, in every row. So nothing moves when tokens are
    appended, when they are cropped, or when a mask takes out the end of a row. While `record_past` is set the ring
    grows and nothing is dropped until `crop`.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, slack: int = WINDOW_SLACK):
        super().__init__()
        self.sliding_window = sliding_window
        self.kept = sliding_window + slack
        self.cumulative_length = 0
        self.record_past = False
        # Tokens in front of every row that the ring has lost, as long as no mask was given; then each row has its own.
        self.lost = 0

    @property
    def size(self) -> int:
        """Columns of the ring."""
        return self.kept if self._buffers is None else self._buffers[0].shape[2]

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.record_past or self.cumulative_length <= self.kept

    def activate_past_recording(self) -> None:
        self.record_past = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self._buffers = (with_room(key_states[:, :, :0], self.kept), with_room(value_states[:, :, :0], self.kept))
        self._show(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout | None = None, **kwargs
    ) -> States:
        """Append compact states; return the window before them and them, `(batch, kv_heads, past + new, dim)`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_batch(self._buffers[0], key_states)
        masked = layout is not None and layout.past_counts is not None
        skipped = 0 if layout is None else layout.skipped
        start = layout.past_counts if masked else self.cumulative_length + skipped
        new_counts = layout.new_counts if masked else None
        # Behind skipped tokens what the ring holds is another window: it reaches only tokens that nobody reads.
        seen = min(self._past(layout), self.sliding_window - 1)
        self._make_room(skipped + key_states.shape[2], start)
        if seen:
            keys = torch.cat([*ring_read(self._buffers[0], start - seen, seen), key_states], dim=2)
            values = torch.cat([*ring_read(self._buffers[1], start - seen, seen), value_states], dim=2)
        else:
            keys, values = key_states, value_states
        self._make_writable()
        ring_write(self._buffers[0], key_states, start, new_counts)
        ring_write(self._buffers[1], value_states, start, new_counts)
        self._advance(skipped + key_states.shape[2], masked)
        return keys, values

    def _past(self, layout: TokenLayout | None) -> int:
        """Slots before the new tokens, as far as the window cares."""
        return self.cumulative_length

    def _make_room(self, q_len: int, start: torch.Tensor | int) -> None:
        """Bring the ring to the size that the next update needs."""
        total = self.cumulative_length + q_len
        if self.record_past:
            size = self.size if total <= self.size else capacity_for(total)
        else:
            size = self.kept
        if size != self.size:
            self._resize(size, start)

    def _make_writable(self) -> None:
        """Go on with copies where a graph needs the buffers as they are, or where they belong to inference mode."""
        if torch.is_grad_enabled() or self._buffers[0].requires_grad or is_frozen(self._buffers[0]):
            self._buffers = (self._buffers[0].clone(), self._buffers[1].clone())

    def _resize(self, size: int, ends: torch.Tensor | int) -> None:
        """Move the newest tokens before `ends` into a ring of another size."""
        ends = torch.as_tensor(ends, device=self._buffers[0].device).reshape(-1)
        columns = ring_positions(ends, size) % self.size
        self._buffers = (columns_of(self._buffers[0], columns), columns_of(self._buffers[1], columns))

    def _advance(self, q_len: int, masked: bool) -> None:
        self.cumulative_length += q_len
        if not masked:
            self.lost = max(self.lost, self.cumulative_length - self.size)
        self._show(min(self.cumulative_length, self.size))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = min(self.cumulative_length, self.sliding_window - 1)
        return seen + query_length, self.cumulative_length - seen

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.sliding_window

    def check_crop(self, tokens_to_remove: int) -> None:
        """As the base class; the window before the cut must still be stored."""
        super().check_crop(tokens_to_remove)
        first = max(self.cumulative_length + tokens_to_remove - self.sliding_window + 1, 0)
        if self.lost > first:
            refuse_crop(tokens_to_remove, self.cumulative_length - self.sliding_window + 1 - self.lost)

    def crop(self, tokens_to_remove: int, row_counts: torch.Tensor | None = None, removed: int = 0) -> None:
        self.cumulative_length += tokens_to_remove
        # How many tokens a padded row loses is known with the next mask; none of them may be lost to the ring by then.
        padded = row_counts is not None
        size = self.kept + removed if padded else self.kept
        if size < self.size:
            self._resize(size, row_counts if padded else self.cumulative_length)
            self.lost = max(self.lost, self.cumulative_length - size)
        self._show(min(self.cumulative_length, self.size))

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = self.lost = 0


class NoKeysLayer(CacheLayerMixin):
    """Stands for a layer that reads another layer's keys and caches nothing."""

    is_compileable = True
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def lazy_initialization(self, key_states, value_states) -> None: ...

    def update(self, key_states, value_states, *args, **kwargs):
        raise RuntimeError("this layer reads another layer's keys and has no cache of its own")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None: ...

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def reset(self) -> None: ...

    def reorder_cache(self, beam_idx) -> None: ...

    def batch_repeat_interleave(self, repeats: int) -> None: ...

    def batch_select_indices(self, indices) -> None: ...


def capacity_for(length: int) -> int:
    """Tokens to make room for when `length` are needed: a quarter more, in whole pages."""
    return -(-(length + length // 4) // PAGE) * PAGE


def check_crop_count(tokens_to_remove: int, length: int) -> None:
    """Raise `ValueError` unless `tokens_to_remove` is 0 or the negative number of some of `length` tokens."""
    if tokens_to_remove > 0 or -tokens_to_remove > length:
        raise ValueError(
            f"`crop` takes the number of tokens to remove as 0 or a negative integer down to -{length}, got "
            f"{tokens_to_remove}; to keep n tokens pass n - {length}."
        )


def refuse_crop(tokens_to_remove: int, at_most: int) -> None:
    """Raise `RuntimeError` for a crop past what window layers keep."""
    raise RuntimeError(
        f"`crop` can undo at most {max(at_most, 0)} tokens of this cache's window layers, got {-tokens_to_remove}; "
        "call `activate_past_recording()` before the tokens that may be undone, or make the cache with more `slack`."
    )
