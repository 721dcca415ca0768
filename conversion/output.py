"""Writing a checkpoint: tensors streamed into safetensors files, in a folder that appears at once or not at all."""

import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch


MAX_SHARD_BYTES = 5_000_000_000

# What a checkpoint may hold, and its name in a header.
STORED_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def check_target(out: Path) -> None:
    """Refuse a target that would be overwritten.

    Raises:
        ValueError: it is a file, a folder with something in it, or a mount point, whose name cannot be given away.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"`out` must be a new or empty folder, got {out}, which is not; name another or remove it.")
    if out.is_mount():
        raise ValueError(
            f"`out` must be a folder that can be replaced, got the mount point {out}; name one inside it."
        )


@contextmanager
def appearing_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it takes the name `out` at the end, and is removed after an error.

    A killed process leaves it behind under its hidden name; `out` itself is complete whenever it exists.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        yield partial
        # Also over an empty folder; one that has been filled meanwhile is an error.
        os.replace(partial, out)  # noqa: PTH105 - Path.replace has no word on folders
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class CheckpointWriter:
    """Writes tensors in any order to places fixed beforehand, holding none of them.

    Args:
        folder (`Path`): where the files go.
        tensors (`Mapping`): key -> (shape, dtype) of everything that will be written.
        max_shard_bytes (`int`): a new file begins where the next tensor would exceed this.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.folder = folder
        self.pending = dict(tensors)
        self.file_of: dict[str, str] = {}
        self._place: dict[str, int] = {}
        self._files: dict[str, BinaryIO] = {}
        shards = self._shards(max_shard_bytes)
        for number, keys in enumerate(shards, 1):
            single = len(shards) == 1
            name = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._begin(name, keys)
        if len(shards) > 1:
            total = sum(self._bytes(key) for key in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self.file_of.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Write one tensor, cast to its announced dtype."""
        shape, dtype = self.pending.pop(key)
        assert tuple(tensor.shape) == tuple(shape), f"{key}: {tuple(tensor.shape)} announced as {tuple(shape)}"
        data = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        file = self._files[self.file_of[key]]
        file.seek(self._place[key])
        file.write(data.reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for file in self._files.values():
            file.close()
        assert kind is not None or not self.pending, f"never written: {sorted(self.pending)}"

    def _bytes(self, key: str) -> int:
        shape, dtype = self.pending[key]
        return torch.Size(shape).numel() * dtype.itemsize

    def _shards(self, max_shard_bytes: int) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        size = 0
        for key in self.pending:
            if shards[-1] and size + self._bytes(key) > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(key)
            size += self._bytes(key)
        return shards

    def _begin(self, name: str, keys: list[str]) -> None:
        """Write a file's header. Wide elements lie first, so that every tensor is aligned to its own."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for key in sorted(keys, key=lambda key: -self.pending[key][1].itemsize):
            shape, dtype = self.pending[key]
            end = offset + self._bytes(key)
            header[key] = {"dtype": STORED_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self.file_of[key], self._place[key] = name, offset
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = (self.folder / name).open("wb")
        self._files[name] = file
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
        for key in keys:
            self._place[key] += 8 + len(text)
