"""Sliding window with sinks against compiled FlexAttention (which has none) and, where installed, fla."""

from collections.abc import Iterator
from functools import cache, partial

import torch
from checks import gradients_are_right, outputs_are_right
from registry import CHECK_LENGTH, SHAPES, WINDOW, Baselines, Row, backward_ms, make_states, median_ms
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hysparse_hf.modeling.attention_hysparse import sliding_window_attention


try:
    from fla.ops.attn import parallel_attn
except ImportError:
    parallel_attn = None


def attend(query, key, value, *, sink=None, backend="triton", **options):
    """The public operation."""
    return sliding_window_attention(query, key, value, window=WINDOW, sink=sink, backend=backend, **options)


@cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


def flex(n: int):
    """FlexAttention with the window as a block mask."""

    def near(batch, head, q_index, kv_index):
        return (kv_index <= q_index) & (kv_index > q_index - WINDOW)

    mask = create_block_mask(near, None, None, n, n, device="cuda", _compile=True)
    return lambda query, key, value: _compiled_flex()(query, key, value, block_mask=mask, enable_gqa=True)


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one shape and length, one per baseline and pass."""
    states = make_states(shape, n)
    grad = torch.randn_like(states[0])
    sink = torch.randn(SHAPES[shape][0], device="cuda")
    kernel = partial(attend, sink=sink)
    reference = partial(attend, sink=sink, backend="reference")
    right = outputs_are_right(kernel, reference, states)
    few = make_states(shape, CHECK_LENGTH)
    forward = median_ms(lambda: kernel(*states))
    backward = backward_ms(kernel, states, grad)
    gradients_right = gradients_are_right(kernel, reference, few)
    calls = {"flex compiled": (flex(n), states, grad)}
    if parallel_attn is not None:
        turned = [tensor.transpose(1, 2).contiguous() for tensor in states]

        def fla(query, key, value):
            return parallel_attn(query, key, value, window_size=WINDOW, sink_bias=sink)

        calls["fla"] = (fla, turned, grad.transpose(1, 2).contiguous())
    for name, (call, inputs, gradient) in calls.items():
        ms = median_ms(lambda call=call, inputs=inputs: call(*inputs))
        yield Row("window", "forward", shape, n, forward, name, ms, right)
        ms = backward_ms(call, inputs, gradient)
        yield Row("window", "backward", shape, n, backward, name, ms, gradients_right)
