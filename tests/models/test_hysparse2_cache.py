"""What the cache holds for a second generation model, and that every operation on it acts on all of its parts."""

import pickle

import pytest
import torch
from models.tiny import CACHE_NAMES, assert_same_logits, draw_ids, logits_alone, padded_mask, run_in_chunks
from models.tiny2 import MODELS, SWITCHES, over_models, tiny_config, tiny_model

from hysparse_hf import measure_cache_bytes, predict_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache


switches = over_models()
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
NONE = torch.tensor([], dtype=torch.long)
LAZY = {"bridge_materialization": "lazy", "rope_parameters": {"rope_theta": 1e4}}


def filled(model, padded=False, length=40, batch=3, waiting=0):
    """Ids, mask and a cache that holds `length` slots of three rows, the last `waiting` of them not yet projected."""
    mask = padded_mask("left", (length, length - 9, length - 4)[:batch], length) if padded else None
    ids = draw_ids(batch, length)
    if mask is not None:
        ids = ids * mask
    done = length - waiting
    _, cache = run_in_chunks(model, ids[:, :done], [done - 4, 1, 3], None if mask is None else mask[:, :done])
    with torch.no_grad():
        for size in (waiting // 2, waiting - waiting // 2) if waiting else ():
            done += size
            part = None if mask is None else mask[:, :done]
            model(ids[:, done - size : done], attention_mask=part, cache=cache, logits_to_keep=NONE)
    return ids, mask, cache


def continues_right(model, ids, mask, cache, new=(5, 1, 1), seed=9):
    """More tokens on the cache give what each row gives alone."""
    more = draw_ids(len(ids), sum(new), seed=seed)
    longer = torch.cat([ids, more], dim=1)
    whole = torch.ones_like(longer)
    if mask is not None:
        whole[:, : ids.shape[1]] = mask
    logits, _ = run_in_chunks(model, more, new, whole if mask is not None else None, cache=cache)
    for row in range(len(ids)):
        tokens = longer[row][whole[row].bool()]
        assert_same_logits(logits[row], logits_alone(model, tokens)[-more.shape[1] :])


@padded_or_not
@pytest.mark.parametrize("length", [1, 37, 60])
@switches
def test_used_bytes_are_as_predicted(switch, length, padded):
    model = tiny_model(**MODELS[switch])
    mask = padded_mask("left", (length, length // 2), length) if padded else None
    _, cache = run_in_chunks(model, draw_ids(2, length), [length], mask)
    measured, predicted = measure_cache_bytes(cache), predict_cache_bytes(model.config, 2, length, torch.float32)
    assert measured["allocated"] <= predicted.pop("allocated")
    assert {name: measured[name] for name in predicted} == predicted
    full, window = (model.config.cache_plan.count(kind) for kind in ("full", "window"))
    token = 2 * model.config.num_key_value_heads * (model.config.head_dim + model.config.v_head_dim) * 4
    assert measured["used"] == token * (full * length + window * min(length, model.config.sliding_window + 32))


def test_sparse_layers_hold_nothing_and_the_bridge_no_states():
    model = tiny_model()
    _, _, cache = filled(model)
    assert [type(layer).__name__ for layer in cache.layers] == [
        "WindowLayer",
        "GrowingLayer",
        "WindowLayer",
        "GrowingLayer",
        "NoKeysLayer",
        "NoKeysLayer",
    ]
    assert [layer.keys is None for layer in cache.layers] == [False] * 4 + [True] * 2
    assert cache.pending == []


class TestLazyBridge:
    @torch.no_grad()
    def test_keeps_states_until_a_position_runs_and_then_frees_them(self):
        model = tiny_model(bridge_materialization="lazy")
        cache = HySparseCache(model.config)
        model(draw_ids(2, 30), cache=cache, logits_to_keep=NONE)
        assert not cache.layers[3].is_initialized
        (pending,) = cache.pending
        assert {source: tuple(states.shape) for source, states in pending.states.items()} == {1: (2, 30, 64)}
        model(draw_ids(2, 1), cache=cache)
        assert cache.pending == []
        assert cache.layers[3].keys.shape[2] == 31

    @pytest.mark.parametrize("fixed", [None, 64], ids=["growing", "pre-allocated"])
    @padded_or_not
    @pytest.mark.parametrize("switch", ["default", "two_bridges", "own_kv", "self_output", "source_rope"])
    @torch.no_grad()
    def test_bytes_of_waiting_states_are_as_predicted(self, switch, padded, fixed):
        model = tiny_model(**{**SWITCHES[switch], "bridge_materialization": "lazy"})
        cache = HySparseCache(model.config, max_cache_len=fixed)
        mask = padded_mask("left", (40, 31), 40) if padded else None
        ids, sources = draw_ids(2, 40), 2 if switch == "two_bridges" else 1

        def feed(start, stop, kept):
            part = None if mask is None else mask[:, :stop]
            model(ids[:, start:stop], attention_mask=part, cache=cache, logits_to_keep=kept)

        for start, stop, kept, pending in ((0, 12, NONE, 12), (12, 21, 1, 0), (21, 38, NONE, 17), (38, 40, NONE, 19)):
            feed(start, stop, kept)
            measured = measure_cache_bytes(cache)
            predicted = predict_cache_bytes(model.config, 2, stop, torch.float32, max_cache_len=fixed, pending=pending)
            assert measured["pending"] == 2 * pending * sources * 64 * 4
            assert measured["allocated"] <= predicted.pop("allocated")
            assert {name: measured[name] for name in predicted} == predicted

    @pytest.mark.parametrize(
        ("settings", "pending"), [({}, 3), ({"bridge_materialization": "lazy"}, 11), ({"dense": True, **LAZY}, 1)]
    )
    def test_tokens_that_cannot_wait_are_refused(self, settings, pending):
        with pytest.raises(ValueError, match="`pending` must lie between 0 and `length`"):
            predict_cache_bytes(tiny_config(**settings), 1, 10, torch.float32, pending=pending)

    @torch.no_grad()
    def test_eager_projects_at_once(self):
        model = tiny_model()
        cache = HySparseCache(model.config)
        logits = model(draw_ids(2, 30), cache=cache, logits_to_keep=NONE).logits
        assert logits.shape == (2, 0, 61)
        assert cache.pending == []
        assert cache.layers[3].keys.shape[2] == 30

    @torch.no_grad()
    def test_a_pending_state_is_what_an_eager_cache_holds_projected(self):
        ids = draw_ids(2, 30)
        caches = []
        for materialization in ("eager", "lazy"):
            model = tiny_model(torch.float64, **{**SWITCHES["own_kv"], "bridge_materialization": materialization})
            cache = HySparseCache(model.config)
            for start, stop in ((0, 12), (12, 29)):
                model(ids[:, start:stop], cache=cache, logits_to_keep=NONE)
            model(ids[:, 29:], cache=cache)
            caches.append(cache)
        for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def model_and_waiting(switch):
    """A model, and how many slots of its cache wait for their projection."""
    if switch == "lazy":
        return tiny_model(torch.float64, **LAZY), 11
    return tiny_model(torch.float64, **MODELS[switch]), 0


operations = over_models(("default", "two_bridges", "own_kv", "branch", "yoco_baseline", "lazy"), ("lazy",))


@padded_or_not
@operations
class TestOperations:
    @pytest.mark.parametrize("count", [0, 1, 4, 7, 11, 13])
    def test_crop(self, switch, padded, count):
        model, waiting = model_and_waiting(switch)
        ids, mask, cache = filled(model, padded, waiting=waiting)
        cache.crop(-count)
        assert cache.get_seq_length() == 40 - count
        mask = None if mask is None else mask[:, : 40 - count]
        continues_right(model, ids[:, : 40 - count], mask, cache)

    def test_crop_below_the_prompt_and_refill(self, switch, padded):
        model, waiting = model_and_waiting(switch)
        ids, mask, cache = filled(model, padded, waiting=waiting)
        for length in (35, 31, 30):
            cache.crop(length - cache.get_seq_length())
        continues_right(model, ids[:, :30], None if mask is None else mask[:, :30], cache)

    def test_reorder(self, switch, padded):
        model, waiting = model_and_waiting(switch)
        ids, mask, cache = filled(model, padded, waiting=waiting)
        order = torch.tensor([2, 0, 0])
        cache.reorder_cache(order)
        continues_right(model, ids[order], None if mask is None else mask[order], cache)

    def test_repeat_and_select(self, switch, padded):
        model, waiting = model_and_waiting(switch)
        ids, mask, cache = filled(model, padded, waiting=waiting)
        cache.batch_repeat_interleave(2)
        chosen = torch.tensor([5, 1])
        cache.batch_select_indices(chosen)
        rows = chosen // 2
        continues_right(model, ids[rows], None if mask is None else mask[rows], cache)

    def test_fork_and_pickle(self, switch, padded):
        model, waiting = model_and_waiting(switch)
        ids, mask, cache = filled(model, padded, waiting=waiting)
        for copied in (cache.fork(), pickle.loads(pickle.dumps(cache))):
            continues_right(model, ids, mask, copied, seed=8)
        assert cache.get_seq_length() == 40
        continues_right(model, ids, mask, cache)

    def test_reset(self, switch, padded):
        model, waiting = model_and_waiting(switch)
        *_, cache = filled(model, padded, waiting=waiting)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.pending == []
        logits, _ = run_in_chunks(model, draw_ids(2, 30, seed=7), [20, 1, 9], cache=cache)
        assert_same_logits(logits[1], logits_alone(model, draw_ids(2, 30, seed=7)[1]))


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("switch", ["default", "branch", "lazy"])
@torch.no_grad()
def test_A02_bursts_without_a_crop_between_them(switch, name):
    model, _ = model_and_waiting(switch)
    ids = draw_ids(1, 24)
    cache = HySparseCache(model.config)
    model(ids[:, :10], logits_to_keep=NONE if switch == "lazy" else 1, **{name: cache})
    cache.activate_past_recording()
    expected = logits_alone(model, ids[0])
    for step in range(5):
        logits = model(ids[:, 10 + step : 11 + step], **{name: cache}).logits
        assert_same_logits(logits[0], expected[10 + step : 11 + step])
    cache.crop(-3)
    logits = model(ids[:, 12:], **{name: cache}).logits
    assert_same_logits(logits[0], expected[12:])


@torch.no_grad()
def test_A05_crop_takes_what_is_to_be_removed_as_a_negative_number():
    model = tiny_model(torch.float64)
    ids, mask, cache = filled(model)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)
    cache.crop(0)
    assert cache.get_seq_length() == 40
    continues_right(model, ids, mask, cache)
