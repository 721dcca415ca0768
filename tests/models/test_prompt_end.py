"""Behind the last full layer only the last tokens of a prompt go on, and that changes no result."""

from contextlib import contextmanager

import pytest
import torch
from models.tiny import (
    SWITCHES,
    assert_same_caches,
    assert_same_logits,
    draw_ids,
    greedy,
    padded_mask,
    spread,
    tiny_config,
    tiny_model,
    uncached_greedy,
)

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT
from hysparse_hf.modeling.modeling_hysparse import HySparseForSequenceClassification


# Settings -> how many of 90 tokens each of the layers behind its keys runs, without a cache and with one, for one
# logit. Windows of 6 reach back 5 tokens; a cache keeps 38 of them.
ENDING: dict[str, tuple[dict, list[int], list[int]]] = {
    "default": ({}, [90] * 3 + [11] * 3, [90] * 3 + [43] * 3),
    "ends_with_full": ({"layer_plan": ["full", "sparse", "full"]}, [90, 90, 1], [90, 90, 1]),
    "one_layer": ({"layer_plan": ["full"]}, [1], [1]),
    "window_behind": ({"layer_plan": ["full", "sparse", "window"]}, [11] * 3, [43] * 3),
    "no_window": (SWITCHES["no_window"], [90] * 3 + [1] * 3, [90] * 3 + [1] * 3),
    "shared_window": (SWITCHES["shared_window"], [90] * 3 + [1] * 3, [90] * 3 + [1] * 3),
    "merged_shared": (SWITCHES["merged_shared"], [90] * 3 + [1] * 3, [90] * 3 + [1] * 3),
    "merged_own": (SWITCHES["merged_own"], [90] * 3 + [11] * 3, [90] * 3 + [43] * 3),
    "own_oracle": (SWITCHES["own_oracle"], [90] * 3 + [11] * 3, [90] * 3 + [43] * 3),
    "dense": (SWITCHES["dense"], [90] * 5 + [1], [90] * 5 + [1]),
    "gated_full": (SWITCHES["headwise_full_gate"], [90] * 3 + [11] * 3, [90] * 3 + [43] * 3),
    "window_layers": (SWITCHES["window_layers"], [90] * 4 + [6] * 2, [90] * 4 + [38] * 2),
    "sum_mean_forced": (SWITCHES["sum_mean_forced"], [90] * 3 + [11] * 3, [90] * 3 + [43] * 3),
    "wide_values": (SWITCHES["wide_values"], [90] * 3 + [11] * 3, [90] * 3 + [43] * 3),
    # Every layer keeps keys of its own there, the last of them a sparse one.
    "own_kv": (SWITCHES["own_kv"], [90] * 6, [90] * 6),
    "only_windows": ({"layer_plan": ["window", "window"]}, [90] * 2, [90] * 2),
}
LENGTHS = (90, 23, 61)
TOTAL = 95

settings = pytest.mark.parametrize("name", ENDING)
fixed = pytest.mark.parametrize("room", [None, 160], ids=["growing", "pre-allocated"])


@contextmanager
def counted_rows(model):
    """While open, a list of how many tokens each layer's feed-forward network was given, in the order of calls."""
    rows: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
        for layer in model.model.layers
    ]
    yield rows
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("kept", [1, 7])
@settings
@torch.no_grad()
def test_logits_and_cache_are_those_of_the_full_pass(name, kept):
    switches, without_cache, with_cache = ENDING[name]
    model, ids = tiny_model(torch.float64, **switches), draw_ids(2, 90)
    whole, part = HySparseCache(model.config), HySparseCache(model.config)
    expected = model(ids, cache=whole).logits[:, -kept:]
    for cache, rows in ((None, without_cache), (part, with_cache)):
        with counted_rows(model) as counted:
            logits = model(ids, cache=cache, use_cache=False, logits_to_keep=kept).logits
        assert_same_logits(logits, expected)
        # What a cache keeps for undoing tokens is more than six further logits need.
        longer = 0 if cache is not None and rows[-1] > 7 else kept - 1
        assert counted == [count if count == 90 else count + longer for count in rows]
    assert_same_caches(part, whole)
    for step in range(8):
        token = draw_ids(2, 1, seed=step)
        assert_same_logits(model(token, cache=part).logits, model(token, cache=whole).logits)


