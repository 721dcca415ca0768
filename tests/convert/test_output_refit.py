"""The ridge refit of the output projection: the minimum of what it says it minimises."""

import pytest
import torch

from hysparse_hf.conversion.output_refit import ridge_towards


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((400, 12), (400, 7), (7, 12))]


def objective(weight, inputs, target, prior, ridge):
    inputs, target, prior = (part.double() for part in (inputs, target, prior))
    penalty = ridge * inputs.square().sum(0).mean()
    return (inputs @ weight.T - target).square().sum() + penalty * (weight - prior).square().sum()


@pytest.mark.parametrize("ridge", [0.003, 0.03, 3.0])
def test_refit_is_the_minimum(problem, ridge):
    """In float64 the gradient of the objective vanishes there."""
    weight = ridge_towards(*problem, ridge=ridge).double().requires_grad_(True)
    inputs, target, prior = problem
    objective(weight, inputs, target, prior, ridge).backward()
    start = prior.double().requires_grad_(True)
    objective(start, inputs, target, prior, ridge).backward()
    assert weight.grad.abs().max() < 1e-5 * start.grad.abs().max()


def test_planted_weight_is_found(problem):
    inputs, _, prior = problem
    planted = torch.randn(7, 12)
    found = ridge_towards(inputs, inputs @ planted.T, prior, ridge=1e-6)
    assert torch.allclose(found, planted, atol=1e-4)


def test_input_that_says_nothing_leaves_the_prior(problem):
    """A channel that is never active keeps the source's weights."""
    inputs, target, prior = problem
    inputs[:, 3] = 0
    assert torch.allclose(ridge_towards(inputs, target, prior)[:, 3], prior[:, 3], atol=1e-6)
