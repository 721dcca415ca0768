"""`generate()` gives what full forwards without a cache give."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from models.generations import both_generations
from models.tiny import (
    CACHE_NAMES,
    SWITCHES,
    assert_same_logits,
    default_sizes,
    draw_ids,
    logits_alone,
    padded_mask,
    recorded_forwards,
    run_in_chunks,
    spread,
    tiny_config,
    tiny_model,
    uncached_greedy,
)
from transformers import DynamicCache

import hysparse_hf.modeling.decoder_hysparse as decoder
from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


switches = pytest.mark.parametrize("switch", SWITCHES)
cache_names = pytest.mark.parametrize("name", CACHE_NAMES)
T1_LENGTHS = [1, 3, 4, 5, 6, 7, 9, 20]
DEFAULT_LENGTHS = [1, 63, 64, 65, 127, 128, 129]


def greedy(model, ids, new_tokens=12, attention_mask=None, **arguments):
    if attention_mask is None and ids is not None:
        # Without a mask `generate` would take a 0 that the model itself wrote for padding.
        attention_mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=attention_mask, max_new_tokens=new_tokens, do_sample=False, **arguments)


def check_against_uncached(model, length, batch=2, new_tokens=10):
    """Token ids and the logits of every step, against full forwards on the growing sequence."""
    ids = draw_ids(batch, length)
    steps = []
    handle = model.lm_head.register_forward_hook(lambda _, args, output: steps.append(output[:, -1]))
    sequences = greedy(model, ids, new_tokens)
    handle.remove()
    assert torch.equal(sequences, uncached_greedy(model, ids, new_tokens))
    with torch.no_grad():
        logits = model(sequences[:, :-1], use_cache=False).logits[:, length - 1 :]
        if logits.dtype == torch.float64:
            assert_same_logits(torch.stack(steps, dim=1), logits)
            return
        # Weights this large amplify rounding; what the uncached run loses to it, the cached one may lose again.
        exact = copy.deepcopy(model).double()(sequences[:, :-1], use_cache=False).logits[:, length - 1 :]
    bound = 2 * (logits - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (torch.stack(steps, dim=1) - exact).abs().max() <= bound


@switches
def test_A31_greedy_equals_uncached(switch):
    model = tiny_model(**SWITCHES[switch])
    check_against_uncached(model, 24, new_tokens=20)
    ids = draw_ids(1, 24)
    assert torch.equal(greedy(model, ids, 20), greedy(model, ids, 20, use_cache=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", T1_LENGTHS)
def test_prompt_lengths_around_block_and_window_of_T1(length, dtype):
    check_against_uncached(tiny_model(dtype), length)


@pytest.mark.parametrize("length", DEFAULT_LENGTHS)
def test_prompt_lengths_around_the_default_block_and_window(length):
    check_against_uncached(tiny_model(torch.float64, **default_sizes()), length, batch=1, new_tokens=6)


def test_the_default_sizes_choose_among_blocks_at_the_longest_prompt():
    model = tiny_model(**default_sizes())
    output = model(draw_ids(1, 129 + 128), output_selected_indices=True)
    assert {tuple(row) for row in output.selected_indices[0][0, :, -1].tolist()} != {(0, 1)}


def test_A25_each_decode_step_receives_one_token():
    model = tiny_model()
    with recorded_forwards(model) as shapes:
        greedy(model, draw_ids(2, 15), 8)
    assert shapes == [(2, 15)] + [(2, 1)] * 7


@cache_names
def test_A25_both_cache_names_are_honoured_by_forward(name):
    model = tiny_model()
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


@pytest.mark.parametrize(("switch", "padded"), [("default", False), *((switch, True) for switch in SWITCHES)])
def test_sampling_equals_sampling_without_a_cache(switch, padded):
    model = tiny_model(**SWITCHES[switch])
    mask = padded_mask("left", (11, 18), 18) if padded else torch.ones(2, 18, dtype=torch.long)
    ids = draw_ids(2, 18) * mask
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampling = {"do_sample": True, "top_k": 20, "max_new_tokens": 10}
        outputs.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **sampling))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], greedy(model, ids, 10, attention_mask=mask))


@switches
def test_A15_left_padded_batch_equals_solo_runs(switch):
    model = tiny_model(**SWITCHES[switch])
    rows = [draw_ids(1, length, seed=length)[0] for length in (5, 15, 11)]
    mask = padded_mask("left", (5, 15, 11), 15)
    output = greedy(model, spread(rows, mask), 10, attention_mask=mask)
    for row, tokens in enumerate(rows):
        assert torch.equal(output[row, 15:], uncached_greedy(model, tokens[None], 10)[0, len(tokens) :])


CHUNKS = [(padded, "default", chunk) for padded in (False, True) for chunk in (1, 4, 7, 30)]
CHUNKS += [(True, switch, 7) for switch in SWITCHES if switch != "default"]


@pytest.mark.parametrize(("padded", "switch", "chunk"), CHUNKS)
def test_chunked_prefill_equals_whole_prefill(padded, switch, chunk):
    model = tiny_model(**SWITCHES[switch])
    mask = padded_mask("left", (21, 30), 30) if padded else None
    ids = draw_ids(2, 30) if mask is None else draw_ids(2, 30) * mask
    with recorded_forwards(model) as shapes:
        output = greedy(model, ids, 8, attention_mask=mask, prefill_chunk_size=chunk)
    assert shapes[0] == (2, chunk)
    assert torch.equal(output, uncached_greedy(model, ids, 8, mask))


@pytest.mark.parametrize("kind", ["assistant", "lookup"])
@both_generations
def test_drafts_behind_a_prompt_padded_on_the_right_are_refused_A03(generation, kind):
    model = generation.tiny_model()
    mask = padded_mask("right", (17,), 20)
    drafting = {"assistant_model": generation.tiny_model(seed=7)} if kind == "assistant" else {}
    ids = draw_ids(1, 5).repeat(1, 4) * mask
    with pytest.raises(ValueError, match="pad it on the left"):
        greedy(model, ids, 8, attention_mask=mask, **(drafting or {"prompt_lookup_num_tokens": 3}))


# Several turns


@switches
def test_multi_turn_with_a_kept_cache(switch):
    model = tiny_model(**SWITCHES[switch])
    ids, cache = draw_ids(2, 14), None
    for turn in range(3):
        arguments = {} if cache is None else {CACHE_ARGUMENT: cache}
        result = greedy(model, ids, 7, return_dict_in_generate=True, **arguments)
        cache = cache_of(result)
        assert torch.equal(result.sequences, uncached_greedy(model, ids, 7))
        assert cache.get_seq_length() == result.sequences.shape[1] - 1
        ids = torch.cat([result.sequences, draw_ids(2, 5, seed=turn)], dim=1)


def test_multi_turn_with_a_full_length_mask():
    model = tiny_model()
    mask = padded_mask("left", (8, 14), 14)
    ids, cache = draw_ids(2, 14) * mask, None
    for turn in range(3):
        arguments = {} if cache is None else {CACHE_ARGUMENT: cache}
        result = greedy(model, ids, 7, attention_mask=mask, return_dict_in_generate=True, **arguments)
        cache = cache_of(result)
        assert torch.equal(result.sequences, uncached_greedy(model, ids, 7, mask))
        # The next turn is padded too, which leaves a hole in the middle of the mask.
        hole = padded_mask("left", (3 + turn, 6), 6)
        ids = torch.cat([result.sequences, draw_ids(2, 6, seed=turn) * hole], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 7), hole], dim=1)


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


@pytest.mark.parametrize("fork", [copy.deepcopy, HySparseCache.fork], ids=["deepcopy", "fork"])
@switches
def test_a_forked_cache_continues_in_two_ways(switch, fork):
    model = tiny_model(**SWITCHES[switch])
    ids = draw_ids(1, 22)
    _, cache = run_in_chunks(model, ids, [20, 1, 1])
    twin = fork(cache)
    for seed, copied in ((1, cache), (2, twin)):
        longer = torch.cat([ids, draw_ids(1, 4, seed=seed)], dim=1)
        assert torch.equal(greedy(model, longer, 9, **{CACHE_ARGUMENT: copied}), uncached_greedy(model, longer, 9))


@pytest.mark.parametrize("end", [2, 6])
def test_multi_turn_after_one_row_ended_early(end):
    """The filling behind an ended row is cached as tokens; the next turn's mask takes it out again."""
    model = tiny_model()
    ids = draw_ids(2, 14)
    token = int(uncached_greedy(model, ids, end)[0, -1])
    result = greedy(model, ids, 9, eos_token_id=token, return_dict_in_generate=True)
    assert result.sequences.shape[1] == 23
    mask = torch.ones_like(result.sequences)
    mask[0, 14 + end :] = 0
    longer = torch.cat([result.sequences, draw_ids(2, 5, seed=9)], dim=1)
    mask = torch.cat([mask, mask.new_ones(2, 5)], dim=1)
    output = greedy(model, longer, 7, attention_mask=mask, **{CACHE_ARGUMENT: cache_of(result)})
    assert torch.equal(output, uncached_greedy(model, longer, 7, mask))


