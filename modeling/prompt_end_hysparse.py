"""The end of a prompt: which tokens go on behind the last full layer, where only the last logits are wanted.

Layers behind it read keys of earlier layers and their own windows, and a full layer's keys need no queries. So of a
long prompt the last full layer makes keys of every token, and only the last tokens go on: those whose logits are
wanted, and those that stand in the windows of these, layer by layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .cache_hysparse import HySparseCache
from .configuration_hysparse import HySparseConfig
from .layers_hysparse import Rotation
from .rows_hysparse import TokenLayout


@dataclass(frozen=True)
class PromptEnd:
    """The last tokens of each row, in compact order (see `TokenLayout`), as queries over the keys of all.

    Args:
        layer_idx (`int`): the layer that makes keys of all tokens and goes on with these.
        layout (`TokenLayout`), rotations (`dict`): of these tokens alone.
        slots (`torch.Tensor`): `(batch or 1, n)`, where they stand among all new tokens.
        asked (`torch.Tensor`): `(batch or 1, kept)`, where those whose logits are wanted stand among them.
    """

    layer_idx: int
    layout: TokenLayout
    rotations: dict[str, Rotation]
    slots: torch.Tensor
    asked: torch.Tensor

    @classmethod
    def of(
        cls, layer_idx: int, layout: TokenLayout, rotations: dict[str, Rotation], length: int, kept: int
    ) -> "PromptEnd":
        """The last `length` tokens of each row, of which the last `kept` slots are asked for."""
        end, slots = layout.of_last(length)
        if layout.place is None:
            asked = torch.arange(length - kept, length, device=slots.device)[None]
        else:
            # A row padded on the right has padding in its last slots; it answers with its last token.
            first = layout.place.gather(1, slots[:, :1])
            asked = torch.minimum(layout.place[:, -kept:] - first, end.new_counts[:, None] - 1).clamp(min=0)
        return cls(layer_idx, end, rotations_at(rotations, slots), slots, asked)

    def to(self, device: torch.device, non_blocking: bool = False) -> "PromptEnd":
        """The same on another device (layers of one model may stand on several)."""

        def move(part: torch.Tensor) -> torch.Tensor:
            return part.to(device, non_blocking=non_blocking)

        layout, rotations = self.layout.to(device, non_blocking), _changed(self.rotations, move)
        return replace(self, layout=layout, rotations=rotations, slots=move(self.slots), asked=move(self.asked))


def prompt_end(
    config: HySparseConfig,
    n_layers: int,
    layout: TokenLayout,
    rotations: dict[str, Rotation],
    cache: HySparseCache | None,
    kept: int,
) -> PromptEnd | None:
    """The tokens that go on behind the last full layer in use; None where all do.

    Args:
        n_layers (`int`): layers in use.
        kept (`int`): last positions whose logits are wanted.
    """
    rows = layout.rows
    if rows.first_key is not None or rows.visibility is not None or rows.query_columns is not None:
        return None
    plan = config.cache_plan[:n_layers]
    if "full" not in plan:
        return None
    last = n_layers - 1 - plan[::-1].index("full")
    if not config.dense and config.layer_plan[last] != "full":
        return None
    length = kept
    for index in range(n_layers - 1, last, -1):
        if plan[index] == "window":
            # What the ring holds beyond the window, to undo tokens, must be right too.
            ring = 0 if cache is None else cache.layers[index].kept
            length = max(length + config.sliding_window - 1, ring)
            if cache is not None and cache.layers[index].record_past:
                return None
    if length >= layout.positions.shape[-1]:
        return None
    return PromptEnd.of(last, layout, rotations, length, kept)


def kept_rows(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Of `(batch, q_len, hidden)` the last rows (0: all), or those that a tensor names."""
    return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]


def tokens_at(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Tokens `slots` `(batch or 1, n)` of states `(batch or 1, q_len, dim)`."""
    slots = slots.to(states.device)
    if len(slots) == 1:
        return states.index_select(1, slots[0])
    return states.expand(len(slots), -1, -1).gather(1, slots[..., None].expand(-1, -1, states.shape[-1]))


def rotations_at(rotations: dict[str, Rotation], slots: torch.Tensor) -> dict[str, Rotation]:
    """Cosines and sines of the tokens `slots` `(batch or 1, n)`."""
    return _changed(rotations, lambda part: tokens_at(part, slots))


def _changed(rotations: dict[str, Rotation], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Rotation]:
    return {kind: None if pair is None else (change(pair[0]), change(pair[1])) for kind, pair in rotations.items()}
