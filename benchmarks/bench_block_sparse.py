"""Block-sparse attention with sinks: layouts, forward, backward, and what the size of the blocks changes."""

from collections.abc import Iterator
from functools import partial

import torch
from checks import gradients_are_right, outputs_are_right
from registry import (
    BLOCK_SIZE,
    CHECK_LENGTH,
    N_SELECTED,
    RECORDED_LENGTH,
    SHAPES,
    SHARING_LAYERS,
    Baselines,
    Row,
    backward_ms,
    index_set,
    make_states,
    median_ms,
)

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    selection_layouts,
)


# At one budget of tokens; larger texts would only repeat the comparison.
OTHER_BLOCK_SIZES = (32, 128)
LONGEST_FOR_OTHERS = 32768


def attend(query, key, value, indices, *, sink, block_size=BLOCK_SIZE, backend="triton", **options):
    """The public operation."""
    return block_sparse_attention(
        query, key, value, indices, block_size=block_size, sink=sink, backend=backend, **options
    )


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one shape and length, for each kind of choice, and for blocks of other sizes."""
    for kind in ("correlated", "random", "first", *(["recorded"] if n == RECORDED_LENGTH else [])):
        yield from measure_set(shape, n, baselines, kind, BLOCK_SIZE)
    for block_size in OTHER_BLOCK_SIZES if n <= LONGEST_FOR_OTHERS else ():
        yield from measure_set(shape, n, baselines, "correlated", block_size)


def measure_set(shape: str, n: int, baselines: Baselines, kind: str, block_size: int) -> Iterator[Row]:
    """Rows of one index set; each sparse layer bears its share of the layouts."""
    heads, kv_heads = SHAPES[shape]
    states = make_states(shape, n)
    sink = torch.randn(heads, device="cuda")
    grad = torch.randn_like(states[0])
    kernel = partial(attend, sink=sink, block_size=block_size)
    reference = partial(kernel, backend="reference")
    n_selected = N_SELECTED * BLOCK_SIZE // block_size
    indices = index_set(kind, kv_heads, n, n_selected, block_size)

    def lay_out():
        return selection_layouts(*states, indices, block_size=block_size, backend="triton")

    with torch.no_grad():
        unions = median_ms(lay_out)
    all_layouts = median_ms(lay_out)
    layouts = lay_out()
    layer = partial(kernel, layouts=layouts)
    union = layouts.counts[..., 1].float().mean().item()
    extra = {
        "sharing_layers": SHARING_LAYERS,
        "block_size": block_size,
        "mean_union": round(union, 1),
        # Of the tokens that a tile of queries multiplies, those that its queries chose.
        "useful_tokens": round((indices >= 0).sum(-1).float().mean().item() / union, 3),
    }
    right = outputs_are_right(lambda *parts: kernel(*parts, indices), reference, states, indices)
    yield Row("layouts", "forward", shape, n, unions, "none", None, right, kind, {"block_size": block_size})
    yield Row(
        "layouts", "forward+backward", shape, n, all_layouts, "none", None, right, kind, {"block_size": block_size}
    )

    ms = median_ms(lambda: layer(*states, indices)) + unions / SHARING_LAYERS
    dense = baselines.dense(shape, n, "forward")
    if n <= LONGEST_FOR_OTHERS and kind == "correlated":
        extra["oracle_ms"], extra["topk_ms"] = oracle_ms(states, block_size, n_selected)
    yield Row("block_sparse", "forward", shape, n, ms, "cudnn dense", dense, right, kind, extra)

    few = make_states(shape, CHECK_LENGTH)
    few_indices = index_set(kind, kv_heads, CHECK_LENGTH, n_selected, block_size)
    right = gradients_are_right(kernel, reference, few, few_indices)
    ms = backward_ms(lambda *parts: layer(*parts, indices), states, grad) + (all_layouts - unions) / SHARING_LAYERS
    dense = baselines.dense(shape, n, "backward")
    yield Row("block_sparse", "backward", shape, n, ms, "cudnn dense", dense, right, kind, extra)


def oracle_ms(states: list[torch.Tensor], block_size: int, n_selected: int) -> tuple[float, float]:
    """Full attention with its oracle, and the part of it that chooses from the stored scores."""

    def choose():
        return full_attention_with_oracle(*states, block_size=block_size, n_selected=n_selected, backend="triton")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        choose()
        torch.cuda.synchronize()
    topk = sum(event.device_time_total for event in profile.key_averages() if "topk" in event.key) / 1000
    return median_ms(choose), topk