# Other inputs and outputs


def test_A19_inputs_embeds_equal_input_ids():
    model = tiny_model()
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


@pytest.mark.parametrize("switch", ["default", "window_layers", "merged_own"])
def test_A19_padded_inputs_embeds_equal_input_ids(switch):
    model = tiny_model(**SWITCHES[switch])
    mask = padded_mask("left", (10, 17), 17)
    ids = draw_ids(2, 17) * mask
    output = greedy(model, None, 9, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    assert torch.equal(output, uncached_greedy(model, ids, 9, mask)[:, 17:])


def test_A19_a_second_generate_from_states_and_a_kept_cache():
    model = tiny_model()
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


def test_an_early_end_of_one_row_leaves_the_others_alone():
    model = tiny_model()
    ids = draw_ids(3, 16)
    plain = uncached_greedy(model, ids, 12)
    end = int(plain[0, 19])
    output = greedy(model, ids, 12, eos_token_id=end)
    for row in range(3):
        new = plain[row, 16:].tolist()
        stop = new.index(end) + 1 if end in new else 12
        expected = new[:stop] + [0] * (12 - stop)
        assert output[row, 16:].tolist() == expected[: output.shape[1] - 16]


@cache_names
@pytest.mark.parametrize("kind", ["tuple", "dynamic"])
def test_A26_caches_of_another_class_are_refused(kind, name):
    model = tiny_model()
    pair = (torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 24))
    cache = (pair,) * 6 if kind == "tuple" else DynamicCache()
    with pytest.raises(TypeError, match="must be a HySparseCache"):
        model(draw_ids(1, 3), **{name: cache})


