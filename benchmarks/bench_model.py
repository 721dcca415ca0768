"""Whole models from token ids: prefill, and forward with backward, of eight layers of the paper's 7B shape.

The baseline is a Llama of the same widths and depth in transformers, with its `sdpa` attention.
"""

import time
from collections.abc import Callable, Iterator

import torch
from registry import Baselines, Row
from transformers import LlamaConfig, LlamaForCausalLM

from hysparse_hf import HySparseConfig, HySparseForCausalLM


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
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    for name, model_class in (("llama", LlamaForCausalLM), ("hysparse", HySparseForCausalLM)):
        model = build(model_class, configs[name], "sdpa").eval()
        figures[name] = {"forward": measure_call(lambda model=model: prefill(model, ids))}
        model.train()
        if n > LONGEST_WITHOUT_CHECKPOINTING:
            model.gradient_checkpointing_enable()
        figures[name]["forward+backward"] = measure_call(lambda model=model: train(model, ids))
        del model
        torch.cuda.empty_cache()
    for passed_over, (ms, gigabytes) in figures["hysparse"].items():
        base_ms, base_gigabytes = figures["llama"][passed_over]
        extra = {
            "peak_gb": gigabytes,
            "baseline_peak_gb": base_gigabytes,
            "speedup": base_ms / ms,
            "checkpointing": passed_over != "forward" and n > LONGEST_WITHOUT_CHECKPOINTING,
        }
        yield Row("model", passed_over, shape, n, ms, "Llama sdpa", base_ms, right, extra=extra)
