"""What a dense checkpoint can be converted to: one row per generation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.configuration_hysparse2 import HySparse2Config
from hysparse_hf.modeling.modeling_hysparse import HySparseForCausalLM
from hysparse_hf.modeling.modeling_hysparse2 import HySparse2ForCausalLM

from .halves import half_plans
from .plan import layer_plan
from .source import read_json


class Architecture(NamedTuple):
    """One generation.

    Args:
        model (`type`): its class with a language modelling head; names configuration and Auto classes.
        plan_fields (`Callable`): fields of the configuration that say the plan, from the `plan` option, the number of
            layers, and the sparse layers per full one.
        plan_option (`Callable`): of a configuration, the `plan` option that asks for its plan.
        groups (`Callable`): of a configuration, per layer the group that its error counts to; of a layer that reads
            another's selection, or of that one (0), its place behind that one.
        longest_read (`Callable`): of a configuration, the length up to which a selection leaves nothing out.
        can_keep_kv (`bool`): whether keys and values can be kept (`keep_kv`).
    """

    model: type[HySparseForCausalLM]
    plan_fields: Callable[[Any, int, int], dict[str, list[str]]]
    plan_option: Callable[[Any], str]
    groups: Callable[[Any], list[str]]
    longest_read: Callable[[Any], int]
    can_keep_kv: bool


def _listed(plan: list[str], first: int = 0) -> str:
    return ",".join(str(layer) for layer, kind in enumerate(plan, first) if kind == "full")


def _places(config: HySparseConfig) -> list[str]:
    return [str(0 if donor is None else index - donor) for index, donor in enumerate(config.donor_plan)]


def _places_in_halves(config: HySparse2Config) -> list[str]:
    border = len(config.self_layer_plan)
    return [f"self {kind}" for kind in config.self_layer_plan] + _places(config)[border:]


# Model type of the configuration -> row.
ARCHITECTURES = {
    "hysparse": Architecture(
        HySparseForCausalLM,
        lambda *options: {"layer_plan": layer_plan(*options)},
        plan_option=lambda config: _listed(config.layer_plan),
        groups=_places,
        longest_read=lambda config: config.oracle_budget,
        can_keep_kv=True,
    ),
    "hysparse2": Architecture(
        HySparse2ForCausalLM,
        half_plans,
        plan_option=lambda config: "/".join(
            (_listed(config.self_layer_plan), _listed(config.cross_layer_plan, len(config.self_layer_plan)))
        ),
        groups=_places_in_halves,
        longest_read=lambda config: config.oracle_budget + config.sliding_window,
        can_keep_kv=False,
    ),
}


def model_class(config: HySparseConfig) -> type[HySparseForCausalLM]:
    """The class, with a language modelling head, that a configuration builds."""
    return ARCHITECTURES[config.model_type].model


def read_config(folder: str | Path) -> HySparseConfig:
    """The configuration of a converted checkpoint.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: the folder holds a model of another kind.
    """
    kind = read_json(Path(folder) / "config.json").get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"the checkpoint must be a converted one, of type {' or '.join(ARCHITECTURES)}, got {kind!r}; name the "
            "folder that `hysparse convert` wrote; the source, where it is asked for, comes first."
        )
    return ARCHITECTURES[kind].model.config_class.from_pretrained(folder)


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """The content of a converted checkpoint's `provenance.json`; empty where there is none."""
    path = Path(folder) / "provenance.json"
    return read_json(path) if path.exists() else {}
