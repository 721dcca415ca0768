"""Decoding of whole models through transformers' `generate()`: eight layers of the paper's 7B shape, random weights.

The caches hold random states of a prompt, so that no prefill is measured. Ours: the growing cache, the pre-allocated
one whose step the library compiles into CUDA graphs, and the mode where sparse layers keep their own keys
(`share_full_kv=False`). The baseline is a Llama of the same widths with `sdpa`, with the library's DynamicCache and
with its compiled StaticCache. The time of a step is that between the device's events of two neighbouring steps.

python benchmarks/bench_generate.py "llama dynamic:32768:1" "hysparse growing:32768:1:64" [--output FILE]

measures single cases, `variant:prompt:batch` or `variant:prompt:batch:new tokens`, one after another.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from bench_model import PLAN, WIDTHS, build
from decode_traffic import traffic_of_step
from registry import Baselines, Row, describe, write_rows
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)

from hysparse_hf import HySparseCache, HySparseConfig, HySparseForCausalLM, measure_cache_bytes


BATCHES = (1, 8)
NEW_TOKENS = 128
# Steps before those that count: compilation, and the recording of graphs.
WARM_STEPS = 12
SHORT_PROMPT, LONG_OUTPUT = 64, 1024
CHECK_PROMPT, CHECK_TOKENS = 1500, 24


@dataclass(frozen=True)
class Case:
    """One model and cache at one size."""

    variant: str
    n: int
    batch: int
    new_tokens: int = NEW_TOKENS

    @property
    def is_ours(self) -> bool:
        return self.variant.startswith("hysparse")

    @property
    def is_static(self) -> bool:
        return self.variant.endswith("static")


VARIANTS = ("llama dynamic", "llama static", "hysparse growing", "hysparse static", "hysparse own-kv static")


class Clock(LogitsProcessor):
    """Called once per step: marks the time on the device, and calls `when_warm` before the steps that count."""

    def __init__(self, when_warm: Callable[[], None]):
        self.events: list[torch.cuda.Event] = []
        self.when_warm = when_warm

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.events) == WARM_STEPS:
            torch.cuda.synchronize()
            self.when_warm()
            torch.cuda.reset_peak_memory_stats()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)
        return scores

    def step_ms(self) -> list[float]:
        """Milliseconds of the steps that count."""
        torch.cuda.synchronize()
        counted = self.events[WARM_STEPS:]
        return [begin.elapsed_time(end) for begin, end in zip(counted, counted[1:], strict=False)]


def make_model(case: Case, dtype: torch.dtype = torch.bfloat16):
    """The case's model on the card."""
    if not case.is_ours:
        return build(LlamaForCausalLM, LlamaConfig(**WIDTHS), "sdpa").to(dtype).eval()
    config = HySparseConfig(**WIDTHS, layer_plan=PLAN, **own_kv_switches(case))
    return build(HySparseForCausalLM, config, "sdpa").to(dtype).eval()


def own_kv_switches(case: Case) -> dict:
    """The training-free mode's settings."""
    if "own-kv" not in case.variant:
        return {}
    return {
        "share_full_kv": False,
        "window_branch": "none",
        "gate_granularity": "none",
        "attention_sink": False,
    }


def make_cache(case: Case, config):
    """The case's cache with random states of `n - 1` tokens: the prompt's last token is the first that is run."""
    filled = case.n - 1
    room = case.n + WARM_STEPS + case.new_tokens
    if case.is_ours:
        held = HySparseCache(config, max_cache_len=room if case.is_static else None)
    else:
        held = StaticCache(config, max_cache_len=room) if case.is_static else DynamicCache(config=config)
    layout = held.layout_without_mask(filled, torch.device("cuda")) if case.is_ours else None
    options = {"layout": layout} if case.is_ours else {}
    plan = config.cache_plan if case.is_ours else ["full"] * config.num_hidden_layers
    shape = (case.batch, config.num_key_value_heads, filled, config.head_dim)
    with torch.no_grad():
        for layer, kind in enumerate(plan):
            if kind != "none":
                key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                held.update(key, value, layer, **options)
                del key, value
        if case.is_ours:
            held.record_rows(layout)
    torch.cuda.empty_cache()
    return held


