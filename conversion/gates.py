"""Gates from least squares: constants in a box first, then logits that are linear in the layer's input.

Both fit the output projection's result Y of a layer by the gated outputs of its branches,

    Y_t ~ sum over branches j and heads h of  g_jh(x_t) z_jht,      z_jht = W_h o_jht

with W_h the columns of the output projection that belong to head h.
"""

import math

import torch


BOX_SWEEPS = 200
GAUSS_NEWTON_SWEEPS, GAUSS_NEWTON_STEP, GAUSS_NEWTON_RIDGE = 3, 0.7, 0.03
# A step of one sweep asks for at most this change of a logit; a closed sigmoid has next to no slope.
LARGEST_CHANGE, SMALLEST_SLOPE = 3.0, 0.02
RIDGE_ITERATIONS = 8
TINY = torch.finfo(torch.float32).tiny


def box_least_squares(
    gram: torch.Tensor, moment: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> torch.Tensor:
    """The minimum of `g' gram g / 2 - moment' g` with `lower <= g <= upper`, by coordinate descent in float64.

    Args:
        gram (`torch.Tensor`): `(n, n)`, positive definite.
        moment, lower, upper (`torch.Tensor`): `(n,)`.
    """
    gram, moment, lower, upper = (part.double().cpu() for part in (gram, moment, lower, upper))
    values = (lower + upper) / 2
    for _ in range(BOX_SWEEPS):
        before = values.clone()
        for i in range(len(values)):
            rest = moment[i] - gram[i] @ values + gram[i, i] * values[i]
            values[i] = (rest / gram[i, i]).clamp(lower[i], upper[i])
        if torch.equal(values, before):
            break
    return values


def constant_gates(
    outputs: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> torch.Tensor:
    """The best constant gates inside a box.

    Args:
        outputs (`torch.Tensor`): `(positions, branches, heads, head_dim)`, what the branches give.
        weight (`torch.Tensor`): `(hidden, heads * head_dim)`, the output projection.
        target (`torch.Tensor`): `(positions, hidden)`.
        lower, upper (`torch.Tensor`): `(branches, heads)`.
    Returns:
        `torch.Tensor`: `(branches, heads)`, float64.
    """
    branches, heads, dim = outputs.shape[1:]
    products = (weight.T @ weight).repeat(branches, branches)
    flat = outputs.flatten(1)
    gram = (flat.T @ flat * products).unflatten(0, (-1, dim)).unflatten(2, (-1, dim)).sum((1, 3))
    moment = (flat * (target @ weight).repeat(1, branches)).sum(0).unflatten(0, (-1, dim)).sum(-1)
    # Heads that attend alike make the sum nearly singular; a trace of ridge keeps their gates alike too.
    ridge = 1e-3 * gram.diagonal().mean()
    gram = gram + ridge * torch.eye(len(gram), device=gram.device)
    return box_least_squares(gram, moment + ridge / 2, lower.flatten(), upper.flatten()).view(branches, heads)


def gate_values(inputs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`sigmoid(inputs @ weights + bias)`, `(positions, branches, heads)`; the bias is the last column of `logits`."""
    return torch.sigmoid(torch.einsum("nc,jhc->njh", inputs, logits[..., :-1]) + logits[..., -1])


def fit_gates(
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    logits: torch.Tensor,
    lower: torch.Tensor,
) -> torch.Tensor:
    """Let gates read the input: Gauss-Newton, one head of one branch at a time.

    For one gate the best coefficient of a position is its present value plus `<z, error> / |z|^2`. The logit that
    gives it is approached with the sigmoid's slope s, each position weighted by `|z|^2 s^2`, under a ridge. Where a
    step takes the mean of a gate below its bound, the bias is raised to the bound. A head keeps its logits where the
    step does not lower the error.

    Args:
        inputs (`torch.Tensor`): `(positions, hidden)`, the layer's normalised input.
        outputs, weight, target (`torch.Tensor`): as in `constant_gates`.
        logits (`torch.Tensor`): `(branches, heads, hidden + 1)`, where to start; the last column is the bias.
        lower (`torch.Tensor`): `(branches, heads)`, bounds of the gates' means, above 0; the start keeps them.
    Returns:
        `torch.Tensor`: logits like those given, which keep the bounds.
    """
    branches, heads, dim = outputs.shape[1:]
    logits = logits.clone()
    gates = gate_values(inputs, logits)
    extended = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
    regression = RidgeRegression(extended, GAUSS_NEWTON_RIDGE)
    error = target - (outputs * gates[..., None]).sum(1).flatten(1) @ weight.T
    for _ in range(GAUSS_NEWTON_SWEEPS):
        # The last branch is the window, which explains most.
        for branch in reversed(range(branches)):
            for head in range(heads):
                output, columns = outputs[:, branch, head], weight[:, head * dim : (head + 1) * dim]
                # |z|^2 and <z, error> of z = W_h o, without z.
                size = (output @ (columns.T @ columns) * output).sum(1)
                agreement = (error @ columns * output).sum(1)
                if not size.any():
                    continue
                gate = gates[:, branch, head]
                slope = (gate * (1 - gate)).clamp(min=SMALLEST_SLOPE)
                wanted = agreement / (size + 1e-6 * size.mean()) / slope
                wanted = wanted.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
                moved = logits[branch, head] + GAUSS_NEWTON_STEP * regression.solve(wanted, size * slope.square())
                proposed = extended @ moved
                rise = rise_to_mean(proposed, lower[branch, head].item())
                moved[-1] += rise
                change = torch.sigmoid(proposed + rise) - gate
                if (change * (2 * agreement - change * size)).sum() > 0:
                    logits[branch, head] = moved
                    gates[:, branch, head] += change
                    error -= (change[:, None] * output) @ columns.T
    return logits


def rise_to_mean(logits: torch.Tensor, lowest: float) -> float:
    """The smallest rise of `logits` `(n,)` from 0 on, to about 1e-6, with which their sigmoids' mean is `lowest`."""
    if torch.sigmoid(logits).mean() >= lowest:
        return 0.0
    low, high = 0.0, math.log(lowest / (1 - lowest)) - logits.min().item()
    while high - low > 1e-6:
        middle = (low + high) / 2
        if torch.sigmoid(logits + middle).mean() >= lowest:
            high = middle
        else:
            low = middle
    return high


class RidgeRegression:
    """Weighted ridge regressions on the same inputs: `argmin sum w (y - inputs u)^2 + ridge |u|^2`.

    Conjugate gradients, preconditioned by the regression without weights. Each iteration reads the inputs twice, where
    the normal equations of each weighting would cost as much as `n` such readings.

    Args:
        inputs (`torch.Tensor`): `(positions, n)`.
        ridge (`float`): in units of the mean weighted square of an input.
    """

    def __init__(self, inputs: torch.Tensor, ridge: float):
        self.inputs, self.ridge = inputs, ridge
        self.squares = inputs.square().mean(1)
        gram = (inputs.T @ inputs).double() / len(inputs)
        gram.diagonal().add_(ridge * self.squares.mean())
        self.factor = torch.linalg.cholesky(gram).to(inputs.dtype)

    def solve(self, wanted: torch.Tensor, weights: torch.Tensor, iterations: int = RIDGE_ITERATIONS) -> torch.Tensor:
        """The coefficients `(n,)` for targets and weights `(positions,)`; only the proportions of weights count."""
        weights = weights / weights.mean() / len(weights)
        penalty = self.ridge * (weights * self.squares).sum()
        solution = self.inputs.new_zeros(self.inputs.shape[1])
        rest = self.inputs.T @ (weights * wanted)
        direction = step = torch.cholesky_solve(rest[:, None], self.factor)[:, 0]
        size = rest @ step
        for _ in range(iterations):
            applied = self.inputs.T @ (weights * (self.inputs @ direction)) + penalty * direction
            length = size / (direction @ applied).clamp(min=TINY)
            solution, rest = solution + length * direction, rest - length * applied
            step = torch.cholesky_solve(rest[:, None], self.factor)[:, 0]
            size, before = rest @ step, size
            direction = step + size / before.clamp(min=TINY) * direction
        return solution
