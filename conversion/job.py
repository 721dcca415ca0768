"""One conversion from its options to a finished folder: all checks first, then the fit, then writing and verifying."""

import copy
import importlib.metadata
import inspect
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

from .architectures import ARCHITECTURES
from .bridge_faults import bridge_record
from .calibration import Calibration, calibration_for
from .damage import Damage
from .families import check_supported, dropped_fields, family_of, hysparse_fields
from .faults import Source, checkpoint_map, compare_tensors, same_bits, sha256_of_tensor
from .fit import LayerFit, naive_value
from .generations import GENERATIONS, REUSE
from .key_map import MAP_VERSION, OPERATIONS, TIED_TARGETS, Entry, fused_experts, target_shapes
from .ladder import INDEX_REUSE
from .output import STORED_DTYPES, CheckpointWriter
from .output_refit import TOKENS_PER_CHANNEL
from .plan import parse_ratio
from .reuse_damage import ReuseDamage
from .source import FolderSource, sha256_of
from .texts import GivenText


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
logger = logging.get_logger(__name__)

INITS = ("fitted", "naive")
CALIBRATION_TOKENS = 8192
GRANULARITIES = ("elementwise", "headwise", "none")
_RECORDED_PACKAGES = ("hysparse_hf", "torch", "transformers", "safetensors", "gguf")


