"""What `generate()` and `forward` may be given beside ids, which caches they take, and what calls leave behind."""

import ast
from pathlib import Path

import pytest
import torch
from models.generations import both_generations, over_settings
from models.tiny import (
    CACHE_NAMES,
    assert_same_logits,
    draw_ids,
    greedy,
    logits_alone,
    padded_mask,
    recorded_forwards,
    run_in_chunks,
    tiny_model,
    uncached_greedy,
)
from transformers import DynamicCache

import hysparse_hf.modeling.decoder_hysparse as decoder
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


cache_names = pytest.mark.parametrize("name", CACHE_NAMES)


# Caches


@both_generations
def test_A25_each_decode_step_receives_one_token(generation):
    model = generation.tiny_model()
    with recorded_forwards(model) as shapes:
        greedy(model, draw_ids(2, 15), 8)
    assert shapes == [(2, 15)] + [(2, 1)] * 7


@cache_names
@both_generations
def test_A25_both_cache_names_are_honoured_by_forward(generation, name):
    model = generation.tiny_model(torch.float64)
    ids = draw_ids(1, 20)
    for network in (model, model.model):
        cache = HySparseCache(model.config)
        with torch.no_grad():
            network(ids[:, :12], **{name: cache})
            network(ids[:, 12:15], **{name: cache})
        assert cache.get_seq_length() == 15
    with torch.no_grad():
        logits = model(ids[:, 15:], **{name: cache}).logits[0]
    assert_same_logits(logits, logits_alone(model, ids[0])[15:])


def test_A25_both_cache_names_at_once_are_an_error():
    model = tiny_model()
    one, two = HySparseCache(model.config), HySparseCache(model.config)
    with pytest.raises(ValueError, match="two names of one argument"):
        model(draw_ids(1, 3), cache=one, past_key_values=two)


@cache_names
def test_generate_takes_the_cache_by_the_names_its_version_knows(name):
    """transformers 5.17 knows one name; the other is refused and never an empty cache."""
    model = tiny_model()
    first = greedy(model, draw_ids(1, 10), 5, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, draw_ids(1, 4, seed=9)], dim=1)
    with recorded_forwards(model) as shapes:
        if name == "cache" and CACHE_ARGUMENT != "cache":
            with pytest.raises(ValueError, match="not used by the model"):
                greedy(model, ids, 6, **{name: cache_of(first)})
            assert shapes == []
            return
        output = greedy(model, ids, 6, **{name: cache_of(first)})
    assert shapes[0] == (1, 5)
    assert torch.equal(output, uncached_greedy(model, ids, 6))


@cache_names
@both_generations
def test_A23_a_given_cache_is_extended_whatever_use_cache_says(generation, name):
    model = generation.tiny_model()
    ids = draw_ids(1, 20)
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :12], use_cache=False, **{name: cache})
        assert cache.get_seq_length() == 12
        output = model(ids[:, 12:], use_cache=False, **{name: cache})
    assert cache.get_seq_length() == 20
    assert cache_of(output) is cache
    assert_same_logits(output.logits[0], logits_alone(model, ids[0])[12:])


def foreign_cache(kind):
    pair = (torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 24))
    return (pair,) * 6 if kind == "tuple" else DynamicCache()


@cache_names
@pytest.mark.parametrize("kind", ["tuple", "dynamic"])
@both_generations
def test_A26_caches_of_another_class_are_refused(generation, kind, name):
    with pytest.raises(TypeError, match="must be a HySparseCache"):
        generation.tiny_model()(draw_ids(1, 3), **{name: foreign_cache(kind)})


@pytest.mark.parametrize("kind", ["tuple", "dynamic"])
def test_A26_generate_refuses_caches_of_another_class(kind):
    with pytest.raises((TypeError, ValueError)):
        greedy(tiny_model(), draw_ids(1, 8), 4, **{CACHE_ARGUMENT: foreign_cache(kind)})


def test_a_cache_class_derived_from_ours_is_ours():
    class CountedCache(HySparseCache):
        pass

    model, ids = tiny_model(), draw_ids(1, 8)
    output = greedy(model, ids, 4, **{CACHE_ARGUMENT: CountedCache(model.config)})
    assert torch.equal(output, uncached_greedy(model, ids, 4))


REMOVED_NAMES = {"key_cache", "value_cache", "seen_tokens", "get_usable_length", "get_max_length", "to_legacy_cache"}


