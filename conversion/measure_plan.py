"""`hysparse plan`: measure what each layer's attention is worth and which layers would stay full; convert nothing."""

import argparse
from pathlib import Path
from typing import Any

from .calibration import calibration_for
from .job import Job, Options
from .source import open_source
from .texts import GivenText


def measure_plan(
    source: str | Path,
    *,
    ratio: str = "1:3",
    max_sparse_run: int | None = None,
    window: int = 128,
    calibrate: GivenText | None = None,
    calibration_tokens: int | None = None,
    calibration_length: int = 2048,
) -> dict[str, Any]:
    """Measure the damage of making layers sparse, as `convert(plan="auto")` does.

    Args:
        source, ratio, max_sparse_run, window, calibrate, calibration_tokens, calibration_length: as in `convert`.
    Returns:
        `dict`: `damage`: per layer the KL to the source when its attention alone becomes the window that it can be
        fitted to; `plans`: for `regular` and `auto` the `full` layers and the `estimate`, the KL of all sparse layers
        together, pairs included, by that measure.
    Raises:
        ValueError, NotImplementedError, FileNotFoundError: as in `convert`; also for a ratio without sparse layers.
    """
    options = Options(
        ratio=ratio,
        plan="auto",
        max_sparse_run=max_sparse_run,
        keep_kv=False,
        budget=64,
        block_size=64,
        window=window,
        gates=(0.05, 0.95),
        gate_granularity="elementwise",
        init="naive",
        dtype=None,
    )
    options.check()
    job = Job(open_source(source), options)
    if not job.measures_plan:
        raise ValueError(f"`ratio` must have sparse layers to measure, got {ratio!r}; use for example '1:3'.")
    plans = {"regular": job.config.layer_plan}
    tokens = job.tokens_needed if calibration_tokens is None else calibration_tokens
    job.calibrate(calibration_for(job.source, calibrate, tokens=tokens, length=calibration_length, window=window))
    plans["auto"] = job.config.layer_plan
    damage = job.damage
    assert damage is not None
    assert job.calibration is not None
    return {
        "source": job.source.name,
        "calibration": job.calibration.record,
        "damage": damage.matrix.diagonal().tolist(),
        "plans": {
            name: {
                "full": [layer for layer, kind in enumerate(plan) if kind == "full"],
                "estimate": damage.of([layer for layer, kind in enumerate(plan) if kind == "sparse"]),
            }
            for name, plan in plans.items()
        },
    }


def table(report: dict[str, Any]) -> str:
    """A report of `measure_plan` for people."""
    plans = report["plans"]
    lines = [
        f"{report['source']}: KL to the source when one layer's attention becomes a fitted window, on "
        f"{report['calibration']['tokens']} tokens",
        f"{'layer':>5}{'KL':>9}" + "".join(f"{name:>9}" for name in plans),
    ]
    for layer, damage in enumerate(report["damage"]):
        marks = ("full" if layer in plan["full"] else "." for plan in plans.values())
        lines.append(f"{layer:5}{damage:9.4f}" + "".join(f"{mark:>9}" for mark in marks))
    lines.append(f"{'all':>5}{'':9}" + "".join(f"{plan['estimate']:9.3f}" for plan in plans.values()))
    return "\n".join([*lines, f"--plan {','.join(map(str, plans['auto']['full']))}"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse plan`."""
    parser.add_argument("source", help="checkpoint folder, or a .gguf file")
    parser.add_argument("--ratio", default="1:3", help="1:N, N sparse layers to a full one (default: %(default)s)")
    parser.add_argument(
        "--max-sparse-run", type=int, metavar="LAYERS", help="sparse layers in a row, at most (default: N + 2)"
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
        ratio=args.ratio,
        max_sparse_run=args.max_sparse_run,
        window=args.window,
        calibrate=args.calibrate,
        calibration_tokens=args.calibration_tokens,
        calibration_length=args.calibration_length,
    )
    print(table(report))
    return 0
