"""Only positions whose logits are asked for run through the cross-decoder, and that changes no result."""

import pytest
import torch
from models.tiny import assert_same_caches, assert_same_logits, draw_ids, greedy, padded_mask, spread, uncached_greedy
from models.tiny2 import SWITCHES, over_models, tiny_model

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT


STAYING = (
    "no_bridge",
    "branch",
    "branch_shared_kv",
    "branch_none",
    "branch_merged_shared",
    "branch_merged_own",
    "dense",
)
LEAVING = {name: settings for name, settings in SWITCHES.items() if name not in STAYING}
LEAVING["yoco"] = {"baseline": "yoco"}
LENGTHS = (33, 50, 41)
TOTAL = 56
KEPT = {
    "last": 1,
    "last-7": 7,
    "positions": torch.tensor([5, 37, 0, 5]),
    "negative-positions": torch.tensor([-1, -40]),
    "mask": torch.arange(40) % 11 == 3,
}
NOT_KEPT = {
    "negative": -1,
    "past-the-end": torch.tensor([0, 40]),
    "before-the-start": torch.tensor([-41]),
    "one-index": torch.tensor(3),
    "a-row-each": torch.tensor([[1], [2]]),
    "fractions": torch.tensor([1.0]),
    "short-mask": torch.ones(39, dtype=torch.bool),
    "list": [1, 2],
}

switches = over_models(LEAVING, fast=("default", "two_bridges", "source_rope"))
materializations = pytest.mark.parametrize("materialization", ["eager", "lazy"])


def counting(model, **options):
    return HySparseCache(model.config, count_tokens=True, **options)


def rows_kept(kept, length=40):
    return min(kept, length) or length if isinstance(kept, int) else len(torch.arange(length)[kept])


def take(logits, kept):
    return logits[:, -kept:] if isinstance(kept, int) else logits[:, kept]


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())
@switches
@torch.no_grad()
def test_logits_and_cache_are_those_of_the_full_pass(switch, kept):
    model = tiny_model(torch.float64, **LEAVING[switch])
    ids = draw_ids(2, 40)
    whole, part = counting(model), counting(model)
    expected = take(model(ids, cache=whole).logits, kept)
    assert_same_logits(model(ids, cache=part, logits_to_keep=kept).logits, expected)
    assert whole.processed_tokens == {"self": 80, "cross": 80}
    assert part.processed_tokens == {"self": 80, "cross": 2 * rows_kept(kept)}
    assert_same_caches(part, whole)
    assert_same_logits(model(ids, use_cache=False, logits_to_keep=kept).logits, expected)
    step = draw_ids(2, 1, seed=9)
    assert_same_logits(model(step, cache=part).logits, model(step, cache=whole).logits)


@pytest.mark.parametrize("kept", NOT_KEPT.values(), ids=NOT_KEPT.keys())
@over_models({"default": {}, "dense": {}}, fast=("default", "dense"))
@torch.no_grad()
def test_what_cannot_be_kept_is_refused_before_the_cache_is_touched(switch, kept):
    model = tiny_model(**SWITCHES[switch])
    cache = counting(model)
    with pytest.raises(ValueError, match="`logits_to_keep` must be a number of last positions"):
        model(draw_ids(2, 40), cache=cache, logits_to_keep=kept)
    assert cache.processed_tokens == {"self": 0, "cross": 0}
    assert cache.get_seq_length() == 0


@over_models(("default", "source_rope", "own_kv"))
@torch.no_grad()
def test_repeats_beyond_the_number_of_tokens_cost_each_position_once(switch):
    model, ids = tiny_model(torch.float64, **SWITCHES[switch]), draw_ids(2, 5)
    cache, kept = counting(model), torch.tensor([4, 0, 4, -1, 2, 2, 4])
    expected = model(ids, use_cache=False).logits[:, kept]
    assert_same_logits(model(ids, cache=cache, logits_to_keep=kept).logits, expected)
    assert cache.processed_tokens == {"self": 10, "cross": 10}


