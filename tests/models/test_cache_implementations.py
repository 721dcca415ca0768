"""Every `cache_implementation` that the library knows is right, or refused before the first forward."""

import pytest
import torch
from models.generations import both_generations
from models.tiny import draw_ids, greedy, recorded_forwards, tiny_model, uncached_greedy
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS


# The library itself leaves "hybrid" out, as the default of older models, and a cache that grows is made.
RIGHT = ("dynamic", "static", "offloaded", "hybrid")
# `generate()` takes this one for continuous batching, and never asks for a cache.
KNOWN = (*ALL_CACHE_IMPLEMENTATIONS, "paged")


def test_the_library_knows_what_is_right():
    assert set(RIGHT) < set(KNOWN)


@pytest.mark.parametrize("implementation", [None, *RIGHT])
@both_generations
def test_tokens_equal_those_of_uncached_runs(generation, implementation):
    model, ids = generation.tiny_model(), draw_ids(2, 15)
    output = greedy(model, ids, 12, cache_implementation=implementation)
    assert torch.equal(output, uncached_greedy(model, ids, 12))


@pytest.mark.parametrize("implementation", [name for name in KNOWN if name not in (*RIGHT, "paged")])
@both_generations
def test_A11_A27_others_are_refused_before_the_first_forward(generation, implementation):
    model = generation.tiny_model()
    with recorded_forwards(model) as shapes, pytest.raises(ValueError, match="`cache_implementation` must be None"):
        greedy(model, draw_ids(1, 3), 4, cache_implementation=implementation)
    assert shapes == []


def test_continuous_batching_is_refused():
    model = tiny_model()
    with recorded_forwards(model) as shapes, pytest.raises(NotImplementedError, match="continuous batching"):
        greedy(model, draw_ids(1, 3), 4, cache_implementation="paged")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[3, 4, 5]])
    assert shapes == []


def test_names_that_the_library_does_not_know_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="cache_implementation"):
        greedy(model, draw_ids(1, 3), 4, cache_implementation="dynamic_full")
