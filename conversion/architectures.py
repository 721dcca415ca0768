"""What a dense checkpoint can be converted to: one row per generation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.modeling_hysparse import HySparseForCausalLM
from hysparse_hf.modeling.modeling_hysparse2 import HySparse2ForCausalLM

from .halves import half_plans
from .plan import layer_plan


class Architecture(NamedTuple):
    """One generation.

    Args:
        model (`type`): its class with a language modelling head; names configuration and Auto classes.
        plan_fields (`Callable`): fields of the configuration that say the plan, from the `plan` option, the number of
            layers, and the sparse layers per full one.
        can_measure (`bool`): whether a plan can be measured, and keys and values can be kept (`keep_kv`).
    """

    model: type[HySparseForCausalLM]
    plan_fields: Callable[[Any, int, int], dict[str, list[str]]]
    can_measure: bool


# Model type of the configuration -> row.
ARCHITECTURES = {
    "hysparse": Architecture(
        HySparseForCausalLM, lambda *options: {"layer_plan": layer_plan(*options)}, can_measure=True
    ),
    "hysparse2": Architecture(HySparse2ForCausalLM, half_plans, can_measure=False),
}


def model_class(config: HySparseConfig) -> type[HySparseForCausalLM]:
    """The class, with a language modelling head, that a configuration builds."""
    return ARCHITECTURES[config.model_type].model


def read_config(folder: str | Path) -> HySparseConfig:
    """The configuration of a converted checkpoint.

    Raises:
        ValueError: the folder holds a model of another kind.
    """
    kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"the checkpoint must be a converted one, of type {' or '.join(ARCHITECTURES)}, got {kind!r}; name the "
            "folder that `hysparse convert` wrote."
        )
    return ARCHITECTURES[kind].model.config_class.from_pretrained(folder)