@pytest.mark.parametrize("kept", [1, 4, 30, torch.tensor([50, 3, 55, 20])], ids=["1", "4", "30", "positions"])
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@over_models(("default", "source_rope", "own_kv", "block", "yoco"), fast=("source_rope",))
@torch.no_grad()
def test_padded_rows(switch, padding, kept):
    model = tiny_model(torch.float64, **LEAVING[switch])
    mask = padded_mask(padding, LENGTHS, TOTAL)
    ids = spread([draw_ids(1, length, 3 + row)[0] for row, length in enumerate(LENGTHS)], mask)
    whole, part = counting(model), counting(model)
    expected = take(model(ids, attention_mask=mask, cache=whole).logits, kept)
    logits = model(ids, attention_mask=mask, cache=part, logits_to_keep=kept).logits
    visible = take(mask[..., None], kept)[..., 0].bool()
    assert logits.isfinite().all()
    if visible.any():
        assert_same_logits(logits[visible], expected[visible])
    assert part.processed_tokens == {"self": 3 * TOTAL, "cross": 3 * rows_kept(kept, TOTAL)}
    mask = torch.cat([mask, mask.new_ones(3, 5)], dim=1)
    more = draw_ids(3, 5, seed=8)
    expected = model(more, attention_mask=mask, cache=whole).logits[:, -2:]
    assert_same_logits(model(more, attention_mask=mask, cache=part, logits_to_keep=2).logits, expected)
    assert part.processed_tokens["cross"] == 3 * rows_kept(kept, TOTAL) + 6


@pytest.mark.parametrize("fixed", [None, 64], ids=["growing", "pre-allocated"])
@materializations
@pytest.mark.parametrize("kept", [1, 2, torch.tensor([0]), torch.tensor([], dtype=torch.long)], ids=str)
@torch.no_grad()
def test_chunks_that_keep_little_then_tokens_that_keep_all(kept, materialization, fixed):
    model = tiny_model(torch.float64, bridge_materialization=materialization, rope_parameters={"rope_theta": 1e4})
    ids = draw_ids(2, 40)
    expected = model(ids, use_cache=False).logits
    cache, done = counting(model, max_cache_len=fixed), 0
    for size in (11, 3, 16):
        logits = model(ids[:, done : done + size], cache=cache, logits_to_keep=kept).logits
        wanted = take(expected[:, done : done + size], kept)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
        done += size
    few = rows_kept(kept, 11)
    assert cache.processed_tokens == {"self": 60, "cross": 2 * 3 * few}
    assert len(cache.pending) == (3 if few == 0 and materialization == "lazy" else 0)
    for size in (7, 1, 2):
        assert_same_logits(model(ids[:, done : done + size], cache=cache).logits, expected[:, done : done + size])
        done += size
    assert cache.pending == []
    assert cache.processed_tokens == {"self": 80, "cross": 2 * 3 * few + 20}


@pytest.mark.parametrize("kept", [3, torch.tensor([0, 21, 40])], ids=["last", "positions"])
@torch.no_grad()
def test_packed_documents(kept):
    model = tiny_model(torch.float64)
    ids = draw_ids(1, 41)
    positions = torch.cat([torch.arange(length) for length in (20, 15, 6)])[None]
    whole = model(ids, position_ids=positions, use_cache=False).logits
    logits = model(ids, position_ids=positions, use_cache=False, logits_to_keep=kept).logits
    assert_same_logits(logits, take(whole, kept))