@fixed
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("name", ["default", "ends_with_full", "merged_own", "window_layers", "dense"])
@torch.no_grad()
def test_padded_rows(name, padding, room):
    model = tiny_model(torch.float64, **ENDING[name][0])
    mask = padded_mask(padding, LENGTHS, TOTAL)
    ids = spread([draw_ids(1, length, 3 + row)[0] for row, length in enumerate(LENGTHS)], mask)
    whole, part = (HySparseCache(model.config, max_cache_len=room) for _ in range(2))
    expected = model(ids, attention_mask=mask, cache=whole).logits[:, -3:]
    with counted_rows(model) as rows:
        logits = model(ids, attention_mask=mask, cache=part, logits_to_keep=3).logits
    assert min(rows) < TOTAL
    visible = mask[:, -3:].bool()
    assert logits.isfinite().all()
    if visible.any():
        assert_same_logits(logits[visible], expected[visible])
    for size in (5, 1, 1):
        more = draw_ids(3, size, seed=size)
        mask = torch.cat([mask, mask.new_ones(3, size)], dim=1)
        expected = model(more, attention_mask=mask, cache=whole).logits
        assert_same_logits(model(more, attention_mask=mask, cache=part).logits, expected)


@fixed
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("name", ["default", "merged_own", "window_layers"])
@torch.no_grad()
def test_rows_of_few_tokens_in_a_later_chunk(name, padding, room):
    """Their windows reach back into the cache, while other rows skip more than a window."""
    model = tiny_model(torch.float64, **ENDING[name][0])
    whole, part = (HySparseCache(model.config, max_cache_len=None if room is None else 300) for _ in range(2))
    mask = torch.ones(4, 50, dtype=torch.long)
    for cache in (whole, part):
        model(draw_ids(4, 50), attention_mask=mask, cache=cache)
    lengths = (90, 4, 0, 45)
    new = padded_mask(padding, lengths, 90)
    ids = spread([draw_ids(1, length, 9 + row)[0] for row, length in enumerate(lengths)], new)
    mask = torch.cat([mask, new], dim=1)
    expected = model(ids, attention_mask=mask, cache=whole).logits[:, -3:]
    logits = model(ids, attention_mask=mask, cache=part, logits_to_keep=3).logits
    visible = new[:, -3:].bool()
    assert_same_logits(logits[visible], expected[visible])
    for step in range(8):
        mask = torch.cat([mask, mask.new_ones(4, 1)], dim=1)
        token = draw_ids(4, 1, seed=step)
        expected = model(token, attention_mask=mask, cache=whole).logits
        assert_same_logits(model(token, attention_mask=mask, cache=part).logits, expected)


@torch.no_grad()
def test_a_row_padded_on_the_right_answers_with_its_last_token():
    model, lengths = tiny_model(torch.float64), (90, 61, 5)
    mask = padded_mask("right", lengths, 90)
    ids = spread([draw_ids(1, length, row)[0] for row, length in enumerate(lengths)], mask)
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits[:, 0]
    assert_same_logits(logits, torch.stack([whole[row, length - 1] for row, length in enumerate(lengths)]))


@fixed
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@torch.no_grad()
def test_chunks_turns_and_undone_tokens(masked, room):
    """Long and short chunks in turn; in between as many tokens are undone as windows keep for that."""
    model = tiny_model(torch.float64)
    whole, part = (HySparseCache(model.config, max_cache_len=None if room is None else 400) for _ in range(2))
    done = 0
    for turn, (size, undone) in enumerate([(60, 0), (45, 32), (3, 0), (70, 20), (1, 0), (44, 32), (90, 0)]):
        ids = draw_ids(2, size, seed=turn)
        done += size
        mask = {"attention_mask": torch.ones(2, done, dtype=torch.long)} if masked else {}
        expected = model(ids, cache=whole, **mask).logits[:, -1:]
        assert_same_logits(model(ids, cache=part, logits_to_keep=1, **mask).logits, expected)
        for cache in (whole, part):
            cache.crop(-undone)
        done -= undone
    token = draw_ids(2, 1)
    mask = {"attention_mask": torch.ones(2, done + 1, dtype=torch.long)} if masked else {}
    assert_same_logits(model(token, cache=part, **mask).logits, model(token, cache=whole, **mask).logits)


ASKING_FOR_ALL = {
    "labels": {"labels": draw_ids(2, 90)},
    "hidden_states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "indices": {"output_selected_indices": True},
    "all_logits": {"logits_to_keep": 0},
    "more_than_there_are": {"logits_to_keep": 91},
    "positions": {"logits_to_keep": torch.tensor([3, 89])},
    "documents": {"position_ids": torch.cat([torch.arange(40), torch.arange(50)])[None], "use_cache": False},
    "visibility": {"attention_mask": torch.ones(90, 90, dtype=torch.bool).tril()[None, None], "use_cache": False},
}


