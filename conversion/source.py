"""Reading a dense checkpoint: a folder of safetensors or pickled shards, or a GGUF file.

Everything about a source is checked before the first tensor is read; tensors are read one shard at a time.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


class WeightFormat(NamedTuple):
    """File names of one storage format."""

    stem: str
    suffix: str

    @property
    def single(self) -> str:
        return self.stem + self.suffix

    @property
    def index_file(self) -> str:
        return f"{self.single}.index.json"

    @property
    def shard(self) -> re.Pattern:
        return re.compile(rf"{re.escape(self.stem)}-(\d+)-of-(\d+){re.escape(self.suffix)}")


# In the order in which they are preferred, as in the library.
WEIGHT_FORMATS = (WeightFormat("model", ".safetensors"), WeightFormat("pytorch_model", ".bin"))

# Copied from a source folder as they are; what does not exist is no error.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def open_source(path: str | Path) -> "FolderSource | GgufSource":
    """Open a checkpoint folder or a `.gguf` file.

    Raises:
        FileNotFoundError: there is nothing, or no checkpoint, at `path`.
        ValueError: files are missing, damaged or contradict each other; they are named.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return FolderSource(path)
    if not path.exists():
        raise FileNotFoundError(
            f"`source` must be a checkpoint folder or a .gguf file, got {path}, which does not exist; download it "
            "first, for example with `hf download`."
        )
    if path.suffix != ".gguf":
        raise ValueError(f"`source` must be a checkpoint folder or a .gguf file, got the file {path.name}.")
    return GgufSource(path)


class _Shard(NamedTuple):
    """One open weight file."""

    keys: list[str]
    info: Callable[[str], tuple[tuple[int, ...], torch.dtype]]
    tensor: Callable[[str], torch.Tensor]


