"""`generate()` with a second generation model gives what full forwards without a cache give."""

import copy

import pytest
import torch
from models.test_preallocated_cache import compiled_generation
from models.tiny import (
    CACHE_NAMES,
    assert_same_logits,
    draw_ids,
    logits_alone,
    padded_mask,
    recorded_forwards,
    run_in_chunks,
    spread,
    uncached_greedy,
)
from models.tiny2 import MODELS, over_models, tiny_model
from transformers import DynamicCache

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


switches = over_models()
# One of each way in which the cross-decoder gets its keys.
some_switches = over_models(("default", "source_rope", "own_kv", "branch", "yoco_baseline"), fast=("default",))
cache_names = pytest.mark.parametrize("name", CACHE_NAMES)


def greedy(model, ids, new_tokens=12, attention_mask=None, **arguments):
    if attention_mask is None and ids is not None:
        attention_mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=attention_mask, max_new_tokens=new_tokens, do_sample=False, **arguments)


@switches
def test_A31_greedy_equals_uncached(switch):
    model = tiny_model(**MODELS[switch])
    ids = draw_ids(2, 24)
    expected = uncached_greedy(model, ids, 20)
    assert torch.equal(greedy(model, ids, 20), expected)
    assert torch.equal(greedy(model, ids, 20, use_cache=False), expected)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 10, 11, 12])
def test_prompt_lengths_around_window_and_budget_C23(length):
    model = tiny_model()
    ids = draw_ids(2, length)
    assert torch.equal(greedy(model, ids), uncached_greedy(model, ids, 12))


def test_A25_each_decode_step_receives_one_token():
    model = tiny_model()
    with recorded_forwards(model) as shapes:
        greedy(model, draw_ids(2, 15), 8)
    assert shapes == [(2, 15)] + [(2, 1)] * 7


@cache_names
def test_A25_both_cache_names_are_honoured_by_forward(name):
    model = tiny_model(torch.float64)
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


def test_sampling_equals_sampling_without_a_cache():
    model = tiny_model()
    ids = draw_ids(2, 18)
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        outputs.append(model.generate(ids, max_new_tokens=16, do_sample=True, top_k=20, use_cache=use_cache))
    assert torch.equal(*outputs)


@some_switches
def test_A15_left_padded_batch_equals_solo_runs(switch):
    model = tiny_model(**MODELS[switch])
    rows = [draw_ids(1, length, seed=length)[0] for length in (5, 15, 11)]
    mask = padded_mask("left", (5, 15, 11), 15)
    output = greedy(model, spread(rows, mask), 10, attention_mask=mask)
    for row, tokens in enumerate(rows):
        assert torch.equal(output[row, 15:], uncached_greedy(model, tokens[None], 10)[0, len(tokens) :])


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("switch", ["default", "source_rope"])
def test_chunked_prefill_equals_whole_prefill(switch, padded):
    model = tiny_model(**MODELS[switch])
    mask = padded_mask("left", (21, 30), 30) if padded else None
    ids = draw_ids(2, 30) if mask is None else draw_ids(2, 30) * mask
    for chunk in (1, 7):
        output = greedy(model, ids, 8, attention_mask=mask, prefill_chunk_size=chunk)
        assert torch.equal(output, uncached_greedy(model, ids, 8, mask))


@some_switches
def test_multi_turn_with_a_kept_cache_and_a_mask(switch):
    model = tiny_model(**MODELS[switch])
    mask = padded_mask("left", (8, 14), 14)
    ids, cache = draw_ids(2, 14) * mask, None
    for turn in range(3):
        arguments = {} if cache is None else {CACHE_ARGUMENT: cache}
        result = greedy(model, ids, 7, attention_mask=mask, return_dict_in_generate=True, **arguments)
        cache = cache_of(result)
        assert torch.equal(result.sequences, uncached_greedy(model, ids, 7, mask))
        hole = padded_mask("left", (3 + turn, 6), 6)
        ids = torch.cat([result.sequences, draw_ids(2, 6, seed=turn) * hole], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 7), hole], dim=1)


@pytest.mark.parametrize("fork", [copy.deepcopy, HySparseCache.fork], ids=["deepcopy", "fork"])
@some_switches
def test_a_forked_cache_continues_in_two_ways(switch, fork):
    model = tiny_model(**MODELS[switch])
    ids = draw_ids(1, 22)
    _, cache = run_in_chunks(model, ids, [20, 1, 1])
    twin = fork(cache)
    for seed, copied in ((1, cache), (2, twin)):
        longer = torch.cat([ids, draw_ids(1, 4, seed=seed)], dim=1)
        assert torch.equal(greedy(model, longer, 9, **{CACHE_ARGUMENT: copied}), uncached_greedy(model, longer, 9))


def test_A19_inputs_embeds_equal_input_ids():
    model = tiny_model()
    ids = draw_ids(2, 17)
    embed = model.get_input_embeddings()
    result = greedy(model, None, 9, inputs_embeds=embed(ids), return_dict_in_generate=True)
    new = uncached_greedy(model, ids, 9)
    assert torch.equal(result.sequences, new[:, 17:])
    longer = torch.cat([new, draw_ids(2, 4, seed=8)], dim=1)
    with torch.no_grad():
        output = model(inputs_embeds=embed(longer[:, 25:]), **{CACHE_ARGUMENT: cache_of(result)})
    for row in range(2):
        assert_same_logits(output.logits[row], logits_alone(model, longer[row])[25:])


