"""Key and value cache: full layers hold every token, sparse and window layers only their window, and nothing else is.

A cache grows by itself, or is allocated once for `max_cache_len` tokens. Growing, it counts on the host, so that
unpadded rows cost no index arithmetic. Allocated once, it counts in tensors that never move: a step reads nothing on
the host, has one shape at every length, and can be compiled into one graph.

What `layers[i].keys` returns is a view of buffers that are written in place: after `crop` and a further append, a view
that somebody kept shows new tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache_columns_hysparse import fixed_zeros, refill
from .cache_fixed_hysparse import FixedLayer, FixedWindowLayer
from .cache_layers_hysparse import (
    WINDOW_SLACK,
    GrowingLayer,
    NoKeysLayer,
    StoredLayer,
    WindowLayer,
    check_crop_count,
    refuse_crop,
)
from .cache_offload_hysparse import OffloadingCache
from .cache_pending_hysparse import PendingStates, without_last
from .rows_hysparse import Rows, TokenLayout, layout_of_length, layout_of_mask


class HySparseCache(OffloadingCache):
    """Cache of a HySparse model: one layer object per model layer, as `config.cache_plan` says.

    Args:
        config (`HySparseConfig`): the model's configuration.
        max_cache_len (`int`, *optional*): allocate for this many tokens, once and for all; default: grow.
        offloading (`bool`): keep full layers in host memory between their turns, fetching each ahead of its turn.
        slack (`int`): tokens that window layers keep beyond the window, so that `crop` can undo that many.
        count_tokens (`bool`): count in `processed_tokens` how many tokens, padding included, go through each half of a
            second generation model while it uses this cache.
    Raises:
        ValueError: a length that is not positive, or offloading of a cache that must not move.
    Source: HySparse (arXiv:2602.03560), section 3.3: sparse layers keep no full-length keys and values.
    """

    layers: list[Any]

    def __init__(
        self,
        config,
        max_cache_len: int | None = None,
        offloading: bool = False,
        *,
        slack: int = WINDOW_SLACK,
        count_tokens: bool = False,
    ):
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(
                f"`max_cache_len` must be at least 1, or None for a cache that grows, got {max_cache_len}."
            )
        if max_cache_len is not None and offloading:
            raise ValueError(
                "`offloading` moves buffers and `max_cache_len` promises that they stay, got both; leave out one."
            )
        window = config.sliding_window
        makers: dict[str, Callable[[], CacheLayerMixin]] = {
            "full": GrowingLayer if max_cache_len is None else lambda: FixedLayer(max_cache_len),
            "window": lambda: (WindowLayer if max_cache_len is None else FixedWindowLayer)(window, slack),
            "none": NoKeysLayer,
        }
        Cache.__init__(self, layers=[makers[kind]() for kind in config.cache_plan])
        self._max_cache_len = max_cache_len
        self.offloading = offloading
        self._v_head_dim = config.v_head_dim
        # Second generation: states not yet projected, and the layers whose keys they will be.
        self.pending: list[PendingStates] = []
        no_bridge = [None] * len(config.cache_plan)
        self.bridged = [source is not None for source in getattr(config, "bridge_plan", no_bridge)]
        self.processed_tokens: dict[str, int] | None = {"self": 0, "cross": 0} if count_tokens else None
        self._prefetch_stream: torch.cuda.Stream | None = None
        # Visible tokens per row, once a mask was given; None while every slot of every row is a token.
        self.row_counts: torch.Tensor | None = None
        # Tokens in front of each row that the window layers have lost.
        self.row_lost: torch.Tensor | None = None
        # Slots cropped since the last forward. How many tokens of a padded row they were, the next mask says.
        self.removed: Any = 0
        # Slots held, and whether there were any yet; only the latter is known on the host. Pre-allocated caches only.
        self.length: torch.Tensor | None = None
        self._is_empty = True

    @property
    def max_cache_len(self) -> int | None:
        """Tokens allocated for; None for a cache that grows."""
        return self._max_cache_len

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Slots held; of a pre-allocated cache a tensor, as the library's static cache gives."""
        if self.max_cache_len is None:
            return super().get_seq_length(layer_idx)
        # A copy, which later tokens do not change.
        return 0 if self._is_empty else self.length.clone()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.max_cache_len is not None and self._is_empty:
            return query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def known_length(self, q_len: int) -> int | None:
        """Slots held, before `q_len` new ones; None where the host would have to wait for the device to know."""
        if self.max_cache_len is None or self._is_empty:
            return self.get_seq_length()
        if torch.compiler.is_compiling() or (self.length.device.type != "cpu" and (q_len == 1 or _is_capturing())):
            return None
        return int(self.length)

    def check_room(self, q_len: int) -> None:
        """Raise `ValueError` if `q_len` more tokens are known not to fit."""
        if self.max_cache_len is None:
            return
        length = self.known_length(q_len)
        if length is not None and length + q_len > self.max_cache_len:
            raise ValueError(
                f"the cache was made for `max_cache_len` = {self.max_cache_len} tokens and holds {length}, got "
                f"{q_len} more; make it longer, or leave `max_cache_len` out for a cache that grows."
            )

    def layout_without_mask(self, q_len: int, device: torch.device) -> TokenLayout:
        """Layout of `q_len` new tokens, all visible, behind what the cache holds."""
        if self.row_counts is None or (self.max_cache_len is not None and self._is_empty):
            return layout_of_length(self.known_length(q_len), q_len, device)
        counts = (self.row_counts - self.removed).clamp(min=0).to(device)
        return TokenLayout(
            positions=counts[:, None] + torch.arange(q_len, device=device),
            past=self.get_seq_length() if self.max_cache_len is None else self.max_cache_len - q_len,
            rows=Rows(query_start=counts),
            past_counts=counts,
            new_counts=torch.full_like(counts, q_len),
        )

    def layout_of_mask(self, attention_mask: torch.Tensor, q_len: int) -> TokenLayout:
        """Layout of a mask `(batch, cached + q_len)`, or of `(batch, q_len)` where the cache is pre-allocated."""
        if self.max_cache_len is None or self._is_empty:
            return layout_of_mask(attention_mask, q_len)
        counts = None
        if attention_mask.shape[1] == q_len:
            counts = (self.row_counts - self.removed).clamp(min=0).to(attention_mask.device)
        layout = layout_of_mask(attention_mask, q_len, counts)
        return replace(layout, past=self.max_cache_len - q_len, rows=Rows(query_start=layout.past_counts))

    def check_rows(self, layout: TokenLayout) -> None:
        """Raise `ValueError` where a mask hides more cached tokens than windows can undo. Reads the data."""
        if layout.past_counts is None or torch.compiler.is_compiling() or _is_capturing():
            return
        window = self._window()
        counts: Any
        lost: Any
        if self.row_counts is None:
            counts, lost = self.get_seq_length(), 0 if window is None else window.lost
        else:
            counts, lost = self.row_counts, self.row_lost
        needed = 0 if window is None else (layout.past_counts - window.sliding_window + 1).clamp(min=0)
        if bool(((layout.past_counts > counts) | (needed < lost)).any()):
            undone = 0 if window is None else window.kept - window.sliding_window
            raise ValueError(
                "`attention_mask` must show the cached tokens as it did when they were cached, but for up to "
                f"{undone} at the end of a row; got one that shows fewer, or more; start with a new cache, or keep "
                "the mask as it was."
            )

    def record_rows(self, layout: TokenLayout) -> None:
        """Remember how many tokens each row has after a forward with this layout."""
        q_len, window = layout.positions.shape[-1], self._window()
        if self.max_cache_len is not None and self.length is None:
            self._make_counters(self._first_stored().keys)
        if layout.new_counts is not None:
            counts = layout.past_counts + layout.new_counts
            # A hidden token of a one-token step takes a column of the window, too.
            written = layout.past_counts + layout.new_counts.clamp(min=1)
        elif self.max_cache_len is not None:
            counts = written = torch.full_like(self.row_counts, q_len)
        else:
            return
        lost = self.row_lost
        if lost is None:
            lost = torch.full_like(counts, 0 if window is None else window.lost)
        self._count("row_lost", lost if window is None else torch.maximum(lost, written - window.size))
        self._count("row_counts", counts)
        if self.max_cache_len is None:
            self.removed = 0
        else:
            self.removed.zero_()
            self.length.add_(q_len)
            self._is_empty = False

    def count_processed(self, half: str, rows: int, tokens: int) -> None:
        """Note that `rows` times `tokens` went through a half, `"self"` or `"cross"`, if they are to be counted."""
        if self.processed_tokens is not None:
            self.processed_tokens[half] += rows * tokens

    def _make_counters(self, states: torch.Tensor) -> None:
        self.row_counts = fixed_zeros(states.shape[:1], states, torch.long)
        self.row_lost = fixed_zeros(states.shape[:1], states, torch.long)
        self.removed = fixed_zeros((), states, torch.long)
        self.length = fixed_zeros((), states, torch.long)

    def _count(self, name: str, value: torch.Tensor) -> None:
        if self.max_cache_len is not None:
            value = refill(getattr(self, name), value)
        setattr(self, name, value)

    def _first_stored(self) -> StoredLayer:
        return next(layer for layer in self.layers if isinstance(layer, StoredLayer))

    def _window(self) -> WindowLayer | None:
        return next((layer for layer in self.layers if isinstance(layer, WindowLayer) and layer.is_initialized), None)

    def early_initialization(self, batch_size, num_heads, head_dim, dtype, device) -> None:
        """As the library's, with the values' own head dimension; `num_heads` and `head_dim` may be one per layer."""
        count = len(self.layers)
        heads = [num_heads] * count if isinstance(num_heads, int) else num_heads
        dims = [head_dim] * count if isinstance(head_dim, int) else head_dim
        for layer, n_heads, dim in zip(self.layers, heads, dims, strict=True):
            if layer.supports_early_init and not layer.is_initialized:
                parts = (
                    torch.zeros(batch_size, n_heads, 0, d, dtype=dtype, device=device) for d in (dim, self._v_head_dim)
                )
                layer.lazy_initialization(*parts)
        if self.max_cache_len is not None and self.length is None:
            self._make_counters(self._first_stored().keys)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every row, of all layers or of none.

        Args:
            tokens_to_remove (`int`): 0 or the negative number of slots to remove.
        Raises:
            ValueError: a positive number, or more than there are.
            RuntimeError: window layers no longer hold the window before the cut.
        """
        check_crop_count(tokens_to_remove, int(self.get_seq_length()))
        waiting = sum(states.length for states in self.pending)
        counts = [tokens_to_remove + min(waiting, -tokens_to_remove) * bridged for bridged in self.bridged]
        # A draft that leaves the model early fills the first layers only.
        filled = [
            (layer, count)
            for layer, count in zip(self.layers, counts, strict=True)
            if isinstance(layer, StoredLayer) and layer.is_initialized
        ]
        if self.row_counts is None:
            for layer, count in filled:
                layer.check_crop(count)
        else:
            self._check_windows(tokens_to_remove)
            self.removed -= tokens_to_remove
        self.pending = without_last(self.pending, -tokens_to_remove)
        if self.max_cache_len is not None:
            if not self._is_empty:
                self.length += tokens_to_remove
            return
        for layer, count in filled:
            layer.crop(count, self.row_counts, self.removed)
        window = self._window()
        if self.row_lost is not None and window is not None:
            self.row_lost = torch.maximum(self.row_lost, self.row_counts - window.size)

    def _check_windows(self, tokens_to_remove: int) -> None:
        window = self._window()
        if window is None:
            return
        counts = (self.row_counts - self.removed).clamp(min=0)
        first = ((counts + tokens_to_remove).clamp(min=0) - window.sliding_window + 1).clamp(min=0)
        if bool((self.row_lost > first).any()):
            refuse_crop(tokens_to_remove, int((counts - window.sliding_window + 1 - self.row_lost).min()))

    def reset(self) -> None:
        super().reset()
        self._is_empty = True
        self.pending = []
        if self.max_cache_len is None:
            self.row_counts = self.row_lost = None
            self.removed = 0
        elif self.length is not None:
            for counter in (self.row_counts, self.row_lost, self.removed, self.length):
                counter.zero_()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._settle()
        super().reorder_cache(beam_idx)
        self._transform_rest(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._settle()
        super().batch_repeat_interleave(repeats)
        self._transform_rest(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._settle()
        super().batch_select_indices(indices)
        self._transform_rest(lambda states: states[indices.to(states.device)])

    def _transform_rest(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.pending = [states.changed(change) for states in self.pending]
        if self.row_counts is not None:
            self._count("row_counts", change(self.row_counts))
            self._count("row_lost", change(self.row_lost))

    def fork(self) -> "HySparseCache":
        """An independent copy, for continuing one prefix in two ways."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict:
        """For pickle and copy: streams are made anew where they are needed."""
        self._settle()
        return {**self.__dict__, "_prefetch_stream": None}


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


__all__ = ["HySparseCache"]
