"""What a cache holds for one layer: all tokens, in buffers that grow or that never move, or the last ones, in a ring.

Keys stand at the column of their content position (see `rows_hysparse`), so padding costs no columns of its own and
blocks of the oracle are aligned in every row. Buffers are written in place; a `cat` per token would copy the whole
history at every step.
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from .rows_hysparse import TokenLayout


# Capacity is a multiple of this many tokens.
PAGE = 128
# Tokens kept beyond the window, to undo that many without recording.
WINDOW_SLACK = 32

States = tuple[torch.Tensor, torch.Tensor]


class StoredLayer(CacheLayerMixin):
    """Base of the layers that hold keys and values: `keys` and `values` are the part of the buffers in use."""

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
        _check_batch(self.keys, key_states)
        columns = None if layout is None else layout.rows.query_start
        total = self.keys.shape[2] + key_states.shape[2]
        if torch.is_grad_enabled():
            # Attention saves these tensors for its backward; writing into them later would break it.
            self._buffers = None
            self.keys = _appended(self.keys, key_states, columns)
            self.values = _appended(self.values, value_states, columns)
            return self.keys, self.values
        if self._buffers is None or self._buffers[0].shape[2] < total or _is_frozen(self._buffers[0]):
            room = capacity_for(total)
            self._buffers = (_with_room(self.keys, room), _with_room(self.values, room))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if columns is None:
                buffer[:, :, total - new.shape[2] : total] = new
            else:
                buffer.scatter_(2, _column_index(new, columns), new)
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
        self._buffers = (_with_room(key_states[:, :, :0], self.kept), _with_room(value_states[:, :, :0], self.kept))
        self._show(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout | None = None, **kwargs
    ) -> States:
        """Append compact states; return the window before them and them, `(batch, kv_heads, past + new, dim)`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _check_batch(self._buffers[0], key_states)
        masked = layout is not None and layout.past_counts is not None
        start = layout.past_counts if masked else self.cumulative_length
        new_counts = layout.new_counts if masked else None
        seen = min(self._past(layout), self.sliding_window - 1)
        self._make_room(key_states.shape[2], start)
        if seen:
            keys = torch.cat([*_ring_read(self._buffers[0], start - seen, seen), key_states], dim=2)
            values = torch.cat([*_ring_read(self._buffers[1], start - seen, seen), value_states], dim=2)
        else:
            keys, values = key_states, value_states
        self._make_writable()
        _ring_write(self._buffers[0], key_states, start, new_counts)
        _ring_write(self._buffers[1], value_states, start, new_counts)
        self._advance(key_states.shape[2], masked)
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
        if torch.is_grad_enabled() or self._buffers[0].requires_grad or _is_frozen(self._buffers[0]):
            self._buffers = (self._buffers[0].clone(), self._buffers[1].clone())

    def _resize(self, size: int, ends: torch.Tensor | int) -> None:
        """Move the newest tokens before `ends` into a ring of another size."""
        ends = torch.as_tensor(ends, device=self._buffers[0].device).reshape(-1)
        columns = _positions(ends, size) % self.size
        self._buffers = (_columns(self._buffers[0], columns), _columns(self._buffers[1], columns))

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


class _FixedMixin:
    """Buffers that are allocated once and keep their address; the cache counts the tokens, for all layers."""

    is_compileable = True

    def _allocate(self, columns: int, *states: torch.Tensor) -> None:
        self.device = states[0].device
        self._buffers = tuple(fixed_zeros((*part.shape[:2], columns, part.shape[3]), part) for part in states)
        self._show(columns)
        self.is_initialized = True

    def _show(self, length: int) -> None:
        self.keys, self.values = self._buffers

    def get_seq_length(self) -> int:
        raise NotImplementedError("a pre-allocated cache counts for all its layers; ask `cache.get_seq_length()`")

    def crop(self, tokens_to_remove: int, row_counts: torch.Tensor | None = None, removed: int = 0) -> None:
        """Nothing to do: the next tokens are written where the cache's counts say."""

    def reset(self) -> None:
        # Zeros, because 0 * NaN is NaN: what is hidden must be finite all the same.
        for buffer in self._buffers or ():
            buffer.zero_()

    def _transform(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            self._buffers = tuple(refill(buffer, change(buffer)) for buffer in self._buffers)
            self._show(self.keys.shape[2])


class FixedLayer(_FixedMixin, StoredLayer):
    """Keys and values of every token, in buffers of `max_cache_len` columns."""

    is_croppable = True
    is_sliding = False

    def __init__(self, max_cache_len: int):
        super().__init__()
        self.max_cache_len = max_cache_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._allocate(self.max_cache_len, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout, **kwargs
    ) -> States:
        """Write compact states at `layout.rows.query_start` and return the whole buffers; of the first, themselves."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _check_batch(self.keys, key_states)
        _check_gradients(key_states, value_states)
        start = layout.rows.query_start
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if start is None:
                buffer[:, :, : new.shape[2]] = new
            else:
                buffer.scatter_(2, _column_index(new, start), new)
        # A long prompt must not attend to all the room behind it.
        return (key_states, value_states) if start is None else (self.keys, self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len


class FixedWindowLayer(_FixedMixin, WindowLayer):
    """A window layer whose ring keeps its address and its size; it records nothing beyond its slack."""

    is_croppable = False  # type: ignore[assignment]

    def activate_past_recording(self) -> None:
        """Nothing to do: what a fixed ring can undo is its slack."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._allocate(self.kept, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout, **kwargs
    ) -> States:
        _check_gradients(key_states, value_states)
        return super().update(key_states, value_states, layout=layout)

    def _past(self, layout: TokenLayout | None) -> int:
        return 0 if layout.rows.query_start is None else self.kept

    def _make_room(self, q_len: int, start: torch.Tensor | int) -> None: ...

    def _make_writable(self) -> None: ...

    def _advance(self, q_len: int, masked: bool) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sliding_window - 1 + query_length, 0


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


