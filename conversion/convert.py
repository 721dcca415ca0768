"""Convert a dense checkpoint into a HySparse checkpoint: an exact map of its tensors, then fitted initial values.

Every layer keeps the source's own weights. Sparse layers get gates, constant at the start (`gates`), and sinks, fitted
in closed form (see `fit`). The output folder appears at once, complete with tokenizer, code and `provenance.json`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from .calibration import calibration_for
from .job import DTYPES, INITS, Job, Options
from .output import MAX_SHARD_BYTES, appearing_folder, check_target
from .source import open_source


def convert(
    source: str | Path,
    out: str | Path,
    *,
    ratio: str = "1:3",
    plan: str | Sequence[int] | None = None,
    budget: int = 1024,
    block_size: int = 64,
    window: int = 128,
    gates: tuple[float, float] = (0.05, 0.95),
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise",
    init: str = "fitted",
    calibrate: Sequence[str | Path] | str | Path | torch.Tensor | None = None,
    calibration_tokens: int = 4096,
    calibration_length: int = 2048,
    dtype: str | torch.dtype | None = None,
    dry_run: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Any]:
    """Write the HySparse checkpoint of a dense one.

    Args:
        source (`str` or `Path`): a checkpoint folder of a family in `families.FAMILIES`, or a `.gguf` file.
        out (`str` or `Path`): a new or empty folder.
        ratio (`str`): `1:N`, one full layer to N sparse ones, for the regular plan.
        plan (`str` or `Sequence[int]`, *optional*): the full layers, or `"regular"`, the default.
        budget (`int`): tokens that a sparse layer's global branch reads; a multiple of `block_size`.
        block_size (`int`): tokens per block.
        window (`int`): tokens of the local branch.
        gates (`tuple[float, float]`): how far the global and the local gate are open at the start, between 0 and 1.
        gate_granularity (`str`): `"elementwise"` or `"headwise"`.
        init (`str`): `"fitted"` fits the sinks on calibration text; `"naive"` leaves them 0.
        calibrate (*optional*): text files for the fit, or token ids `(windows, length)`. Without it the source
            samples its own text, for which all of it is loaded.
        calibration_tokens (`int`), calibration_length (`int`): tokens read from files, in all and per window.
        dtype (`str` or `torch.dtype`, *optional*): of the output; default: each tensor keeps its own.
        dry_run (`bool`): print the map and write nothing.
        max_shard_bytes (`int`): larger checkpoints are written in shards.
    Returns:
        `dict`: the content of `provenance.json`.
    Raises:
        ValueError, NotImplementedError, FileNotFoundError: before any work, naming what is wrong: options, target
            folder, source files, tensors without a place. Nothing is left behind.

    ```python
    >>> from hysparse_hf import convert
    >>> convert("SmolLM2-135M-Instruct", "SmolLM2-HySparse", calibrate=["manual.txt", "novel.txt"])  # doctest: +SKIP
    ```
    """
    # Resolved, since the finished folder takes this name: neither "." nor a link can be renamed over.
    out = Path(out).expanduser().resolve()
    check_target(out)
    options = Options(
        ratio=ratio,
        plan=plan if plan is None or isinstance(plan, str) else list(plan),
        budget=budget,
        block_size=block_size,
        window=window,
        gates=gates,
        gate_granularity=gate_granularity,
        init=init,
        dtype=str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
    )
    options.check()
    job = Job(open_source(source), options)
    if dry_run:
        print(job.table())
        return job.provenance()
    if init == "fitted" and job.fits_something:
        job.fit(
            calibration_for(job.source, calibrate, tokens=calibration_tokens, length=calibration_length, window=window)
        )
    with appearing_folder(out) as folder:
        return job.write(folder, max_shard_bytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse convert`."""
    parser.add_argument("source", help="checkpoint folder (Llama, Mistral, Qwen2, Qwen3), or a .gguf file")
    parser.add_argument("out", help="new or empty folder")
    parser.add_argument("--ratio", default="1:3", help="1:N, N sparse layers to a full one (default: %(default)s)")
    parser.add_argument("--plan", default="regular", help="full layers such as 0,3,8, or regular (the default)")
    parser.add_argument(
        "--budget", type=int, default=1024, metavar="TOKENS", help="read by the global branch (default: %(default)s)"
    )
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="TOKENS", help="tokens per block (default: %(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=128, metavar="TOKENS", help="read by the local branch (default: %(default)s)"
    )
    parser.add_argument(
        "--gates",
        type=float,
        nargs=2,
        default=(0.05, 0.95),
        metavar=("GLOBAL", "LOCAL"),
        help="how far the gates are open at the start (default: 0.05 0.95)",
    )
    parser.add_argument(
        "--gate-granularity", default="elementwise", choices=("elementwise", "headwise"), help="default: %(default)s"
    )
    parser.add_argument("--init", default="fitted", choices=INITS, help="sinks: fitted (the default), or naive, all 0")
    parser.add_argument(
        "--calibrate", nargs="+", metavar="FILE", help="text to fit on; without it the source samples its own"
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=4096, metavar="N", help="in all (default: %(default)s)"
    )
    parser.add_argument(
        "--calibration-length", type=int, default=2048, metavar="N", help="per window (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the output (default: the source's)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, write nothing")


def run(args: argparse.Namespace) -> int:
    """Run `hysparse convert`."""
    record = convert(
        args.source,
        args.out,
        ratio=args.ratio,
        plan=args.plan,
        budget=args.budget,
        block_size=args.block_size,
        window=args.window,
        gates=tuple(args.gates),
        gate_granularity=args.gate_granularity,
        init=args.init,
        calibrate=args.calibrate,
        calibration_tokens=args.calibration_tokens,
        calibration_length=args.calibration_length,
        dtype=args.dtype,
        dry_run=args.dry_run,
    )
    full = [index for index, kind in enumerate(record["plan"]) if kind == "full"]
    if not args.dry_run:
        checked = record["verification"]["tensors_equal"]
        print(f"{args.out}: full layers {full}; {checked} tensors equal the source's, bit for bit or as cast.")
    return 0
