"""Convert a dense checkpoint into a HySparse checkpoint: an exact map of its tensors, then fitted initial values.

Every tensor of the source has its place, and the map is exact. Then, on calibration text, it is measured which layers
can be sparse (`damage`, `reuse_damage`), and their sinks, gates and output projections are fitted (`fit`). The output
folder appears at once, complete with tokenizer, code and `provenance.json`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from .architectures import ARCHITECTURES
from .job import DTYPES, GRANULARITIES, INITS, Job, Options
from .output import MAX_SHARD_BYTES, appearing_folder, check_target
from .source import open_source


def convert(
    source: str | Path,
    out: str | Path,
    *,
    architecture: str = "hysparse",
    ratio: str = "1:3",
    plan: str | Sequence[int] | Sequence[Sequence[int]] | None = None,
    max_sparse_run: int | None = None,
    keep_kv: bool = False,
    budget: int = 1024,
    block_size: int = 64,
    window: int = 128,
    gates: tuple[float, float] = (0.05, 0.95),
    gate_granularity: Literal["elementwise", "headwise", "none"] = "elementwise",
    init: str = "fitted",
    calibrate: Sequence[str | Path] | str | Path | torch.Tensor | None = None,
    calibration_tokens: int | None = None,
    calibration_length: int = 2048,
    dtype: str | torch.dtype | None = None,
    dry_run: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Any]:
    """Write the HySparse checkpoint of a dense one.

    Args:
        source (`str` or `Path`): a checkpoint folder of a family in `families.FAMILIES`, or a `.gguf` file.
        out (`str` or `Path`): a new or empty folder.
        architecture (`str`): `"hysparse"`, or `"hysparse2"` for the second generation, whose halves `half_plans` in
            `halves` describes. There `gates` opens the sparse and the window layers', `block_size` says nothing, and
            the cross-decoder is fitted as `cross_fit` says.
        ratio (`str`): `1:N`, one full layer to N sparse ones, as many full layers as the regular plan has.
        plan (`str` or `Sequence[int]`, *optional*): the full layers, `"regular"`, or `"auto"`: those whose attention
            is missed most, measured on the calibration text (`damage`; with `keep_kv` those whose choices lose least
            for the layers after them, `reuse_damage`). Default: auto, and regular with `init="naive"`. For the second
            generation the full layers of both halves, `"0,7/15,19"`; auto chooses those of the self-decoder, as many
            as in the regular plan, and leaves the border and the cross-decoder as there.
        max_sparse_run (`int`, *optional*): sparse layers in a row that auto may choose, at most, or window layers of
            the second generation; default N + 2.
        keep_kv (`bool`): the mode that needs no training: each sparse layer keeps its own keys and values in full
            length and reads the blocks that its full layer selected; no window, gates or sinks, nothing is fitted.
            It saves time and no memory.
        budget (`int`): tokens that a sparse layer's global branch reads; a multiple of `block_size`.
        block_size (`int`): tokens per block.
        window (`int`): tokens of the local branch.
        gates (`tuple[float, float]`): how far the global and the local gate are open at a naive start, between 0
            and 1.
        gate_granularity (`str`): `"elementwise"`, `"headwise"` or `"none"`.
        init (`str`): `"fitted"` fits sinks, gates and output projections; `"naive"` has sinks of 0, constant gates
            and the source's output projections.
        calibrate (*optional*): text files to measure and fit on, or token ids `(windows, length)`. Without it the
            source samples its own text, for which all of it is loaded.
        calibration_tokens (`int`, *optional*): tokens of calibration text in all; default 8,192, or ten times the
            hidden size where that is more. With less than ten times the hidden size output projections stay.
        calibration_length (`int`): tokens per window of a file.
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
        plan=plan,
        budget=budget,
        block_size=block_size,
        window=window,
        max_sparse_run=max_sparse_run,
        keep_kv=keep_kv,
        gates=gates,
        gate_granularity=gate_granularity,
        init=init,
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
    )
    options.check()
    job = Job(open_source(source), options)
    if dry_run:
        print(job.table())
        return job.provenance()
    if job.measures_plan or job.fits_something:
        job.calibrate_on(calibrate, calibration_tokens, calibration_length)
    with appearing_folder(out) as folder:
        return job.write(folder, max_shard_bytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse convert`."""
    parser.add_argument(
        "source", help="checkpoint folder (Llama, Mistral, Mixtral, Qwen2, Qwen3, their MoE), or a .gguf file"
    )
    parser.add_argument("out", help="new or empty folder")
    parser.add_argument(
        "--architecture",
        default="hysparse",
        choices=tuple(ARCHITECTURES),
        help="first or second generation (default: %(default)s)",
    )
    parser.add_argument("--ratio", default="1:3", help="1:N, N sparse layers to a full one (default: %(default)s)")
    parser.add_argument(
        "--plan",
        help="full layers such as 0,3,8 (of the second generation those of both halves, 0,7/15,19), regular, or auto: "
        "measured (the default; regular with --init naive)",
    )
    parser.add_argument(
        "--max-sparse-run",
        type=int,
        metavar="LAYERS",
        help="sparse layers in a row in an auto plan, window layers of hysparse2 (default: N + 2)",
    )
    parser.add_argument(
        "--keep-kv",
        action="store_true",
        help="sparse layers keep their own keys and values and only read the selected blocks; needs no training",
    )
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
        help="how far the gates are open at a naive start (default: 0.05 0.95)",
    )
    parser.add_argument(
        "--gate-granularity", default="elementwise", choices=GRANULARITIES, help="default: %(default)s"
    )
    parser.add_argument(
        "--init",
        default="fitted",
        choices=INITS,
        help="sinks, gates and output projections fitted (the default), or naive: sinks 0, gates constant",
    )
    parser.add_argument(
        "--calibrate", nargs="+", metavar="FILE", help="text to measure and fit on; without it the source writes it"
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="in all (default: 8192, or ten times the hidden size where that is more)",
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
        architecture=args.architecture,
        ratio=args.ratio,
        plan=args.plan,
        max_sparse_run=args.max_sparse_run,
        keep_kv=args.keep_kv,
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
        checked, fitted = (record["verification"][name] for name in ("tensors_equal", "tensors_fitted"))
        print(
            f"{args.out}: full layers {full}; {checked} tensors equal the source's, bit for bit or as cast; "
            f"{fitted} were fitted."
        )
    return 0
