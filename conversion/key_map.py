"""Which source tensor becomes which tensor of ours: tables, and the map that they give for one checkpoint.

The map is exact. Every source key is used once or dropped by a rule that says why; every target key is filled once or
is a new parameter with a named initial value; `source_tensor` is the inverse.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig

from .architectures import model_class


# Raised whenever a table changes what a conversion writes.
MAP_VERSION = 1


class Operation(NamedTuple):
    """How a tensor changes on its way, and back."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    invert: Callable[[torch.Tensor], torch.Tensor]


OPERATIONS = {"copy": Operation(apply=lambda tensor: tensor, invert=lambda tensor: tensor)}


class Rule(NamedTuple):
    """One row: names with `{layer}`, `{expert}` and `{part}` open; target None drops the tensor for `reason`."""

    source: str
    target: str | None
    operation: str = "copy"
    reason: str = ""


def _kept(name: str) -> Rule:
    return Rule(name, name)


# Llama and its descendants name their tensors as we do. A row that finds nothing is no error by itself: biases and
# norms of queries and keys exist where the configuration says so, and a target that stays empty is an error.
DENSE_DECODER = (
    _kept("model.embed_tokens.weight"),
    _kept("model.layers.{layer}.self_attn.q_proj.{part}"),
    _kept("model.layers.{layer}.self_attn.k_proj.{part}"),
    _kept("model.layers.{layer}.self_attn.v_proj.{part}"),
    _kept("model.layers.{layer}.self_attn.o_proj.{part}"),
    _kept("model.layers.{layer}.self_attn.q_norm.weight"),
    _kept("model.layers.{layer}.self_attn.k_norm.weight"),
    _kept("model.layers.{layer}.mlp.gate_proj.{part}"),
    _kept("model.layers.{layer}.mlp.up_proj.{part}"),
    _kept("model.layers.{layer}.mlp.down_proj.{part}"),
    _kept("model.layers.{layer}.input_layernorm.weight"),
    _kept("model.layers.{layer}.post_attention_layernorm.weight"),
    _kept("model.norm.weight"),
    _kept("lm_head.weight"),
    Rule(
        "model.layers.{layer}.self_attn.rotary_emb.inv_freq", None, reason="computed from the configuration when built"
    ),
    Rule("model.rotary_emb.inv_freq", None, reason="computed from the configuration when built"),
)

