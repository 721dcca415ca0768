"""How close conversions of one checkpoint start to it: KL and perplexity on held-out text, retrieval, time and memory.

python benchmarks/conversion_quality.py SOURCE --calibrate FILE... --text FILE... [--variants regular,auto,keep-kv]
    [--length 2048] [--budget 512] [--needles 200 --needle-length 1024] [--output FILE]

Calibrate on files that share nothing with the texts. Fits are made anew for each variant; plans are measured once, one
for layers that become windows and one for layers that keep their keys and values.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.passkey import make_passkeys, make_shared_passkeys, measure_retrieval
from hysparse_hf.conversion.quality import Predictions, compare_predictions, on_device, predict, record_of
from hysparse_hf.conversion.source import open_source
from hysparse_hf.conversion.texts import Text, read_texts


# Name -> options of `convert`; the plan named `auto` is replaced by the measured one after its first use of a kind.
VARIANTS: dict[str, dict[str, Any]] = {
    "naive": {"init": "naive", "plan": "regular"},
    "regular": {"plan": "regular"},
    "auto": {"plan": "auto"},
    "keep-kv": {"keep_kv": True, "plan": "auto"},
    "keep-kv-regular": {"keep_kv": True, "plan": "regular"},
}


def measure(
    name: str, options: dict[str, Any], arguments: argparse.Namespace, teacher: Predictions, texts: list[Text]
) -> dict[str, Any]:
    """Convert with some options; the record of the result on the texts, and what the conversion took."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        provenance = convert(
            arguments.source,
            Path(folder) / "out",
            budget=arguments.budget,
            calibrate=arguments.calibrate,
            calibration_tokens=arguments.calibration_tokens,
            **options,
        )
        seconds = time.perf_counter() - began
        model = on_device(HySparseForCausalLM.from_pretrained(Path(folder) / "out", dtype=torch.float32).eval())
    full = [layer for layer, kind in enumerate(provenance["plan"]) if kind == "full"]
    record = record_of(compare_predictions(teacher, predict(model, texts, name), texts), texts)
    record |= {"full": full, "seconds": seconds, "peak_gb": peak_gb(), "damage": provenance["damage"]}
    return record | retrieval(model, arguments, name)


def retrieval(model: Any, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Passkeys found, where they are asked for."""
    if not arguments.needles:
        return {}
    tokenizer = open_source(arguments.source).load_tokenizer()
    shared = arguments.needles_per_text
    passkeys = (
        make_shared_passkeys(tokenizer, arguments.needles // shared, shared, arguments.needle_length)
        if shared
        else make_passkeys(tokenizer, arguments.needles, arguments.needle_length)
    )
    return {"needles": measure_retrieval(model, passkeys, name)}


def peak_gb() -> float:
    """Largest resident memory of this process so far, in 1e9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def print_row(name: str, record: dict[str, Any]) -> None:
    """One line: KL and perplexity per text, the ratio of perplexities of all texts, and the rest."""
    cells = "".join(f"{text['kl']:9.3f}{text['perplexity']:8.2f}" for text in record["texts"])
    found = f"{record['needles']['exact']:7.2f}" if "needles" in record else ""
    ratio = record["perplexity"] / record["first_perplexity"]
    print(f"{name:16}{cells}{record['kl']:9.3f}{ratio:7.3f}{found}  {record.get('full', '')}", flush=True)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--variants", default="regular,auto,keep-kv", help=f"among {', '.join(VARIANTS)}")
    parser.add_argument("--calibration-tokens", type=int)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--needles", type=int, default=0)
    parser.add_argument("--needle-length", type=int, default=1024)
    parser.add_argument("--needles-per-text", type=int, default=0, help="questions about one text; 0: texts with one")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    source = open_source(arguments.source)
    texts = read_texts(source, arguments.text, length=arguments.length, windows=1)
    model = on_device(source.load_model(torch.float32))
    teacher = predict(model, texts, "teacher")
    rows = {"teacher": record_of(compare_predictions(teacher, teacher, texts), texts)}
    rows["teacher"] |= retrieval(model, arguments, "teacher")
    print(f"{arguments.length} tokens a text, budget {arguments.budget}, float32; KL and perplexity of each, then")
    print("KL and perplexity over the teacher's of all, passkeys found, and the full layers")
    print(f"{'':16}" + "".join(f"{text.name[:15]:>17}" for text in texts) + f"{'all':>16}", flush=True)
    print_row("teacher", rows["teacher"])
    # Whether keys and values are kept -> the full layers of the measured plan.
    measured: dict[bool, list[int]] = {}
    for name in arguments.variants.split(","):
        options = dict(VARIANTS[name])
        keeps = "keep_kv" in options
        if options["plan"] == "auto" and keeps in measured:
            options["plan"] = measured[keeps]
        rows[name] = measure(name, options, arguments, teacher, texts)
        if VARIANTS[name]["plan"] == "auto":
            measured[keeps] = rows[name]["full"]
        print_row(name, rows[name])
        print(f"{'':16}converted in {rows[name]['seconds']:.0f} s; peak {rows[name]['peak_gb']:.1f} GB", flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