def fixed_zeros(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros that keep their address: never an inference tensor, which could not be written outside inference mode."""
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)
    with torch.inference_mode(False), torch.no_grad():
        zeros = torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)
    # CUDA graphs of a compiled step then read and write it where it lies.
    torch._dynamo.mark_static_address(zeros)
    return zeros


def refill(held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """`held` with what `states` say, in place where the shapes agree."""
    if held.shape == states.shape:
        return held.copy_(states)
    return fixed_zeros(states.shape, states).copy_(states)


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


def _check_batch(stored: torch.Tensor, new: torch.Tensor) -> None:
    if stored.shape[:2] != new.shape[:2]:
        raise ValueError(
            f"the cache holds (batch, kv_heads) = {tuple(stored.shape[:2])}, got new states of "
            f"{tuple(new.shape[:2])}; use a new cache, or `batch_repeat_interleave` / `batch_select_indices`."
        )


def _check_gradients(*states: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(part.requires_grad for part in states):
        raise ValueError(
            "a pre-allocated cache is written in place, which no backward pass survives, got keys that require "
            "gradients; run the model under torch.no_grad(), or use a cache without `max_cache_len`."
        )


def _with_room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros, not uninitialised memory: columns behind a shorter row are masked, but 0 * NaN is NaN.
    grown = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    grown[:, :, : states.shape[2]] = states
    return grown


def _is_frozen(buffer: torch.Tensor) -> bool:
    """Tensors made in inference mode cannot be written outside it."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()


def _column_index(new: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    index = columns.to(new.device)[:, None] + torch.arange(new.shape[2], device=new.device)
    return index[:, None, :, None].expand_as(new)


def _appended(states: torch.Tensor, new: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    if columns is None:
        return torch.cat([states, new], dim=2)
    return torch.cat([states, torch.zeros_like(new)], dim=2).scatter(2, _column_index(new, columns), new)


def _columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns `(batch or 1, n)` of `(batch, kv_heads, length, dim)` states."""
    index = columns.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))


def _positions(ends: torch.Tensor, size: int) -> torch.Tensor:
    """Which position before `ends` `(rows,)` each column of a ring holds, `(rows, size)`; negative for none."""
    last = ends[:, None] - 1
    return last - (last - torch.arange(size, device=ends.device)) % size


def _ring_read(buffer: torch.Tensor, first: torch.Tensor | int, count: int) -> tuple[torch.Tensor, ...]:
    """Tokens `first` to `first + count` in order, as parts to be joined along the columns."""
    size = buffer.shape[2]
    if isinstance(first, torch.Tensor):
        return (_columns(buffer, (first[:, None] + torch.arange(count, device=first.device)) % size),)
    begin = first % size
    around = max(begin + count - size, 0)
    return (buffer[:, :, begin : begin + count], buffer[:, :, :around])


def _ring_write(
    buffer: torch.Tensor, new: torch.Tensor, start: torch.Tensor | int, new_counts: torch.Tensor | None
) -> None:
    """Write tokens from content position `start` on; of a padded row, the first `new_counts`."""
    size, q_len = buffer.shape[2], new.shape[2]
    if isinstance(start, int):
        new = new[:, :, -size:]
        begin = (start + q_len - new.shape[2]) % size
        until = min(begin + new.shape[2], size)
        buffer[:, :, begin:until] = new[:, :, : until - begin]
        buffer[:, :, : new.shape[2] - (until - begin)] = new[:, :, until - begin :]
    elif q_len == 1:
        # A hidden token takes a column too; `row_lost` of the cache counts it.
        buffer.scatter_(2, _column_index(new, start % size), new)
    else:
        source = _positions(start + new_counts, size) - start[:, None]
        taken = _columns(new, source.clamp(min=0))
        buffer.copy_(torch.where((source >= 0).to(buffer.device)[:, None, :, None], taken, buffer))
