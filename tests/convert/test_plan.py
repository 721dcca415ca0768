"""Which layers stay full."""

import itertools

import pytest
import torch

from hysparse_hf.conversion.plan import layer_plan, measured_layer_plan, parse_ratio


def full_layers(plan):
    return [index for index, kind in enumerate(plan) if kind == "full"]


@pytest.mark.parametrize(
    ("layers", "ratio", "expected"),
    [(36, "1:3", [0, 4, 8, 12, 16, 20, 24, 28, 32, 35]), (49, "1:11", [0, 12, 24, 36, 48]), (3, "1:0", [0, 1, 2])],
)
@pytest.mark.parametrize("plan", [None, "regular"])
def test_regular_plan_follows_the_ratio(layers, ratio, expected, plan):
    assert full_layers(layer_plan(plan, layers, parse_ratio(ratio))) == expected


@pytest.mark.parametrize("plan", ["0,3,8", "0, 3, 8", [0, 3, 8], (8, 0, 3)])
def test_explicit_plan(plan):
    assert full_layers(layer_plan(plan, 10, 3)) == [0, 3, 8]


@pytest.mark.parametrize("plan", ["", "0,x", [0, None], "0,,3", [0, 2.5]])
def test_what_is_no_list_is_refused(plan):
    with pytest.raises(ValueError, match="'auto', 'regular' or a list of full layers"):
        layer_plan(plan, 10, 3)


@pytest.mark.parametrize("ratio", ["3", "2:3", "1:", "1:-1", "1:x", ""])
def test_what_is_no_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="must read 1:N"):
        parse_ratio(ratio)


def runs_of(full, layers):
    ordered = [*sorted(full), layers]
    return [after - before - 1 for before, after in itertools.pairwise(ordered)]


def best_plan(damage, num_full, longest_run):
    """Every plan tried."""
    layers = len(damage)
    plans = ({0, *rest} for rest in itertools.combinations(range(1, layers), num_full - 1))
    allowed = [full for full in plans if max(runs_of(full, layers)) <= longest_run]
    return min(allowed, key=lambda full: cost_of(damage, full))


def cost_of(damage, full):
    sparse = [layer for layer in range(len(damage)) if layer not in full]
    return damage[sparse][:, sparse].sum().item()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_full", "longest_run"), [(3, 4), (4, 3), (4, 9)])
def test_damage_that_adds_up_gives_the_best_plan(seed, num_full, longest_run):
    damage = torch.rand(11, generator=torch.Generator().manual_seed(seed)).diag().double()
    found = full_layers(measured_layer_plan(damage, num_full, longest_run))
    assert found == sorted(best_plan(damage, num_full, longest_run))


@pytest.mark.parametrize("seed", range(5))
def test_no_exchange_improves_a_measured_plan(seed):
    """Pairs count: the plan costs no more than the one that is best if damages only added up."""
    generator = torch.Generator().manual_seed(seed)
    errors = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    damage = errors @ errors.T
    full = set(full_layers(measured_layer_plan(damage, 4, 4)))
    cost = cost_of(damage, full)
    for leaving, entering in itertools.product(full - {0}, set(range(11)) - full):
        other = full - {leaving} | {entering}
        assert max(runs_of(other, 11)) > 4 or cost_of(damage, other) >= cost
    assert cost <= cost_of(damage, full_layers(measured_layer_plan(damage.diagonal().diag(), 4, 4)))


def test_errors_that_cancel_are_left_together():
    """Layers 1 and 2 undo each other's error; either one alone costs more than layer 3 does."""
    damage = torch.diag(torch.tensor([0.0, 5.0, 5.0, 1.0]))
    damage[1, 2] = damage[2, 1] = -4.9
    assert full_layers(measured_layer_plan(damage, 2, 2)) == [0, 3]


def test_runs_that_so_few_full_layers_cannot_break_are_refused():
    with pytest.raises(ValueError, match="`max_sparse_run` must be at least 3 for 3 full layers of 11, got 2"):
        measured_layer_plan(torch.eye(11), 3, 2)
