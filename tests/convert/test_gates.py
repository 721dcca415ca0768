"""Gates from least squares: known solutions, the best in their box, and never worse than what they start from."""

import itertools

import pytest
import torch

from hysparse_hf.conversion.gates import (
    RidgeRegression,
    box_least_squares,
    constant_gates,
    fit_gates,
    gate_values,
    rise_to_mean,
)


POSITIONS, BRANCHES, HEADS, DIM, HIDDEN = 600, 2, 3, 4, 10
# So low that no gate of these tests comes near.
UNBOUND = torch.full((BRANCHES, HEADS), 1e-6)


@pytest.fixture
def layer():
    """Inputs `(positions, hidden)`, outputs of the branches, and an output projection."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(POSITIONS, HIDDEN, generator=generator)
    outputs = torch.randn(POSITIONS, BRANCHES, HEADS, DIM, generator=generator)
    weight = torch.randn(HIDDEN, HEADS * DIM, generator=generator)
    return inputs, outputs, weight


def projected(outputs, gates, weight):
    """What the output projection gives; gates `(positions or 1, branches, heads)`."""
    return (outputs * gates[..., None]).sum(1).flatten(1) @ weight.T


def error(layer, target, logits):
    inputs, outputs, weight = layer
    return (projected(outputs, gate_values(inputs, logits), weight) - target).square().sum().item()


def constant_logits(gates):
    logits = torch.zeros(BRANCHES, HEADS, HIDDEN + 1)
    logits[..., -1] = torch.logit(gates)
    return logits


@pytest.mark.parametrize("seed", range(4))
def test_box_minimum_is_the_best_of_all_active_sets(seed):
    """Every choice of values held at a bound, the others solved for in float64: the best feasible one."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    gram, moment = root @ root.T + 0.01 * torch.eye(5), 3 * torch.randn(5, generator=generator, dtype=torch.float64)
    lower, upper = torch.full((5,), -0.5, dtype=torch.float64), torch.full((5,), 0.8, dtype=torch.float64)
    best, lowest = None, float("inf")
    for held in itertools.product((None, "lower", "upper"), repeat=5):
        free = torch.tensor([side is None for side in held])
        values = torch.tensor([{"lower": -0.5, "upper": 0.8}.get(side, 0.0) for side in held], dtype=torch.float64)
        if free.any():
            values[free] = torch.linalg.solve(gram[free][:, free], moment[free] - gram[free][:, ~free] @ values[~free])
        if ((values >= lower) & (values <= upper)).all():
            cost = (values @ gram @ values / 2 - moment @ values).item()
            best, lowest = (values, cost) if cost < lowest else (best, lowest)
    assert torch.allclose(box_least_squares(gram, moment, lower, upper), best, atol=1e-8)


def test_planted_constant_gates_are_found(layer):
    _, outputs, weight = layer
    planted = torch.tensor([[0.2, 0.5, 0.1], [0.9, 0.3, 0.6]])
    found = constant_gates(
        outputs, weight, projected(outputs, planted[None], weight), torch.zeros(2, 3), torch.ones(2, 3)
    )
    assert torch.allclose(found.float(), planted, atol=2e-3)


def test_constant_gates_stay_in_their_box(layer):
    _, outputs, weight = layer
    planted = torch.tensor([[-1.0, 0.5, 0.0], [2.0, 0.3, 1.0]])
    lower, upper = torch.tensor([[0.05] * 3, [0.02] * 3]), torch.full((2, 3), 0.98)
    found = constant_gates(outputs, weight, projected(outputs, planted[None], weight), lower, upper)
    assert (found >= lower).all()
    assert (found <= upper).all()
    assert (found[0, 0], found[1, 0]) == (lower[0, 0], upper[1, 0])


