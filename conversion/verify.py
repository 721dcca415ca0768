"""`hysparse verify`: does a checkpoint hold what its source holds, and what does each rung of the ladder cost?

First the tensors, bit for bit. Then the ladder: each rung's predictions beside the source's own, the numbers it
finds in a long text, and the error of each layer's attention. One model is in memory at a time, in float32.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig

from .architectures import ARCHITECTURES, read_config, read_provenance
from .bridge_faults import bridge_faults, plan_faults
from .early_exit import leave_early
from .families import longest_text
from .faults import Source, checkpoint_map, fitted_changes, module_faults, weight_faults
from .ladder import load_rung, rungs_of
from .passkey import Passkey, make_passkeys, measure_retrieval
from .quality import (
    AttentionStates,
    Figures,
    attention_errors,
    compare_predictions,
    on_device,
    predict,
    record_attention,
    record_of,
    total_of,
)
from .source import FolderSource, open_source
from .texts import GivenText, Text, add_text_arguments, read_texts, shortest_of, warn_of_short


logger = logging.get_logger(__name__)

# How far rung 0 may be from the source, relative to the largest logit. Rounding gives 1e-6 to 1e-5, more in deeper
# models; one projection rounded to bfloat16 gives 6e-4 in the tests' five layers.
DENSE_TOLERANCE = 1e-4
# Of text that both models read, module by module, to name what differs.
MODULE_TOKENS = 256
# How far a module may be from the source's, relative to its largest output, where weights have the source's dtype.
MODULE_TOLERANCE = 1e-5


def verify(
    source: str | Path,
    out: str | Path,
    *,
    text: GivenText | None = None,
    length: int = 2048,
    windows: int = 1,
    samples: int = 100,
    sample_length: int | None = None,
    rungs: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Check a converted checkpoint against its source and measure the ladder between them.

    Args:
        source (`str` or `Path`): the dense checkpoint, as for `convert`.
        out (`str` or `Path`): the converted checkpoint, before any training.
        text (*optional*): text files, or token ids `(windows, length)`; without it the source samples its own.
        length (`int`): tokens per window of text. Only what lies beyond the budget is left out by a selection.
        windows (`int`): windows per text file.
        samples (`int`): passkeys to look for; 0 for none.
        sample_length (`int`, *optional*): tokens of a passkey's text; default: `length`.
        rungs (`Sequence[int]`, *optional*): measure only these; the comparison of rung 0 with the source is always
            made. Default: all up to the checkpoint itself.
    Returns:
        `dict`: `faults`: one line each, beginning with the tensor or module, empty for a right conversion; `tensors`:
        how many are equal, new and fitted, and how far each fitted one is from its source; and unless a tensor is
        wrong `dense_difference`, `source_perplexity`, and `ladder`: per rung its figures, by text also, its share of
        passkeys, and errors of the attention outputs by layer and by position in the layer's group; for the second
        generation also `early_exit`: how far predictions are from whole passes', and how many tokens each half ran.
    Raises:
        ValueError, NotImplementedError, FileNotFoundError: something else than two checkpoints and text.
    """
    opened, out = open_source(source), Path(out)
    config = read_config(out)
    ladder = rungs_of(config)
    asked = _asked(rungs, len(ladder))
    report: dict[str, Any] = {
        "source": opened.name,
        "checkpoint": out.resolve().name,
        "faults": plan_faults(out) or weight_faults(opened, out),
    }
    if report["faults"]:
        if not read_provenance(out):
            report["faults"].append("provenance.json: missing, so a fitted tensor cannot be told from a wrong one")
        return report
    key_map, fitted = checkpoint_map(opened, config), fitted_changes(opened, out)
    mapped = sum(entry.target is not None for entry in key_map.entries)
    report["tensors"] = {"equal": mapped - len(fitted), "new": len(key_map.new), "fitted": fitted}
    texts = read_texts(opened, text, length=length, windows=windows)
    passkeys = _passkeys(opened, samples, min(sample_length or length, longest_text(opened.load_config())))
    lengths = {"text": shortest_of(texts)}
    lengths |= {"passkeys": min(len(key.prefix) + len(key.rest) for key in passkeys)} if passkeys else {}
    warn_of_short(lengths, ARCHITECTURES[config.model_type].longest_read(config))
    report["text"] = [{"name": item.name, "tokens": sum(map(len, item.windows))} for item in texts]
    teacher = predict(on_device(opened.load_model(torch.float32)), texts, "source")
    dense: AttentionStates | None = None
    report["ladder"] = []
    for rung in logging.tqdm([ladder[number] for number in sorted({0, *asked})], desc="ladder", unit="rung"):
        model = on_device(load_rung(rung, opened, out))
        predicted = predict(model, texts, f"rung {rung.number}")
        if rung.leaves_early:
            exit = leave_early(model, texts, predicted, f"rung {rung.number}")
            predicted = exit.predictions
            report |= {"early_exit": exit.record(), "faults": exit.faults()}
        figures = compare_predictions(teacher, predicted, texts)
        if dense is None:
            # The first rung is the dense one: it must be the source, and is what the others are compared with inside.
            report |= _dense_record(figures)
            report["faults"] = _dense_faults(report["dense_difference"], source, out, texts)
            if report["faults"]:
                return report
            dense = record_attention(model, texts[0].windows[0])
        report["faults"] = report["faults"] or bridge_faults(model, out, texts[0].windows[0][:MODULE_TOKENS])
        if report["faults"]:
            return report
        if rung.number in asked:
            report["ladder"].append(
                {"rung": rung.number, "name": rung.name, "switches": rung.switches}
                | record_of(figures, texts)
                | {"retrieval": measure_retrieval(model, passkeys, f"rung {rung.number}") if passkeys else None}
                | _error_record(attention_errors(model, texts[0].windows[0], dense), config)
            )
        # The next rung is loaded into the room of this one.
        del model
    return report


