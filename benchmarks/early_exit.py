"""What a prompt costs a second generation model when only its last position goes through the cross-decoder.

python benchmarks/early_exit.py [--length 4096] [--device cpu] [--repeats 3]

A toy of 12 and 12 layers: the full pass (all logits) beside the prefill (the last position's), both into a cache. Then
the bridge's two materializations over a prompt in chunks of which only the last keeps a logit: time of the chunks,
time of the call that gives the first token, and bytes that the cache holds before and after it. No figure is printed
unless the logits agree.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, HySparseCache, measure_cache_bytes


CHUNKS = 8
# float32 logits of this toy are of the order of 1.
TOLERANCE = 1e-4
NO_LOGITS = torch.tensor([], dtype=torch.long)


def toy(materialization: str, device: str) -> HySparse2ForCausalLM:
    """Twelve layers in each half, the cross-decoder's keys projected from layer 6."""
    torch.manual_seed(0)
    config = HySparse2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        oracle_budget=128,
        sliding_window=128,
        bridge_materialization=materialization,
    )
    return HySparse2ForCausalLM(config).eval().to(device)


def timed(call: Callable, *arguments, device: str) -> tuple[float, torch.Tensor]:
    """Seconds that one call took, and what it returned."""
    began = time.perf_counter()
    result = call(*arguments)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def last_logits(
    model: HySparse2ForCausalLM, pieces: Sequence[torch.Tensor], cache: HySparseCache, kept: int | torch.Tensor
) -> torch.Tensor:
    """Feed pieces of a prompt; logits `(batch, vocabulary)` of the last position, or of none."""
    for piece in pieces:
        logits = model(piece, cache=cache, logits_to_keep=kept).logits
    return logits[:, -1:]


@torch.no_grad()
def compare_with_the_full_pass(ids: torch.Tensor, repeats: int, device: str) -> torch.Tensor:
    """Print both times and how many tokens each half processed; return the last logits."""
    model = toy("eager", device)
    logits, times = {}, {}
    for name, kept in (("full pass", 0), ("prefill", 1)):
        runs = []
        for _ in range(repeats):
            cache = HySparseCache(model.config, count_tokens=True)
            runs.append(timed(last_logits, model, [ids], cache, kept, device=device))
        times[name], logits[name] = median(run[0] for run in runs), runs[-1][1]
        print(f"{name:10}{times[name]:9.3f} s   tokens processed: {cache.processed_tokens}")
    difference = (logits["prefill"] - logits["full pass"]).abs().max().item()
    if difference > TOLERANCE:
        raise SystemExit(f"no ratio: the last logits differ by {difference:.1e}")
    print(f"prefill / full pass = {times['prefill'] / times['full pass']:.3f} (logits differ by {difference:.1e})")
    return logits["prefill"]


@torch.no_grad()
def compare_materializations(ids: torch.Tensor, expected: torch.Tensor, repeats: int, device: str) -> None:
    """Print time and memory of eager and lazy projection over a prompt in chunks."""
    pieces = ids.chunk(CHUNKS, dim=1)
    models = {materialization: toy(materialization, device) for materialization in ("eager", "lazy")}
    reading: dict[str, list[float]] = {name: [] for name in models}
    answering: dict[str, list[float]] = {name: [] for name in models}
    bytes_held = {}
    # In turn, so that a busy machine slows both.
    for _ in range(repeats):
        for name, model in models.items():
            cache = HySparseCache(model.config)
            reading[name].append(timed(last_logits, model, pieces[:-1], cache, NO_LOGITS, device=device)[0])
            before = measure_cache_bytes(cache)["allocated"]
            took, logits = timed(last_logits, model, pieces[-1:], cache, 1, device=device)
            answering[name].append(took)
            bytes_held[name] = before, measure_cache_bytes(cache)["allocated"]
            difference = (logits - expected).abs().max().item()
            if difference > TOLERANCE:
                raise SystemExit(f"no figures for {name}: the last logits differ by {difference:.1e}")
    for name, (before, after) in bytes_held.items():
        print(
            f"{name}: {CHUNKS - 1} chunks {median(reading[name]):.3f} s, cache {before / 1e6:.2f} MB; "
            f"last chunk {median(answering[name]):.3f} s, cache {after / 1e6:.2f} MB; time to first token includes "
            + ("its own chunk's projections" if name == "eager" else "all projections of the bridge")
        )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ids = torch.randint(1024, (1, arguments.length), generator=torch.Generator().manual_seed(0)).to(arguments.device)
    print(
        f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads, {arguments.length} tokens"
    )
    expected = compare_with_the_full_pass(ids, arguments.repeats, arguments.device)
    compare_materializations(ids, expected, arguments.repeats, arguments.device)


if __name__ == "__main__":
    main()
