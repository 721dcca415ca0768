"""Decoding on a pre-allocated cache compiled into one graph, captured on a card, and by the kernels."""

import copy
import warnings

import pytest
import torch
from models.cache_runs import padded_or_not, rows_and_mask
from models.generations import over_settings
from models.tiny import (
    draw_ids,
    greedy,
    spread,
    tiny_model,
)
from torch._dynamo import lookup_backend
from torch._inductor.utils import run_and_get_code

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT


def compiled_generation(model, backend, ids, **arguments):
    """The output, and of each graph that it took how many of its sizes are variables; every call is one graph."""
    torch._dynamo.reset()
    graphs = []

    def recording(graph, inputs):
        graphs.append(sum(isinstance(value, torch.SymInt | int) for value in inputs))
        return lookup_backend(backend)(graph, inputs)

    eager = model.forward
    model.forward = torch.compile(eager, fullgraph=True, backend=recording)
    try:
        return greedy(model, ids, cache_implementation="static", **arguments), graphs
    finally:
        model.forward = eager
        torch._dynamo.reset()


def test_D09_fifty_steps_in_two_graphs():
    """One for the prompt and one for every step, whatever the length."""
    model = tiny_model(layer_plan=["full", "sparse", "window"])
    rows, mask = rows_and_mask(padded=True)
    ids = spread(rows, mask)
    output, graphs = compiled_generation(model, "eager", ids, new_tokens=50, attention_mask=mask)
    assert torch.equal(output, greedy(model, ids, 50, attention_mask=mask))
    assert graphs == [0, 0]


@pytest.mark.slow
@padded_or_not
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_D09_fifty_steps_compiled_by(backend, padded):
    model = tiny_model()
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    output, graphs = compiled_generation(model, backend, ids, new_tokens=50, attention_mask=mask)
    assert torch.equal(output, greedy(model, ids, 50, attention_mask=mask))
    assert graphs == [0, 0]


