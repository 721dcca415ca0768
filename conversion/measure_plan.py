"""`hysparse plan`: measure what each layer's attention is worth and which layers would stay full; convert nothing."""

import argparse
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES
from .job import Job, Options
from .source import open_source
from .texts import GivenText


def measure_plan(
    source: str | Path,
    *,
    architecture: str = "hysparse",
    ratio: str = "1:3",
    max_sparse_run: int | None = None,
    keep_kv: bool = False,
    budget: int = 1024,
    block_size: int = 64,
    window: int = 128,
    calibrate: GivenText | None = None,
    calibration_tokens: int | None = None,
    calibration_length: int = 2048,
) -> dict[str, Any]:
    """Measure the damage of making layers sparse, as `convert(plan="auto")` does.

    Args:
        source, architecture, ratio, max_sparse_run, keep_kv, window, calibrate, calibration_tokens,
            calibration_length: as in `convert`.
        budget (`int`), block_size (`int`): as there; say something with `keep_kv` only.
    Returns:
        `dict`: `damage`: per layer the KL to the source when its attention alone becomes the window that it can be
        fitted to; `plans`: for `regular` and `auto` the `full` layers, the `option` of `convert` that asks for them,
        and the `estimate`, the KL of all sparse layers together, pairs included, by that measure. For the second
        generation all of it is about the windows of the self-decoder; the cross-decoder's plan is the regular one.
        With `keep_kv` the damage has a column per full layer that is tried, as many layers before this one
        as its name says, and the estimate is the sum. `replacement` says in words what became of the layer, and `text`
        on how much text that was measured, plain and repeated.
    Raises:
        ValueError, NotImplementedError, FileNotFoundError: as in `convert`; also for a ratio without sparse layers.
    """
    options = Options(
        ratio=ratio,
        plan="auto",
        max_sparse_run=max_sparse_run,
        keep_kv=keep_kv,
        budget=budget,
        # Else nothing depends on blocks, and no budget is refused for them.
        block_size=block_size if keep_kv else 1,
        window=window,
        gates=(0.05, 0.95),
        gate_granularity="elementwise",
        init="naive",
        dtype=None,
        architecture=architecture,
    )
    options.check()
    job = Job(open_source(source), options)
    if not job.measures_plan:
        raise ValueError(
            f"`ratio` must have sparse layers to measure, or windows in the self-decoder, got {ratio!r} for "
            f"{job.config.num_hidden_layers} layers; use for example '1:3', or a source of more layers."
        )
    plans = {"regular": job.config}
    job.calibrate_on(calibrate, calibration_tokens, calibration_length)
    plans["auto"] = job.config
    damage, option = job.damage, ARCHITECTURES[architecture].plan_option
    assert damage is not None
    assert job.calibration is not None
    return {
        "source": job.source.name,
        "calibration": job.calibration.record,
        "damage": damage.alone(),
        "replacement": damage.replacement,
        "text": damage.text,
        "plans": {
            name: {
                "full": [layer for layer, kind in enumerate(config.layer_plan) if kind == "full"],
                "option": option(config),
                "estimate": damage.of_plan(config.layer_plan),
            }
            for name, config in plans.items()
        },
    }


def table(report: dict[str, Any]) -> str:
    """A report of `measure_plan` for people."""
    plans, damage = report["plans"], report["damage"]
    columns = damage if isinstance(damage, dict) else {"KL": dict(enumerate(damage))}
    lines = [
        f"{report['source']}: KL to the source when one layer's attention {report['replacement']}, on "
        + _words(report["text"]),
        f"{'layer':>5}" + "".join(f"{name:>9}" for name in (*columns, *plans)),
    ]
    for layer in sorted({layer for column in columns.values() for layer in column}):
        cells = (f"{column[layer]:9.4f}" if layer in column else f"{'':9}" for column in columns.values())
        marks = ("full" if layer in plan["full"] else "." for plan in plans.values())
        lines.append(f"{layer:5}" + "".join(cells) + "".join(f"{mark:>9}" for mark in marks))
    blank = " " * 9 * len(columns)
    lines.append(f"{'all':>5}{blank}" + "".join(f"{plan['estimate']:9.3f}" for plan in plans.values()))
    return "\n".join([*lines, f"--plan {plans['auto']['option']}"])


def _words(text: dict[str, int]) -> str:
    if "plain" in text:
        return (
            f"plain text ({text['plain']} x {text['tokens']} tokens) and text that stands twice ({text['repeated']})"
        )
    return f"{text['pieces']} pieces of {text['tokens']} tokens that stand twice each, reading {text['budget']}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse plan`."""
    parser.add_argument("source", help="checkpoint folder, or a .gguf file")
    parser.add_argument(
        "--architecture",
        default="hysparse",
        choices=tuple(ARCHITECTURES),
        help="first or second generation (default: %(default)s)",
    )
    parser.add_argument("--ratio", default="1:3", help="1:N, N sparse layers to a full one (default: %(default)s)")
    parser.add_argument(
        "--max-sparse-run",
        type=int,
        metavar="LAYERS",
        help="sparse or window layers in a row, at most (default: N + 2)",
    )
    parser.add_argument(
        "--keep-kv",
        action="store_true",
        help="measure for sparse layers that keep their own keys and values and read another layer's choice",
    )
    parser.add_argument(
        "--budget",
        type=int,
        default=1024,
        metavar="TOKENS",
        help="of --keep-kv: tokens selected (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="TOKENS", help="of --keep-kv: per block (default: %(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=128, metavar="TOKENS", help="of the local branch (default: %(default)s)"
    )
    parser.add_argument(
        "--calibrate", nargs="+", metavar="FILE", help="text to measure on; without it the source writes it"
    )
    parser.add_argument("--calibration-tokens", type=int, metavar="N", help="in all (default: as in convert)")
    parser.add_argument(
        "--calibration-length", type=int, default=2048, metavar="N", help="per window (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run `hysparse plan`."""
    report = measure_plan(
        args.source,
        architecture=args.architecture,
        ratio=args.ratio,
        max_sparse_run=args.max_sparse_run,
        keep_kv=args.keep_kv,
        budget=args.budget,
        block_size=args.block_size,
        window=args.window,
        calibrate=args.calibrate,
        calibration_tokens=args.calibration_tokens,
        calibration_length=args.calibration_length,
    )
    print(table(report))
    return 0