class FolderSource:
    """A folder as `save_pretrained` writes it; single or sharded, with or without an index."""

    def __init__(self, path: Path):
        self.path = path
        self.raw_config = read_json(path / "config.json")
        self.format, self.shards, self.index = _weight_files(path)
        self.tensors: dict[str, TensorInfo] = {}
        for shard in self.shards:
            with self._opened(shard) as opened:
                for key in opened.keys:
                    if key in self.tensors:
                        raise ValueError(
                            f"{path.name}: {key} is in {self.tensors[key].file} and in {shard}; keep one of them."
                        )
                    self.tensors[key] = TensorInfo(*opened.info(key), shard)
        self._check_index()

    @property
    def name(self) -> str:
        """Name without the place: `org/model` and the revision for a download cache, else the folder's own."""
        path = self.path.resolve()
        if path.parent.name == "snapshots":
            return path.parent.parent.name.removeprefix("models--").replace("--", "/") + f"@{path.name}"
        return path.name

    @property
    def files(self) -> list[Path]:
        """The files that determine the result."""
        return [self.path / name for name in ("config.json", *self.shards)]

    def load_config(self) -> PreTrainedConfig:
        """The configuration as transformers reads it."""
        return AutoConfig.from_pretrained(self.path, trust_remote_code=False)

    def load_model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The source model itself, all of it in memory, in evaluation mode."""
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype or "auto").eval()

    def load_tokenizer(self):
        """The tokenizer, or None where the folder has none."""
        known = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
        if not any((self.path / name).exists() for name in known):
            return None
        return AutoTokenizer.from_pretrained(self.path)

    def tensors_of_shard(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of one shard, in the order of its keys; the shard is closed at the end."""
        with self._opened(shard) as opened:
            for key, info in self.tensors.items():
                if info.file == shard:
                    yield key, opened.tensor(key)

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor."""
        with self._opened(self.tensors[key].file) as opened:
            return opened.tensor(key)

    def save_companions(self, folder: Path) -> None:
        """Copy tokenizer, chat template and licence."""
        for pattern in COMPANION_FILES:
            for file in sorted(self.path.glob(pattern)):
                if file.is_file():
                    copy = folder / file.relative_to(self.path)
                    copy.parent.mkdir(exist_ok=True)
                    copy.write_bytes(file.read_bytes())

    def generation_config(self) -> dict[str, Any] | None:
        """The content of generation_config.json, if there is one."""
        path = self.path / "generation_config.json"
        return read_json(path) if path.exists() else None

    @contextmanager
    def _opened(self, shard: str) -> Iterator[_Shard]:
        path = self.path / shard
        if self.format.suffix == ".bin":
            content = _load_pickle(path)
            yield _Shard(
                list(content), lambda key: (tuple(content[key].shape), content[key].dtype), content.__getitem__
            )
            return
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{shard} must be a complete safetensors file, got: {error}; fetch it again.") from error

        def info(key: str) -> tuple[tuple[int, ...], torch.dtype]:
            part = handle.get_slice(key)
            stored = part.get_dtype()
            if stored not in _SAFETENSORS_DTYPES:
                raise NotImplementedError(
                    f"{shard}: {key} must be of a dtype among {', '.join(_SAFETENSORS_DTYPES)}, got {stored}, which "
                    "packed weights have; convert the unquantised checkpoint."
                )
            return tuple(part.get_shape()), _SAFETENSORS_DTYPES[stored]

        with handle:
            # As the tensors lie in the file, so that one pass reads forward.
            yield _Shard(handle.offset_keys(), info, handle.get_tensor)

    def _check_index(self) -> None:
        if self.index is None:
            return
        faults = [
            f"{key} is in {self.format.index_file} for {file} and "
            + (f"lies in {self.tensors[key].file}" if key in self.tensors else "in no file")
            for key, file in self.index.items()
            if key not in self.tensors or self.tensors[key].file != file
        ]
        faults += [
            f"{key} is in {self.tensors[key].file} and not in the index" for key in self.tensors.keys() - self.index
        ]
        if faults:
            raise ValueError(
                f"{self.path.name}: the index must name the tensors of its files, got:\n  "
                + "\n  ".join(sorted(faults))
                + "\nFetch the checkpoint again."
            )


class GgufSource:
    """A GGUF file, through transformers' own reader; its weights are dequantised to float32 and held in memory."""

    def __init__(self, path: Path):
        try:
            import gguf  # noqa: F401 - the reader of transformers needs it
        except ImportError as error:
            raise ImportError('a GGUF file needs the package gguf; pip install "hysparse_hf[gguf]"') from error
        self.path = path
        self.name = path.name
        self.files = [path]
        self.shards = [path.name]
        config = self._load(AutoConfig)
        if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
            raise NotImplementedError(
                f"{path.name} holds a mixture of experts, and what transformers reads of one leaves out the experts' "
                "width and whether their weights add up to one; convert the original checkpoint."
            )
        self.raw_config = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
        self._config = config
        self._model: PreTrainedModel | None = None
        self._tensors: dict[str, TensorInfo] = {}

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Key -> what is known of the tensor. The file is read at the first use."""
        if not self._tensors:
            state = self._loaded().state_dict()
            if self._config.tie_word_embeddings:
                state.pop("lm_head.weight", None)
            self._tensors = {key: TensorInfo(tuple(t.shape), t.dtype, self.path.name) for key, t in state.items()}
        return self._tensors

    def load_config(self) -> PreTrainedConfig:
        """The configuration as transformers reads it."""
        return self._config

    def load_model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The source model itself, in evaluation mode."""
        if dtype in (None, torch.float32):
            return self._loaded()
        return self._load_model(dtype)

    def load_tokenizer(self):
        """The tokenizer inside the file."""
        return self._load(AutoTokenizer)

    def tensors_of_shard(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of the file."""
        state = self._loaded().state_dict()
        for key in self.tensors:
            yield key, state[key]

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor."""
        return self._loaded().state_dict()[key]

    def save_companions(self, folder: Path) -> None:
        """Write the tokenizer and its chat template."""
        self.load_tokenizer().save_pretrained(folder)

    def generation_config(self) -> dict[str, Any] | None:
        """What transformers derives from the file."""
        config = self._loaded().generation_config
        return None if config is None else config.to_diff_dict()

    def _load(self, auto_class, **options):
        try:
            return auto_class.from_pretrained(self.path.parent, gguf_file=self.path.name, **options)
        except (ValueError, TypeError, KeyError, IndexError, OSError, EOFError) as error:
            raise ValueError(
                f"{self.path.name} must be a complete GGUF file of an architecture that transformers reads, got: "
                f"{error}; fetch it again, or convert the original checkpoint."
            ) from error

    def _load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        model, report = self._load(AutoModelForCausalLM, dtype=dtype, output_loading_info=True)
        if report["missing_keys"]:
            # The library gives them random values: of a Mixtral file, say, which names itself a Llama.
            raise ValueError(
                f"{self.path.name} must hold every weight of a {type(model).__name__}, and lacks "
                f"{', '.join(sorted(report['missing_keys']))}; convert the original checkpoint."
            )
        return model.eval()

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            self._model = self._load_model(torch.float32)
        return self._model


def sha256_of(path: Path) -> str:
    """The hash of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or holds no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        files = sorted(file.name for file in path.parent.glob("*.gguf"))
        advice = f"name the file {files[0]} in it" if files else "name the folder that holds it"
        raise FileNotFoundError(
            f"{path.parent.name} must be a checkpoint folder, and has no {path.name}; {advice}."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path.name} must be valid JSON, got: {error}; fetch it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a JSON object, got a {type(content).__name__}; fetch it again.")
    return content


def _weight_files(path: Path) -> tuple[WeightFormat, list[str], dict[str, str] | None]:
    """Format, weight files in order, and key -> file of the index where there is one."""
    for form in WEIGHT_FORMATS:
        shards = sorted(file.name for file in path.iterdir() if form.shard.fullmatch(file.name))
        has_single, has_index = (path / form.single).exists(), (path / form.index_file).exists()
        if has_single and has_index and not shards and _names_alone(path / form.index_file, form.single):
            return form, *_indexed(path, form, shards)
        if has_single and (shards or has_index):
            others = ", ".join([*shards, *[form.index_file] * has_index])
            raise ValueError(
                f"{path.name} must hold one checkpoint, got {form.single} beside {others}; remove what is stale."
            )
        if has_single:
            return form, [form.single], None
        if has_index:
            return form, *_indexed(path, form, shards)
        if shards:
            return form, _complete(path, form, shards), None
    raise FileNotFoundError(
        f"{path.name} must hold model.safetensors, its shards, or pytorch_model.bin, and has none of them; name the "
        "folder that holds the weights."
    )


def _names_alone(index_file: Path, name: str) -> bool:
    """Whether an index says of every tensor that it lies in the file `name`."""
    index = read_json(index_file).get("weight_map")
    return isinstance(index, dict) and set(map(str, index.values())) == {name}


def _indexed(path: Path, form: WeightFormat, present: list[str]) -> tuple[list[str], dict[str, str]]:
    index = read_json(path / form.index_file).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{form.index_file} must hold a `weight_map`, got none; fetch it again.")
    named = sorted(set(index.values()))
    absent = [file for file in named if not (path / file).is_file() or Path(file).name != file]
    unnamed = sorted(set(present) - set(named))
    if absent or unnamed:
        raise ValueError(
            f"{path.name}: the files of {form.index_file} must be those of the folder; "
            + f"missing: {', '.join(absent) or 'none'}; not in the index: {', '.join(unnamed) or 'none'}. "
            "Fetch the checkpoint again."
        )
    return named, index


def _complete(path: Path, form: WeightFormat, shards: list[str]) -> list[str]:
    """The shards of a folder without an index, all of one numbering."""
    matches = [match for shard in shards if (match := form.shard.fullmatch(shard))]
    totals = {match[2] for match in matches}
    numbers = {int(match[1]) for match in matches}
    expected = set(range(1, int(min(totals)) + 1))
    if len(totals) > 1 or numbers != expected:
        raise ValueError(
            f"{path.name} must hold every shard of one numbering, got {', '.join(shards)}; missing numbers: "
            f"{sorted(expected - numbers) or 'none'}. Fetch the checkpoint again."
        )
    return shards


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled shard; nothing in it is executed."""
    try:
        # Only the zip format can be mapped; files from before it are read whole.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        raise ValueError(
            f"{path.name} must be a pickle of tensors only, and is refused: "
            f"{str(error).splitlines()[0]} Convert a safetensors checkpoint instead."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path.name} must hold a dict of tensors; convert a safetensors checkpoint instead.")
    return content
