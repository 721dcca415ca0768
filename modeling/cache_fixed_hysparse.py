"""What a pre-allocated cache holds for one layer: buffers that keep their address and their shape."""

from collections.abc import Callable
from typing import Any

import torch

from .cache_columns_hysparse import check_batch, fixed_zeros, refill, write_columns
from .cache_layers_hysparse import States, StoredLayer, WindowLayer
from .rows_hysparse import TokenLayout


class _FixedMixin:
    """Buffers that are allocated once and keep their address; the cache counts the tokens, for all layers."""

    is_compileable = True
    _buffers: Any

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
        check_batch(self.keys, key_states)
        _check_gradients(key_states, value_states)
        start = layout.rows.query_start
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if start is None:
                buffer[:, :, : new.shape[2]] = new
            else:
                write_columns(buffer, new, start)
        # A long prompt must not attend to all the room behind it.
        return (key_states, value_states) if start is None else (self.keys, self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len


class FixedWindowLayer(_FixedMixin, WindowLayer):
    """A window layer whose ring keeps its address and its size; it records nothing beyond its slack."""

    is_croppable = False

    def activate_past_recording(self) -> None:
        """Nothing to do: what a fixed ring can undo is its slack."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._allocate(self.kept, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, layout: TokenLayout | None = None, **kwargs
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


def _check_gradients(*states: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(part.requires_grad for part in states):
        raise ValueError(
            "a pre-allocated cache is written in place, which no backward pass survives, got keys that require "
            "gradients; run the model under torch.no_grad(), or use a cache without `max_cache_len`."
        )