@some_switches
def test_A06_beams_equal_beams_without_a_cache(switch):
    model = tiny_model(**MODELS[switch])
    ids = draw_ids(2, 13)
    arguments = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    on, off = (greedy(model, ids, 14, use_cache=use_cache, **arguments) for use_cache in (True, False))
    assert torch.equal(on.sequences, off.sequences)
    torch.testing.assert_close(on.sequences_scores, off.sequences_scores, atol=1e-5, rtol=0)


def test_beams_of_a_padded_batch_equal_solo_beams():
    model = tiny_model()
    rows = [draw_ids(1, length, seed=length)[0] for length in (7, 13)]
    mask = padded_mask("left", (7, 13), 13)
    output = greedy(model, spread(rows, mask), 10, attention_mask=mask, num_beams=3)
    for row, tokens in enumerate(rows):
        solo = greedy(model, tokens[None], 10, num_beams=3, use_cache=False)[0, len(tokens) :]
        assert torch.equal(output[row, 13:], solo)


@pytest.mark.parametrize("padding", [0, 3])
@some_switches
def test_A03_prompt_lookup_equals_greedy(switch, padding):
    model = tiny_model(**MODELS[switch])
    tokens = draw_ids(1, 5)[0].repeat(4)
    mask = padded_mask("left", (20,), 20 + padding)
    ids = spread([tokens], mask)
    with recorded_forwards(model) as shapes:
        output = greedy(model, ids, 25, attention_mask=mask, prompt_lookup_num_tokens=3)
    assert max(length for _, length in shapes[1:]) > 1
    assert torch.equal(output, uncached_greedy(model, ids, 25, mask))


@pytest.mark.parametrize("same", [True, False], ids=["good_drafts", "bad_drafts"])
def test_A03_an_assistant_model_equals_greedy(same):
    model = tiny_model()
    assistant = tiny_model(seed=0 if same else 7)
    ids = draw_ids(1, 20)
    assert torch.equal(greedy(model, ids, 25, assistant_model=assistant), uncached_greedy(model, ids, 25))


@pytest.mark.parametrize("layers", [1, 3, 4, 5])
def test_drafts_that_leave_the_model_early_equal_greedy(layers):
    model, ids = tiny_model(), draw_ids(1, 20)
    drafted = greedy(model, ids, 25, assistant_early_exit=layers)
    assert model.config.num_hidden_layers == 6
    assert torch.equal(drafted, uncached_greedy(model, ids, 25))


@some_switches
def test_A11_a_pre_allocated_cache_equals_greedy(switch):
    model = tiny_model(**MODELS[switch])
    for length in (3, 20):
        ids = draw_ids(2, length)
        output = greedy(model, ids, 15, cache_implementation="static")
        assert torch.equal(output, uncached_greedy(model, ids, 15))


@cache_names
@pytest.mark.parametrize("kind", ["tuple", "dynamic"])
def test_A26_caches_of_another_class_are_refused(kind, name):
    pair = (torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 24))
    with pytest.raises(TypeError, match="must be a HySparseCache"):
        tiny_model()(draw_ids(1, 3), **{name: (pair,) * 6 if kind == "tuple" else DynamicCache()})


def test_A27_a_quantised_cache_is_refused_before_the_first_forward():
    model = tiny_model()
    with recorded_forwards(model) as shapes, pytest.raises(ValueError, match="cache_implementation"):
        greedy(model, draw_ids(1, 3), 4, cache_implementation="quantized")
    assert shapes == []


# State


def module_state(model):
    """Everything that hangs on the modules, by identity, and the values of buffers."""
    attributes = {
        (name, key): (id(value), len(value) if isinstance(value, dict | list) else None)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    return attributes, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("switch", ["default", "source_rope"])
def test_A01_calls_leave_nothing_on_the_model(switch):
    model = tiny_model(**MODELS[switch])
    attributes, buffers = module_state(model)
    first, second = draw_ids(3, 19), draw_ids(1, 8, seed=5)
    outputs = [greedy(model, first, 10), greedy(model, second, 10)]
    after, buffers_after = module_state(model)
    assert after == attributes
    assert all(torch.equal(buffers_after[name], buffers[name]) for name in buffers)
    for ids, output in zip((first, second), outputs, strict=True):
        assert torch.equal(output, greedy(tiny_model(**MODELS[switch]), ids, 10))


def test_A01_two_caches_advance_in_turn():
    model = tiny_model()
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
def test_A21_generate_in_training_mode(checkpointing):
    model = tiny_model()
    ids = draw_ids(2, 20)
    expected = greedy(model, ids, 8)
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    with recorded_forwards(model) as shapes:
        assert torch.equal(greedy(model, ids, 8), expected)
    assert shapes[1:] == [(2, 1)] * 7


@cache_names
def test_A23_a_given_cache_is_extended_whatever_use_cache_says(name):
    model = tiny_model()
    ids = draw_ids(1, 20)
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :12], use_cache=False, **{name: cache})
        output = model(ids[:, 12:], use_cache=False, **{name: cache})
    assert cache.get_seq_length() == 20
    assert cache_of(output) is cache
    assert_same_logits(output.logits[0], logits_alone(model, ids[0])[12:])


@pytest.mark.slow
@over_models()
def test_D09_every_switch_decodes_in_two_graphs(switch):
    """One for the prompt and one for every step, whatever the length."""
    model = tiny_model(**MODELS[switch])
    mask = padded_mask("left", (9, 20, 13), 20)
    ids = spread([draw_ids(1, length, seed=length)[0] for length in (9, 20, 13)], mask)
    output, graphs = compiled_generation(model, "eager", ids, new_tokens=12, attention_mask=mask)
    assert torch.equal(output, greedy(model, ids, 12, attention_mask=mask))
    assert graphs == [0, 0]
