"""`generate()` on a pre-allocated cache, asked for by `cache_implementation` or given."""

import pytest
import torch
from models import tiny, tiny2
from models.cache_runs import padded_or_not, rows_and_mask
from models.generations import WAYS, case
from models.tiny import (
    SWITCHES,
    draw_ids,
    greedy,
    padded_mask,
    recorded_forwards,
    spread,
    tiny_model,
    uncached_greedy,
)

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


@pytest.mark.parametrize(
    ("generation", "switch", "padding"),
    [case(tiny, switch, "left") for switch in tiny.SWITCHES]
    + [case(generation, "default", None) for generation in (tiny, tiny2)]
    + [case(tiny2, way, "left", marks=() if way == "default" else pytest.mark.slow) for way in WAYS],
)
def test_A11_static_generation_equals_uncached(generation, switch, padding):
    model = generation.tiny_model(**generation.MODELS[switch])
    rows, mask = rows_and_mask(padding)
    ids = spread(rows, mask)
    output = greedy(model, ids, 14, attention_mask=mask, cache_implementation="static")
    assert torch.equal(output, uncached_greedy(model, ids, 14, mask if padding else None))


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