def test_a_cache_class_derived_from_ours_is_ours():
    class CountedCache(HySparseCache):
        pass

    model, ids = tiny_model(), draw_ids(1, 8)
    output = greedy(model, ids, 4, **{CACHE_ARGUMENT: CountedCache(model.config)})
    assert torch.equal(output, uncached_greedy(model, ids, 4))


@pytest.mark.parametrize("kind", ["tuple", "dynamic"])
def test_A26_generate_refuses_caches_of_another_class(kind):
    model = tiny_model()
    pair = (torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 24))
    cache = (pair,) * 6 if kind == "tuple" else DynamicCache()
    with pytest.raises((TypeError, ValueError)):
        greedy(model, draw_ids(1, 8), 4, **{CACHE_ARGUMENT: cache})


# State


def module_state(model):
    """Everything that hangs on the modules, by identity, and the values of buffers."""
    attributes = {
        (name, key): (id(value), len(value) if isinstance(value, dict | list) else None)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    return attributes, {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_A01_calls_leave_nothing_on_the_model():
    model = tiny_model()
    attributes, buffers = module_state(model)
    first, second = draw_ids(3, 19), draw_ids(1, 8, seed=5)
    outputs = [greedy(model, first, 10), greedy(model, second, 10)]
    after, buffers_after = module_state(model)
    assert after == attributes
    assert buffers_after.keys() == buffers.keys()
    assert all(torch.equal(buffers_after[name], buffers[name]) for name in buffers)
    for ids, output in zip((first, second), outputs, strict=True):
        assert torch.equal(output, greedy(tiny_model(), ids, 10))


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
    assert model.training


@cache_names
def test_A23_a_given_cache_is_extended_whatever_use_cache_says(name):
    model = tiny_model()
    ids = draw_ids(1, 20)
    cache = HySparseCache(model.config)
    with torch.no_grad():
        model(ids[:, :12], use_cache=False, **{name: cache})
        assert cache.get_seq_length() == 12
        output = model(ids[:, 12:], use_cache=False, **{name: cache})
    assert cache.get_seq_length() == 20
    assert cache_of(output) is cache
    assert_same_logits(output.logits[0], logits_alone(model, ids[0])[12:])


REMOVED_NAMES = {"key_cache", "value_cache", "seen_tokens", "get_usable_length", "get_max_length", "to_legacy_cache"}


def test_A24_the_code_uses_no_removed_cache_members():
    files = sorted(Path(decoder.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        used = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not used & REMOVED_NAMES, f"{file.name} uses {used & REMOVED_NAMES}"


def test_A24_five_tokens_on_this_version():
    model = tiny_model()
    assert greedy(model, draw_ids(1, 9), 5).shape == (1, 14)


def test_eager_and_default_attention_agree():
    model = tiny_model()
    ids = draw_ids(2, 40)
    with torch.no_grad():
        default = model(ids).logits
        model.set_attn_implementation("eager")
        assert_same_logits(model(ids).logits, default)


def test_the_pad_token_of_T1_is_never_drawn():
    assert tiny_config().pad_token_id == 0
    assert draw_ids(8, 64).min() >= 2
