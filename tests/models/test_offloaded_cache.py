"""`HySparseCache(config, offloading=True)`: full layers wait in host memory and are back before their turn."""

import pytest
import torch
from models import tiny2
from models.cache_runs import continues_right
from models.generations import both_generations, over_settings
from models.tiny import draw_ids, greedy, padded_mask, run_in_chunks, tiny_config, tiny_model, uncached_greedy

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.cache_layers_hysparse import GrowingLayer
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


@pytest.fixture
def moves(monkeypatch):
    """`(operation, layer object)` in the order of the calls; an update of a layer that is away is an error."""
    calls, away = [], set()
    update = GrowingLayer.update

    def offload(layer):
        calls.append(("offload", layer))
        away.add(id(layer))

    def prefetch(layer):
        calls.append(("prefetch", layer))
        away.discard(id(layer))

    def checked(layer, *args, **kwargs):
        assert id(layer) not in away, "a layer that is away was written to"
        return update(layer, *args, **kwargs)

    for name, method in (("offload", offload), ("prefetch", prefetch), ("update", checked)):
        monkeypatch.setattr(GrowingLayer, name, method)
    return calls


def test_each_turn_fetches_the_next_full_layer_and_sends_its_own_away(moves):
    model = tiny_model()
    cache = HySparseCache(model.config, offloading=True)
    run_in_chunks(model, draw_ids(1, 12), [12], cache=cache)
    layers = {id(layer): index for index, layer in enumerate(cache.layers)}
    # Layers 0 and 3 are full; the sparse ones between them have a window, which stays.
    assert [(name, layers[id(layer)]) for name, layer in moves] == [
        ("prefetch", 3),
        ("offload", 0),
        ("prefetch", 3),
        ("prefetch", 3),
        ("prefetch", 0),
        ("offload", 3),
        ("prefetch", 0),
        ("prefetch", 0),
    ]


@over_settings(second=tiny2.SWITCHES)
def test_A28_every_full_layer_is_there_in_its_turn(generation, switch, moves):
    model = generation.tiny_model(**generation.MODELS[switch])
    ids = draw_ids(2, 14)
    output = greedy(model, ids, 5, cache_implementation="offloaded")
    assert torch.equal(output, uncached_greedy(model, ids, 5))
    assert {name for name, _ in moves} == {"offload", "prefetch"}


@both_generations
def test_beams_and_turns_equal_those_of_a_cache_that_stays(generation):
    model = generation.tiny_model()
    mask = padded_mask("left", (9, 14), 14)
    ids = draw_ids(2, 14) * mask
    arguments = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 3}
    expected = greedy(model, ids, 10, **arguments)
    assert torch.equal(greedy(model, ids, 10, cache_implementation="offloaded", **arguments), expected)
    cache = HySparseCache(model.config, offloading=True)
    for turn in range(2):
        output = greedy(model, ids, 6, attention_mask=mask, **{CACHE_ARGUMENT: cache})
        assert torch.equal(output, uncached_greedy(model, ids, 6, mask))
        ids = torch.cat([output, draw_ids(2, 4, seed=turn)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 10)], dim=1)


@pytest.mark.gpu
@over_settings(("default", "no_window", "own_kv", "window_layers"), ("default", "own_kv", "source_rope"))
def test_A28_on_a_card_full_layers_wait_in_host_memory(generation, switch):
    sizes = {"head_dim": 32, "oracle_block_size": 16, "oracle_budget": 32, **generation.MODELS[switch]}
    model = generation.tiny_model(torch.float32, **sizes).cuda()
    ids = draw_ids(2, 40).cuda()
    expected = greedy(model, ids, 40)
    result = greedy(model, ids, 40, cache_implementation="offloaded", return_dict_in_generate=True)
    assert torch.equal(result.sequences, expected)
    layers = cache_of(result).layers
    full = [layer for layer in layers if isinstance(layer, GrowingLayer)]
    # The first one is fetched ahead of the next step.
    assert [layer.keys.device.type for layer in full] == ["cuda"] + ["cpu"] * (len(full) - 1)
    assert all(layer.keys.is_cuda for layer in layers if layer.is_sliding)
    beams = {"num_beams": 3, "num_return_sequences": 3}
    output = greedy(model, ids, 10, cache_implementation="offloaded", **beams)
    assert torch.equal(output, greedy(model, ids, 10, **beams))


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["fork", "batch_repeat_interleave", "crop"])
@both_generations
def test_operations_on_layers_that_are_away(generation, operation):
    model = generation.tiny_model(torch.float64).cuda()
    ids = draw_ids(2, 60).cuda()
    cache = HySparseCache(model.config, offloading=True)
    run_in_chunks(model, ids, [57, 1, 2], cache=cache)
    if operation == "fork":
        cache = cache.fork()
    elif operation == "crop":
        cache.crop(-7)
        ids = ids[:, :53]
    else:
        cache.batch_repeat_interleave(2)
        ids = ids.repeat_interleave(2, dim=0)
    continues_right(model, ids, None, cache)


def test_a_cache_that_offloads_can_be_copied():
    cache = HySparseCache(tiny_config(), offloading=True)
    assert cache.fork().offloading
