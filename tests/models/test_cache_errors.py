"""What a pre-allocated cache refuses, before it has changed."""

import pytest
import torch
from models.tiny import draw_ids, tiny_config, tiny_model

from hysparse_hf import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT


IDS = draw_ids(1, 20)


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_that_is_not_positive(length):
    with pytest.raises(ValueError, match=f"`max_cache_len` must be at least 1, .* got {length}"):
        HySparseCache(tiny_config(), max_cache_len=length)


def test_offloading_buffers_that_must_stay():
    with pytest.raises(ValueError, match="got both; leave out one"):
        HySparseCache(tiny_config(), max_cache_len=8, offloading=True)


def test_more_tokens_than_it_was_made_for():
    model = tiny_model()
    cache = HySparseCache(model.config, max_cache_len=20)
    with torch.no_grad():
        model(IDS[:, :15], cache=cache)
        with pytest.raises(ValueError, match=r"`max_cache_len` = 20 tokens and holds 15, got 6 more"):
            model(draw_ids(1, 6), cache=cache)
    assert int(cache.get_seq_length()) == 15


def test_the_length_of_one_layer():
    cache = HySparseCache(tiny_config(), max_cache_len=20)
    with pytest.raises(NotImplementedError, match=r"ask `cache\.get_seq_length\(\)`"):
        cache.layers[0].get_seq_length()


def test_a_training_step():
    model = tiny_model()
    with pytest.raises(ValueError, match="which no backward pass survives"):
        model(IDS, cache=HySparseCache(model.config, max_cache_len=20))


@pytest.mark.parametrize(
    ("room", "arguments", "words"),
    [
        pytest.param(30, {}, r"`max_cache_len` = 30 tokens, but up to (39|40) are", id="too-short"),
        pytest.param(60, {"prompt_lookup_num_tokens": 3}, "assisted decoding undoes tokens", id="drafts"),
    ],
)
def test_generating_beyond_it(room, arguments, words):
    model = tiny_model()
    cache = HySparseCache(model.config, max_cache_len=room)
    with pytest.raises(ValueError, match=words):
        model.generate(IDS, max_new_tokens=20, do_sample=False, **{CACHE_ARGUMENT: cache}, **arguments)
    assert cache.get_seq_length() == 0