@pytest.mark.slow
@over_settings()
def test_D09_every_switch_decodes_in_two_graphs(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    rows, mask = rows_and_mask(padded=True)
    ids = spread(rows, mask)
    output, graphs = compiled_generation(model, "eager", ids, new_tokens=12, attention_mask=mask)
    assert torch.equal(output, greedy(model, ids, 12, attention_mask=mask))
    assert graphs == [0, 0]


@padded_or_not
def test_a_compiled_step_copies_no_buffer(padded):
    """What a step writes goes into the buffers; a compiler that makes new ones reads and writes the whole history."""
    room = 777
    model = tiny_model(layer_plan=["full", "sparse"], num_hidden_layers=2)
    rows, mask = rows_and_mask(padded)
    cache = HySparseCache(model.config, max_cache_len=room)
    torch._dynamo.reset()
    with torch.no_grad():
        model(spread(rows, mask), attention_mask=mask, cache=cache)
        write = torch.compile(cache.layers[0].update, fullgraph=True)
        states = [torch.randn(2, *part.shape[1:2], 1, part.shape[3]) for part in cache.layers[0]._buffers]
        layout = cache.layout_without_mask(1, torch.device("cpu"))
        _, code = run_and_get_code(write, *states, layout=layout)
    allocated = [line for line in "\n".join(code).splitlines() if "= empty_strided" in line and f", {room}, " in line]
    assert allocated == []
    for buffer, state in zip(cache.layers[0]._buffers, states, strict=True):
        for row, count in enumerate(mask.sum(-1).tolist()):
            assert torch.equal(buffer[row, :, count], state[row, :, 0])


# Kernels


KERNEL_SIZES = {"head_dim": 32, "oracle_block_size": 16, "oracle_budget": 32}


@pytest.mark.slow
@padded_or_not
@torch.no_grad()
def test_kernels_give_what_the_reference_gives_and_never_look_at_spare_columns(padded, monkeypatch):
    """Room behind a prompt may hold anything; later chunks and steps take nothing from it."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model(layer_plan=["full", "sparse"], num_hidden_layers=2, **KERNEL_SIZES).to(device)
    rows, mask = rows_and_mask(padded)
    ids, mask = spread(rows, mask).to(device), mask.to(device)
    logits = []
    for backend, poisoned in (("reference", False), ("triton", False), ("triton", True)):
        monkeypatch.setenv("HYSPARSE_BACKEND", backend)
        cache, done, pieces = HySparseCache(model.config, max_cache_len=60), 0, []
        for size in (20, 18, 1, 2):
            new = slice(done, done + size)
            pieces.append(model(ids[:, new], attention_mask=mask[:, : done + size], cache=cache).logits)
            done += size
            if poisoned:
                for row, count in enumerate(mask[:, :done].sum(-1).tolist()):
                    for buffer in cache.layers[0]._buffers:
                        buffer[row, :, count:] = float("nan")
        logits.append(torch.cat(pieces, dim=1)[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[1], logits[2])


@pytest.mark.gpu
@padded_or_not
@torch.no_grad()
def test_a_captured_step_of_the_whole_model_counts_on_the_device(padded):
    """One graph, replayed, gives what the growing cache gives token by token; nothing in it waits for the host."""
    model = tiny_model(**KERNEL_SIZES).cuda()
    rows, mask = rows_and_mask(padded)
    ids, mask = spread(rows, mask).cuda(), mask.cuda()
    more = draw_ids(2, 30, seed=5).cuda()
    caches = HySparseCache(model.config), HySparseCache(model.config, max_cache_len=100)
    for cache in caches:
        model(ids, attention_mask=mask, cache=cache)
    token = more[:, :1].clone()
    expected = [model(more[:, :1], attention_mask=None, cache=caches[0]).logits]
    with torch.cuda.stream(torch.cuda.Stream()):
        actual = [model(token, cache=caches[1]).logits]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(token, cache=caches[1]).logits
    for step in range(1, 30):
        token.copy_(more[:, step : step + 1])
        graph.replay()
        actual.append(captured.clone())
        expected.append(model(more[:, step : step + 1], cache=caches[0]).logits)
    torch.testing.assert_close(torch.cat(actual, 1), torch.cat(expected, 1), rtol=0, atol=1e-4)


@pytest.mark.gpu
@padded_or_not
def test_D09_turns_of_any_length_need_no_further_graph_on_a_card(padded):
    model = tiny_model(torch.bfloat16, **KERNEL_SIZES).cuda()
    rows, mask = rows_and_mask(padded)
    ids, mask = spread(rows, mask).cuda(), mask.cuda()
    cache = HySparseCache(model.config, max_cache_len=200)
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for new_tokens in (20, 45, 30):
            output = greedy(model, ids, new_tokens, attention_mask=mask, **{CACHE_ARGUMENT: cache})
            counts.append(counters["stats"]["unique_graphs"])
            ids = torch.cat([output, draw_ids(2, 3, seed=new_tokens).cuda()], dim=1)
            mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], dim=1)
    assert counts[0] >= 1
    assert counts == counts[:1] * 3
    assert sum(counters["graph_break"].values()) == 0
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert [str(each.message) for each in caught if "distinct" in str(each.message)] == []


@pytest.mark.gpu
@padded_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_generate_compiles_by_itself_on_a_card(dtype, padded):
    """The library compiles a step, with CUDA graphs, where the cache and the device allow it.

    Compiled code rounds elsewhere, so a token need not be the uncompiled one: it must be the best, up to rounding.
    """
    model = tiny_model(dtype, **KERNEL_SIZES).cuda()
    rows, mask = rows_and_mask(padded)
    ids, mask = spread(rows, mask).cuda(), mask.cuda()
    torch._dynamo.reset()
    output = greedy(model, ids, 40, attention_mask=mask, cache_implementation="static")
    assert hasattr(model, "_compiled_call")
    whole = torch.cat([mask, mask.new_ones(2, 39)], dim=1)
    with torch.no_grad():
        own = model(output[:, :-1], attention_mask=whole, use_cache=False).logits[:, 40:].double()
        exact = copy.deepcopy(model).double()(output[:, :-1], attention_mask=whole, use_cache=False).logits[:, 40:]
    missed = exact.amax(-1) - exact.gather(-1, output[:, 41:, None])[..., 0]
    assert missed.max() <= 2 * (own - exact).abs().max()
