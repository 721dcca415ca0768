"""One new token per row: a full layer with its choice of blocks, and a sparse layer, by graph replay.

Beside the full layer stand cuDNN's plain decode, which chooses nothing, a device copy, and the kernels of prefill;
beside the sparse layer its parts one by one and the kernels of prefill. Replays go round several sets of states whose
keys and values together are larger than the card's cache, as those of a model's layers are.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from checks import is_within
from registry import (
    BLOCK_SIZE,
    HEAD_DIM,
    N_SELECTED,
    SHAPES,
    WINDOW,
    Baselines,
    Row,
    dense_attention,
    median_ms,
)
from torch.nn.attention import SDPBackend

from hysparse_hf.modeling import (
    triton_block_sparse,
    triton_full_attention,
    triton_sliding_window,
    triton_sparse_layer,
)
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
    sparse_layer_attention,
)


BATCHES = (1, 8)
# The sets' keys and values together, several times the card's cache.
ROUND_BYTES = 400e6
MOST_SETS = 24
# Calls in one graph, and replays of which the median counts.
CALLS = 24
REPLAYS = 20


def replay_ms(calls: list[Callable]) -> float:
    """Milliseconds per call: one graph of `CALLS` calls that go round, median over its replays."""
    with torch.no_grad():
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in itertools.islice(itertools.cycle(calls), CALLS):
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return sorted(times)[REPLAYS // 2]


def copy_bytes_per_second(n_bytes: int = 2**31) -> float:
    """Bytes read plus bytes written per second by a copy on the device."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * n_bytes / (median_ms(lambda: target.copy_(source)) * 1e-3)


@contextmanager
def prefill_kernels() -> Iterator[None]:
    """Let calls with few queries take the kernels of prefill."""
    modules = (triton_full_attention, triton_sparse_layer, triton_block_sparse, triton_sliding_window)
    before = [module.takes_decode for module in modules]
    for module in modules:
        module.takes_decode = lambda *tensors: False
    try:
        yield
    finally:
        for module, takes in zip(modules, before, strict=True):
            module.takes_decode = takes