@pytest.mark.parametrize("kept", [3, torch.tensor([0, 21, 39])], ids=["last", "positions"])
@torch.no_grad()
def test_a_4d_mask(kept):
    model = tiny_model(torch.float64)
    ids = draw_ids(2, 40)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    mask[..., 13:, 12] = False
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    assert_same_logits(model(ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits, take(whole, kept))


ASKING_FOR_ALL = {
    "labels": {"labels": draw_ids(2, 40)},
    "hidden_states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "indices": {"output_selected_indices": True},
    "all_logits": {"logits_to_keep": 0},
    "more_than_there_are": {"logits_to_keep": 41},
}


class TestAllRowsRun:
    @pytest.mark.parametrize("asked", ASKING_FOR_ALL.values(), ids=ASKING_FOR_ALL.keys())
    @torch.no_grad()
    def test_where_a_row_per_token_is_asked_for_B10(self, asked):
        model = tiny_model(torch.float64)
        ids = draw_ids(2, 40)
        cache = counting(model)
        output = model(ids, cache=cache, **{"logits_to_keep": 0 if "labels" in asked else 2, **asked})
        assert cache.processed_tokens == {"self": 80, "cross": 80}
        whole = model(ids, use_cache=False).logits
        assert_same_logits(output.logits, whole if "logits_to_keep" in asked or "labels" in asked else whole[:, -2:])
        if output.hidden_states is not None:
            assert {states.shape for states in output.hidden_states} == {(2, 40, 64)}

    @pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
    @torch.no_grad()
    def test_where_the_configuration_asks_B10(self, name):
        model = tiny_model(torch.float64)
        model.set_attn_implementation("eager")  # the library allows maps by configuration with no other
        setattr(model.config, name, True)
        cache = counting(model)
        output = model(draw_ids(2, 40), cache=cache, logits_to_keep=1)
        assert cache.processed_tokens["cross"] == 80
        assert output.logits.shape[1] == 1

    @pytest.mark.parametrize("switch", STAYING)
    @torch.no_grad()
    def test_where_cross_layers_need_every_position(self, switch):
        model = tiny_model(torch.float64, **SWITCHES[switch])
        ids = draw_ids(2, 40)
        cache = counting(model)
        logits = model(ids, cache=cache, logits_to_keep=3).logits
        assert cache.processed_tokens == {"self": 80, "cross": 80}
        assert_same_logits(logits, model(ids, use_cache=False).logits[:, -3:])

    @torch.no_grad()
    def test_generate_gives_the_logits_and_hidden_states_it_is_asked_for_B10(self):
        model = tiny_model(torch.float64)
        ids = draw_ids(2, 20)
        asked = {"output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True}
        result = model.generate(ids, max_new_tokens=6, do_sample=False, **asked)
        whole = model(result.sequences[:, :-1], use_cache=False).logits[:, 19:]
        assert_same_logits(torch.stack(result.logits, dim=1), whole.float())
        assert result.hidden_states[0][-1].shape == (2, 20, 64)


class TestCounter:
    def test_is_off_by_default(self):
        assert HySparseCache(tiny_model().config).processed_tokens is None

    @torch.no_grad()
    def test_a_reset_cache_goes_on_counting(self):
        model = tiny_model()
        cache = counting(model)
        model(draw_ids(1, 9), cache=cache, logits_to_keep=1)
        cache.reset()
        model(draw_ids(1, 9), cache=cache, logits_to_keep=1)
        assert cache.processed_tokens == {"self": 18, "cross": 2}


class TestGenerate:
    @pytest.mark.parametrize(("chunk", "prompts"), [(None, 1), (8, 3), (20, 1)], ids=str)
    def test_a_prompt_costs_one_position_of_the_cross_decoder(self, chunk, prompts):
        model = tiny_model()
        ids = draw_ids(2, 20)
        cache = counting(model)
        output = greedy(model, ids, 10, prefill_chunk_size=chunk, **{CACHE_ARGUMENT: cache})
        assert torch.equal(output, uncached_greedy(model, ids, 10))
        assert cache.processed_tokens == {"self": 2 * 29, "cross": 2 * (prompts + 9)}

    def test_several_turns_on_one_cache(self):
        model = tiny_model()
        ids, cache = draw_ids(2, 14), counting(model)
        for turn in range(3):
            output = greedy(model, ids, 7, **{CACHE_ARGUMENT: cache})
            assert torch.equal(output, uncached_greedy(model, ids, 7))
            assert cache.processed_tokens["cross"] == 2 * 7 * (turn + 1)
            ids = torch.cat([output, draw_ids(2, 5, seed=turn)], dim=1)

    def test_drafts_cost_a_position_each(self):
        model = tiny_model()
        ids = draw_ids(1, 5).repeat(1, 4)
        cache = counting(model)
        cache.activate_past_recording()
        output = greedy(model, ids, 25, prompt_lookup_num_tokens=3, **{CACHE_ARGUMENT: cache})
        assert torch.equal(output, uncached_greedy(model, ids, 25))
        # Of the first call all but the prompt before its last token; afterwards every token that is fed.
        assert cache.processed_tokens["self"] - cache.processed_tokens["cross"] == 19


class TestTraining:
    @pytest.mark.parametrize("switch", ["default", "residual", "self_output", "own_kv"])
    def test_gradients_of_kept_logits_are_those_of_the_full_pass(self, switch):
        model = tiny_model(torch.float64, **LEAVING[switch]).train()
        ids, kept = draw_ids(2, 40), torch.tensor([5, 20, 39])
        grads = []
        for early in (True, False):
            model.zero_grad()
            logits = model(ids, use_cache=False, logits_to_keep=kept if early else 0).logits
            (logits if early else logits[:, kept]).sin().sum().backward()
            grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for name, grad in grads[1].items():
            torch.testing.assert_close(grads[0][name], grad, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