def _asked(rungs: Sequence[int] | None, count: int) -> list[int]:
    asked = list(range(count)) if rungs is None else sorted(set(rungs))
    if not asked or not 0 <= asked[0] <= asked[-1] < count:
        raise ValueError(f"`rungs` must be among 0 to {count - 1}, where this checkpoint's ladder ends, got {rungs}.")
    return asked


def _passkeys(source: Source, samples: int, length: int) -> list[Passkey]:
    if samples < 0:
        raise ValueError(f"`samples` must be at least 0, got {samples}; 0 looks for no passkeys.")
    tokenizer = source.load_tokenizer() if samples else None
    if samples and tokenizer is None:
        logger.warning(f"{source.name} has no tokenizer, so retrieval is not measured; add its tokenizer files.")
    return make_passkeys(tokenizer, samples, length) if tokenizer else []


def _dense_record(figures: list[Figures]) -> dict[str, Any]:
    total = total_of(figures)
    return {
        "source_perplexity": total.record()["first_perplexity"],
        "dense_difference": {"largest": total.largest_difference, "largest_logit": total.largest},
    }


def _dense_faults(difference: dict[str, float], source: str | Path, out: Path, texts: list[Text]) -> list[str]:
    if difference["largest"] <= DENSE_TOLERANCE * difference["largest_logit"]:
        return []
    if not math.isfinite(difference["largest"]):
        return ["logits: not finite on rung 0 or in the source; look for weights that are not finite in the source."]
    # Modules with weights in a coarser dtype than the source's differ by its rounding.
    coarser = _dtypes_of(FolderSource(out)) - _dtypes_of(open_source(source))
    tolerance = max([MODULE_TOLERANCE, *(torch.finfo(dtype).eps for dtype in coarser)])
    modules = module_faults(source, out, texts[0].windows[0][None, :MODULE_TOKENS], tolerance)
    faults = [f"{name}: differs from the source's module by {error:.2g}" for name, error in modules.items()]
    return faults or [
        f"logits: rung 0 differs from the source by {difference['largest']:.2g} of {difference['largest_logit']:.2g} "
        "although each module agrees; rotary, attention or activation settings in config.json are not the source's."
    ]


def _dtypes_of(source: Source) -> set[torch.dtype]:
    return {info.dtype for info in source.tensors.values()}


def _error_record(errors: list[float], config: HySparseConfig) -> dict[str, Any]:
    """Errors by layer, and their mean by position r: 0 is a full layer, r the r-th layer after it."""
    by_position: dict[str, list[float]] = {}
    for group, error in zip(ARCHITECTURES[config.model_type].groups(config), errors, strict=True):
        by_position.setdefault(group, []).append(error)
    means = {group: sum(part) / len(part) for group, part in sorted(by_position.items(), key=_numbers_first)}
    return {"attention_errors": errors, "errors_by_position": means}


