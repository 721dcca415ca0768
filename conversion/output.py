"""Writing a checkpoint: tensors streamed into safetensors files, in a folder that appears at once or not at all."""

import json
import os
import re
import secrets
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from transformers.utils import logging


try:
    import fcntl
except ImportError:  # Windows: folders of killed processes stay
    fcntl = None

logger = logging.get_logger(__name__)


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
    parent = next(folder for folder in out.parents if folder.exists())
    try:
        # Access rights do not tell: the file system may refuse. What is made here is removed at once.
        with tempfile.TemporaryDirectory(dir=parent, prefix=_partial_prefix(out)):
            pass
    except OSError as error:
        raise ValueError(
            f"`out` must lie where folders can be made, got {out}: {error.strerror}; name another place."
        ) from error


@contextmanager
def appearing_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it takes the name `out` at the end, and is removed after an error.

    `out` itself is complete whenever it exists. A killed process leaves its folder behind under a hidden name, and
    the next one that writes the same `out` removes it. A folder that a running process holds is left alone.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    partial, lock = _locked_folder(out)
    try:
        yield partial
        try:
            # Also over an empty folder.
            os.replace(partial, out)  # noqa: PTH105 - Path.replace has no word on folders
        except OSError as error:
            raise ValueError(
                f"`out` must stay a new or empty folder until the end, got {out}, which something else has filled or "
                f"changed meanwhile ({error.strerror}); convert again under another name."
            ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _partial_prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def _locked_folder(out: Path) -> tuple[Path, int | None]:
    """A new folder, and the descriptor that holds its lock, None where the file system has no locks."""
    while True:
        partial = out.parent / f"{_partial_prefix(out)}{secrets.token_hex(4)}"
        partial.mkdir()
        try:
            lock = _lock(partial, wait=True)
        except FileNotFoundError:
            continue
        if partial.exists():
            return partial, lock
        # Between its creation and its locking another process took it for an abandoned one.
        assert lock is not None, f"{partial} has been removed"
        os.close(lock)


def _remove_abandoned(out: Path) -> None:
    """Remove what killed processes left of `out`: the system drops a process's locks with the process."""
    ours = re.compile(rf"{re.escape(_partial_prefix(out))}[0-9a-f]{{8}}")
    for partial in sorted(path for path in out.parent.iterdir() if ours.fullmatch(path.name)):
        try:
            lock = _lock(partial, wait=False)
        except OSError:
            # Held by a running process, or gone meanwhile.
            continue
        if lock is not None:
            logger.warning(f"{partial.name} was left behind by a process that was killed, and is removed.")
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, wait: bool) -> int | None:
    """The descriptor that holds a folder's lock; None where there are no locks.

    Raises:
        BlockingIOError: another process holds it, and `wait` is off.
        FileNotFoundError: the folder is gone.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        # A file system without locks on folders, such as some network ones.
        os.close(descriptor)
        return None
    return descriptor


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
        """Write one tensor, cast to its announced dtype.

        Raises:
            ValueError: the dtype has no place for one of its values.
        """
        shape, dtype = self.pending.pop(key)
        assert tuple(tensor.shape) == tuple(shape), f"{key}: {tuple(tensor.shape)} announced as {tuple(shape)}"
        tensor = tensor.detach().cpu()
        data = tensor.to(dtype).contiguous()
        if data.dtype != tensor.dtype and data.numel():
            largest = max(map(abs, (bound.item() for bound in tensor.aminmax())))
            if largest > torch.finfo(dtype).max and (data.isinf() & tensor.isfinite()).any():
                raise ValueError(
                    f"{key} must fit the `dtype` of the output, {dtype}, got values of up to {largest:.3g}; use "
                    "bfloat16 or float32."
                )
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