@dataclass(frozen=True)
class Options:
    """What was asked for; see `convert`."""

    ratio: str
    plan: str | Sequence | None
    max_sparse_run: int | None
    keep_kv: bool
    budget: int
    block_size: int
    window: int
    gates: Sequence[float]
    gate_granularity: Literal["elementwise", "headwise", "none"]
    init: str
    dtype: str | None
    architecture: str = "hysparse"

    def __post_init__(self):
        # As JSON holds them; ranges, arrays and their numbers may come from Python.
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))

    def check(self) -> None:
        """Raise `ValueError` for what the configuration itself does not check, or names otherwise."""
        for name in ("budget", "block_size", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of tokens, at least 1, got {value!r}.")
        if self.architecture == "hysparse" and self.budget % self.block_size:
            below = self.budget - self.budget % self.block_size
            near = " or ".join(str(tokens) for tokens in (below, below + self.block_size) if tokens)
            raise ValueError(
                f"`budget` must be a multiple of `block_size` ({self.block_size}), got {self.budget}; use {near}."
            )
        if (
            not isinstance(self.gates, list)
            or len(self.gates) != 2
            or not all(isinstance(gate, int | float) and 0 < gate < 1 for gate in self.gates)
        ):
            raise ValueError(
                f"`gates` must be two numbers between 0 and 1 (global, local), got {self.gates}; a gate is a sigmoid "
                "and is never quite open or closed, so use for example 0.05 and 0.95."
            )
        if self.gate_granularity not in GRANULARITIES:
            raise ValueError(f"`gate_granularity` must be one of {GRANULARITIES}, got {self.gate_granularity!r}.")
        run = self.max_sparse_run
        if run is not None and (not isinstance(run, int) or run < 1):
            raise ValueError(f"`max_sparse_run` must be at least 1, got {run!r}; leave it out for N + 2.")
        if self.init not in INITS:
            raise ValueError(f"`init` must be one of {INITS}, got {self.init!r}.")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"`architecture` must be one of {tuple(ARCHITECTURES)}, got {self.architecture!r}.")
        if self.keep_kv and not ARCHITECTURES[self.architecture].can_keep_kv:
            raise NotImplementedError(
                f"`keep_kv` is not there for `architecture={self.architecture!r}`, whose sparse layers have no keys "
                "and values; leave it out, or convert to the first generation."
            )
        is_unfitted = self.init == "naive" and self.architecture == "hysparse" and not self.keep_kv
        if self.gate_granularity == "none" and is_unfitted:
            raise ValueError(
                "`gate_granularity='none'` needs `init='fitted'`, got 'naive'; with neither gates nor a fit the two "
                "branches of a converted layer would add up to twice its output."
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")


def _plain(value: Any) -> Any:
    """Sequences as lists, and numbers of other libraries as Python's."""
    if isinstance(value, str):
        return value
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return [_plain(part) for part in value] if isinstance(value, Iterable) else value


class Job:
    """One conversion. Building it checks everything; only `write` touches the disk.

    Args:
        source (`FolderSource` or `GgufSource`): an open source.
        options (`Options`): checked options.
    """

    def __init__(self, source: Source, options: Options):
        self.source, self.options = source, options
        self.architecture, family = family_of(source.raw_config, source.name)
        source_config = source.load_config()
        check_supported(source_config, source.raw_config, source.name)
        fields = hysparse_fields(source_config, family)
        self.dropped_fields = dropped_fields(source.raw_config, fields)
        self.sparse_per_full = parse_ratio(options.ratio)
        architecture = ARCHITECTURES[options.architecture]
        self.model_class = architecture.model
        self.generation = REUSE if options.keep_kv else GENERATIONS[options.architecture]
        is_auto = options.plan == "auto" or (options.plan is None and options.init == "fitted")
        # An automatic plan has as many full layers as the regular one, which stands in its place until measured.
        plan = None if is_auto else options.plan
        self.max_sparse_run = options.max_sparse_run or self.sparse_per_full + 2
        switches = INDEX_REUSE.switches if options.keep_kv else {"gate_granularity": options.gate_granularity}
        self.fields = {
            **fields,
            **switches,
            "oracle_budget": options.budget,
            "oracle_block_size": options.block_size,
            "sliding_window": options.window,
            "architectures": [self.model_class.__name__],
        }
        self._set_plan(architecture.plan_fields(plan, source_config.num_hidden_layers, self.sparse_per_full))
        self.measures_plan = is_auto and set(self.generation.choices(self.config)) != {"full"}
        if self.measures_plan:
            self.generation.check_run(self.config, self.max_sparse_run)
        # Of the dense switch, where every layer has keys and values: what a plan drops must be in the source too.
        dense = copy.deepcopy(self.config)
        dense.dense = True
        self.dense_entry_of = {entry.target: entry for entry in checkpoint_map(self.source, dense).entries}
        self._check_dtypes()
        self._check_tied()
        self.damage: Damage | ReuseDamage | None = None
        self.fits: dict[int, LayerFit] = {}
        # Mapped tensors that the fit replaces: target -> hashes of the mapped value and of the one written.
        self.replaced: dict[str, dict[str, str]] = {}
        # Parameters without a source: target -> hash of the value written.
        self.new: dict[str, str] = {}
        self.calibration: Calibration | None = None
        self.verification: dict[str, Any] = {}

    def _set_plan(self, plan_fields: dict[str, list[str]]) -> None:
        """The configuration and the key map of a plan."""
        fields: dict[str, Any] = {**self.fields, **plan_fields}
        self.config = self.model_class.config_class(**fields)
        self.config.auto_map = dict(self.model_class._auto_map)
        self.shapes = target_shapes(self.config, self.source.tensors)
        self.key_map = checkpoint_map(self.source, self.config)
        self.entry_of = {entry.target: entry for entry in self.key_map.entries if entry.target is not None}
        self.dtype = self.config.dtype = self._dtype_of(self.entry_of["model.embed_tokens.weight"].source)

    @property
    def fits_something(self) -> bool:
        """Whether there are layers with values to fit."""
        return (
            self.options.init == "fitted"
            and not self.options.keep_kv
            and bool(self.generation.fitted_layers(self.config))
        )

    @property
    def tokens_needed(self) -> int:
        """Tokens of calibration text from which everything is fitted."""
        return max(CALIBRATION_TOKENS, TOKENS_PER_CHANNEL * self.config.hidden_size)

    def table(self) -> str:
        """The whole map, one tensor a line, and what comes of the configuration."""
        rows = [("SOURCE", "SHAPE", "DTYPE", "OPERATION", "TARGET")]
        for entry in self.key_map.entries:
            info = self.source.tensors[entry.source]
            dtype = str(info.dtype).removeprefix("torch.")
            target = entry.target or f"dropped: {entry.reason}"
            rows.append((entry.source, _shape(info.shape), dtype, entry.operation if entry.target else "-", target))
        dtype = str(self.dtype).removeprefix("torch.")
        rows += [("-", _shape(self.shapes[key]), dtype, f"new: {init}", key) for key, init in self.key_map.new.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        full = [index for index, kind in enumerate(self.config.layer_plan) if kind == "full"]
        if self.measures_plan and self.damage is None:
            choices = self.generation.choices(self.config)
            lines.append(
                f"plan auto: which {choices.count('full')} of the first {len(choices)} layers stay full is measured "
                "in the conversion; here the regular ones"
            )
        lines += [f"config field {name} dropped: {reason}" for name, reason in self.dropped_fields.items()]
        lines.append(
            f"{self.architecture} {self.source.name}: {self.config.num_hidden_layers} layers, full {full}; "
            f"{len(self.entry_of)} tensors mapped, {len(self.key_map.dropped)} dropped, {len(self.key_map.new)} new"
        )
        return "\n".join(lines)

    def calibrate_on(self, text: GivenText | None, tokens: int | None, length: int) -> None:
        """Read calibration text, and `calibrate` on it.

        Args:
            text (*optional*): files or token ids, as for `convert`.
            tokens (`int`, *optional*), length (`int`): in all, by default `tokens_needed`, and per window.
        Raises:
            ValueError, FileNotFoundError: as from `calibration_for`.
        """
        tokens = self.tokens_needed if tokens is None else tokens
        # Without a window branch no window of text is too short for it.
        window = 1 if self.options.keep_kv else self.options.window
        found = calibration_for(self.source, text, tokens=tokens, length=length, window=window)
        self.calibrate(replace(found, record={**found.record, "asked": {"tokens": tokens, "length": length}}))

    def calibrate(self, calibration: Calibration) -> None:
        """Measure the plan and fit the layers that have less to read, as far as the options ask for it."""
        self.calibration = calibration
        needed = TOKENS_PER_CHANNEL * self.config.hidden_size
        refit = calibration.record["tokens"] >= needed
        if not refit and self.fits_something:
            logger.warning(
                f"Output projections are not fitted: that takes {needed} tokens of calibration text, "
                f"{TOKENS_PER_CHANNEL} times the hidden size, and there are {calibration.record['tokens']}."
            )
        longest = max(map(len, calibration.windows))
        read = ARCHITECTURES[self.options.architecture].longest_read(self.config)
        if self.fits_something and longest <= read:
            logger.warning(
                f"The global branch is fitted on text that it reads whole, windows of {longest} tokens where a query "
                f"reads {read}; calibrate on longer windows, or convert with a smaller budget."
            )
        if self.measures_plan:
            self.damage = self.generation.damage(
                self.config, self.mapped, calibration.windows, refit=refit, longest_run=self.max_sparse_run
            ).run()
            self._set_plan(self.generation.measured_plan(self.damage, self.config, self.max_sparse_run))
        if self.fits_something:
            self.fits = self.generation.fit(self.config, self.mapped, calibration.windows, refit=refit).run()

    def fitted(self, target: str) -> torch.Tensor | None:
        """The value that the fit gives a target tensor, if it gives one."""
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", target)
        fit = self.fits.get(int(layer[1])) if layer else None
        return self.generation.fitted_tensor(layer[2], fit.values, self.config) if layer and fit else None

    def mapped(self, target: str) -> torch.Tensor:
        """One tensor of the dense switch from the source; fused experts also where each lies by itself."""
        if target not in self.dense_entry_of:
            return fused_experts(target, self.config.num_experts, self.mapped)
        entry = self.dense_entry_of[target]
        return OPERATIONS[entry.operation].apply(self.source.tensor(entry.source))

    def write(self, folder: Path, max_shard_bytes: int) -> dict[str, Any]:
        """Fill a folder and verify it.

        Returns:
            `dict`: the content of its `provenance.json`.
        Raises:
            RuntimeError: what was written is not what it should be.
        """
        self._write_tensors(folder, max_shard_bytes)
        self.config.save_pretrained(folder)
        self._write_companions(folder)
        self._verify(folder)
        record = self.provenance()
        (folder / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return record

    def provenance(self) -> dict[str, Any]:
        """Where the checkpoint comes from and how it was made; names no place on this machine."""
        return {
            "source": {
                "name": self.source.name,
                "architecture": self.architecture,
                "files": {
                    file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in self.source.files
                },
            },
            "map_version": MAP_VERSION,
            "versions": _versions(),
            "options": asdict(self.options),
            "plan": self.config.layer_plan,
            "max_sparse_run": self.max_sparse_run if self.measures_plan else None,
            "bridge": bridge_record(self.config),
            "keys": {
                "mapped": len(self.entry_of),
                "dropped": self.key_map.dropped,
                "new": self.key_map.new,
            },
            "dropped_config_fields": self.dropped_fields,
            "calibration": None if self.calibration is None else self.calibration.record,
            "damage": None if self.damage is None else self.damage.record(),
            "fit": {str(index): fit.figures for index, fit in self.fits.items()},
            "fitted_tensors": self.replaced,
            "new_tensors": self.new,
            "verification": self.verification,
        }

    def _dtype_of(self, source_key: str) -> torch.dtype:
        """The dtype in which a source tensor is written."""
        return DTYPES[self.options.dtype] if self.options.dtype else self.source.tensors[source_key].dtype

    def _check_dtypes(self) -> None:
        packed = [
            f"{entry.source} ({self.source.tensors[entry.source].dtype})"
            for entry in self.entry_of.values()
            if self.source.tensors[entry.source].dtype not in STORED_DTYPES
        ]
        if packed:
            raise NotImplementedError(
                f"tensors must be of {', '.join(str(dtype) for dtype in STORED_DTYPES)}, got {', '.join(packed)}; "
                "convert the unquantised checkpoint."
            )

    def _check_tied(self) -> None:
        """A redundant head of a tied checkpoint must be the embedding."""
        for entry in self.key_map.entries:
            if entry.target is None and entry.source in TIED_TARGETS:
                embedding = self.entry_of[TIED_TARGETS[entry.source]].source
                if not same_bits(self.source.tensor(entry.source), self.source.tensor(embedding)):
                    raise ValueError(
                        f"{entry.source} must equal {embedding}, since config.json says `tie_word_embeddings: true`, "
                        "and it differs; set `tie_word_embeddings` to false there to keep both, or delete the head "
                        "to keep the embedding."
                    )

    def _write_tensors(self, folder: Path, max_shard_bytes: int) -> None:
        planned = {
            target: (self.shapes[target], self._dtype_of(entry.source)) for target, entry in self.entry_of.items()
        }
        planned |= {key: (self.shapes[key], self.dtype) for key in self.key_map.new}
        entries = {entry.source: entry for entry in self.key_map.entries}
        progress = logging.tqdm(total=len(planned), desc="writing tensors", unit="tensor")
        with progress, CheckpointWriter(folder, planned, max_shard_bytes) as writer:
            for shard in self.source.shards:
                for key, tensor in self.source.tensors_of_shard(shard):
                    entry = entries[key]
                    if entry.target is not None:
                        writer.write(entry.target, self._final(entry, tensor))
                        progress.update()
            for key, init in self.key_map.new.items():
                fitted = self.fitted(key)
                value = naive_value(init, self.shapes[key], self.options.gates) if fitted is None else fitted
                self.new[key] = sha256_of_tensor(value.to(self.dtype))
                writer.write(key, value)
                progress.update()

    def _final(self, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
        """What is written for a source tensor: its mapped value, or the fitted one, with both hashes recorded."""
        assert entry.target is not None
        mapped = OPERATIONS[entry.operation].apply(tensor)
        fitted = self.fitted(entry.target)
        if fitted is None:
            return mapped
        written = fitted.to(self._dtype_of(entry.source))
        self.replaced[entry.target] = {"mapped_sha256": sha256_of_tensor(mapped), "sha256": sha256_of_tensor(written)}
        return fitted

    def _write_companions(self, folder: Path) -> None:
        """Tokenizer, generation settings and the model's code."""
        self.source.save_companions(folder)
        generation = self.source.generation_config()
        if generation is None:
            generation = GenerationConfig.from_model_config(self.config).to_diff_dict()
        # Our model makes its own cache and refuses every other kind.
        generation.pop("cache_implementation", None)
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        entry = inspect.getfile(self.model_class)
        for file in (entry, *get_relative_import_files(entry)):
            shutil.copyfile(file, folder / Path(file).name)

    def _verify(self, folder: Path) -> None:
        """Compare what lies on the disk with the source, and let the library load it, without its values."""
        faults = compare_tensors(self.source, FolderSource(folder), self.key_map, self.replaced, self.new)
        loaded: Any = self.model_class.from_pretrained(folder, device_map="meta", output_loading_info=True)
        report = loaded[1]
        faults += [f"{kind}: {sorted(map(str, keys))}" for kind, keys in report.items() if keys]
        if faults:
            raise RuntimeError("the written checkpoint must equal its source, got:\n  " + "\n  ".join(faults))
        mapped = [entry for target, entry in self.entry_of.items() if target not in self.replaced]
        self.verification = {
            "tensors_equal": len(mapped),
            "tensors_fitted": len(self.replaced),
            "tensors_cast": sum(
                self._dtype_of(entry.source) != self.source.tensors[entry.source].dtype for entry in mapped
            ),
            "loading_report": {kind: sorted(map(str, keys)) for kind, keys in report.items()},
        }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
