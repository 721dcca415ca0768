"""The part of a cache that keeps full layers in host memory between their turns."""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from .cache_layers_hysparse import GrowingLayer


class OffloadingCache(DynamicCache):
    """With `offloading`, each full layer leaves the card behind its turn, and is fetched during the turn before it."""

    offloading: bool
    _prefetch_stream: torch.cuda.Stream | None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one layer and return what its attention reads; see the layer classes."""
        layer: Any = self.layers[layer_idx]
        if not self.offloading:
            return layer.update(key_states, value_states, *args, **kwargs)
        if key_states.is_cuda:
            device = key_states.device
            if self._prefetch_stream is None:
                self._prefetch_stream = torch.cuda.Stream(device)
            # This layer must have arrived, and memory that the next one may get must no longer be read.
            torch.cuda.current_stream(device).wait_stream(self._prefetch_stream)
            self._prefetch_stream.wait_stream(torch.cuda.current_stream(device))
        self.prefetch(layer_idx + 1)
        states = layer.update(key_states, value_states, *args, **kwargs)
        self.offload(layer_idx)
        return states

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Fetch the next layer that is kept in host memory, from `layer_idx` on and around to the first.

        Only full layers are: the others hold a window, or nothing.
        """
        order = [*range(layer_idx, len(self.layers)), *range(layer_idx)]
        following = next((i for i in order if isinstance(self.layers[i], GrowingLayer)), None)
        if following is not None:
            with torch.cuda.stream(self._prefetch_stream):
                self.layers[following].prefetch()

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Send a full layer to host memory, behind what the current stream still does with it."""
        if isinstance(self.layers[layer_idx], GrowingLayer):
            self.layers[layer_idx].offload()

    def _settle(self) -> None:
        """Wait until no layer is on its way between devices."""
        if self._prefetch_stream is not None:
            torch.cuda.synchronize(self._prefetch_stream.device)
