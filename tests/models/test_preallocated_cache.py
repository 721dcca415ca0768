"""`HySparseCache(config, max_cache_len=n)`: what a growing cache gives, in buffers that never move."""

import copy
import warnings

import pytest
import torch
from models.tiny import (
    CACHE_NAMES,
    SWITCHES,
    assert_same_logits,
    draw_ids,
    greedy,
    logits_alone,
    padded_mask,
    recorded_forwards,
    run_in_chunks,
    spread,
    tiny_config,
    tiny_model,
    uncached_greedy,
)
from torch._dynamo import lookup_backend
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import cosine_similarity

from hysparse_hf import measure_cache_bytes, predict_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


switches = pytest.mark.parametrize("switch", SWITCHES)
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
LENGTHS = (41, 30)


def rows_and_mask(padded, total=41):
    """Two rows of ids with their mask, left padded or not."""
    lengths = LENGTHS if padded else (total, total)
    mask = padded_mask("left", lengths, total)
    return [draw_ids(1, length, seed=length + row)[0] for row, length in enumerate(lengths)], mask


def tensors_of(cache):
    """Every tensor that the cache holds on to."""
    buffers = [buffer for layer in cache.layers for buffer in getattr(layer, "_buffers", None) or ()]
    return [*buffers, cache.row_counts, cache.row_lost, cache.length, cache.removed]


def assert_continues(model, cache, ids, mask, new=(5, 1, 1, 9)):
    more = draw_ids(len(ids), sum(new), seed=9)
    whole = torch.cat([mask, torch.ones_like(more)], dim=1)
    logits, _ = run_in_chunks(model, more, new, whole, cache=cache)
    for row in range(len(ids)):
        tokens = torch.cat([ids[row], more[row]])[whole[row].bool()]
        assert_same_logits(logits[row], logits_alone(model, tokens)[-sum(new) :])


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
@padded_or_not
@torch.no_grad()
def test_a_step_may_come_in_another_number_format(max_cache_len, padded):
    """A prompt under autocast, then steps outside it, or the other way round: the cache keeps its first format."""
    # Every block is read, so that rounding cannot change a selection.
    model = tiny_model(oracle_budget=64)
    ids, mask = rows_and_mask(padded)
    ids = spread(ids, mask)
    plain = model(ids, attention_mask=mask, use_cache=False).logits
    for first in (True, False):
        cache = HySparseCache(model.config, max_cache_len=max_cache_len)
        pieces = []
        for part, lowered in ((slice(0, 34), first), (slice(34, 35), not first), (slice(35, 41), not first)):
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                pieces.append(model(ids[:, part], attention_mask=mask[:, : part.stop], cache=cache).logits.float())
        logits = torch.cat(pieces, dim=1)[:, 34:]
        assert cosine_similarity(logits, plain[:, 34:].float(), dim=-1).min() > 0.97


# Right at every length


@pytest.mark.parametrize(
    ("switch", "given", "padded"),
    [(switch, "once", True) for switch in SWITCHES] + [("default", "always", True), ("default", "once", False)],
)
def test_chunks_and_steps_equal_each_row_alone(switch, given, padded):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    cache = HySparseCache(model.config, max_cache_len=48)
    with torch.no_grad():
        done, logits = 0, []
        for size in (13, 1, 1, 8, 1, 17):
            part = mask[:, : done + size] if given == "always" or not done or not bool(mask[:, done:].all()) else None
            step = model(ids[:, done : done + size], attention_mask=part, **{CACHE_ARGUMENT: cache}).logits
            logits.append(step)
            done += size
    assert int(cache.get_seq_length()) == 41
    for row, tokens in enumerate(rows):
        assert_same_logits(torch.cat(logits, dim=1)[row][mask[row].bool()], logits_alone(model, tokens))


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_masks_of_the_new_tokens_alone(kind):
    """The cache knows its rows, so a mask need not be of what is cached."""
    model = tiny_model(torch.float64)
    mask = padded_mask(kind, LENGTHS, 41)
    rows = [draw_ids(1, length, seed=length)[0] for length in LENGTHS]
    ids, cache, done, logits = spread(rows, mask), HySparseCache(model.config, max_cache_len=41), 0, []
    with torch.no_grad():
        for size in (14, 1, 6, 1, 1, 18):
            new = slice(done, done + size)
            logits.append(model(ids[:, new], attention_mask=mask[:, new], cache=cache).logits)
            done += size
    for row, tokens in enumerate(rows):
        assert_same_logits(torch.cat(logits, dim=1)[row][mask[row].bool()], logits_alone(model, tokens))


