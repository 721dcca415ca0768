"""Buffers that grow in place: how often they move, and what a graph, inference mode or a kept view sees of it."""

import pytest
import torch
from models.cache_runs import append, padded_or_not, states_of
from models.tiny import (
    assert_same_logits,
    draw_ids,
    logits_alone,
    padded_mask,
    run_in_chunks,
    tiny_config,
    tiny_model,
)

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import cache_of
from hysparse_hf.modeling.rows_hysparse import layout_of_mask


def storages_of(cache):
    """Data pointer of what each layer's keys stand in."""
    return [None if layer.keys is None else layer.keys.untyped_storage().data_ptr() for layer in cache.layers]


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "padded"])
def test_few_reallocations_over_4096_appended_tokens(padded):
    config = tiny_config()
    cache = HySparseCache(config)
    append(cache, config, 2, 50)
    changes = [0] * len(config.cache_plan)
    last = storages_of(cache)
    states = states_of(config, 2, 1)
    with torch.no_grad():
        for step in range(4096):
            layout = layout_of_mask(torch.ones(2, 51 + step), 1) if padded else None
            for index in range(6):
                cache.update(*states, index, layout=layout)
            now = storages_of(cache)
            for index, (a, b) in enumerate(zip(last, now, strict=True)):
                changes[index] += a != b
            last = now
    assert cache.get_seq_length() == 4146
    assert max(changes) <= 20
    assert [index for index, count in enumerate(changes) if count] == [0, 3]


def test_growth_appending_under_no_grad_after_inference_mode():
    model = tiny_model()
    ids = draw_ids(1, 40)
    for prefill in (3, 30):
        with torch.inference_mode():
            cache = cache_of(model(ids[:, :prefill], use_cache=True))
            model(ids[:, prefill : prefill + 1], cache=cache)
        logits, _ = run_in_chunks(model, ids[:, prefill + 1 :], [1, 1, 5, 40 - prefill - 8], cache=cache)
        assert_same_logits(logits[0], logits_alone(model, ids[0])[prefill + 1 :])


def test_growth_with_gradients_after_inference_mode():
    model = tiny_model()
    ids = draw_ids(1, 40)
    with torch.inference_mode():
        _, cache = run_in_chunks(model, ids[:, :30], [28, 1, 1])
    output = model(ids[:, 30:], cache=cache)
    output.logits.sum().backward()
    assert_same_logits(output.logits[0].detach(), logits_alone(model, ids[0])[30:])


@padded_or_not
def test_growth_two_forwards_with_gradients_on_one_cache(padded):
    """The gradients are those of one forward over everything."""
    model = tiny_model(torch.float64)
    ids = draw_ids(2, 30)
    mask = padded_mask("left", (30, 22), 30) if padded else torch.ones(2, 30, dtype=torch.long)
    weights = torch.randn(2, 30, 61, dtype=torch.float64) * mask[..., None]

    def gradients(chunks):
        model.zero_grad()
        cache, done, total = HySparseCache(model.config), 0, 0.0
        for size in chunks:
            part = mask[:, : done + size] if padded else None
            logits = model(ids[:, done : done + size], attention_mask=part, cache=cache).logits
            total = total + (logits * weights[:, done : done + size]).sum()
            done += size
        total.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    whole, pieces = gradients([30]), gradients([12, 1, 1, 16])
    for name, gradient in whole.items():
        torch.testing.assert_close(pieces[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


def test_growth_appending_without_gradients_leaves_an_earlier_backward_intact():
    model = tiny_model(torch.float64)
    ids = draw_ids(1, 30)
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
        model(ids[:, 10:12], cache=cache)
    loss = model(ids[:, 12:20], cache=cache).logits.square().sum()
    run_in_chunks(model, ids[:, 20:], [1, 1, 8], cache=cache)
    loss.backward()
    taken = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :12], cache=cache)
    model(ids[:, 12:20], cache=cache).logits.square().sum().backward()
    for a, b in zip(taken, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-9, rtol=1e-9)


def test_growth_a_kept_view_shows_new_tokens_after_crop_and_append():
    """The documented aliasing: views are of the buffer, which is written in place."""
    config = tiny_config()
    cache = HySparseCache(config)
    append(cache, config, 1, 20)
    view = cache.layers[0].keys
    copied = view.clone()
    append(cache, config, 1, 3)
    assert torch.equal(view, copied)
    cache.crop(-6)
    append(cache, config, 1, 5)
    assert torch.equal(view[:, :, :17], copied[:, :, :17])
    assert not torch.equal(view[:, :, 17:], copied[:, :, 17:])


def test_growth_an_offloaded_layer_keeps_its_room():
    """The buffer travels, not the view of what is in use: the next append need not copy it once more."""
    config = tiny_config()
    cache = HySparseCache(config)
    append(cache, config, 1, 20)
    rooms = [buffer.shape[2] for buffer in cache.layers[0]._buffers]
    for operation in (cache.layers[0].offload, cache.layers[0].prefetch):
        operation()
        assert [buffer.shape[2] for buffer in cache.layers[0]._buffers] == rooms
    last = storages_of(cache)
    append(cache, config, 1, 1)
    assert storages_of(cache) == last