def _numbers_first(item: tuple[str, Any]) -> tuple[int, str]:
    return len(item[0]), item[0]


def table(report: dict[str, Any]) -> str:
    """A report of `verify` for people."""
    if report["faults"]:
        return "\n".join([f"{report['checkpoint']} is not {report['source']}:", *map("  {}".format, report["faults"])])
    tensors, difference = report["tensors"], report["dense_difference"]
    lines = [f"{tensors['equal']} tensors equal the source's, bit for bit or as cast; {tensors['new']} new"]
    if tensors["fitted"]:
        name, most = max(tensors["fitted"].items(), key=lambda item: item[1])
        lines[0] += f"; {len(tensors['fitted'])} fitted, changed by up to {most:.2f} of their norm ({name})"
    measured = ", ".join(f"{text['name']} ({text['tokens']})" for text in report["text"])
    if "early_exit" in report:
        exit, processed = report["early_exit"], report["early_exit"]["processed_tokens"]
        lines.append(
            f"early exit: {exit['rows']} rows asked for, {processed['cross']} of {processed['self']} tokens through "
            f"the cross-decoder; KL {exit['kl']:.1e} from whole passes, logits differ by up to "
            f"{exit['difference']['largest']:.1e}"
        )
    lines += [
        f"rung 0 differs from the source by {difference['largest']:.1e} in logits up to "
        f"{difference['largest_logit']:.1f}; the source's perplexity is {report['source_perplexity']:.2f}",
        f"text (tokens): {measured}",
        "",
    ]
    positions = list(report["ladder"][0]["errors_by_position"])
    lines.append(
        f"{'rung':37}{'KL':>8}{'perplexity':>12}{'same token':>12}{'passkey':>9}  error of attention outputs at r = "
        + ", ".join(positions)
    )
    for rung in report["ladder"]:
        found = f"{rung['retrieval']['exact']:.2f}" if rung["retrieval"] else "-"
        errors = "".join(f"{error:7.3f}" for error in rung["errors_by_position"].values())
        lines.append(
            f"{rung['rung']} {rung['name']:35}{rung['kl']:8.4f}{rung['perplexity']:12.2f}{rung['same_token']:12.3f}"
            f"{found:>9}  {errors}"
        )
    if [rung["rung"] for rung in report["ladder"]] == list(range(len(report["ladder"]))) != [0]:
        steps = zip(report["ladder"], report["ladder"][1:], strict=False)
        rise, worst = max(((after["kl"] - before["kl"], after) for before, after in steps), key=lambda step: step[0])
        lines += ["", f"most is lost on rung {worst['rung']}, {worst['name']}: KL {rise:+.4f}"]
    if len(report["text"]) > 1:
        lines += ["", f"{'KL / perplexity':37}" + "".join(f"{text['name'][:22]:>24}" for text in report["text"])]
        for rung in report["ladder"]:
            cells = (f"{text['kl']:.4f} /{text['perplexity']:8.2f}" for text in rung["texts"])
            lines.append(f"{rung['rung']} {rung['name']:35}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse verify`."""
    parser.add_argument("source", help="the dense checkpoint: a folder, or a .gguf file")
    parser.add_argument("out", help="the converted checkpoint, before any training")
    add_text_arguments(parser, required=False)
    parser.add_argument(
        "--samples", type=int, default=100, metavar="N", help="passkeys to look for, 0 for none (default: %(default)s)"
    )
    parser.add_argument(
        "--sample-length", type=int, metavar="TOKENS", help="of the text around a passkey (default: --length)"
    )
    parser.add_argument("--rungs", type=int, nargs="+", metavar="N", help="measure only these (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")


def run(args: argparse.Namespace) -> int:
    """Run `hysparse verify`; 1 where the checkpoint is not the source's."""
    report = verify(
        args.source,
        args.out,
        text=args.text,
        length=args.length,
        windows=args.windows,
        samples=args.samples,
        sample_length=args.sample_length,
        rungs=args.rungs,
    )
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if report["faults"] else 0
