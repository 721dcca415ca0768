"""Does a converted checkpoint hold what its source holds? Tensor by tensor, module by module, and in the logits.

`weight_faults` compares every tensor through the inverse map and says what a wrong one holds instead; a tensor that
was fitted must be the one that `provenance.json` records. `module_faults` runs the source and compares each module
under its own inputs, so that a wrong table is caught too. `dense_difference` is the one number: the logits of the
`dense=True` switch against the source's.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.modeling_hysparse import HySparseForCausalLM

from .architectures import model_class, read_config, read_provenance
from .families import family_of
from .key_map import KEY_MAPS, OPERATIONS, Entry, KeyMap, build_key_map, is_keyless, keyless_layers, target_shapes
from .source import FolderSource, GgufSource, open_source


Source = FolderSource | GgufSource


def checkpoint_map(source: Source, config: HySparseConfig) -> KeyMap:
    """The key map from a source to a checkpoint of `config`.

    Raises:
        ValueError: keys that do not fit; see `build_key_map`.
    """
    _, family = family_of(source.raw_config, source.name)
    return build_key_map(
        KEY_MAPS[family.key_map],
        {key: info.shape for key, info in source.tensors.items()},
        target_shapes(config, source.tensors),
        prefixes=family.prefixes,
        tied=config.tie_word_embeddings,
        keyless=keyless_layers(config),
    )


def weight_faults(source: str | Path | Source, out: str | Path) -> list[str]:
    """Compare every tensor of a converted checkpoint with its source, bit for bit where the dtype was kept.

    Args:
        source (`str`, `Path`, `FolderSource` or `GgufSource`): the dense checkpoint.
        out (`str` or `Path`): the converted checkpoint, before any training.
    Returns:
        `list[str]`: one line per wrong tensor, beginning with its name; empty when all agree.
    """
    source = source if isinstance(source, Source) else open_source(source)
    converted = FolderSource(Path(out))
    key_map = checkpoint_map(source, read_config(out))
    return compare_tensors(source, converted, key_map, fitted_tensors(out), read_provenance(out).get("new_tensors"))


def fitted_tensors(out: str | Path) -> dict[str, dict[str, str]]:
    """Mapped tensors that the fit replaced: key -> `mapped_sha256` and `sha256`, as recorded in `provenance.json`."""
    return read_provenance(out).get("fitted_tensors", {})


def compare_tensors(
    source: Source,
    converted: FolderSource,
    key_map: KeyMap,
    fitted: Mapping[str, Mapping[str, str]] | None = None,
    new: Mapping[str, str] | None = None,
) -> list[str]:
    """`weight_faults` for a source and a checkpoint that are open already; one shard at a time.

    `fitted` are the tensors that the fit replaced, as from `fitted_tensors`; `new` the hashes of tensors without a
    source, if they are known.
    """
    fitted = fitted or {}
    expected = {entry.target for entry in key_map.entries if entry.target} | key_map.new.keys()
    faults = [f"{key}: missing in the converted checkpoint" for key in sorted(expected - converted.tensors.keys())]
    faults += [f"{key}: not part of the model" for key in sorted(converted.tensors.keys() - expected)]
    entries = {entry.source: entry for entry in key_map.entries}
    for shard in source.shards:
        for key, tensor in source.tensors_of_shard(shard):
            entry = entries[key]
            if entry.target not in converted.tensors:
                continue
            held = converted.tensor(entry.target)
            if entry.target in fitted:
                faults += _faults_of_fitted(entry, tensor, held, fitted)
            elif not _agrees(entry, tensor, held):
                faults.append(f"{entry.target}: {_what_is_wrong(entry, tensor, held, source, key_map, converted)}")
    for key in key_map.new:
        if key not in converted.tensors:
            continue
        held = converted.tensor(key)
        if not held.isfinite().all():
            faults.append(f"{key}: holds values that are not finite")
        elif new and sha256_of_tensor(held) != new.get(key):
            faults.append(f"{key}: is not what was written, by the hash in provenance.json")
    return faults


def _faults_of_fitted(
    entry: Entry, tensor: torch.Tensor, held: torch.Tensor, fitted: Mapping[str, Mapping[str, str]]
) -> list[str]:
    assert entry.target is not None
    record, found = fitted[entry.target], sha256_of_tensor(held)
    mapped = OPERATIONS[entry.operation].apply(tensor)
    other = next((f" but that of {key}" for key, values in fitted.items() if values["sha256"] == found), "")
    wrong = [
        (found != record["sha256"], f"is not what was fitted{other}"),
        (sha256_of_tensor(mapped) != record["mapped_sha256"], f"was fitted in place of another {entry.source}"),
    ]
    return [f"{entry.target}: {words}, by the hashes in provenance.json" for is_wrong, words in wrong if is_wrong]


def sha256_of_tensor(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.sha256(_bytes(tensor).cpu().numpy().data).hexdigest()


def fitted_changes(source: Source, out: str | Path) -> dict[str, float]:
    """How far each fitted tensor is from its mapped value, relative to that: `|fitted - mapped| / |mapped|`."""
    converted, fitted = FolderSource(Path(out)), fitted_tensors(out)
    changes = {}
    for entry in checkpoint_map(source, read_config(out)).entries:
        if entry.target in fitted:
            mapped = OPERATIONS[entry.operation].apply(source.tensor(entry.source)).float()
            changes[entry.target] = ((converted.tensor(entry.target).float() - mapped).norm() / mapped.norm()).item()
    return changes


def _agrees(entry: Entry, tensor: torch.Tensor, held: torch.Tensor) -> bool:
    operation = OPERATIONS[entry.operation]
    if held.dtype == tensor.dtype:
        return same_bits(operation.invert(held), tensor)
    return same_bits(operation.apply(tensor).to(held.dtype), held)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality that also holds for NaN and tells 0 from -0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _what_is_wrong(
    entry: Entry, tensor: torch.Tensor, held: torch.Tensor, source: Source, key_map: KeyMap, converted: FolderSource
) -> str:
    """Say what a wrong tensor holds: another tensor of its layer, its own heads in another order, or other values."""
    if held.shape != tensor.shape:
        return f"has shape {tuple(held.shape)}, the source's {entry.source} has {tuple(tensor.shape)}"
    for other in _mistakable(entry, key_map):
        if source.tensors[other.source].shape == tuple(held.shape) and _agrees(
            other, source.tensor(other.source), held
        ):
            return f"holds the source's {other.source}"
    expected = tensor.to(held.dtype)
    order = _head_order(expected, held, read_config(converted.path))
    if order is not None:
        return f"holds the source's {entry.source} with its heads in the order {order}"
    if tensor.dim() == 3:
        order = _order(expected, held)
        if order is not None:
            return f"holds the source's {entry.source} with its experts in the order {order}"
        wrong = [i for i in range(len(held)) if not torch.equal(held[i], expected[i])]
        swapped = all(torch.equal(held[i].roll(held.shape[1] // 2, 0), expected[i]) for i in wrong)
        return f"differs from the source's {entry.source} in experts {wrong}" + ", gate and up swapped" * swapped
    difference = (held.double() - tensor.double()).abs().max().item()
    return f"differs from the source's {entry.source} by up to {difference:.3g}"


def _mistakable(entry: Entry, key_map: KeyMap) -> list[Entry]:
    """What a tensor may have been mistaken for: others of its layer, then its like in other layers, dropped or not."""
    layer = re.match(r".*?layers\.\d+\.", entry.source)
    if layer is None:
        return []
    name = entry.source.removeprefix(layer[0])
    siblings = [other for other in key_map.entries if other.target and other.source.startswith(layer[0])]
    alike = [other for other in key_map.entries if re.fullmatch(rf".*?layers\.\d+\.{re.escape(name)}", other.source)]
    return [other for other in (*siblings, *alike) if other is not entry]


def _head_order(tensor: torch.Tensor, held: torch.Tensor, config: HySparseConfig) -> list[int] | None:
    """The permutation of heads (rows, or columns of an output projection) that makes `held` of `tensor`, if any."""
    for dim in range(tensor.dim()):
        for heads in (config.num_key_value_heads, config.num_attention_heads):
            if tensor.shape[dim] != heads * config.head_dim:
                continue
            first, second = (part.unflatten(dim, (heads, -1)).movedim(dim, 0) for part in (tensor, held))
            order = _order(first, second)
            if order is not None:
                return order
    return None


def _order(first: torch.Tensor, second: torch.Tensor) -> list[int] | None:
    """The permutation along the first dimension that makes `second` of `first`, if any."""
    order = [next((i for i, part in enumerate(first) if torch.equal(part, other)), -1) for other in second]
    return order if sorted(order) == list(range(len(first))) else None


@torch.no_grad()
def module_faults(
    source: str | Path | PreTrainedModel, out: str | Path, input_ids: torch.Tensor, tolerance: float = 1e-5
) -> dict[str, float]:
    """Run the source, and give each module of the converted model the source module's own inputs.

    Independent of the key map: modules are paired by their names. A module differs alone, whatever comes before it.

    Args:
        source (`str`, `Path` or `PreTrainedModel`): the dense checkpoint or model.
        out (`str` or `Path`): the converted checkpoint.
        input_ids (`torch.Tensor`): `(batch, length)`.
        tolerance (`float`): relative to the largest output of the module.
    Returns:
        `dict[str, float]`: name of a module that differs -> largest relative difference, in order of execution.
    """
    model, dense = _dense_pair(source, out)
    counterparts = dict(dense.named_modules())
    faults: dict[str, float] = {}

    def hook_of(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            other = counterparts.get(name)
            difference = float("inf")
            if other is not None:
                difference = _relative_difference(other(*inputs), output)
            if not difference <= tolerance:
                faults[name] = max(difference, faults.get(name, 0.0))

        return hook

    handles = [
        module.register_forward_hook(hook_of(name))
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return faults


def _relative_difference(actual: Any, expected: Any) -> float:
    """Largest difference of two tensors over the largest value; of a router's tuples, of its logits and weights."""
    if isinstance(expected, tuple):
        parts = zip(actual, expected, strict=True)
        return max(_relative_difference(*pair) for pair in parts if pair[1].is_floating_point())
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


