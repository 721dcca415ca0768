"""Full attention with its oracle: forward with scores and top-k, backward by the library and by our own kernels."""

from collections.abc import Iterator
from functools import partial

import torch
from checks import gradients_are_right, outputs_are_right
from registry import (
    BLOCK_SIZE,
    CHECK_LENGTH,
    N_SELECTED,
    SHAPES,
    Baselines,
    Row,
    backward_ms,
    make_states,
    median_ms,
)
from torch.nn.attention import SDPBackend

from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle


def attend(query, key, value, *, backend="triton", n_selected=N_SELECTED, **options):
    """The output alone."""
    options = {"block_size": BLOCK_SIZE, "n_selected": n_selected, **options}
    return full_attention_with_oracle(query, key, value, backend=backend, **options)[0]


def selection_is_right(states) -> bool:
    """Chosen blocks score no less than rejected ones, by float32 scores of a few rows."""
    query, key, _ = states
    n = query.shape[2]
    indices = full_attention_with_oracle(*states, block_size=BLOCK_SIZE, n_selected=N_SELECTED, backend="triton")[2]
    group = query.shape[1] // key.shape[1]
    for place in (n // 2 + 5, n - 1):
        keys = key[:, :, : place + 1].float().repeat_interleave(group, 1)
        logits = (keys @ query[:, :, place, :, None].float())[..., 0] * query.shape[-1] ** -0.5
        scores = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % BLOCK_SIZE), value=float("-inf"))
        scores = scores.unflatten(-1, (-1, BLOCK_SIZE)).amax(-1) - logits.logsumexp(-1, keepdim=True)
        scores = scores.unflatten(1, (-1, group)).amax(2)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, indices[:, :, place].long(), True)
        lowest = scores.masked_fill(~chosen, float("inf")).amin(-1)
        highest = scores.masked_fill(chosen, float("-inf")).amax(-1)
        if (chosen.sum(-1) != N_SELECTED).any() or (lowest < highest - 1e-4).any():
            print(f"check failed: selection of query {place}", flush=True)
            return False
    return True


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one shape and length."""
    states = make_states(shape, n)
    reference = partial(attend, backend="reference", n_selected=0)
    right = outputs_are_right(attend, reference, states) and selection_is_right(states)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = full_attention_with_oracle(*states, block_size=BLOCK_SIZE, n_selected=N_SELECTED, backend="triton")
    held = sum(tensor.numel() * tensor.element_size() for tensor in results)
    extra = {"extra_bytes": torch.cuda.max_memory_allocated() - before - held}
    del results
    dense = baselines.dense(shape, n, "forward")
    ms = median_ms(lambda: attend(*states))
    extra["without_oracle_ms"] = median_ms(lambda: attend(*states, n_selected=0))
    if n <= 32768:
        extra["flash_ms"] = baselines.dense(shape, n, "forward", SDPBackend.FLASH_ATTENTION)
        scores = torch.rand(SHAPES[shape][1], n, n // BLOCK_SIZE, device="cuda")
        extra["torch_topk_ms"] = median_ms(lambda: scores.topk(N_SELECTED, -1))
        del scores
    yield Row("oracle", "forward", shape, n, ms, "cudnn dense", dense, right, extra=extra)

    few = make_states(shape, CHECK_LENGTH)
    dense = baselines.dense(shape, n, "backward")
    grad = torch.randn_like(states[0])
    for variant in ("library", "repeatable"):
        torch.use_deterministic_algorithms(variant == "repeatable", warn_only=True)
        try:
            right = gradients_are_right(attend, reference, few)
            ms = backward_ms(attend, states, grad)
        finally:
            torch.use_deterministic_algorithms(False)
        yield Row("oracle", "backward", shape, n, ms, "cudnn dense", dense, right, extra={"variant": variant})