def draw_states(batch: int, heads: int, kv_heads: int, n: int) -> list[torch.Tensor]:
    """Query of one token, keys and values, random normal bfloat16."""
    shapes = ((batch, heads, 1), (batch, kv_heads, n), (batch, kv_heads, n))
    return [torch.randn(*shape, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def full_layer(query, key, value, backend="triton"):
    """The public operation at the sizes of this folder."""
    return full_attention_with_oracle(query, key, value, block_size=BLOCK_SIZE, n_selected=N_SELECTED, backend=backend)


def full_is_right(states: list[torch.Tensor]) -> bool:
    """The first row's output by the tests' budget, and its blocks but for such as two roundings may swap."""
    first = [tensor[:1] for tensor in states]
    with torch.no_grad():
        actual, low = full_layer(*states), full_layer(*first, backend="reference")
        exact = full_layer(*(tensor.double() for tensor in first), backend="reference")
    same = (actual[2][:1] == exact[2]).float().mean().item()
    return is_within(actual[0][:1], low[0], exact[0]) and same > 0.9


def measure(shape: str, n: int, baselines: Baselines) -> Iterator[Row]:
    """Rows of one shape and length, for each batch size."""
    for batch in BATCHES:
        yield from measure_full(shape, n, batch, baselines)
        torch.cuda.empty_cache()
        yield from measure_sparse(shape, n, batch)
        torch.cuda.empty_cache()


def measure_full(shape: str, n: int, batch: int, baselines: Baselines) -> Iterator[Row]:
    """The full layer beside cuDNN's decode and beside the kernels of prefill."""
    heads, kv_heads = SHAPES[shape]
    kv_bytes = 2 * batch * kv_heads * n * HEAD_DIM * 2
    sets = max(1, min(MOST_SETS, round(ROUND_BYTES / kv_bytes)))
    states = [draw_states(batch, heads, kv_heads, n) for _ in range(sets)]
    right = full_is_right(states[0])
    ms = replay_ms([lambda parts=parts: full_layer(*parts) for parts in states])
    attend = dense_attention(SDPBackend.CUDNN_ATTENTION, is_causal=False)
    dense_ms = replay_ms([lambda parts=parts: attend(*parts) for parts in states])
    with prefill_kernels():
        before_ms = replay_ms([lambda parts=parts: full_layer(*parts) for parts in states])
    copied = baselines.once("copy", copy_bytes_per_second)
    extra = {
        "batch": batch,
        "variant": f"batch {batch}",
        "gb_per_s": kv_bytes / ms / 1e6,
        "copy_gb_per_s": copied / 1e9,
        "share_of_copy": kv_bytes / (ms * 1e-3) / copied,
    }
    yield Row("decode_full", "decode", shape, n, ms, "cudnn decode", dense_ms, right, extra=extra)
    yield Row("decode_full", "decode", shape, n, ms, "prefill kernels", before_ms, right, extra=extra)


def measure_sparse(shape: str, n: int, batch: int) -> Iterator[Row]:
    """The sparse layer beside its parts and beside the kernels of prefill; indices are random blocks."""
    heads, kv_heads = SHAPES[shape]
    sets = max(1, min(MOST_SETS, round(ROUND_BYTES / (batch * kv_heads * 1152 * HEAD_DIM * 4))))
    shared = draw_states(batch, heads, kv_heads, n)[1:]
    blocks = -(-n // BLOCK_SIZE)
    sinks = {name: torch.randn(heads, device="cuda") for name in ("sink_global", "sink_local")}
    arguments = []
    for _ in range(sets):
        indices = torch.rand(batch, kv_heads, 1, blocks, device="cuda").topk(N_SELECTED).indices.sort(-1).values
        gates = [torch.randn(batch, heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        arguments.append((draw_states(batch, heads, kv_heads, WINDOW), indices.int(), gates))

    def layer(window_states, indices, gates, far=shared, sinks=sinks, backend="triton"):
        return sparse_layer_attention(
            window_states[0],
            *far,
            indices,
            *window_states,
            block_size=BLOCK_SIZE,
            window=WINDOW,
            gate_global=gates[0],
            gate_local=gates[1],
            backend=backend,
            **sinks,
        )

    def of_first_row(call, change):
        """The reference on the first row alone, whose keys are then few enough to be held in float64."""
        near, indices, gates = call
        states = [[change(tensor[:1]) for tensor in part] for part in (near, gates, shared)]
        options = {name: change(sink) for name, sink in sinks.items()}
        return layer(states[0], indices[:1], states[1], far=states[2], sinks=options, backend="reference")

    def one_by_one(window_states, indices, gates):
        far = block_sparse_attention(
            window_states[0], *shared, indices, block_size=BLOCK_SIZE, sink=sinks["sink_global"], backend="triton"
        )
        near = sliding_window_attention(*window_states, window=WINDOW, sink=sinks["sink_local"], backend="triton")
        return torch.sigmoid(gates[0]) * far + torch.sigmoid(gates[1]) * near

    with torch.no_grad():
        low, exact = (of_first_row(arguments[0], change) for change in (torch.Tensor.contiguous, torch.Tensor.double))
        right = is_within(layer(*arguments[0])[:1], low, exact)
    ms = replay_ms([lambda each=each: layer(*each) for each in arguments])
    parts_ms = replay_ms([lambda each=each: one_by_one(*each) for each in arguments])
    with prefill_kernels():
        before_ms = replay_ms([lambda each=each: layer(*each) for each in arguments])
    extra = {"batch": batch, "variant": f"batch {batch}"}
    yield Row("decode_sparse", "decode", shape, n, ms, "one by one", parts_ms, right, extra=extra)
    yield Row("decode_sparse", "decode", shape, n, ms, "prefill kernels", before_ms, right, extra=extra)