def measure_case(
    case: Case, when_warm: Callable[[], None] = lambda: None, load: Callable[[Case], PreTrainedModel] = make_model
) -> dict:
    """Figures of one case: milliseconds per step, tokens per second, memory, and for ours what a step reads."""
    # The compiled step of the case before is part of a cycle, and holds its model.
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model = load(case)
    held = make_cache(case, model.config)
    clock = Clock(when_warm)
    ids = torch.randint(model.config.vocab_size, (case.batch, case.n), device="cuda")
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=held,
        max_new_tokens=WARM_STEPS + case.new_tokens,
        min_new_tokens=WARM_STEPS + case.new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([clock]),
        pad_token_id=0,
    )
    times = sorted(clock.step_ms())
    figures = {
        "ms": times[len(times) // 2],
        "p99_ms": times[int(len(times) * 0.99)],
        "tokens_per_s": case.batch * len(times) / sum(times) * 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        **cache_bytes(case, held, model.config),
    }
    if case.is_ours and not case.is_static and case.new_tokens == NEW_TOKENS:
        figures["traffic"] = traffic_of_last_step(model, held, case)
    return figures


def cache_bytes(case: Case, held, config) -> dict[str, float]:
    """Bytes of keys and values in use and allocated, in GB."""
    if case.is_ours:
        found = measure_cache_bytes(held)
        return {f"kv_{name}_gb": found[name] / 1e9 for name in ("used", "allocated")}
    tokens = case.n + WARM_STEPS + case.new_tokens - 1
    used = 2 * case.batch * tokens * config.num_key_value_heads * config.head_dim * 2 * config.num_hidden_layers
    allocated = sum(part.numel() * part.element_size() for layer in held.layers for part in (layer.keys, layer.values))
    return {"kv_used_gb": used / 1e9, "kv_allocated_gb": allocated / 1e9}


def traffic_of_last_step(model, held, case: Case) -> dict:
    """One more token on the filled cache, and what its selections made it read."""
    ids = torch.zeros(case.batch, 1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        output = model(ids, past_key_values=held, output_selected_indices=True)
    return traffic_of_step(model.config, [int(held.get_seq_length())] * case.batch, output.selected_indices)


@cache
def own_paths_agree() -> bool:
    """Growing and pre-allocated caches give the same tokens in float32."""
    return caches_agree(make_model(Case("hysparse growing", 0, 1), torch.float32))


def caches_agree(model: PreTrainedModel) -> bool:
    """A float32 model's tokens are the same with a growing and with a pre-allocated cache."""
    ids = torch.randint(model.config.vocab_size, (2, CHECK_PROMPT), device="cuda")
    outputs = [
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CHECK_TOKENS,
            do_sample=False,
            cache_implementation=kind,
            disable_compile=True,
            pad_token_id=0,
        )
        for kind in (None, "static")
    ]
    return torch.equal(*outputs)


def rows_of(figures: dict[Case, dict], right: bool, shape: str = "g4") -> Iterator[Row]:
    """Our cases beside both baselines of their size."""
    for case, found in figures.items():
        if not case.is_ours:
            continue
        found = dict(found)
        ms = found.pop("ms")
        for baseline in ("llama dynamic", "llama static"):
            dense = figures.get(Case(baseline, case.n, case.batch, case.new_tokens))
            if dense is None:
                continue
            extra = {
                "variant": case.variant,
                "batch": case.batch,
                "new_tokens": case.new_tokens,
                "speedup": dense["ms"] / ms,
                **found,
                "baseline_figures": dense,
            }
            yield Row("generate", "decode", shape, case.n, ms, baseline, dense["ms"], right, extra=extra)


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one prompt length; the shape is the 7B's, so other groupings have none."""
    if shape != "g4":
        return
    right = own_paths_agree()
    cases = [Case(variant, n, batch) for batch in BATCHES for variant in VARIANTS]
    if not baselines.once("short prompt", lambda: 0.0):
        baselines.times["short prompt",] = 1.0
        cases += [Case(variant, SHORT_PROMPT, 1, LONG_OUTPUT) for variant in VARIANTS]
    yield from rows_of({case: measure_case(case) for case in cases}, right)


def named_case(text: str) -> Case:
    """The case that a command line names."""
    variant, *sizes = text.split(":")
    if variant not in VARIANTS or len(sizes) not in (2, 3) or not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"wants variant:prompt:batch[:new tokens], variants {VARIANTS}, got {text!r}")
    return Case(variant, *map(int, sizes))


def main() -> int:
    """Measure the cases that the command line names; return 1 if our own caches do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=named_case)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    header = describe()
    right = own_paths_agree()
    figures = {}
    for case in arguments.cases:
        figures[case] = measure_case(case)
        print(case, {name: found for name, found in figures[case].items() if name != "traffic"}, flush=True)
        if arguments.output:
            write_rows(arguments.output, header, list(rows_of(figures, right)))
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
