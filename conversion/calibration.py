"""Text for the fit: windows of token ids from files, or sampled from the source itself."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .families import longest_text
from .source import FolderSource, GgufSource


logger = logging.get_logger(__name__)

# Characters read per token wanted; dense text and code stay well below.
CHARACTERS_PER_TOKEN = 12
# A window shorter than the others is left out below one part in so many of their length.
SHORTEST_PART = 4
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
    option: str = "calibrate",
) -> Calibration:
    """The windows to fit on.

    Args:
        source (`FolderSource` or `GgufSource`): gives the tokenizer, or the text where there is none.
        calibrate: text files; or token ids `(windows, length)`; `None` samples from the source.
        tokens (`int`): tokens wanted, in all; files share them evenly.
        length (`int`): tokens per window, at most `families.longest_text` of the source.
        window (`int`): the sliding window; positions inside the first one say nothing about sinks.
        option (`str`): how `calibrate` is named where it was given, for messages.
    Raises:
        ValueError: no tokenizer for the files, a file that is too short, windows no longer than `window`, or token
            ids beyond the source's own sliding window.
        FileNotFoundError: a file does not exist.
    """
    if not isinstance(tokens, int) or not isinstance(length, int) or tokens < 1 or length < 2:
        raise ValueError(
            f"`calibration_length` must be at least 2 and `calibration_tokens` at least 1, got {length!r} and "
            f"{tokens!r}; leave both out for the defaults."
        )
    config = source.load_config()
    limit = longest_text(config)
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
        result = _from_tokens(calibrate, config.vocab_size, option)
        if limit < min(calibrate.shape[1], config.max_position_embeddings):
            raise ValueError(
                f"token ids must lie within the sliding window of {source.name} ({limit} tokens), got windows of "
                f"{calibrate.shape[1]}; beyond it the source forgets what its conversion reads, so cut them."
            )
    else:
        files = [calibrate] if isinstance(calibrate, str | Path) else calibrate
        if limit < min(length, config.max_position_embeddings):
            logger.warning(f"Windows of text are cut to the sliding window of {source.name}, {limit} tokens.")
        result = _from_files(source, [Path(file) for file in files], tokens, min(length, limit), window, option)
    _check_length(min(len(ids) for ids in result.windows), window)
    return result


def repeated_pieces(windows: Sequence[torch.Tensor], count: int, length: int) -> tuple[torch.Tensor, ...]:
    """Pieces of the windows, evenly among those that all of them give, each standing twice: `count` at most.

    The second time a model looks up what it says. Plain text hardly needs what lies far back.
    """
    found = [piece for ids in windows for piece in ids.split(length) if len(piece) == length]
    count = min(count, len(found))
    return tuple(found[len(found) * i // count].repeat(2) for i in range(count))


def _check_length(shortest: int, window: int) -> None:
    if shortest <= window:
        raise ValueError(
            f"calibration windows must be longer than `window` ({window} tokens), got {shortest}; give longer text, "
            "a smaller window, or init='naive'."
        )


def _from_tokens(ids: torch.Tensor, vocab_size: int, option: str) -> Calibration:
    if ids.dim() != 2 or ids.is_floating_point() or not len(ids):
        raise ValueError(
            f"`{option}` as a tensor must be token ids (windows, length), got {tuple(ids.shape)} of {ids.dtype}."
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"`{option}` must hold token ids of the source (0 to {vocab_size - 1}), got {int(ids.min())} to "
            f"{int(ids.max())}; use its own tokenizer."
        )
    return Calibration.of(list(ids.cpu().long()), "tokens")


def _from_files(
    source: FolderSource | GgufSource, files: list[Path], tokens: int, length: int, window: int, option: str
) -> Calibration:
    if not files:
        raise ValueError(f"`{option}` must name at least one text file, got none; name one, or leave it out.")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = source.load_tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"`{option}` needs a tokenizer to read text files, and {source.name} has none; add its tokenizer files, "
            "or pass token ids from Python."
        )

    def tokens_of(part: str) -> torch.Tensor:
        return tokenizer(part, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0].long()

    wanted, characters = math.ceil(tokens / length), length * CHARACTERS_PER_TOKEN
    windows: list[torch.Tensor] = []
    for number, (file, text) in enumerate(zip(files, texts, strict=True)):
        count = max(1, wanted // len(files) + (number < wanted % len(files)))
        if len(text) > count * characters:
            found = [tokens_of(piece)[:length] for piece in _spread(text, count, characters)]
        else:
            found = _consecutive(tokens_of(text), count, length)
        # What is shorter than the others, the end of a text, must still say something.
        kept = [ids for ids in found if len(ids) == length or len(ids) > max(window, length // SHORTEST_PART)]
        kept = kept or [ids for ids in found[:1] if len(ids)]
        if not kept:
            raise ValueError(f"`{option}`: {file.name} must hold text, got none; leave the file out.")
        windows += kept
    record = [{"name": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files]
    return Calibration.of(windows, "files", files=record)


def _consecutive(ids: torch.Tensor, count: int, length: int) -> list[torch.Tensor]:
    """Up to `count` windows of a whole text without overlap: all of it, or as many at even distances."""
    room = max(0, len(ids) - count * length)
    starts = [room // 3] if count == 1 else [i * length + room * i // (count - 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def _spread(text: str, count: int, characters: int) -> list[str]:
    """`count` pieces at even distances of a text that is longer than all of them."""
    room = len(text) - characters
    starts = [room * i // (count - 1) for i in range(count)] if count > 1 else [room // 3]
    pieces = []
    for start in starts:
        # From the next line on, so that no piece begins inside a word.
        line = text.find("\n", start, start + 400) + 1 if start else 0
        pieces.append(text[max(start, line) : start + characters])
    return pieces


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
    # The source's own settings, penalties or a time limit, would change the text or end it early.
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
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
    model.generation_config = own
    return Calibration.of(list(ids.cpu()), "sampled from the source")
