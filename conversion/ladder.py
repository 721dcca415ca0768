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
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.modeling_hysparse import HySparseForCausalLM

from .architectures import model_class, read_config
from .faults import Source, checkpoint_map
from .key_map import OPERATIONS


class Rung(NamedTuple):
    """One row: what is changed in the checkpoint's configuration, and whether its own (fitted) weights are used."""

    number: int
    name: str
    switches: dict[str, Any]
    fitted: bool


_NOTHING_NEW = {"gate_granularity": "none", "attention_sink": False}

LADDER = (
    Rung(0, "dense, rebuilt from the source", {"dense": True, **_NOTHING_NEW}, fitted=False),
    Rung(
        1,
        "index reuse, own keys and values",
        {"share_full_kv": False, "window_branch": "none", **_NOTHING_NEW},
        fitted=False,
    ),
    Rung(2, "fitted sinks, gates and window", {"share_full_kv": False}, fitted=True),
    Rung(3, "keys and values of the full layer", {}, fitted=True),
)

# The training-free mode: with each layer's own keys and values there is nothing new, so nothing that needs training.
INDEX_REUSE = LADDER[1]


def rungs_of(config: HySparseConfig) -> tuple[Rung, ...]:
    """The rungs up to the one that a checkpoint of `config` is.

    Raises:
        ValueError: the configuration is that of a control experiment, which is no rung.
    """
    if config.dense or not config.share_oracle or config.window_branch not in ("own", "none"):
        raise ValueError(
            "a ladder leads to a converted model, with `dense=False`, `share_oracle=True` and `window_branch` 'own' "
            f"or 'none', got {config.dense}, {config.share_oracle} and {config.window_branch!r}; use `compare`."
        )
    if config.share_full_kv:
        return LADDER
    is_mapped = all(getattr(config, field) == value for field, value in INDEX_REUSE.switches.items())
    return LADDER[:2] if is_mapped else LADDER[:3]


def rung_config(rung: Rung, config: HySparseConfig) -> HySparseConfig:
    """The configuration of a rung on the ladder to a checkpoint of `config`."""
    return type(config)(**{**config.to_dict(), **rung.switches})


def load_rung(rung: Rung, source: Source, out: str | Path, dtype: torch.dtype = torch.float32) -> HySparseForCausalLM:
    """A rung as a model, in evaluation mode.

    Args:
        rung (`Rung`): a row of `LADDER`.
        source (`FolderSource` or `GgufSource`): the dense checkpoint, read where the rung has mapped weights.
        out (`str` or `Path`): the converted checkpoint, which gives the configuration and the fitted weights.
        dtype (`torch.dtype`): of the weights.
    """
    config = read_config(out)
    model = model_class(config)
    if rung.fitted:
        return model.from_pretrained(out, dtype=dtype, **rung.switches).eval()
    config = rung_config(rung, config)
    key_map = checkpoint_map(source, config)
    assert not key_map.new, f"a mapped rung has no new parameters, got {sorted(key_map.new)}"
    entries = {entry.source: entry for entry in key_map.entries}
    state = {
        entries[key].target: OPERATIONS[entries[key].operation].apply(tensor)
        for shard in source.shards
        for key, tensor in source.tensors_of_shard(shard)
        if entries[key].target is not None
    }
    return model.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()
