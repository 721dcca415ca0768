"""Whole models from token ids: prefill, and forward with backward, of eight layers of the paper's 7B shape.

The baseline is a Llama of the same widths and depth in transformers, with its `sdpa` attention. What random weights
choose is as good as random, the worst case. So a second model makes the same choice, at the same cost, and then takes
indices whose neighbours agree as in real text. Prefill is the first step of `generate()`, where only the last tokens
go on behind the last full layer's keys; beside it stands the same with every token in every layer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from registry import Baselines, Row, index_set
from transformers import LlamaConfig, LlamaForCausalLM

from hysparse_hf import HySparseConfig, HySparseForCausalLM
from hysparse_hf.modeling import decoder_hysparse, modeling_hysparse


PLAN = ["full", "sparse", "sparse", "sparse"] * 2
WIDTHS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": len(PLAN),
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0},
}
CHECK_LENGTH = 4096
# Beyond this length the activations of all layers do not fit; both models then recompute them.
LONGEST_WITHOUT_CHECKPOINTING = 32768
REPEATS = 3
# Name of the figures of a prefill of which nothing is left out.
EVERY_TOKEN = "every token"


def build(model_class: type, config, attention: str | None = None):
    """A model with random bfloat16 weights on the card."""
    config._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    return model


def prefill(model, ids: torch.Tensor) -> None:
    """As the first step of `generate()`: a cache, and the last position's logits."""
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)


def train(model, ids: torch.Tensor) -> None:
    """Loss and all gradients."""
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def measure_call(call: Callable[[], None]) -> tuple[float, float]:
    """Median milliseconds of some calls after a first one, and their peak memory in GB."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2] * 1e3, torch.cuda.max_memory_allocated() / 1e9


@contextmanager
def running_every_token() -> Iterator[None]:
    """While open, every token of a prompt runs through every layer, as if all logits were wanted."""
    begun = modeling_hysparse.prompt_end
    modeling_hysparse.prompt_end = lambda *arguments: None
    try:
        yield
    finally:
        modeling_hysparse.prompt_end = begun


@contextmanager
def choosing(kind: str, n: int) -> Iterator[None]:
    """While open, full layers choose as they do, and hand on the index set `kind` unless that is `"random"`."""
    if kind == "random":
        yield
        return
    indices = index_set(kind, WIDTHS["num_key_value_heads"], n)
    attend = decoder_hysparse.full_attention_with_oracle

    def replaced(*states, **options):
        output, lse, _ = attend(*states, **options)
        # Of a prompt's last full layer only the last tokens ask.
        return output, lse, indices[:, :, n - states[0].shape[2] :]

    decoder_hysparse.full_attention_with_oracle = replaced
    try:
        yield
    finally:
        decoder_hysparse.full_attention_with_oracle = attend


def measure_model(model, ids: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Milliseconds and peak GB of each pass."""
    figures = {"forward": measure_call(lambda: prefill(model.eval(), ids))}
    model.train()
    if ids.shape[1] > LONGEST_WITHOUT_CHECKPOINTING:
        model.gradient_checkpointing_enable()
    figures["forward+backward"] = measure_call(lambda: train(model, ids))
    model.gradient_checkpointing_disable()
    return figures


def logits_are_right(config: HySparseConfig) -> bool:
    """The kernels stray no further from float32 than the reference in the same dtype does, in mean KL."""
    ids = torch.randint(WIDTHS["vocab_size"], (1, CHECK_LENGTH), device="cuda")
    logs = {}
    model = build(HySparseForCausalLM, config)
    for name, attention, dtype in (
        ("kernels", "sdpa", torch.bfloat16),
        ("reference", "eager", torch.bfloat16),
        ("exact", "eager", torch.float32),
    ):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logs[name] = model.to(dtype)(ids, use_cache=False, logits_to_keep=512).logits.float().log_softmax(-1)
    distance = {
        name: (logs["exact"].exp() * (logs["exact"] - logs[name])).sum(-1).mean().item()
        for name in ("kernels", "reference")
    }
    print(f"# KL to float32: {distance}", flush=True)
    return distance["kernels"] <= 2 * distance["reference"] + 1e-4


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one length; the shape is the 7B's, so other groupings have none."""
    if shape != "g4":
        return
    configs = {
        "hysparse": HySparseConfig(**WIDTHS, layer_plan=PLAN),
        "llama": LlamaConfig(**WIDTHS),
    }
    right = logits_are_right(configs["hysparse"])
    ids = torch.randint(WIDTHS["vocab_size"], (1, n), device="cuda")
    model = build(LlamaForCausalLM, configs["llama"], "sdpa")
    dense = measure_model(model, ids)
    del model
    torch.cuda.empty_cache()
    model = build(HySparseForCausalLM, configs["hysparse"], "sdpa")
    for kind in ("random", "correlated"):
        with choosing(kind, n):
            figures = measure_model(model, ids)
            with running_every_token():
                figures[EVERY_TOKEN] = measure_call(lambda: prefill(model.eval(), ids))
        for name, (ms, gigabytes) in figures.items():
            passed_over = "forward" if name == EVERY_TOKEN else name
            base_ms, base_gigabytes = dense[passed_over]
            extra = {
                "peak_gb": gigabytes,
                "baseline_peak_gb": base_gigabytes,
                "speedup": base_ms / ms,
                "checkpointing": passed_over != "forward" and n > LONGEST_WITHOUT_CHECKPOINTING,
            }
            if name == EVERY_TOKEN:
                extra["variant"] = name
            yield Row("model", passed_over, shape, n, ms, "Llama sdpa", base_ms, right, kind, extra)
