"""Decoding of a dense checkpoint and of its conversion, as `bench_generate` measures models of random weights.

python benchmarks/bench_checkpoint.py SOURCE CONVERTED [--lengths 2048,8192] [--output FILE]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_generate import BATCHES, VARIANTS, Case, caches_agree, measure_case, rows_of
from registry import Row, describe, write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from hysparse_hf.registration import register


def measure(source: str, converted: str, lengths: list[int]) -> Iterator[Row]:
    """Rows of the conversion beside its source, at each batch size."""

    def load(case: Case, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        folder = converted if case.is_ours else source
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()

    variants = [variant for variant in VARIANTS if "own-kv" not in variant]
    right = caches_agree(load(Case("hysparse growing", 0, 1), torch.float32))
    for n in lengths:
        for batch in BATCHES:
            cases = [Case(variant, n, batch) for variant in variants]
            figures = {case: measure_case(case, load=load) for case in cases}
            yield from rows_of(figures, right, Path(source).name)


def main() -> int:
    """Run what the command line names; return 1 if the check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("converted")
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    register()
    header, rows = describe(), []
    for row in measure(arguments.source, arguments.converted, [int(n) for n in arguments.lengths.split(",")]):
        rows.append(row)
        figures = f"{row.ms:8.2f} ms{row.baseline_ms:9.2f}  {row.baseline}" if row.check_passed else "withheld"
        print(f"{row.n:>7}{row.extra['batch']:>3} {row.extra['variant']:17}{figures}", flush=True)
        if arguments.output:
            write_rows(arguments.output, header, rows)
    return int(not all(row.check_passed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
