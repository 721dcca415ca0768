"""The rungs between a dense model and its conversion, each a set of switches and a choice of weights.

0. dense: every layer attends to everything, over its own keys and values; the source's weights, by the exact map.
1. index reuse: sparse layers read only the blocks that their full layer chose, of their own keys and values; mapped
   weights.
2. fitted branches: they add their window, sinks and gates; both branches read the layer's own keys and values; the
   checkpoint's fitted weights.
3. shared keys and values: the global branch reads the full layer's. This is the converted model itself.

Rungs 0 and 1 have no gates and no sinks, and are rebuilt from the source, since the fit may have changed tensors that
the map copied (the output projections). Rungs 2 and 3 are the checkpoint as it lies on the disk, rung 2 with one
switch set. Each rung adds one thing to the one before it. The fit is made for rung 3, whose global gates are nearly
closed; on rung 2 the layer's own keys and values pass the same gates, so it may lie further from the source than
rung 3.

A checkpoint may itself be a lower rung: one whose sparse layers keep their own keys and values has no rung 3, and
without a window branch, sinks and gates it is rung 1.

The second generation has a ladder of its own:

0. dense: as above.
1. windows in the self-decoder, with their sinks, gates and output projections as fitted; the cross-decoder's layers
   read everything, of their own keys and values, with mapped weights.
2. selection: its sparse layers read the window and the tokens that their full layer chose, in one softmax, of their
   own keys and values.
3. shared keys and values: they read the full layer's, which it still makes of its own input.
4. bridge: the full layers make them of the self-decoder's states, with the weights that they have in the source.
5. fitted cross-decoder: its projections, sinks and gates too. This is the checkpoint as it lies on the disk.
6. early exit: only the rows whose logits are asked for run through the cross-decoder, which must change nothing.

Up to rung 4 what is new in the cross-decoder lets everything pass: gates are open, sinks take nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.configuration_hysparse2 import HySparse2Config
from hysparse_hf.modeling.modeling_hysparse import HySparseForCausalLM

from .architectures import model_class, read_config
from .faults import Source, checkpoint_map
from .key_map import OPERATIONS, layer_of, target_shapes
from .source import FolderSource


class Rung(NamedTuple):
    """One row: what is changed in the checkpoint's configuration, and whose weights are used.

    Args:
        number, name: as in the list above.
        switches (`dict`): fields of the configuration.
        fitted (`str`): which half has the checkpoint's own (fitted) weights; the rest has the source's.
        leaves_early (`bool`): whether the rows are run a few at a time, as far as each half has to.
    """

    number: int
    name: str
    switches: dict[str, Any]
    fitted: Literal["none", "self", "all"]
    leaves_early: bool = False


_NOTHING_NEW = {"gate_granularity": "none", "attention_sink": False}

LADDER = (
    Rung(0, "dense, rebuilt from the source", {"dense": True, **_NOTHING_NEW}, fitted="none"),
    Rung(
        1,
        "index reuse, own keys and values",
        {"share_full_kv": False, "window_branch": "none", **_NOTHING_NEW},
        fitted="none",
    ),
    Rung(2, "fitted sinks, gates and window", {"share_full_kv": False}, fitted="all"),
    Rung(3, "keys and values of the full layer", {}, fitted="all"),
)

BRIDGED_LADDER = (
    LADDER[0],
    Rung(
        1,
        "windows in the self-decoder, fitted",
        {"bridge": False, "share_full_kv": False, "selection": "all"},
        fitted="self",
    ),
    Rung(2, "selection, own keys and values", {"bridge": False, "share_full_kv": False}, fitted="self"),
    Rung(3, "keys and values of the full layer", {"bridge": False}, fitted="self"),
    Rung(4, "bridge, projections as in the source", {}, fitted="self"),
    Rung(5, "fitted cross-decoder", {}, fitted="all"),
    Rung(6, "early exit", {}, fitted="all", leaves_early=True),
)

# What lets everything pass: a sigmoid of 30 is 1 in float32, and a sink of -10,000 takes no mass.
OPEN = {"gate_global": 30.0, "gate_local": 30.0, "sink_global": -1e4, "sink_local": -1e4, "zero": 0.0}

# The training-free mode: with each layer's own keys and values there is nothing new, so nothing that needs training.
INDEX_REUSE = LADDER[1]


def rungs_of(config: HySparseConfig) -> tuple[Rung, ...]:
    """The rungs up to the one that a checkpoint of `config` is.

    Raises:
        ValueError: the configuration is that of a control experiment, which is no rung.
    """
    return _LADDERS[config.model_type](config)


def _first_generation(config: HySparseConfig) -> tuple[Rung, ...]:
    if config.dense or not config.share_oracle or config.window_branch not in ("own", "none"):
        raise ValueError(
            "a ladder leads to a converted model, with `dense=False`, `share_oracle=True` and `window_branch` 'own' "
            f"or 'none', got {config.dense}, {config.share_oracle} and {config.window_branch!r}; use `compare`."
        )
    if config.share_full_kv:
        return LADDER
    is_mapped = all(getattr(config, field) == value for field, value in INDEX_REUSE.switches.items())
    return LADDER[:2] if is_mapped else LADDER[:3]


def _second_generation(config: HySparse2Config) -> tuple[Rung, ...]:
    if not config.leaves_early or not (config.share_full_kv and config.share_oracle) or config.selection != "token":
        raise ValueError(
            "a ladder leads to a converted model, with a cross-decoder, `dense=False`, `bridge=True`, "
            "`recent_window='forced'`, `share_full_kv=True`, `share_oracle=True` and `selection='token'`, got "
            f"{config.cross_layer_plan}, {config.dense}, {config.bridge}, {config.recent_window!r}, "
            f"{config.share_full_kv}, {config.share_oracle} and {config.selection!r}; use `compare`."
        )
    return BRIDGED_LADDER


_LADDERS: dict[str, Callable[[Any], tuple[Rung, ...]]] = {
    "hysparse": _first_generation,
    "hysparse2": _second_generation,
}


def rung_config(rung: Rung, config: HySparseConfig) -> HySparseConfig:
    """The configuration of a rung on the ladder to a checkpoint of `config`."""
    return type(config)(**{**config.to_dict(), **rung.switches})


def load_rung(rung: Rung, source: Source, out: str | Path, dtype: torch.dtype = torch.float32) -> HySparseForCausalLM:
    """A rung as a model, in evaluation mode.

    Args:
        rung (`Rung`): a row of a ladder.
        source (`FolderSource` or `GgufSource`): the dense checkpoint, read where the rung has mapped weights.
        out (`str` or `Path`): the converted checkpoint, which gives the configuration and the fitted weights.
        dtype (`torch.dtype`): of the weights.
    """
    config: Any = read_config(out)
    model = model_class(config)
    if rung.fitted == "all":
        return model.from_pretrained(out, dtype=dtype, **rung.switches).eval()
    config = rung_config(rung, config)
    state = _mapped_state(source, config)
    if rung.fitted == "self":
        converted, layers = FolderSource(Path(out)), range(len(config.self_layer_plan))
        state |= {key: converted.tensor(key) for key in state if layer_of(key) in layers}
    return model.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


def _mapped_state(source: Source, config: HySparseConfig) -> dict[str, torch.Tensor]:
    """The source's tensors by the exact map; what is new lets everything pass."""
    key_map, shapes = checkpoint_map(source, config), target_shapes(config, source.tensors)
    entries = {entry.source: entry for entry in key_map.entries}
    state = {key: torch.full(shapes[key], OPEN[init]) for key, init in key_map.new.items()}
    for shard in source.shards:
        for key, tensor in source.tensors_of_shard(shard):
            target = entries[key].target
            if target is not None:
                state[target] = OPERATIONS[entries[key].operation].apply(tensor)
    return state
