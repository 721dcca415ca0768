"""What a conversion measures and fits: one row per generation, beside the one in `architectures`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .bridge_fit import BridgedFittingPass, cross_fitted_layers
from .cross_fit import cross_tensor
from .damage import Damage, DamagePass
from .fit import FittingPass, fitted_layers, fitted_tensor
from .halves_damage import HalvesDamagePass, check_halves, measured_halves
from .layer_stream import ReadTarget
from .plan import check_run, longest_run_of, measured_layer_plan, reuse_layer_plan
from .reuse_damage import ReuseDamage, ReusePass


Windows = tuple[torch.Tensor, ...]


class Generation(NamedTuple):
    """One generation.

    Args:
        fit (`type`): the pass that gives layers their initial values.
        fitted_layers (`Callable`): of a configuration, which layers these are.
        fitted_tensor (`Callable`): a parameter by its name inside the layer, from the layer's values.
        choices (`Callable`): of a configuration, the plan of the layers among which an automatic one chooses.
        damage (`Callable`): the pass that measures what a plan costs, from configuration, mapped weights and windows,
            whether output projections are fitted, and the longest sparse run.
        measured_plan (`Callable`): fields of the configuration, from damage, configuration and longest sparse run.
        check_run (`Callable`): of configuration and longest sparse run, raises `ValueError` where no plan has it.
    """

    fit: type[FittingPass]
    fitted_layers: Callable[[Any], Sequence[int]]
    fitted_tensor: Callable[[str, Any, Any], torch.Tensor | None]
    choices: Callable[[Any], list[str]]
    damage: Callable[..., DamagePass | ReusePass]
    measured_plan: Callable[[Any, Any, int], dict[str, list[str]]]
    check_run: Callable[[Any, int], None]


def _all_layers(config: Any) -> list[str]:
    return config.layer_plan


def _self_decoder(config: Any) -> list[str]:
    return config.self_layer_plan


def _measured(damage: Damage, config: Any, longest_run: int) -> dict[str, list[str]]:
    return {"layer_plan": measured_layer_plan(damage.matrix, config.layer_plan.count("full"), longest_run)}


def _check(config: Any, longest_run: int) -> None:
    check_run(len(config.layer_plan), config.layer_plan.count("full"), longest_run)


def _reuse_measured(damage: ReuseDamage, config: Any, longest_run: int) -> dict[str, list[str]]:
    return {"layer_plan": reuse_layer_plan(damage.matrix, config.layer_plan.count("full"), longest_run)}


def _damage_pass(config: Any, read: ReadTarget, windows: Windows, *, refit: bool, longest_run: int) -> DamagePass:
    return DamagePass(config, read, windows, refit=refit)


def _halves_pass(config: Any, read: ReadTarget, windows: Windows, *, refit: bool, longest_run: int) -> DamagePass:
    return HalvesDamagePass(config, read, windows, refit=refit)


def _reuse_pass(config: Any, read: ReadTarget, windows: Windows, *, refit: bool, longest_run: int) -> ReusePass:
    # As far as the plan goes that stands in the place of the measured one, so that both can be compared.
    return ReusePass(config, read, windows, longest_run=max(longest_run, longest_run_of(config.layer_plan)))


# Model type of the configuration -> row.
GENERATIONS = {
    "hysparse": Generation(FittingPass, fitted_layers, fitted_tensor, _all_layers, _damage_pass, _measured, _check),
    "hysparse2": Generation(
        BridgedFittingPass,
        cross_fitted_layers,
        cross_tensor,
        _self_decoder,
        _halves_pass,
        measured_halves,
        check_halves,
    ),
}

# The mode without training: nothing is fitted, and what a layer loses depends on whose choice it reads.
REUSE = GENERATIONS["hysparse"]._replace(damage=_reuse_pass, measured_plan=_reuse_measured)