def test_A24_the_code_uses_no_removed_cache_members():
    files = sorted(Path(decoder.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        used = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not used & REMOVED_NAMES, f"{file.name} uses {used & REMOVED_NAMES}"


# Other inputs and outputs


@both_generations
def test_A19_inputs_embeds_equal_input_ids(generation):
    model = generation.tiny_model()
    ids = draw_ids(2, 17)
    embed = model.get_input_embeddings()
    result = greedy(model, None, 9, inputs_embeds=embed(ids), return_dict_in_generate=True)
    new = uncached_greedy(model, ids, 9)
    assert torch.equal(result.sequences, new[:, 17:])
    # A second turn, again as states; the cache lacks the last token, which comes first.
    longer = torch.cat([new, draw_ids(2, 4, seed=8)], dim=1)
    with torch.no_grad():
        output = model(inputs_embeds=embed(longer[:, 25:]), **{CACHE_ARGUMENT: cache_of(result)})
    for row in range(2):
        assert_same_logits(output.logits[row], logits_alone(model, longer[row])[25:])


@over_settings(("default", "window_layers", "merged_own"), ("default",))
def test_A19_padded_inputs_embeds_equal_input_ids(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    mask = padded_mask("left", (10, 17), 17)
    ids = draw_ids(2, 17) * mask
    output = greedy(model, None, 9, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    assert torch.equal(output, uncached_greedy(model, ids, 9, mask)[:, 17:])


@both_generations
def test_A19_a_second_generate_from_states_and_a_kept_cache(generation):
    model = generation.tiny_model()
    ids = draw_ids(1, 17)
    embed = model.get_input_embeddings()
    first = greedy(model, ids, 6, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, draw_ids(1, 4, seed=8)], dim=1)
    mask = torch.ones_like(longer)
    kept = {CACHE_ARGUMENT: cache_of(first)}
    second = greedy(model, None, 6, attention_mask=mask, inputs_embeds=embed(longer), **kept)
    assert torch.equal(second, uncached_greedy(model, longer, 6)[:, longer.shape[1] :])


def test_a_streamer_receives_prompt_and_tokens():
    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, streamer = tiny_model(), Streamer()
    output = greedy(model, draw_ids(1, 12), 6, streamer=streamer)
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended


@both_generations
def test_eager_and_default_attention_agree(generation):
    model = generation.tiny_model()
    ids = draw_ids(2, 40)
    with torch.no_grad():
        default = model(ids).logits
        model.set_attn_implementation("eager")
        assert_same_logits(model(ids).logits, default)


# State


def module_state(model):
    """Everything that hangs on the modules, by identity, and the values of buffers."""
    attributes = {
        (name, key): (id(value), len(value) if isinstance(value, dict | list) else None)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    return attributes, {name: buffer.clone() for name, buffer in model.named_buffers()}


@over_settings(("default",), ("default", "source_rope"), fast=("default", "source_rope"))
def test_A01_calls_leave_nothing_on_the_model(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    attributes, buffers = module_state(model)
    first, second = draw_ids(3, 19), draw_ids(1, 8, seed=5)
    outputs = [greedy(model, first, 10), greedy(model, second, 10)]
    after, buffers_after = module_state(model)
    assert after == attributes
    assert buffers_after.keys() == buffers.keys()
    assert all(torch.equal(buffers_after[name], buffers[name]) for name in buffers)
    for ids, output in zip((first, second), outputs, strict=True):
        assert torch.equal(output, greedy(generation.tiny_model(**generation.MODELS[switch]), ids, 10))


@both_generations
def test_A01_two_caches_advance_in_turn(generation):
    model = generation.tiny_model()
    rows = [draw_ids(3, 25), draw_ids(1, 25, seed=5)]
    caches, pieces = [None, None], [[], []]
    for start, stop in ((0, 9), (9, 10), (10, 18), (18, 25)):
        for which in (0, 1):
            logits, caches[which] = run_in_chunks(
                model, rows[which][:, start:stop], [stop - start], cache=caches[which]
            )
            pieces[which].append(logits)
    for which, ids in enumerate(rows):
        for row, logits in zip(ids, torch.cat(pieces[which], dim=1), strict=True):
            assert_same_logits(logits, logits_alone(model, row))


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
@both_generations
def test_A21_generate_in_training_mode(generation, checkpointing):
    model = generation.tiny_model()
    ids = draw_ids(2, 20)
    expected = greedy(model, ids, 8)
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    with recorded_forwards(model) as shapes:
        assert torch.equal(greedy(model, ids, 8), expected)
    assert shapes[1:] == [(2, 1)] * 7
    assert model.training
