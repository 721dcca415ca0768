"""States of the second generation's self-decoder that wait in a cache to become keys of the cross-decoder."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .rows_hysparse import Rows, TokenLayout


class PendingStates(NamedTuple):
    """The new tokens of one forward call, compact (see `TokenLayout`).

    Args:
        states (`dict`): per entry of `config.bridge_map` `(batch, new, hidden)`.
        rotations (`dict`): per layer kind cosines and sines `(batch, new, rotary_dim)`, or None.
        query_start (`torch.Tensor`, *optional*): `(batch,)`, as in `Rows`.
    """

    states: dict
    rotations: dict
    query_start: torch.Tensor | None

    @classmethod
    def of(cls, states: dict, layout: TokenLayout, rotations: dict) -> "PendingStates":
        """Keep what was computed for the tokens of `layout`."""
        batch = len(next(iter(states.values())))

        def kept(part: torch.Tensor) -> torch.Tensor:
            part = part.expand(batch, -1, -1)
            return layout.to(part.device).compact(part[:, None])[:, 0]

        turned = {kind: None if pair is None else tuple(map(kept, pair)) for kind, pair in rotations.items()}
        return cls({source: kept(part) for source, part in states.items()}, turned, layout.rows.query_start)

    @property
    def length(self) -> int:
        """Slots that these tokens took."""
        return next(iter(self.states.values())).shape[1]

    @property
    def layout(self) -> TokenLayout:
        """Layout of the compact tokens."""
        device = next(iter(self.states.values())).device
        return TokenLayout(
            positions=torch.arange(self.length, device=device)[None], rows=Rows(query_start=self.query_start)
        )

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PendingStates":
        """The same, with `change` applied to the batch dimension of everything."""
        start = None if self.query_start is None else change(self.query_start)
        return self._replace(**_mapped(self, change), query_start=start)

    def shortened(self, count: int) -> "PendingStates":
        """The same without the last `count` slots: compact tokens stand in front, so columns behind are dropped."""
        return self._replace(**_mapped(self, lambda part: part[:, : self.length - count]))


def _mapped(pending: PendingStates, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    turned = {kind: None if pair is None else tuple(map(change, pair)) for kind, pair in pending.rotations.items()}
    return {"states": {source: change(part) for source, part in pending.states.items()}, "rotations": turned}


def without_last(pending: list[PendingStates], count: int) -> list[PendingStates]:
    """Pending states without the last `count` slots, or none where they are fewer."""
    left = list(pending)
    while left and count:
        last = left.pop()
        if last.length > count:
            left.append(last.shortened(count))
        count -= min(count, last.length)
    return left
