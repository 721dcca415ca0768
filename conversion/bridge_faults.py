"""Is each layer of a converted checkpoint what it was converted as, and reads the states it was made for?

`provenance.json` says the plan, and whose states the cross-decoder's projections read. `plan_faults` compares
config.json with it, and `bridge_faults` runs the model and compares what the projections are given with what that
layer reads, whatever the code in between.
"""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig

from .architectures import read_config, read_provenance


PROJECTION = "model.layers.{}.self_attn.k_proj"
# What a layer's own projections read, the bridge's other end reads too.
READER = "model.layers.{}.self_attn.q_proj"


def bridge_record(config: HySparseConfig) -> dict[str, int]:
    """Layer whose keys and values are made of another's input -> that layer; empty for the first generation."""
    plan = getattr(config, "bridge_plan", [])
    return {str(layer): source for layer, source in enumerate(plan) if source is not None}


def _recorded(out: str | Path) -> dict[str, int]:
    return read_provenance(out).get("bridge", {})


def plan_faults(out: str | Path) -> list[str]:
    """Compare config.json with `provenance.json`.

    Args:
        out (`str` or `Path`): the converted checkpoint.
    Returns:
        `list[str]`: one line per layer that is of another kind than it was converted as, and per layer that reads
        other states than it was made for, beginning with its projection of keys.
    """
    recorded, config = _recorded(out), read_config(out)
    found = bridge_record(config)
    is_normed = not recorded or config.bridge_source == "normed"
    faults = [
        f"model.layers.{layer}: is {kind or 'not there'} by config.json, and was made {was}, by provenance.json"
        for layer, (kind, was) in enumerate(zip_longest(config.layer_plan, read_provenance(out).get("plan", [])))
        if was not in (kind, None)
    ]
    return faults + [
        f"{PROJECTION.format(layer)}.weight: reads {_states(found.get(layer), is_normed)} by config.json, and was "
        f"made to read {_states(source, True)}, by provenance.json"
        for layer, source in recorded.items()
        if not is_normed or found.get(layer) != source
    ]


def _states(layer: int | str | None, is_normed: bool) -> str:
    if layer is None:
        return "its own input"
    return f"what layer {layer} reads" if is_normed else f"the residual stream before layer {layer}"


@torch.no_grad()
def bridge_faults(model: Any, out: str | Path, window: torch.Tensor) -> list[str]:
    """Run a model and compare what the bridged projections are given with what the recorded layer reads.

    Args:
        model (`HySparse2ForCausalLM`): a rung of the checkpoint; where its bridge is off there is nothing to compare.
        out (`str` or `Path`): the converted checkpoint, whose `provenance.json` says which layer it is.
        window (`torch.Tensor`): token ids `(length,)`.
    Returns:
        `list[str]`: one line per wrong layer, beginning with its projection of keys.
    """
    if not bridge_record(model.config):
        return []
    pairs = {PROJECTION.format(layer): READER.format(source) for layer, source in _recorded(out).items()}
    modules, given = dict(model.named_modules()), {}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple) -> None:
            given[name] = inputs[0]

        return hook

    names = {name for pair in pairs.items() for name in pair}
    handles = [modules[name].register_forward_pre_hook(keep(name)) for name in names]
    try:
        model.base_model(input_ids=window[None].to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [
        f"{name}: is given other states than {other} reads"
        for name, other in pairs.items()
        if not torch.equal(given[name], given[other])
    ]
