"""Queries for keys that another layer made, by least squares.

A sparse layer of the second generation reads its full layer's keys k. Its own queries were trained for other keys, and
find nothing there. For each head the logits of the fitted queries W x, turned to their positions by R, come as near as
they can to the logits a that the source's layer gives its own keys,

    argmin over W of  sum over t and s <= t of  p_ts (k_s' R_t W x_t - a_ts - b_t)^2  +  ridge |W|^2

with b_t free, since a softmax does not see it, and p_ts half the source's attention and half uniform: errors matter
where the source attends, and nothing may grow elsewhere. Solved by conjugate gradients, preconditioned by the second
moments of x. On SmolLM2-135M-Instruct the fit explains 83 to 96 % of the weighted variance of the logits of heads in
layers 16 to 25, read from keys that are projected from layer 14.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hysparse_hf.modeling.layers_hysparse import rotate

from .layer_stream import AttentionInputs


# One query in so many is fitted on.
QUERY_STRIDE = 4
QUERY_ITERATIONS, QUERY_RIDGE = 8, 0.01


@dataclass(frozen=True)
class HeadPart:
    """What one window says of one head.

    Args:
        inputs (`torch.Tensor`): `(queries, n)`, what the queries are projected from.
        rotation (`tuple`, *optional*): cosines and sines at the queries' positions, `(1, queries, rotary_dim)`.
        key (`torch.Tensor`): `(length, head_dim)`, rotated and scaled.
        logits (`torch.Tensor`): `(queries, length)`, the source's; 0 where a query does not see.
        weights (`torch.Tensor`): `(queries, length)`; 0 where a query does not see.
    """

    inputs: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    key: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def of(
        inputs: torch.Tensor,
        own: AttentionInputs,
        key: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        head: int,
        scaling: float,
    ) -> "HeadPart":
        """From a layer's own queries and keys, and the key `(1, kv_heads, length, head_dim)` that it shall read."""
        length, kv_head = len(inputs), head // (own.query.shape[1] // key.shape[1])
        rows = torch.arange(min(QUERY_STRIDE, length) - 1, length, QUERY_STRIDE, device=key.device)
        visible = torch.arange(length, device=key.device) <= rows[:, None]
        logits = own.query[0, head, rows] @ own.key[0, kv_head].T * scaling
        attention = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = (attention + visible / visible.sum(1, keepdim=True)) / 2
        cos, sin = (part[:, rows] for part in rotation)
        return HeadPart(
            inputs[rows], (cos, sin), key[0, kv_head] * scaling, logits.masked_fill(~visible, 0.0), weights
        )

    def logits_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Logits `(queries, length)` of the queries that `weight` `(head_dim, n)` projects."""
        return rotate((self.inputs @ weight.T)[None, None], self.rotation)[0, 0] @ self.key.T

    def centred(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits without their weighted mean over the keys, times the weights."""
        return self.weights * (logits - (self.weights * logits).sum(1, keepdim=True))

    def moment(self, logits: torch.Tensor) -> torch.Tensor:
        """The adjoint of `logits_of` for centred logits, `(head_dim, n)`."""
        cos, sin = self.rotation
        return rotate((self.centred(logits) @ self.key)[None, None], (cos, -sin))[0, 0].T @ self.inputs


def fit_queries(
    inputs: Sequence[torch.Tensor],
    own: Sequence[AttentionInputs],
    keys: Sequence[torch.Tensor],
    rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
) -> tuple[torch.Tensor, float]:
    """Fit all heads of a layer; every argument has an entry per window.

    Args:
        inputs (`torch.Tensor`): `(length, n)`, what the queries are projected from; a column of ones fits a bias.
        own (`AttentionInputs`): of the source's layer.
        keys (`torch.Tensor`): `(1, kv_heads, length, head_dim)`, rotated, that the layer shall read.
        rotations: cosines and sines at all positions, `(1, length, rotary_dim)`.
        scaling (`float`): of the logits.
    Returns:
        `(weight, error)`: `(heads * head_dim, n)`, and the weighted error of the logits relative to their deviation.
    """
    joined = torch.cat(list(inputs))
    moments = (joined.T @ joined).double() / len(joined)
    size = moments.diagonal().mean()
    moments.diagonal().add_(QUERY_RIDGE * size)
    factor = torch.linalg.cholesky(moments).to(joined.dtype)
    weights, wrong, total = [], 0.0, 0.0
    for head in range(own[0].query.shape[1]):
        windows = zip(inputs, own, keys, rotations, strict=True)
        regression = HeadRegression([HeadPart.of(*window, head, scaling) for window in windows], size, factor)
        weight = regression.solve()
        for part in regression.parts:
            difference = part.logits_of(weight) - part.logits
            wrong += (part.centred(difference) * difference).sum().item()
            total += (part.centred(part.logits) * part.logits).sum().item()
        weights.append(weight)
    return torch.cat(weights), (max(wrong, 0.0) / total) ** 0.5


class HeadRegression:
    """The least squares of one head, solved by conjugate gradients.

    Args:
        parts (`Sequence[HeadPart]`): of every window.
        size (`torch.Tensor`): the mean square of an input.
        factor (`torch.Tensor`): Cholesky factor of the inputs' second moments, which precondition.
    """

    def __init__(self, parts: Sequence[HeadPart], size: torch.Tensor, factor: torch.Tensor):
        self.parts, self.factor = parts, factor
        squares = [len(part.inputs) * part.key.square().mean().item() for part in parts]
        self.ridge = QUERY_RIDGE * size.item() * sum(squares)

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """The left side of the normal equations."""
        moments = torch.stack([part.moment(part.logits_of(weight)) for part in self.parts])
        return moments.sum(0) + self.ridge * weight

    def precondition(self, rest: torch.Tensor) -> torch.Tensor:
        """What `rest` would be solved by if keys were uncorrelated."""
        return torch.cholesky_solve(rest.T, self.factor).T

    def solve(self) -> torch.Tensor:
        """The weight `(head_dim, n)` after `QUERY_ITERATIONS` steps."""
        rest = torch.stack([part.moment(part.logits) for part in self.parts]).sum(0)
        solution, tiny = torch.zeros_like(rest), torch.finfo(rest.dtype).tiny
        direction = step = self.precondition(rest)
        size = (rest * step).sum()
        for _ in range(QUERY_ITERATIONS):
            applied = self.apply(direction)
            length = size / (direction * applied).sum().clamp(min=tiny)
            solution, rest = solution + length * direction, rest - length * applied
            step = self.precondition(rest)
            size, before = (rest * step).sum(), size
            direction = step + size / before.clamp(min=tiny) * direction
        return solution
