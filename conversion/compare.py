"""`hysparse compare`: how far one checkpoint's predictions are from another's, whatever each of them is."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from .architectures import ARCHITECTURES
from .quality import compare_predictions, on_device, predict, record_of
from .source import open_source
from .texts import GivenText, add_text_arguments, read_texts, shortest_of, warn_of_short


def compare(
    first: str | Path, second: str | Path, *, text: GivenText, length: int = 2048, windows: int = 1
) -> dict[str, Any]:
    """Measure two checkpoints on the same tokens, dense ones, converted ones or trained ones; one is loaded at a time.

    Args:
        first (`str` or `Path`): a checkpoint folder or a `.gguf` file; gives the tokenizer.
        second (`str` or `Path`): the other one, of the same vocabulary.
        text: text files, or token ids `(windows, length)`.
        length (`int`), windows (`int`): tokens per window, and windows per file.
    Returns:
        `dict`: `kl` of the second from the first (nats per token), `first_perplexity`, `perplexity` (of the second),
        `same_token` (share of positions with the same top token), `tokens`; and the same per text in `texts`.
    Raises:
        ValueError: the vocabularies differ, or the text is none.
    """
    sources = [open_source(first), open_source(second)]
    configs = [source.load_config() for source in sources]
    sizes = [config.vocab_size for config in configs]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the checkpoints must have one vocabulary, got {sizes[0]} tokens in {sources[0].name} and {sizes[1]} in "
            f"{sources[1].name}; compare two of the same family."
        )
    texts = read_texts(sources[0], text, length=length, windows=windows)
    for source, config in zip(sources, configs, strict=True):
        if config.model_type in ARCHITECTURES:
            lengths = {f"text for {source.name}": shortest_of(texts)}
            warn_of_short(lengths, ARCHITECTURES[config.model_type].longest_read(config))
    one, other = (predict(on_device(source.load_model(torch.float32)), texts, source.name) for source in sources)
    names = {"first": sources[0].name, "second": sources[1].name}
    return names | record_of(compare_predictions(one, other, texts), texts)


def table(report: dict[str, Any]) -> str:
    """A report of `compare` for people."""
    lines = [f"{'text':32}{'tokens':>8}{'KL':>9}{'perplexity':>12}{'then':>9}{'same token':>12}"]
    total = [{"name": "all", **report}] if len(report["texts"]) > 1 else []
    lines += [
        f"{row['name'][:31]:32}{row['tokens']:8}{row['kl']:9.4f}{row['first_perplexity']:12.2f}"
        f"{row['perplexity']:9.2f}{row['same_token']:12.3f}"
        for row in [*report["texts"], *total]
    ]
    return "\n".join([f"{report['first']}, then {report['second']}", *lines])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse compare`."""
    parser.add_argument("first", help="a checkpoint folder, or a .gguf file")
    parser.add_argument("second", help="another one of the same vocabulary")
    add_text_arguments(parser, required=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")


def run(args: argparse.Namespace) -> int:
    """Run `hysparse compare`."""
    report = compare(args.first, args.second, text=args.text, length=args.length, windows=args.windows)
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