# An expert may lie by itself or in the fused tensors of its layer, and stays as it lies: the model loads both.
MIXTURE_OF_EXPERTS = (
    *DENSE_DECODER,
    _kept("model.layers.{layer}.mlp.gate.weight"),
    _kept("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"),
    _kept("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
    _kept("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"),
    _kept("model.layers.{layer}.mlp.experts.gate_up_proj"),
    _kept("model.layers.{layer}.mlp.experts.down_proj"),
    _kept("model.layers.{layer}.mlp.shared_expert.gate_proj.weight"),
    _kept("model.layers.{layer}.mlp.shared_expert.up_proj.weight"),
    _kept("model.layers.{layer}.mlp.shared_expert.down_proj.weight"),
    _kept("model.layers.{layer}.mlp.shared_expert_gate.weight"),
    # Mixtral has names of its own.
    Rule("model.layers.{layer}.block_sparse_moe.gate.weight", "model.layers.{layer}.mlp.gate.weight"),
    Rule(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    ),
    Rule(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ),
    Rule(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    ),
)

KEY_MAPS = {"dense_decoder": DENSE_DECODER, "mixture_of_experts": MIXTURE_OF_EXPERTS}

# What a layer without keys and values of its own has no place for.
KEYS_AND_VALUES = re.compile(r"model\.layers\.(?P<layer>\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")
KEYLESS_REASON = "the layer reads the keys and values of the full layer before it"

# Fused tensor of a layer's experts -> what each expert's part of it is made of, by rows.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

# Parameters without a source -> name of the initial value (see `fit.naive_value`).
NEW_PARAMETERS = {
    "model.layers.{layer}.self_attn.gate_global_proj.weight": "zero",
    "model.layers.{layer}.self_attn.gate_global_proj.bias": "gate_global",
    "model.layers.{layer}.self_attn.gate_local_proj.weight": "zero",
    "model.layers.{layer}.self_attn.gate_local_proj.bias": "gate_local",
    "model.layers.{layer}.self_attn.sink_global": "sink_global",
    "model.layers.{layer}.self_attn.sink_local": "sink_local",
}

# Target -> target that it shares storage with when the embeddings are tied.
TIED_TARGETS = {"lm_head.weight": "model.embed_tokens.weight"}

_OPEN = {"{layer}": r"(?P<layer>\d+)", "{expert}": r"(?P<expert>\d+)", "{part}": r"(?P<part>weight|bias)"}


@dataclass(frozen=True)
class Entry:
    """One source tensor of one checkpoint: its own name, and its target or the reason why it has none."""

    source: str
    target: str | None
    operation: str
    reason: str = ""


@dataclass(frozen=True)
class KeyMap:
    """The map of one checkpoint: `entries` in the source's order, `new` target -> name of its initial value."""

    entries: tuple[Entry, ...]
    new: dict[str, str]

    @property
    def dropped(self) -> dict[str, str]:
        """Source key -> reason, of the tensors without a target."""
        return {entry.source: entry.reason for entry in self.entries if entry.target is None}

    def source_tensor(self, entry: Entry, target: torch.Tensor) -> torch.Tensor:
        """The inverse: the source's tensor from its target's."""
        return OPERATIONS[entry.operation].invert(target)


def build_key_map(
    rules: Iterable[Rule],
    sources: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, tuple[int, ...]],
    *,
    prefixes: tuple[str, ...] = ("model.",),
    tied: bool = False,
    keyless: Collection[int] = (),
) -> KeyMap:
    """Assign every source key and account for every target key.

    Args:
        rules (`Iterable[Rule]`): a table of `KEY_MAPS`.
        sources (`Mapping`): source key -> shape.
        targets (`Mapping`): target key -> shape; of tied keys only the one that is stored.
        prefixes (`tuple[str, ...]`): spellings of the prefix that the rules write as `model.`.
        tied (`bool`): the head shares the embedding; a head in the source is then redundant.
        keyless (`Collection[int]`): layers whose own keys and values are dropped, as from `keyless_layers`.
    Raises:
        ValueError: a source key that no rule knows or that has no place in the target, a target key that stays
            empty, two sources for one target, or a shape that differs; all such keys are named.
    """
    compiled = [(_pattern(rule.source), rule) for rule in rules]
    compiled_new = [(_pattern(name), init) for name, init in NEW_PARAMETERS.items()]
    prefix = _prefix_of(sources, prefixes)
    entries: list[Entry] = []
    faults: list[str] = []
    filled: dict[str, str] = {}
    for key, shape in sources.items():
        entry = _entry(key, "model." + key.removeprefix(prefix) if _is_inside(key, prefix) else key, compiled)
        if entry is None:
            faults.append(f"{key} {_text(shape)} is in the source and no rule knows it")
            continue
        if tied and entry.target in TIED_TARGETS:
            entry = Entry(key, None, entry.operation, f"tied: equals {TIED_TARGETS[entry.target]}")
        elif entry.target is not None and is_keyless(entry.target, keyless):
            entry = Entry(key, None, entry.operation, KEYLESS_REASON)
        elif entry.target is not None:
            faults += _faults_of(entry, shape, targets, filled)
        entries.append(entry)
    new = {}
    for target, shape in targets.items():
        init = next((init for pattern, init in compiled_new if pattern.fullmatch(target)), None)
        if target in filled:
            continue
        if init is not None:
            new[target] = init
        else:
            faults.append(f"{target} {_text(shape)} is missing in the source")
    if faults:
        raise ValueError(
            "the source's tensors must be those that its config.json describes, got:\n  "
            + "\n  ".join(faults)
            + "\nUse a complete checkpoint, or correct config.json (biases, tied embeddings, number of layers)."
        )
    return KeyMap(tuple(entries), new)


