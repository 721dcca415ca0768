"""Text to measure on: windows of token ids from files, from tokens, or from what the source writes itself."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from .calibration import Calibration, calibration_for, sample_text
from .families import longest_text
from .source import FolderSource, GgufSource


logger = logging.get_logger(__name__)

# A text given from Python: files, or token ids `(windows, length)`.
GivenText = Sequence[str | Path] | str | Path | torch.Tensor


class Text(NamedTuple):
    """A name, and windows of token ids, each `(length,)`."""

    name: str
    windows: tuple[torch.Tensor, ...]


def read_texts(source: FolderSource | GgufSource, given: GivenText | None, *, length: int, windows: int) -> list[Text]:
    """The texts to measure on, one per file.

    Args:
        source (`FolderSource` or `GgufSource`): gives the tokenizer, or the text where none is given.
        given (*optional*): text files, or token ids `(windows, length)`; `None` samples from the source.
        length (`int`): tokens per window, at most `families.longest_text` of the source.
        windows (`int`): windows per file, spread over it.
    Raises:
        ValueError: a length below 2, no windows, no tokenizer for the files, or a file without text.
        FileNotFoundError: a file does not exist.
    """
    if length < 2 or windows < 1:
        raise ValueError(f"`length` must be at least 2 and `windows` at least 1, got {length} and {windows}.")
    option: dict[str, Any] = {"length": length, "window": 0, "option": "text"}
    if given is None:
        logger.warning("No text was given: the figures are of text that the source samples from itself.")
        length = min(length, longest_text(source.load_config()))
        return [Text("sampled from the source", sample_text(source, windows, length).windows)]
    if isinstance(given, torch.Tensor):
        return [_checked("token ids", calibration_for(source, given, tokens=1, **option))]
    files = [given] if isinstance(given, str | Path) else given
    if not files:
        raise ValueError("`text` must name at least one text file, got none; name one to measure on.")
    return [
        _checked(Path(file).name, calibration_for(source, [file], tokens=windows * length, **option)) for file in files
    ]


def _checked(name: str, read: Calibration) -> Text:
    shortest = min(map(len, read.windows))
    if shortest < 2:
        raise ValueError(f"`text` must have a token to predict after another, got {shortest} of {name}; leave it out.")
    return Text(name, read.windows)


def warn_of_short(lengths: dict[str, int], longest_read: int) -> None:
    """Say which texts, name -> tokens, are so short that a query reads all of them."""
    for name, tokens in lengths.items():
        if tokens <= longest_read:
            logger.warning(
                f"Nothing is left out in {name} of {tokens} tokens, since a query reads {longest_read}: the "
                "figures do not show what a selection leaves out. Measure on longer windows."
            )


def shortest_of(texts: Sequence[Text]) -> int:
    """Tokens of the shortest window."""
    return min(len(window) for text in texts for window in text.windows)


def add_text_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `--text`, `--length` and `--windows`."""
    without = "" if required else "; without it the source samples its own"
    parser.add_argument("--text", nargs="+", required=required, metavar="FILE", help=f"text to measure on{without}")
    parser.add_argument(
        "--length", type=int, default=2048, metavar="TOKENS", help="per window of text (default: %(default)s)"
    )
    parser.add_argument("--windows", type=int, default=1, metavar="N", help="windows per file (default: %(default)s)")
