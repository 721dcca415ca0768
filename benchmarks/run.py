"""Measure the operations beside their baselines, print a table, write JSON.

python benchmarks/run.py [--ops oracle,block_sparse] [--shapes g4,g16] [--lengths 8192,32768] [--output FILE]

With `--output results.json` a plot is drawn into `results.png` where matplotlib is installed.

A row is printed only if its operation was right in this run. The package must be installed (`pip install -e .`).
"""

import argparse
import importlib.util
from pathlib import Path

import bench_block_sparse
import bench_decode
import bench_generate
import bench_model
import bench_oracle
import bench_sparse_layer
import bench_window
import torch
from registry import SHAPES, Baselines, Row, describe, write_rows


OPERATIONS = {
    "oracle": bench_oracle.measure,
    "block_sparse": bench_block_sparse.measure,
    "sparse_layer": bench_sparse_layer.measure,
    "window": bench_window.measure,
    "decode": bench_decode.measure,
    "generate": bench_generate.measure,
    "model": bench_model.measure,
}


def print_row(row: Row) -> None:
    """One line of the table, or the reason why there is none."""
    variant = f"{row.index_set or ''} {row.extra.get('variant', '')} {row.extra.get('block_size', '')}".strip()
    name = f"{row.op:<13}{row.passed_over:<17}{row.shape:<5}{row.n:>7}  {variant:<24}"
    if not row.check_passed:
        print(f"{name} withheld: its check failed", flush=True)
        return
    baseline = f"{row.baseline_ms:10.3f} {row.ratio:7.3f}  {row.baseline}" if row.baseline_ms else ""
    print(f"{name}{row.ms:10.3f}{baseline}", flush=True)


def main() -> int:
    """Run what the command line names; return 1 if any check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPERATIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    header = describe()
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    print(f"{'op':<13}{'pass':<17}{'shape':<5}{'n':>7}  {'set':<24}{'ms':>10}{'base ms':>10}{'ratio':>8}")
    rows = []
    baselines = Baselines()
    for length in arguments.lengths.split(","):
        for shape in arguments.shapes.split(","):
            for operation in arguments.ops.split(","):
                for row in OPERATIONS[operation](shape, int(length), baselines):
                    print_row(row)
                    rows.append(row)
                torch.cuda.empty_cache()
                if arguments.output:
                    write_rows(arguments.output, header, rows)
    if arguments.output and importlib.util.find_spec("matplotlib"):
        from plot import draw

        draw([arguments.output], arguments.output.with_suffix(".png"))
    return int(not all(row.check_passed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