def keyless_layers(config: HySparseConfig) -> set[int]:
    """Layers that have no keys and values of their own."""
    return {index for index, cached in enumerate(config.cache_plan) if cached == "none"}


def is_keyless(target: str, layers: Collection[int]) -> bool:
    """Whether a target key makes keys or values of a layer among `layers`."""
    match = KEYS_AND_VALUES.fullmatch(target)
    return match is not None and int(match["layer"]) in layers


def layer_of(target: str) -> int | None:
    """The layer that a target key belongs to; None outside the layers."""
    match = re.match(r"model\.layers\.(\d+)\.", target)
    return int(match[1]) if match else None


def _prefix_of(sources: Iterable[str], prefixes: tuple[str, ...]) -> str:
    """The spelling in use: the one that stands before the layers."""
    keys = list(sources)
    return next((p for p in prefixes if any(key.startswith(f"{p}layers.") for key in keys)), prefixes[0])


def _is_inside(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and not key.startswith("lm_head.")


def _entry(key: str, canonical: str, rules: list[tuple[re.Pattern, Rule]]) -> Entry | None:
    for pattern, rule in rules:
        match = pattern.fullmatch(canonical)
        if match:
            target = None if rule.target is None else rule.target.format(**match.groupdict())
            return Entry(key, target, rule.operation, rule.reason)
    return None


def _faults_of(
    entry: Entry, shape: tuple[int, ...], targets: Mapping[str, tuple[int, ...]], filled: dict[str, str]
) -> list[str]:
    """Record the target as filled; return what is wrong with that."""
    assert entry.target is not None
    if entry.target not in targets:
        return [f"{entry.source} {_text(shape)} is in the source, and config.json leaves no place for it"]
    if entry.target in filled:
        return [f"{entry.source} and {filled[entry.target]} are both in the source for {entry.target}"]
    filled[entry.target] = entry.source
    if tuple(shape) != tuple(targets[entry.target]):
        return [f"{entry.source} has shape {_text(shape)}, config.json asks for {_text(targets[entry.target])}"]
    return []


def _pattern(template: str) -> re.Pattern:
    text = re.escape(template)
    for name, group in _OPEN.items():
        text = text.replace(re.escape(name), group)
    return re.compile(text)


def _text(shape: Iterable[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def target_shapes(config: HySparseConfig, sources: Iterable[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every key that a checkpoint of this configuration stores, with its shape.

    Args:
        config (`HySparseConfig`): of the checkpoint.
        sources (`Iterable[str]`): keys of the source; where an expert lies by itself there, each does here.
    """
    with torch.device("meta"):
        state = model_class(config)(config).state_dict()
    tied = TIED_TARGETS if config.tie_word_embeddings else {}
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items() if key not in tied}
    if not any(re.search(r"\.experts\.\d+\.", key) for key in sources):
        return shapes
    return {name: part for key, shape in shapes.items() for name, part in _separated(key, shape)}


def _separated(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes of the experts in a fused tensor; any other tensor is itself."""
    experts, is_fused, name = key.rpartition(".experts.")
    if not is_fused:
        yield key, shape
        return
    for expert in range(shape[0]):
        for part in EXPERT_PARTS[name]:
            yield f"{experts}.experts.{expert}.{part}.weight", (shape[1] // len(EXPERT_PARTS[name]), shape[2])


def fused_experts(key: str, number: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The fused tensor `key` of a layer's experts, from experts that lie by themselves.

    Args:
        key (`str`): a target key such as `model.layers.0.mlp.experts.down_proj`.
        number (`int`): of experts.
        read (`Callable`): gives a target tensor.
    """
    experts, _, name = key.rpartition(".")
    return torch.stack(
        [
            torch.cat([read(f"{experts}.{expert}.{part}.weight") for part in EXPERT_PARTS[name]])
            for expert in range(number)
        ]
    )
