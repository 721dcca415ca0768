"""Sinks of a sparse layer's branches, from what its window gives and what dense attention gives.

A plain window throws away the mass that dense attention puts outside it, most of all on the first tokens, and its
output is then about twice too large. The sink of the local branch takes that mass back: per head, with the dense
output Y, the window's output o and its log-sum-exp z, all without a sink,

    sink = argmin over b of  sum over t >= window of  |Y_t - sigmoid(z_t - b) o_t|^2

On SmolLM2-135M-Instruct (regular plan, window 128, 8,192 tokens of two manuals) this takes the relative error of the
window branch's heads from 0.94 to 0.37, the mean of 21 layers; the window then keeps 51 % of the mass.

The sink of the global branch has no such target: the selected keys belong to another layer, and the best that its
output can do for this one at the start is nearly nothing. A fit would close the branch, which has to learn from there.
So it is set where it takes a tenth of the mass at the median position: the branch is open, the sink has a gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


GRID_POINTS, GRID_BELOW, GRID_ABOVE = 73, -8.0, 10.0
GLOBAL_SINK_SHARE = 0.1


@dataclass
class HeadSums:
    """What the fit needs of each position: `<Y, o>`, `|o|^2`, `|Y|^2` and z, each `(heads, positions)`."""

    dot: torch.Tensor
    square: torch.Tensor
    target: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def of(dense: torch.Tensor, local: torch.Tensor, lse: torch.Tensor, skip: int) -> "HeadSums":
        """From outputs `(length, heads, head_dim)` and lse `(heads, length)`, without the first `skip` positions."""
        dense, local = (part[skip:].transpose(0, 1).float() for part in (dense, local))
        return HeadSums((dense * local).sum(-1), local.square().sum(-1), dense.square().sum(-1), lse[:, skip:])

    @staticmethod
    def join(parts: "Sequence[HeadSums]") -> "HeadSums":
        """All positions of several windows."""
        names = ("dot", "square", "target", "lse")
        return HeadSums(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in names))


def fit_local_sink(sums: HeadSums) -> tuple[torch.Tensor, float, float, float]:
    """The best sink per head on a grid around the median log-sum-exp.

    Returns:
        `(sink, share, error_without, error_with)`: sink `(heads,)`; the mean share of mass that the window keeps;
        relative errors of the outputs, without and with the sink.
    """
    grid = sums.lse.median(dim=1).values[:, None] + torch.linspace(
        GRID_BELOW, GRID_ABOVE, GRID_POINTS, device=sums.lse.device
    )
    errors = torch.stack(
        [
            (share.square() * sums.square - 2 * share * sums.dot).sum(1)
            for share in (torch.sigmoid(sums.lse - sink[:, None]) for sink in grid.T)
        ],
        dim=1,
    )
    lowest, index = errors.min(dim=1)
    sink = grid.gather(1, index[:, None])[:, 0]
    total = sums.target.sum()
    without = (sums.square - 2 * sums.dot).sum()
    share = torch.sigmoid(sums.lse - sink[:, None]).mean().item()
    return sink, share, _relative(total + without, total), _relative(total + lowest.sum(), total)


def _relative(error: torch.Tensor, total: torch.Tensor) -> float:
    # In this order, for a NaN to stay.
    return math.sqrt(max((error / total).item(), 0.0))


def sink_for_share(lse: torch.Tensor, share: float = GLOBAL_SINK_SHARE) -> torch.Tensor:
    """The sink per head that takes `share` of the mass at the median position of `lse` `(heads, positions)`."""
    return lse.median(dim=1).values + math.log(share / (1 - share))
