"""Key and value cache: full layers grow, sparse and window layers keep only their window, nothing else is held.

Keys stand at the column of their content position (see `rows_hysparse`), so padding costs no columns of its own and
blocks of the oracle are aligned in every row. Buffers grow by a quarter at a time and are written in place; a `cat`
per token would copy the whole history at every step.

What `layers[i].keys` returns is a view: after `crop` and a further append, a view that somebody kept shows new tokens.
"""

import copy
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from .rows_hysparse import Rows, TokenLayout, layout_of_length


# Capacity is a multiple of this many tokens, and the window's spare room.
PAGE = 128
# Tokens kept beyond the window, to undo that many without recording.
WINDOW_SLACK = 32


class GrowingLayer(DynamicLayer):
    """Keys and values of every token, in buffers with room to grow."""

    is_sliding = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._buffers: tuple[torch.Tensor, ...] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
            self._buffers = tuple(_with_room(states, capacity_for(total)) for states in (self.keys, self.values))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            _write(buffer, new, total - new.shape[2], columns)
        self._show(total)
        return self.keys, self.values

    def _show(self, length: int) -> None:
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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and change nothing."""
        _check_crop(tokens_to_remove, self.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if tokens_to_remove:
            self.keys = self.keys[:, :, :tokens_to_remove]
            self.values = self.values[:, :, :tokens_to_remove]

    def reset(self) -> None:
        self.keys = self.values = self._buffers = None
        self.is_initialized = False

    def _transform(self, change) -> None:
        """Apply `change` to the batch dimension or the device of everything held, spare room included."""
        if not self.is_initialized:
            return
        if self._buffers is None:
            self.keys, self.values = change(self.keys), change(self.values)
        else:
            length = self.keys.shape[2]
            self._buffers = tuple(change(buffer) for buffer in self._buffers)
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


class WindowLayer(GrowingLayer):
    """Keys and values of the last `sliding_window + slack` tokens, each row's newest token in the last column.

    While `record_past` is set, nothing is dropped until `crop`.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, slack: int = WINDOW_SLACK, **kwargs):
        super().__init__(**kwargs)
        self.sliding_window = sliding_window
        self.kept = sliding_window + slack
        self.cumulative_length = 0
        self.record_past = False
        # Where in the buffers the stored window begins.
        self._offset = 0
        # Slots removed from padded rows since the last update; the rows' own counts say how far each one moves.
        self._removed = 0
        self._stored_counts: torch.Tensor | None = None

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.record_past or self.cumulative_length <= self.kept

    def activate_past_recording(self) -> None:
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append compact states; return the window before them and them, `(batch, kv_heads, past + new, dim)`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _check_batch(self.keys, key_states)
        q_len = key_states.shape[2]
        self._align(layout)
        stored = self.keys.shape[2]
        seen = min(stored, self.sliding_window - 1)
        total = stored + q_len
        self.cumulative_length += q_len
        keep = total if self.record_past else min(total, self.kept)
        padded = layout is not None and layout.new_counts is not None
        if not padded and not torch.is_grad_enabled() and q_len <= PAGE and not self.record_past:
            self._append_in_place(key_states, value_states, keep)
            stop = self._offset + keep
            keys, values = (buffer[:, :, stop - q_len - seen : stop] for buffer in self._buffers)
            return keys, values
        self._buffers = None
        pairs = ((self.keys, key_states), (self.values, value_states))
        joined = [torch.cat(pair, dim=2) if stored else pair[1] for pair in pairs]
        if padded:
            ends = stored + layout.new_counts[:, None]
            columns = (ends - keep + torch.arange(keep, device=ends.device)).clamp(min=0)
            self.keys, self.values = (_columns(states, columns) for states in joined)
            self._stored_counts = layout.past_counts + layout.new_counts
        else:
            # A copy, where something is dropped: a view would hold on to the whole prompt.
            self.keys, self.values = (states[:, :, total - keep :] for states in joined)
            if keep < total:
                self.keys, self.values = self.keys.clone(), self.values.clone()
        first = stored - seen
        return joined[0][:, :, first:], joined[1][:, :, first:]

    def _append_in_place(self, key_states: torch.Tensor, value_states: torch.Tensor, keep: int) -> None:
        q_len, stored = key_states.shape[2], self.keys.shape[2]
        offset = self._offset
        if self._buffers is None or _is_frozen(self._buffers[0]):
            self._buffers = tuple(_with_room(states, self.kept + PAGE) for states in (self.keys, self.values))
            offset = 0
        elif offset + stored + q_len > self._buffers[0].shape[2]:
            for buffer, states in zip(self._buffers, (self.keys, self.values), strict=True):
                buffer[:, :, :stored] = states.clone()
            offset = 0
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            _write(buffer, new, offset + stored, None)
        self._offset = offset + stored + q_len - keep
        self._show(keep)

    def _show(self, length: int) -> None:
        stop = self._offset + length
        self.keys, self.values = (buffer[:, :, self._offset : stop] for buffer in self._buffers)

    def _align(self, layout: TokenLayout | None) -> None:
        """Bring each row's newest visible token to the last column: after `crop`, or when the mask now hides some."""
        if layout is None or layout.past_counts is None or not self.keys.shape[2]:
            return
        moved = self._moved(layout.past_counts)
        columns = (torch.arange(self._removed, self.keys.shape[2], device=moved.device) - moved[:, None]).clamp(min=0)
        self.keys, self.values = _columns(self.keys, columns), _columns(self.values, columns)
        self._buffers, self._removed = None, 0

    def _moved(self, past_counts: torch.Tensor) -> torch.Tensor:
        """How many of the newest stored tokens of each row are not among its `past_counts` visible ones."""
        stored = self.cumulative_length if self._stored_counts is None else self._stored_counts.to(past_counts.device)
        return stored - past_counts

    def lacks_tokens(self, past_counts: torch.Tensor) -> torch.Tensor:
        """Rows, bool `(batch,)`, whose window of `past_counts` tokens is no longer, or never was, stored."""
        moved = self._moved(past_counts)
        left = self.keys.shape[2] - moved
        return (moved < 0) | (left < past_counts.clamp(max=self.sliding_window - 1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = min(self.cumulative_length, self.sliding_window - 1)
        return seen + query_length, self.cumulative_length - seen

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.sliding_window

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and change nothing: the window before the cut must still be stored."""
        super().check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        stored = self.keys.shape[2] - self._removed
        if stored + tokens_to_remove < min(self.cumulative_length + tokens_to_remove, self.sliding_window - 1):
            raise RuntimeError(
                f"`crop` can undo at most {stored - self.sliding_window + 1} tokens of this window layer, got "
                f"{-tokens_to_remove}; call `activate_past_recording()` before the tokens that may be undone."
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        self.cumulative_length += tokens_to_remove
        if self._stored_counts is not None:
            # How far each row moves is known with the next mask; a row that moves by all needs the most columns.
            self._removed -= tokens_to_remove
            first = max(0, self.keys.shape[2] - self.kept - self._removed)
            self.keys, self.values = self.keys[:, :, first:], self.values[:, :, first:]
        else:
            last = self.keys.shape[2] + tokens_to_remove
            first = max(0, last - self.kept)
            self.keys, self.values = self.keys[:, :, first:last], self.values[:, :, first:last]
            if self._buffers is not None:
                self._offset += first

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = self._removed = 0
        self._stored_counts = None

    def _transform(self, change) -> None:
        super()._transform(change)
        if self._stored_counts is not None:
            self._stored_counts = change(self._stored_counts)


class NoKeysLayer(CacheLayerMixin):
    """Stands for a layer that reads another layer's keys and caches nothing."""

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


class HySparseCache(DynamicCache):
    """Cache of a HySparse model: one layer object per model layer, as `config.cache_plan` says.

    Args:
        config (`HySparseConfig`): the model's configuration.
        slack (`int`): tokens that window layers keep beyond the window, so that `crop` can undo that many.
    Source: HySparse (arXiv:2602.03560), section 3.3: sparse layers keep no full-length keys and values.
    """

    def __init__(self, config, slack: int = WINDOW_SLACK):
        makers: dict[str, Callable[[], CacheLayerMixin]] = {
            "full": GrowingLayer,
            "window": lambda: WindowLayer(config.sliding_window, slack),
            "none": NoKeysLayer,
        }
        Cache.__init__(self, layers=[makers[kind]() for kind in config.cache_plan])
        # Visible tokens per row, once a mask was given; None while every slot of every row is a token.
        self.row_counts: torch.Tensor | None = None

    def layout_without_mask(self, q_len: int, device: torch.device) -> TokenLayout:
        """Layout of `q_len` new tokens, all visible, behind what the cache holds."""
        if self.row_counts is None:
            return layout_of_length(self.get_seq_length(), q_len, device)
        counts = self.row_counts.to(device)
        return TokenLayout(
            positions=counts[:, None] + torch.arange(q_len, device=device),
            past=self.get_seq_length(),
            rows=Rows(query_start=counts),
            past_counts=counts,
            new_counts=torch.full_like(counts, q_len),
        )

    def check_rows(self, layout: TokenLayout) -> None:
        """Raise `ValueError` where a mask hides more cached tokens than windows can undo. Reads the data."""
        windows = (layer for layer in self.layers if isinstance(layer, WindowLayer) and layer.is_initialized)
        window = next(windows, None)
        if window is None or layout.past_counts is None or torch.compiler.is_compiling():
            return
        if bool(window.lacks_tokens(layout.past_counts).any()):
            raise ValueError(
                "`attention_mask` must show the cached tokens as it did when they were cached, but for up to "
                f"{window.kept - window.sliding_window} at the end of a row; got one that shows fewer, or more; start "
                "with a new cache, or keep the mask as it was."
            )

    def record_rows(self, layout: TokenLayout) -> None:
        """Remember how many tokens each row has after a forward with this layout."""
        if layout.new_counts is not None:
            self.row_counts = layout.past_counts + layout.new_counts

    def crop(self, tokens_to_remove: int) -> None:
        _check_crop(tokens_to_remove, self.get_seq_length())
        # A draft that leaves the model early fills the first layers only.
        filled = [layer for layer in self.layers if isinstance(layer, GrowingLayer) and layer.is_initialized]
        for layer in filled:
            # All layers or none: one that refuses must not find the others cut already.
            layer.check_crop(tokens_to_remove)
        for layer in filled:
            layer.crop(tokens_to_remove)
        if self.row_counts is not None:
            # Without its mask the removed part counts as tokens; the next mask, if there is one, says better.
            self.row_counts = (self.row_counts + tokens_to_remove).clamp(min=0)

    def reset(self) -> None:
        super().reset()
        self.row_counts = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._transform_counts(lambda counts: counts.index_select(0, beam_idx.to(counts.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._transform_counts(lambda counts: counts.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._transform_counts(lambda counts: counts[indices.to(counts.device)])

    def _transform_counts(self, change) -> None:
        if self.row_counts is not None:
            self.row_counts = change(self.row_counts)

    def fork(self) -> "HySparseCache":
        """An independent copy, for continuing one prefix in two ways."""
        return copy.deepcopy(self)


def capacity_for(length: int) -> int:
    """Tokens to make room for when `length` are needed: a quarter more, in whole pages."""
    return -(-(length + length // 4) // PAGE) * PAGE


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


def _write(buffer: torch.Tensor, new: torch.Tensor, start: int, columns: torch.Tensor | None) -> None:
    if columns is None:
        buffer[:, :, start : start + new.shape[2]] = new
    else:
        buffer.scatter_(2, _column_index(new, columns), new)


def _columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    index = columns.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))


def _check_batch(stored: torch.Tensor, new: torch.Tensor) -> None:
    if stored.shape[:2] != new.shape[:2]:
        raise ValueError(
            f"the cache holds (batch, kv_heads) = {tuple(stored.shape[:2])}, got new states of "
            f"{tuple(new.shape[:2])}; use a new cache, or `batch_repeat_interleave` / `batch_select_indices`."
        )


def _check_crop(tokens_to_remove: int, length: int) -> None:
    if tokens_to_remove > 0 or -tokens_to_remove > length:
        raise ValueError(
            f"`crop` takes the number of tokens to remove as 0 or a negative integer down to -{length}, got "
            f"{tokens_to_remove}; to keep n tokens pass n - {length}."
        )


__all__ = ["HySparseCache"]