class TestAllTokensRun:
    @pytest.mark.parametrize("asked", ASKING_FOR_ALL.values(), ids=ASKING_FOR_ALL.keys())
    @torch.no_grad()
    def test_where_more_is_asked_for_B10(self, asked):
        model, ids = tiny_model(torch.float64), draw_ids(2, 90)
        with counted_rows(model) as rows:
            output = model(ids, **{"logits_to_keep": 0 if "labels" in asked else 2, **asked})
        assert set(rows) == {90}
        plain = {name: given for name, given in asked.items() if name in ("position_ids", "attention_mask")}
        whole = model(ids, use_cache=False, **plain).logits
        kept = asked.get("logits_to_keep", 0 if "labels" in asked else 2)
        assert_same_logits(output.logits, whole[:, kept] if isinstance(kept, torch.Tensor) else whole[:, -kept:])

    @pytest.mark.parametrize("name", ["output_hidden_states", "output_selected_indices"])
    @torch.no_grad()
    def test_where_the_decoder_alone_is_asked_B10(self, name):
        model, ids = tiny_model(torch.float64), draw_ids(2, 90)
        with counted_rows(model) as rows:
            output = model.model(ids, logits_to_keep=1, **{name: True})
        assert set(rows) == {90}
        assert output.last_hidden_state.shape[1] == 1

    @torch.no_grad()
    def test_where_router_logits_are_asked_for_B10(self):
        model, ids = tiny_model(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8), draw_ids(2, 90)
        for asked in ({"output_router_logits": True}, {}):
            with counted_rows(model) as rows:
                output = model.model(ids, logits_to_keep=1, **asked)
            assert (set(rows) == {90}) == bool(asked)
        assert output.router_logits is None

    @torch.no_grad()
    def test_where_windows_record_what_may_be_undone(self):
        model, ids = tiny_model(torch.float64), draw_ids(2, 90)
        cache = HySparseCache(model.config)
        cache.activate_past_recording()
        with counted_rows(model) as rows:
            model(ids, cache=cache, logits_to_keep=1)
        assert set(rows) == {90}
        cache.crop(-80)
        again = model(ids[:, 10:], cache=cache, logits_to_keep=1).logits
        assert_same_logits(again, model(ids, use_cache=False).logits[:, -1:])


@pytest.mark.parametrize("asked", [{}, {"output_hidden_states": True}], ids=["plain", "whole"])
@pytest.mark.parametrize("kept", [-1, [1], torch.tensor([90])], ids=str)
@torch.no_grad()
def test_what_cannot_be_kept_is_refused_before_the_cache_is_touched(kept, asked):
    model = tiny_model()
    cache = HySparseCache(model.config)
    with pytest.raises(ValueError, match="`logits_to_keep` must be a number of last positions"):
        model(draw_ids(2, 90), cache=cache, logits_to_keep=kept, **asked)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_classifier_reads_every_row_whatever_is_kept():
    model = HySparseForSequenceClassification(tiny_config(num_labels=3)).eval()
    ids = draw_ids(2, 90)
    assert torch.equal(model(ids, logits_to_keep=1).logits, model(ids).logits)


class TestGenerate:
    @pytest.mark.parametrize(
        "options",
        [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 50}, {"cache_implementation": "offloaded"}],
        ids=["growing", "static", "chunks", "offloaded"],
    )
    def test_a_long_prompt(self, options):
        model, ids = tiny_model(), draw_ids(2, 90)
        with counted_rows(model) as rows:
            output = greedy(model, ids, 12, **options)
        assert {43} < set(rows)
        assert torch.equal(output, uncached_greedy(model, ids, 12))

    def test_several_turns_on_one_cache(self):
        model, ids = tiny_model(), draw_ids(2, 70)
        cache = HySparseCache(model.config)
        for turn in range(3):
            output = greedy(model, ids, 7, **{CACHE_ARGUMENT: cache})
            assert torch.equal(output, uncached_greedy(model, ids, 7))
            ids = torch.cat([output, draw_ids(2, 55, seed=turn)], dim=1)

    def test_beams(self):
        model, ids = tiny_model(), draw_ids(2, 90)
        options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
        with counted_rows(model) as rows:
            output = model.generate(ids, **options)
        assert min(rows) == 1
        assert 43 in rows
        assert torch.equal(output, model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_one_graph():
    model, ids = tiny_model(torch.float64, layer_plan=["full", "sparse"]), draw_ids(2, 90)
    mask = padded_mask("left", (90, 20), 90)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    cache = HySparseCache(model.config, max_cache_len=120)
    logits = compiled(ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits
    torch._dynamo.reset()
    assert_same_logits(logits, model(ids, attention_mask=mask, use_cache=False).logits[:, -1:])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients_of_kept_logits_are_those_of_the_full_pass(checkpointing):
    model, ids = tiny_model(torch.float64).train(), draw_ids(2, 90)
    if checkpointing:
        model.gradient_checkpointing_enable()
    grads = []
    for kept in (4, 0):
        model.zero_grad()
        with counted_rows(model) as rows:
            model(ids, use_cache=False, logits_to_keep=kept).logits[:, -4:].sin().sum().backward()
        assert (min(rows) < 90) == (kept == 4)
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
