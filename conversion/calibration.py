"""Text for the fit: windows of token ids from files, or sampled from the source itself."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .source import FolderSource, GgufSource


logger = logging.get_logger(__name__)

# Characters read per token wanted; dense text and code stay well below.
CHARACTERS_PER_TOKEN = 12
SAMPLED_LENGTH = 512


@dataclass(frozen=True)
class Calibration:
    """Windows of token ids, each `(length,)`, and what `provenance.json` says of them."""

    windows: tuple[torch.Tensor, ...]
    record: dict[str, Any]

    @staticmethod
    def of(windows: Sequence[torch.Tensor], kind: str, **record: Any) -> "Calibration":
        """Calibration with the hash of its tokens recorded."""
        digest = hashlib.sha256(b"".join(window.to(torch.int64).numpy().tobytes() for window in windows))
        tokens = sum(len(window) for window in windows)
        return Calibration(
            tuple(windows),
            {"kind": kind, "windows": len(windows), "tokens": tokens, "tokens_sha256": digest.hexdigest(), **record},
        )


def calibration_for(
    source: FolderSource | GgufSource,
    calibrate: Sequence[str | Path] | str | Path | torch.Tensor | None,
    *,
    tokens: int,
    length: int,
    window: int,
) -> Calibration:
    """The windows to fit on.

    Args:
        source (`FolderSource` or `GgufSource`): gives the tokenizer, or the text where there is none.
        calibrate: text files; or token ids `(windows, length)`; `None` samples from the source.
        tokens (`int`): tokens wanted, in all; files share them evenly.
        length (`int`): tokens per window, at most the source's `max_position_embeddings`.
        window (`int`): the sliding window; positions inside the first one say nothing about sinks.
    Raises:
        ValueError: no tokenizer for the files, a file that is too short, or windows no longer than `window`.
        FileNotFoundError: a file does not exist.
    """
    config = source.load_config()
    limit = config.max_position_embeddings
    if calibrate is None:
        sampled = min(max(SAMPLED_LENGTH, 2 * window), limit)
        # Sampling takes minutes; a window that no text of this length can fit is known before.
        _check_length(sampled, window)
        logger.warning(
            "No calibration text was given: the conversion is fitted on text that the source samples from itself. "
            "Text of the kind that the model will read fits better; pass it with --calibrate FILE."
        )
        return sample_text(source, math.ceil(tokens / sampled), sampled)
    if isinstance(calibrate, torch.Tensor):
        result = _from_tokens(calibrate, config.vocab_size)
    else:
        files = [calibrate] if isinstance(calibrate, str | Path) else calibrate
        result = _from_files(source, [Path(file) for file in files], tokens, min(length, limit))
    _check_length(min(len(ids) for ids in result.windows), window)
    return result


def _check_length(shortest: int, window: int) -> None:
    if shortest <= window:
        raise ValueError(
            f"calibration windows must be longer than `window` ({window} tokens), got {shortest}; give longer text, "
            "a smaller window, or init='naive'."
        )


def _from_tokens(ids: torch.Tensor, vocab_size: int) -> Calibration:
    if ids.dim() != 2 or ids.is_floating_point() or not len(ids):
        raise ValueError(
            f"`calibrate` as a tensor must be token ids (windows, length), got {tuple(ids.shape)} of {ids.dtype}."
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"`calibrate` must hold token ids of the source (0 to {vocab_size - 1}), got {int(ids.min())} to "
            f"{int(ids.max())}; use its own tokenizer."
        )
    return Calibration.of(list(ids.cpu()), "tokens")


def _from_files(source: FolderSource | GgufSource, files: list[Path], tokens: int, length: int) -> Calibration:
    if not files:
        raise ValueError("`calibrate` must name at least one text file, got none; leave it out to sample the text.")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = source.load_tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"`calibrate` needs a tokenizer to read text files, and {source.name} has none; add its tokenizer files, "
            "or pass token ids from Python."
        )
    wanted = math.ceil(tokens / length)
    windows: list[torch.Tensor] = []
    for number, (file, text) in enumerate(zip(files, texts, strict=True)):
        before = len(windows)
        count = max(1, wanted // len(files) + (number < wanted % len(files)))
        for piece in _spread(text, count, length * CHARACTERS_PER_TOKEN):
            ids = tokenizer(piece, add_special_tokens=False, return_tensors="pt").input_ids[0, :length]
            windows += [ids] if len(ids) == length or len(windows) == before else []
        if len(windows) == before:
            raise ValueError(f"`calibrate`: {file.name} must hold text, got none; leave the file out.")
    record = [{"name": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files]
    return Calibration.of(windows, "files", files=record)


def _spread(text: str, count: int, characters: int) -> list[str]:
    """Up to `count` pieces at even distances, without overlap where the text is long enough."""
    room = max(0, len(text) - characters)
    starts = sorted({room * i // max(count - 1, 1) for i in range(count)}) if count > 1 else [room // 3]
    pieces = []
    for start in starts:
        # From the next line on, so that no piece begins inside a word.
        line = text.find("\n", start, start + 400) + 1 if start else 0
        pieces.append(text[max(start, line) : start + characters])
    return [piece for piece in pieces if piece]


class _Progress(BaseStreamer):
    """A progress bar that `generate` moves."""

    def __init__(self, steps: int):
        self.bar = logging.tqdm(total=steps, desc="sampling text", unit="token")

    def put(self, value: torch.Tensor) -> None:
        # The prompt comes first, then one token of each row at a time.
        self.bar.update(1 if value.dim() == 1 else 0)

    def end(self) -> None:
        self.bar.close()


@torch.no_grad()
def sample_text(source: FolderSource | GgufSource, rows: int, length: int) -> Calibration:
    """`rows` windows of `length` tokens that the source writes itself, always the same ones."""
    model: Any = source.load_model(None)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    bos, generator = model.config.bos_token_id, torch.Generator().manual_seed(0)
    start = torch.randint(model.config.vocab_size, (rows, 1), generator=generator)
    if bos is not None:
        start = torch.full_like(start, bos)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(
            start.to(model.device),
            attention_mask=torch.ones_like(start, device=model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=length - 1,
            max_new_tokens=length - 1,
            pad_token_id=model.config.pad_token_id or 0,
            streamer=_Progress(length - 1),
        )
    return Calibration.of(list(ids.cpu()), "sampled from the source")