@pytest.mark.parametrize("length", range(4, 9))
def test_A10_A11_around_the_window(length):
    """Before the window is full nothing but tokens is attended, and nothing is lost when it fills."""
    model = tiny_model(torch.float64)
    ids = draw_ids(2, length + 4)
    logits, _ = run_in_chunks(model, ids, [length, 1, 1, 1, 1], cache=HySparseCache(model.config, max_cache_len=100))
    for row in range(2):
        assert_same_logits(logits[row], logits_alone(model, ids[row]))


@torch.no_grad()
def test_maps_and_indices_equal_those_of_a_growing_cache():
    model = tiny_model(torch.float64, window_branch="merged_own").eval()
    model.set_attn_implementation("eager")
    rows, mask = rows_and_mask(padded=True)
    ids = spread(rows, mask)
    outputs = []
    for cache in (HySparseCache(model.config), HySparseCache(model.config, max_cache_len=64)):
        run_in_chunks(model, ids[:, :35], [30, 5], mask, cache=cache)
        asked = {"output_attentions": True, "output_selected_indices": True}
        outputs.append(model(ids[:, 35:], attention_mask=mask, cache=cache, **asked))
    growing, fixed = outputs
    for ours, theirs in zip(fixed.selected_indices, growing.selected_indices, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(fixed.attentions, growing.attentions, strict=True):
        assert_same_logits(ours, theirs)


# Addresses


@padded_or_not
def test_nothing_moves_once_it_is_allocated(padded):
    model = tiny_model(torch.float64)
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    cache = HySparseCache(model.config, max_cache_len=80)
    with torch.inference_mode():
        run_in_chunks(model, ids, [41], mask, cache=cache)
    held = tensors_of(cache)
    addresses = [tensor.data_ptr() for tensor in held]
    assert_continues(model, cache, ids, mask)
    cache.crop(-16)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_continues(model, cache, ids[[1, 0]], mask[[1, 0]])
    cache.reset()
    assert_continues(model, cache, ids[:, :0], mask[:, :0])
    assert [tensor.data_ptr() for tensor in held] == addresses
    assert all(a is b for a, b in zip(tensors_of(cache), held, strict=True))


def test_allocation_ahead_of_the_first_token():
    model = tiny_model(torch.float64, v_head_dim=40)
    cache = HySparseCache(model.config, max_cache_len=64)
    assert not cache.is_initialized
    cache.early_initialization(2, 2, 24, torch.float64, torch.device("cpu"))
    held = tensors_of(cache)
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    assert cache.layers[0].values.shape == (2, 2, 64, 40)
    rows, mask = rows_and_mask(padded=True)
    ids = spread(rows, mask)
    run_in_chunks(model, ids, [41], mask, cache=cache)
    assert_continues(model, cache, ids, mask)
    assert all(a is b for a, b in zip(tensors_of(cache), held, strict=True))


def test_what_the_library_asks_of_a_static_cache():
    config = tiny_config()
    cache = HySparseCache(config, max_cache_len=50)
    assert cache.is_compileable
    assert not HySparseCache(config).is_compileable
    assert cache.max_cache_len == cache.get_max_length() == 50
    assert HySparseCache(config).max_cache_len is None
    assert cache.get_mask_sizes(7, 0) == cache.get_mask_sizes(7, 1) == (7, 0)
    model = tiny_model()
    run_in_chunks(model, draw_ids(2, 9), [9], cache=cache)
    assert isinstance(cache.get_seq_length(), torch.Tensor)
    seen = {}
    update = cache.update

    def recording(key, value, layer_idx, **kwargs):
        announced = cache.get_mask_sizes(key.shape[2], layer_idx)[0]
        states = update(key, value, layer_idx, **kwargs)
        seen[layer_idx] = (announced, states[0].shape[2], states[1].shape[2])
        return states

    cache.update = recording
    run_in_chunks(model, draw_ids(2, 3), [3], cache=cache)
    assert [seen[index] for index in range(3)] == [(50, 50, 50), (8, 8, 8), (8, 8, 8)]


@switches
def test_bytes_are_predicted_exactly(switch):
    model = tiny_model(**SWITCHES[switch])
    cache = HySparseCache(model.config, max_cache_len=64)
    for length in (20, 21, 60):
        run_in_chunks(
            model,
            draw_ids(2, length - int(cache.get_seq_length())),
            [length - int(cache.get_seq_length())],
            cache=cache,
        )
        measured = measure_cache_bytes(cache)
        assert measured == predict_cache_bytes(model.config, 2, length, torch.float32, max_cache_len=64)
        assert measured["used"] == predict_cache_bytes(model.config, 2, length, torch.float32)["used"]


def test_bytes_of_more_than_fits_are_an_error():
    with pytest.raises(ValueError, match="`length` must be at most `max_cache_len`"):
        predict_cache_bytes(tiny_config(), 2, 65, torch.float32, max_cache_len=64)


# Refusals


@padded_or_not
def test_more_than_fits_is_refused_before_anything_is_written(padded):
    model = tiny_model(torch.float64)
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    cache = HySparseCache(model.config, max_cache_len=57)
    with pytest.raises(ValueError, match="`max_cache_len` = 57 tokens and holds 0, got 58"):
        run_in_chunks(model, draw_ids(2, 58), [58], cache=cache)
    run_in_chunks(model, ids, [41], mask, cache=cache)
    held = [tensor.clone() for tensor in tensors_of(cache)]
    for size in (17, 20):
        whole = torch.cat([mask, torch.ones(2, size, dtype=torch.long)], dim=1)
        with pytest.raises(ValueError, match="`max_cache_len` = 57 tokens and holds 41"):
            run_in_chunks(model, draw_ids(2, size), [size], whole, cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), held, strict=True))
    assert_continues(model, cache, ids, mask)
    with pytest.raises(ValueError, match="holds 57, got 1 more"):
        run_in_chunks(model, draw_ids(2, 1), [1], cache=cache)