def test_gates_that_read_the_input_are_found(layer):
    """Targets made with gates that follow the input: constants explain part of it, the fit most of the rest."""
    inputs, outputs, weight = layer
    planted = constant_logits(torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.5, 0.6]]))
    planted[..., :-1] = 0.4 * torch.randn(BRANCHES, HEADS, HIDDEN, generator=torch.Generator().manual_seed(1))
    target = projected(outputs, gate_values(inputs, planted), weight)
    constants = constant_gates(outputs, weight, target, torch.full((2, 3), 0.02), torch.full((2, 3), 0.98))
    start = constant_logits(constants.float())
    found = fit_gates(inputs, outputs, weight, target, start, UNBOUND)
    assert error(layer, target, found) < 0.03 * error(layer, target, start)
    assert (found - planted).abs().mean() < 0.25 * (start - planted).abs().mean()
    assert torch.equal(found, fit_gates(inputs, outputs, weight, target, start, UNBOUND))


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_no_target_makes_gates_worse(layer, scale):
    """Unreachable targets included: a step that does not help is not taken."""
    inputs, outputs, weight = layer
    target = scale * torch.randn(POSITIONS, HIDDEN, generator=torch.Generator().manual_seed(3))
    start = constant_logits(torch.full((BRANCHES, HEADS), 0.5))
    found = fit_gates(inputs, outputs, weight, target, start, UNBOUND)
    assert found.isfinite().all()
    assert error(layer, target, found) < error(layer, target, start)


def test_means_keep_their_bounds(layer):
    """The target holds nothing of the first branch: free gates close, bound ones stay open and still improve."""
    inputs, outputs, weight = layer
    planted = constant_logits(torch.tensor([[1e-6] * HEADS, [0.5] * HEADS]))
    planted[1, :, :-1] = 0.4 * torch.randn(HEADS, HIDDEN, generator=torch.Generator().manual_seed(1))
    target = projected(outputs, gate_values(inputs, planted), weight)
    start = constant_logits(torch.tensor([[0.05, 0.1, 0.2], [0.5] * HEADS]))
    lower = torch.tensor([[0.05, 0.1, 0.15], [0.02] * HEADS])
    free, bound = (fit_gates(inputs, outputs, weight, target, start, bounds) for bounds in (UNBOUND, lower))
    assert (gate_values(inputs, free).mean(0)[0] < lower[0] / 2).all()
    means = gate_values(inputs, bound).mean(0)
    assert (means > lower - 1e-4).all()
    assert torch.allclose(means[0], lower[0], atol=1e-3)
    assert error(layer, target, free) < error(layer, target, bound) < error(layer, target, start)


@pytest.mark.parametrize("lowest", [0.02, 0.5, 0.9])
def test_rise_takes_the_mean_to_the_bound_and_not_further(lowest):
    logits = 3 * torch.randn(500, generator=torch.Generator().manual_seed(0)) - 9
    rise = rise_to_mean(logits, lowest)
    assert torch.sigmoid(logits + rise).mean().item() == pytest.approx(lowest, abs=1e-5)
    assert rise > 0
    assert rise_to_mean(logits + rise + 0.1, lowest) == 0


def test_branch_without_output_keeps_its_gates(layer):
    inputs, outputs, weight = layer
    outputs[:, 0] = 0
    start = constant_logits(torch.full((BRANCHES, HEADS), 0.4))
    found = fit_gates(inputs, outputs, weight, torch.randn(POSITIONS, HIDDEN), start, UNBOUND)
    assert torch.equal(found[0], start[0])
    assert not torch.equal(found[1], start[1])


@pytest.mark.parametrize("ridge", [0.003, 0.3])
def test_ridge_regression_is_that_of_the_normal_equations(ridge):
    """Unequal columns, one far larger than the rest, and weights over four orders of magnitude; float64 beside it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 20, generator=generator) * torch.logspace(0, 1.5, 20)
    wanted, weights = torch.randn(500, generator=generator), 10 ** (4 * torch.rand(500, generator=generator))
    found = RidgeRegression(inputs, ridge).solve(wanted, weights, iterations=60)
    x, y, w = inputs.double(), wanted.double(), (weights / weights.mean()).double()
    gram = (x * w[:, None]).T @ x
    gram += ridge * gram.diagonal().mean() * torch.eye(20)
    expected = torch.linalg.solve(gram, x.T @ (w * y))
    assert (found - expected).norm() < 1e-4 * expected.norm()
    few = RidgeRegression(inputs, ridge).solve(wanted, weights)
    assert (few - expected).norm() < 0.05 * expected.norm()
