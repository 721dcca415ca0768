"""Which layers stay full: the regular rule of the paper, an explicit list, or the least measured damage."""

import math
import operator
from collections.abc import Callable, Sequence

import torch

from hysparse_hf.modeling.configuration_hysparse import regular_layer_plan


def parse_ratio(ratio: str) -> int:
    """Sparse layers per full layer of a ratio such as `"1:3"`.

    Raises:
        ValueError: anything but `1:N` with N at least 0.
    """
    full, _, sparse = str(ratio).partition(":")
    if full.strip() != "1" or not sparse.strip().isdecimal():
        raise ValueError(
            f"`ratio` must read 1:N (one full layer, then N sparse ones), got {ratio!r}; use for example '1:3'."
        )
    return int(sparse)


def layer_plan(plan: str | Sequence[int] | None, num_layers: int, sparse_layers_per_full: int) -> list[str]:
    """The kind of every layer, `"full"` or `"sparse"`.

    Args:
        plan (`str` or `Sequence[int]`, *optional*): the full layers, as integers or as `"0,3,8"`; `None` or
            `"regular"` for the regular plan.
        num_layers (`int`): layers of the source.
        sparse_layers_per_full (`int`): N of the 1:N ratio; only read by the regular plan.
    Raises:
        ValueError: no list of layers, a layer that the source lacks, a layer listed twice, or layer 0 missing.
    """
    if plan is None or plan == "regular":
        return regular_layer_plan(num_layers, sparse_layers_per_full)
    full = _listed(plan)
    outside = sorted({layer for layer in full if not 0 <= layer < num_layers})
    if outside:
        raise ValueError(
            f"`plan` must list layers of the source (0 to {num_layers - 1}), got {outside}; leave them out."
        )
    repeated = sorted({layer for layer in full if full.count(layer) > 1})
    if repeated:
        raise ValueError(f"`plan` must list each full layer once, got {repeated} again; remove the repetition.")
    if 0 not in full:
        raise ValueError(
            f"`plan` must include layer 0, got {sorted(full)}; a sparse layer reads the full layer before it, so "
            "the first layer is always full."
        )
    return ["full" if layer in full else "sparse" for layer in range(num_layers)]


def _listed(plan: str | Sequence[int]) -> list[int]:
    parts = plan.split(",") if isinstance(plan, str) else plan
    try:
        return [int(part) if isinstance(part, str) else operator.index(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`plan` must be 'auto', 'regular' or a list of full layers such as 0,3,8, got {plan!r}; correct it."
        ) from error


def measured_layer_plan(damage: torch.Tensor, num_full: int, longest_run: int) -> list[str]:
    """The plan with the least damage: the best one if damages only added up, then exchanges as long as they help.

    Args:
        damage (`torch.Tensor`): `(layers, layers)`, symmetric; making a set of layers sparse costs the sum over the
            set's rows and columns.
        num_full (`int`): full layers, layer 0 among them.
        longest_run (`int`): sparse layers in a row, at most.
    Raises:
        ValueError: so few full layers cannot keep all runs that short.
    """
    check_run(len(damage), num_full, longest_run)
    costs = damage.double().tolist()
    alone = [row[i] for i, row in enumerate(costs)]
    full = _best_if_additive(lambda start, end: sum(alone[start + 1 : end]), len(costs), num_full, longest_run)
    lowest = _cost(costs, full)
    improved = True
    while improved:
        improved = False
        for leaving in full - {0}:
            for entering in set(range(len(costs))) - full:
                candidate = full - {leaving} | {entering}
                if _longest_run(candidate, len(costs)) <= longest_run and _cost(costs, candidate) < lowest:
                    full, lowest, improved = candidate, _cost(costs, candidate), True
                    break
            if improved:
                break
    return ["full" if layer in full else "sparse" for layer in range(len(costs))]


def check_run(num_layers: int, num_full: int, longest_run: int) -> None:
    """Raise `ValueError` if so few full layers leave more than `longest_run` sparse layers in a row."""
    shortest = math.ceil((num_layers - num_full) / num_full)
    if longest_run < shortest:
        raise ValueError(
            f"`max_sparse_run` must be at least {shortest} for {num_full} full layers of {num_layers}, got "
            f"{longest_run}; raise it, or give a `ratio` with more full layers."
        )


def reuse_layer_plan(damage: torch.Tensor, num_full: int, longest_run: int) -> list[str]:
    """The plan with the least sum of what each sparse layer loses by reading the choice of the full one before it.

    Args:
        damage (`torch.Tensor`): `(layers, layers)`, entry f, l of layer l reading what layer f chooses; only entries
            with l - f from 1 to `longest_run` are read.
        num_full, longest_run (`int`): as in `measured_layer_plan`.
    Raises:
        ValueError: so few full layers cannot keep all runs that short.
    """
    check_run(len(damage), num_full, longest_run)
    costs = damage.double().tolist()
    full = _best_if_additive(lambda start, end: sum(costs[start][start + 1 : end]), len(costs), num_full, longest_run)
    return ["full" if layer in full else "sparse" for layer in range(len(costs))]


def _best_if_additive(
    cost_of_run: Callable[[int, int], float], layers: int, num_full: int, longest_run: int
) -> set[int]:
    """Full layers that leave the cheapest others sparse; dynamic programming over the last full layer.

    `cost_of_run(start, end)` is that of all sparse layers between the full layer `start` and the next one, `end`.
    """
    # After layer i as the n-th full one: cost of the sparse layers before it, and the full ones.
    best: dict[int, tuple[float, set[int]]] = {0: (0.0, {0})}
    for _ in range(num_full - 1):
        following: dict[int, tuple[float, set[int]]] = {}
        for last, (cost, full) in best.items():
            for layer in range(last + 1, min(last + longest_run + 2, layers)):
                total = cost + cost_of_run(last, layer)
                if layer not in following or total < following[layer][0]:
                    following[layer] = total, full | {layer}
        best = following
    ends = [
        (cost + cost_of_run(last, layers), full)
        for last, (cost, full) in best.items()
        if layers - 1 - last <= longest_run
    ]
    return min(ends, key=lambda end: (end[0], sorted(end[1])))[1]


def longest_run_of(plan: list[str]) -> int:
    """How many sparse layers a plan has in a row, at most."""
    return _longest_run({layer for layer, kind in enumerate(plan) if kind == "full"}, len(plan))


def _cost(costs: list[list[float]], full: set[int]) -> float:
    sparse = [layer for layer in range(len(costs)) if layer not in full]
    return sum(costs[i][j] for i in sparse for j in sparse)


def _longest_run(full: set[int], layers: int) -> int:
    ordered = [*sorted(full), layers]
    return max(after - before - 1 for before, after in zip(ordered, ordered[1:], strict=False))