@torch.no_grad()
def dense_difference(source: str | Path | PreTrainedModel, out: str | Path, input_ids: torch.Tensor) -> float:
    """Largest difference of the logits between a source and the `dense=True` switch of its conversion, in float32.

    Args:
        source (`str`, `Path` or `PreTrainedModel`): the dense checkpoint (folder or GGUF file) or its model.
        out (`str` or `Path`): the converted checkpoint. A fit does not matter: sinks and gates are off under the
            switch, and the source's values stand in for fitted tensors, and for keys and values that were dropped.
        input_ids (`torch.Tensor`): `(batch, length)`.
    """
    model, dense = _dense_pair(source, out)
    expected = model(input_ids=input_ids, use_cache=False).logits
    return (dense(input_ids=input_ids, use_cache=False).logits - expected).abs().max().item()


def _dense_pair(source: str | Path | PreTrainedModel, out: str | Path) -> tuple[PreTrainedModel, HySparseForCausalLM]:
    """The source and the converted model under the `dense=True` switch, both in float32.

    Fitted tensors, and those of layers without keys and values, have the source's values, under the source's own
    names: they all belong to attention, which every family names alike.
    """
    if isinstance(source, PreTrainedModel) and source.dtype != torch.float32:
        raise ValueError(f"`source` must be a float32 model for this comparison, got {source.dtype}; load it so.")
    model: Any = source if isinstance(source, PreTrainedModel) else open_source(source).load_model(torch.float32)
    config, mapped = read_config(out), model.state_dict()
    keyless = keyless_layers(config)
    taken = {*fitted_tensors(out), *(key for key in mapped if is_keyless(key, keyless))}
    converted = FolderSource(Path(out))
    state = {key: tensor for shard in converted.shards for key, tensor in converted.tensors_of_shard(shard)}
    state |= {key: mapped[key] for key in taken}
    config.dense = True
    dense = model_class(config).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return model.eval(), dense.to(model.device).eval()