@pytest.mark.parametrize("length", [0, -3])
def test_a_length_that_is_not_positive_is_an_error(length):
    with pytest.raises(ValueError, match="`max_cache_len` must be at least 1"):
        HySparseCache(tiny_config(), max_cache_len=length)


def test_offloading_buffers_that_must_stay_is_an_error():
    with pytest.raises(ValueError, match="got both; leave out one"):
        HySparseCache(tiny_config(), max_cache_len=8, offloading=True)


def test_the_length_of_one_layer_is_an_error():
    cache = HySparseCache(tiny_config(), max_cache_len=20)
    with pytest.raises(NotImplementedError, match=r"ask `cache\.get_seq_length\(\)`"):
        cache.layers[0].get_seq_length()


def test_gradients_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="require gradients"):
        model(draw_ids(1, 5), cache=HySparseCache(model.config, max_cache_len=9))
    model.requires_grad_(False)
    model(draw_ids(1, 5), cache=HySparseCache(model.config, max_cache_len=9))


@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_4d_masks_are_refused_behind_cached_tokens(name):
    model = tiny_model()
    cache = HySparseCache(model.config, max_cache_len=30)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    ids = draw_ids(1, 20)
    logits = model(ids[:, :15], attention_mask=mask[:, :, :15, :15], **{name: cache}).logits[0]
    assert_same_logits(logits, logits_alone(model, ids[0])[:15])
    with pytest.raises(ValueError, match="pre-allocated"):
        model(ids[:, 15:], attention_mask=mask[:, :, 15:], **{name: cache})


# generate()


@pytest.mark.parametrize(("switch", "padded"), [(switch, True) for switch in SWITCHES] + [("default", False)])
def test_static_generation_equals_uncached(switch, padded):
    model = tiny_model(**SWITCHES[switch])
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    output = greedy(model, ids, 14, attention_mask=mask, cache_implementation="static")
    assert torch.equal(output, uncached_greedy(model, ids, 14, mask if padded else None))


@padded_or_not
def test_static_sampling_equals_growing(padded):
    model = tiny_model()
    rows, mask = rows_and_mask(padded)
    outputs = []
    for implementation in (None, "static"):
        torch.manual_seed(0)
        outputs.append(
            model.generate(
                spread(rows, mask),
                attention_mask=mask,
                max_new_tokens=20,
                do_sample=True,
                num_return_sequences=2,
                cache_implementation=implementation,
            )
        )
    assert torch.equal(*outputs)


