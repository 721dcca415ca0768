"""The output projection of a sparse layer, fitted once more to what its gated branches give."""

import torch


RIDGE = 0.03
# Below this many tokens per channel the refit learns the calibration text, not the layer.
TOKENS_PER_CHANNEL = 10


def ridge_towards(
    inputs: torch.Tensor, target: torch.Tensor, prior: torch.Tensor, ridge: float = RIDGE
) -> torch.Tensor:
    """The `weight` that minimises `|target - inputs weight'|^2 + penalty |weight - prior|^2`.

    Args:
        inputs (`torch.Tensor`): `(positions, n)`.
        target (`torch.Tensor`): `(positions, hidden)`.
        prior (`torch.Tensor`): `(hidden, n)`.
        ridge (`float`): the penalty, in units of the mean squared input.
    """
    gram = (inputs.T @ inputs).double()
    penalty = ridge * gram.diagonal().mean()
    moment = (inputs.T @ target).double() + penalty * prior.T.double()
    gram.diagonal().add_(penalty)
    return torch.linalg.solve(gram, moment).T.contiguous().to(prior.dtype)
