"""Who reads whose keys, values and blocks, told from outside: by weights, by cache, by device."""

import pytest
import torch
from models import tiny2
from models.generations import over_settings
from models.tiny import assert_same_logits, draw_ids, run_in_chunks, tiny_model

from hysparse_hf import HySparseCache
from hysparse_hf.modeling.compat_transformers import cache_of


def layer_outputs(model, ids, **arguments):
    """What leaves each decoder layer, and the cache."""
    states = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: states.append(output[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        cache = cache_of(model(ids, **arguments))
    for handle in handles:
        handle.remove()
    return states, cache


def layers_that_read(model, ids, weight):
    """Layers whose output moves with `weight` while each still receives the states that it received before."""
    inputs = []
    record = [
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0])) for layer in model.model.layers
    ]
    before, _ = layer_outputs(model, ids, use_cache=False)
    for handle in record:
        handle.remove()
    hold = [
        layer.register_forward_pre_hook(lambda module, args, own=own: (own, *args[1:]))
        for layer, own in zip(model.model.layers, inputs, strict=True)
    ]
    with torch.no_grad():
        weight.mul_(-0.5)
    after, _ = layer_outputs(model, ids, use_cache=False)
    for handle in hold:
        handle.remove()
    with torch.no_grad():
        weight.mul_(-2)
    return [
        number
        for number, (one, other) in enumerate(zip(before, after, strict=True))
        if (one - other).abs().max() > 1e-4
    ]


@pytest.mark.parametrize("layers", [5, 6])
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_a_donors_weights_reach_its_own_group_alone_B12(layers, projection):
    plan = (["full", "sparse", "sparse"] * 2)[:layers]
    model = tiny_model(layer_plan=plan)
    assert model.config.donor_plan == [None, 0, 0, None, 3, 3][:layers]
    ids = draw_ids(1, 64)
    read = [layers_that_read(model, ids, getattr(layer.self_attn, projection).weight) for layer in model.model.layers]
    # A full layer's keys and values reach its sparse layers, a sparse layer's own reach nobody else.
    assert read == [[0, 1, 2], [1], [2], [3, 4, 5][: layers - 3], [4], [5]][:layers]


@over_settings(second=tiny2.SWITCHES)
def test_a_prefill_beyond_the_window_feeds_every_layer_all_of_its_keys_B16(generation, switch):
    model = generation.tiny_model(torch.float64, **generation.MODELS[switch])
    ids = draw_ids(2, 33)
    whole, _ = layer_outputs(model, ids, use_cache=False)
    states, cache = layer_outputs(model, ids[:, :30], use_cache=True)
    for one, other in zip(states, whole, strict=True):
        assert_same_logits(one, other[:, :30])
    for position in range(30, 33):
        states, cache = layer_outputs(model, ids[:, position : position + 1], cache=cache)
        for one, other in zip(states, whole, strict=True):
            assert_same_logits(one, other[:, position : position + 1])


@pytest.mark.parametrize("length", [7, 8, 9])
def test_crossing_the_budget_by_prefill_and_by_decode_is_continuous_C23(length):
    small, covering = tiny_model(torch.float64), tiny_model(torch.float64, oracle_budget=64)
    ids = draw_ids(1, length + 4)
    with torch.no_grad():
        whole = small(ids, use_cache=False).logits
        dense = covering(ids, use_cache=False).logits
    stepwise, _ = run_in_chunks(small, ids, [length, 1, 1, 1, 1])
    assert_same_logits(stepwise, whole)
    # The budget of eight tokens covers everything for the first eight queries, and no longer for the ninth.
    assert_same_logits(whole[:, :8], dense[:, :8])
    assert (whole - dense)[:, 8:].abs().amax(-1).min() > 1e-4


def test_a_layer_without_keys_of_its_own_caches_none_B16():
    cache = HySparseCache(tiny_model(window_branch="none").config)
    with pytest.raises(RuntimeError, match="reads another layer's keys"):
        cache.update(torch.zeros(1, 2, 1, 24), torch.zeros(1, 2, 1, 24), 1)
