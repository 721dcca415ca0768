"""`generate()` gives what full forwards without a cache give, for prompts of every kind and over several turns."""

import copy

import pytest
import torch
from models import tiny, tiny2
from models.generations import KINDS, WAYS, both_generations, case, over_settings
from models.tiny import (
    assert_same_logits,
    default_sizes,
    draw_ids,
    greedy,
    padded_mask,
    recorded_forwards,
    run_in_chunks,
    spread,
    tiny_model,
    uncached_greedy,
)

from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


some_settings = over_settings(second=WAYS, fast=("default",), first_fast=KINDS)


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


@over_settings()
def test_A31_greedy_equals_uncached(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    check_against_uncached(model, 24, new_tokens=20)
    ids = draw_ids(1, 24)
    assert torch.equal(greedy(model, ids, 20), greedy(model, ids, 20, use_cache=False))


@pytest.mark.parametrize(
    ("generation", "length"),
    [case(tiny, length) for length in (1, 3, 4, 5, 6, 7, 9, 20)]
    + [case(tiny2, length) for length in (1, 4, 5, 6, 7, 10, 11, 12)],
)
def test_prompt_lengths_around_block_window_and_budget_C23(generation, length):
    check_against_uncached(generation.tiny_model(torch.float64), length)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_prompt_lengths_around_the_default_block_and_window(length):
    check_against_uncached(tiny_model(torch.float64, **default_sizes()), length, batch=1, new_tokens=6)


def test_the_default_sizes_choose_among_blocks_at_the_longest_prompt():
    model = tiny_model(**default_sizes())
    output = model(draw_ids(1, 129 + 128), output_selected_indices=True)
    assert {tuple(row) for row in output.selected_indices[0][0, :, -1].tolist()} != {(0, 1)}


@pytest.mark.parametrize(
    ("generation", "switch", "padding"),
    [case(tiny, name, "left", marks=() if name in KINDS else pytest.mark.slow) for name in tiny.SWITCHES]
    + [case(tiny, "default", None), case(tiny2, "default", "left"), case(tiny2, "default", None)],
)
def test_sampling_equals_sampling_without_a_cache(generation, switch, padding):
    model = generation.tiny_model(**generation.MODELS[switch])
    mask = padded_mask(padding, (11, 18), 18) if padding else torch.ones(2, 18, dtype=torch.long)
    ids = draw_ids(2, 18) * mask
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampling = {"do_sample": True, "top_k": 20, "max_new_tokens": 10}
        outputs.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **sampling))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], greedy(model, ids, 10, attention_mask=mask))


@some_settings
def test_A15_left_padded_batch_equals_solo_runs(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    rows = [draw_ids(1, length, seed=length)[0] for length in (5, 15, 11)]
    mask = padded_mask("left", (5, 15, 11), 15)
    output = greedy(model, spread(rows, mask), 10, attention_mask=mask)
    for row, tokens in enumerate(rows):
        assert torch.equal(output[row, 15:], uncached_greedy(model, tokens[None], 10)[0, len(tokens) :])


@pytest.mark.parametrize(
    ("generation", "switch", "padding", "chunk"),
    [case(tiny, "default", padding, chunk) for padding in (None, "left") for chunk in (1, 4, 7, 30)]
    + [case(tiny, switch, "left", 7) for switch in tiny.SWITCHES if switch != "default"]
    + [case(tiny2, way, None, 7) for way in ("default", "source_rope")]
    + [case(tiny2, way, "left", chunk) for way in ("default", "source_rope") for chunk in (1, 7)],
)
def test_chunked_prefill_equals_whole_prefill(generation, switch, padding, chunk):
    model = generation.tiny_model(**generation.MODELS[switch])
    mask = padded_mask(padding, (21, 30), 30) if padding else None
    ids = draw_ids(2, 30) if mask is None else draw_ids(2, 30) * mask
    with recorded_forwards(model) as shapes:
        output = greedy(model, ids, 8, attention_mask=mask, prefill_chunk_size=chunk)
    assert shapes[0] == (2, chunk)
    assert torch.equal(output, uncached_greedy(model, ids, 8, mask))


@both_generations
def test_an_early_end_of_one_row_leaves_the_others_alone(generation):
    model = generation.tiny_model()
    ids = draw_ids(3, 16)
    plain = uncached_greedy(model, ids, 12)
    end = int(plain[0, 19])
    output = greedy(model, ids, 12, eos_token_id=end)
    for row in range(3):
        new = plain[row, 16:].tolist()
        stop = new.index(end) + 1 if end in new else 12
        expected = new[:stop] + [0] * (12 - stop)
        assert output[row, 16:].tolist() == expected[: output.shape[1] - 16]


# Several turns


@over_settings(second=("default",), first_fast=KINDS)
def test_multi_turn_with_a_kept_cache(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    ids, cache = draw_ids(2, 14), None
    for turn in range(3):
        arguments = {} if cache is None else {CACHE_ARGUMENT: cache}
        result = greedy(model, ids, 7, return_dict_in_generate=True, **arguments)
        cache = cache_of(result)
        assert torch.equal(result.sequences, uncached_greedy(model, ids, 7))
        assert cache.get_seq_length() == result.sequences.shape[1] - 1
        ids = torch.cat([result.sequences, draw_ids(2, 5, seed=turn)], dim=1)


@over_settings(("default",), WAYS, fast=("default",))
def test_multi_turn_with_a_full_length_mask(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
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


@pytest.mark.parametrize("end", [2, 6])
@both_generations
def test_multi_turn_after_one_row_ended_early(generation, end):
    """The filling behind an ended row is cached as tokens; the next turn's mask takes it out again."""
    model = generation.tiny_model()
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


@some_settings
def test_a_forked_cache_continues_in_two_ways(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    ids = draw_ids(1, 22)
    _, cache = run_in_chunks(model, ids, [20, 1, 1])
    for seed, copied in enumerate((cache.fork(), copy.deepcopy(cache), cache), start=1):
        longer = torch.cat([ids, draw_ids(1, 4, seed=seed)], dim=1)
        assert torch.equal(greedy(model, longer, 9, **{CACHE_ARGUMENT: copied}), uncached_greedy(model, longer, 9))