@padded_or_not
@pytest.mark.parametrize("switch", ["default", "no_window", "window_layers"])
def test_static_beams_equal_growing_beams(switch, padded):
    model = tiny_model(**SWITCHES[switch])
    rows, mask = rows_and_mask(padded)
    arguments = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    on, off = (
        greedy(model, spread(rows, mask), 12, attention_mask=mask, cache_implementation=kind, **arguments)
        for kind in ("static", None)
    )
    assert torch.equal(on.sequences, off.sequences)
    torch.testing.assert_close(on.sequences_scores, off.sequences_scores, atol=1e-5, rtol=0)


@padded_or_not
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_static_chunked_prefill(chunk, padded):
    model = tiny_model()
    rows, mask = rows_and_mask(padded)
    ids = spread(rows, mask)
    output = greedy(model, ids, 8, attention_mask=mask, cache_implementation="static", prefill_chunk_size=chunk)
    assert torch.equal(output, uncached_greedy(model, ids, 8, mask))


def test_several_turns_on_one_static_cache():
    model = tiny_model()
    cache = HySparseCache(model.config, max_cache_len=64)
    mask = padded_mask("left", (8, 14), 14)
    ids = draw_ids(2, 14) * mask
    for turn in range(3):
        output = greedy(model, ids, 7, attention_mask=mask, **{CACHE_ARGUMENT: cache})
        assert torch.equal(output, uncached_greedy(model, ids, 7, mask))
        hole = padded_mask("left", (3 + turn, 6), 6)
        ids = torch.cat([output, draw_ids(2, 6, seed=turn) * hole], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 7), hole], dim=1)


def test_a_turn_after_one_row_ended_early_on_a_static_cache():
    model = tiny_model()
    ids, cache = draw_ids(2, 14), HySparseCache(model.config, max_cache_len=64)
    token = int(uncached_greedy(model, ids, 2)[0, -1])
    sequences = greedy(model, ids, 9, eos_token_id=token, **{CACHE_ARGUMENT: cache})
    mask = torch.ones(2, 28, dtype=torch.long)
    mask[0, 16:23] = 0
    longer = torch.cat([sequences, draw_ids(2, 5, seed=9)], dim=1)
    output = greedy(model, longer, 7, attention_mask=mask, **{CACHE_ARGUMENT: cache})
    assert torch.equal(output, uncached_greedy(model, longer, 7, mask))


def test_max_cache_len_of_the_generation_config_makes_room_for_later_calls():
    model = tiny_model()
    output = greedy(
        model, draw_ids(1, 9), 4, cache_implementation="static", max_cache_len=70, return_dict_in_generate=True
    )
    assert cache_of(output).max_cache_len == 70
    output = greedy(model, draw_ids(1, 9), 4, cache_implementation="static", return_dict_in_generate=True)
    assert cache_of(output).max_cache_len == 12


def test_generate_refuses_a_cache_that_is_too_short_before_the_first_forward():
    model = tiny_model()
    cache = HySparseCache(model.config, max_cache_len=20)
    with recorded_forwards(model) as shapes, pytest.raises(ValueError, match="`max_cache_len` = 20 tokens"):
        greedy(model, draw_ids(1, 12), 10, **{CACHE_ARGUMENT: cache})
    assert shapes == []
    assert greedy(model, draw_ids(1, 12), 9, **{CACHE_ARGUMENT: cache}).shape == (1, 21)


@pytest.mark.parametrize("kind", ["implementation", "own"])
def test_drafts_are_refused_before_the_first_forward(kind):
    model = tiny_model()
    own = {CACHE_ARGUMENT: HySparseCache(model.config, max_cache_len=90)}
    arguments = {"cache_implementation": "static"} if kind == "implementation" else own
    with recorded_forwards(model) as shapes, pytest.raises(ValueError, match="assisted"):
        greedy(model, draw_ids(1, 12), 10, prompt_lookup_num_tokens=3, **arguments)
    assert shapes == []


# torch.compile


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
@switches
def test_D09_every_switch_decodes_in_two_graphs(switch):
    model = tiny_model(**SWITCHES[switch])
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
