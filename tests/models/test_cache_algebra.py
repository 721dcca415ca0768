"""Operations on a cache in any order, against the rows they stand for, run alone and without a cache."""

import copy
import functools
import pickle

import pytest
import torch
from models.tiny import assert_same_logits, draw_ids, logits_alone, tiny_model

from hysparse_hf import measure_cache_bytes
from hysparse_hf.modeling.cache_hysparse import HySparseCache


hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")
rule, precondition = stateful.rule, stateful.precondition

WINDOW, SLACK, ROOM = 6, 4, 56
KEPT = WINDOW + SLACK
PLANS = {
    "default": {"layer_plan": ["full", "sparse", "window", "full", "sparse"]},
    "window_first": {"layer_plan": ["window", "full", "sparse"]},
    "no_window": {"layer_plan": ["full", "sparse", "sparse"], "window_branch": "none"},
}


@functools.cache
def model_of(plan):
    return tiny_model(torch.float64, **PLANS[plan])


class CacheMachine(stateful.RuleBasedStateMachine):
    """A cache beside the rows that it should stand for: their tokens, slot by slot, and which slots are padding.

    `lost` says of each row how many of its first tokens a window may have forgotten: all but the last `KEPT` that it
    ever had at once, unless the cache was recording.
    """

    @stateful.initialize(
        plan=st.sampled_from(sorted(PLANS)), fixed=st.booleans(), padded=st.booleans(), batch=st.integers(1, 3)
    )
    def begin(self, plan, fixed, padded, batch):
        self.model, self.fixed, self.padded = model_of(plan), fixed, padded
        self.has_windows = "window" in self.model.config.cache_plan
        self.cache = HySparseCache(self.model.config, max_cache_len=ROOM if fixed else None, slack=SLACK)
        self.seed, self.recording = 0, False
        self.clear(batch)

    def clear(self, batch):
        self.ids = torch.empty(batch, 0, dtype=torch.long)
        self.mask = torch.empty(batch, 0, dtype=torch.long)
        self.lost = torch.zeros(batch, dtype=torch.long)
        # Tokens per row at the last forward, and slots cropped since.
        self.counts = torch.zeros(batch, dtype=torch.long)
        self.removed = 0

    @property
    def slots(self):
        return self.ids.shape[1]

    def assumed(self):
        """Tokens per row, if no mask says better: what was cropped counts as tokens."""
        return (self.counts - self.removed).clamp(min=0)

    def reaches(self, counts):
        """Rows whose window before `counts` tokens is still there."""
        return self.lost <= (counts - WINDOW + 1).clamp(min=0) if self.has_windows else counts >= 0

    # Tokens.

    @rule(data=st.data())
    def one_token(self, data):
        self.append(data, 1)

    @rule(data=st.data(), length=st.sampled_from([2, 3, 5, 6, 9]))
    def several_tokens(self, data, length):
        self.append(data, length)

    @rule(data=st.data(), length=st.sampled_from([11, 19]))
    def more_tokens_than_a_window_holds(self, data, length):
        self.append(data, length)

    def append(self, data, length):
        new = torch.ones(len(self.ids), length, dtype=torch.long)
        if self.padded and data.draw(st.booleans(), label="holes"):
            bits = data.draw(st.lists(st.booleans(), min_size=new.numel(), max_size=new.numel()), label="visible")
            new = torch.tensor(bits, dtype=torch.long).view_as(new)
        self.feed(new, data.draw(st.sampled_from(["all", "new", "none"]), label="mask"))

    def feed(self, new, passed):
        length = new.shape[1]
        ids = draw_ids(len(new), length, seed=self.seed) * new
        self.seed += 1
        whole = torch.cat([self.mask, new], dim=1)
        past = self.mask.sum(-1)
        if not self.padded:
            mask = None
        elif not torch.equal(past, self.assumed()) or (passed == "new" and not self.fixed):
            mask = whole
        else:
            mask = {"all": whole, "new": new, "none": None if bool(new.all()) else whole}[passed]
        if self.fixed and self.slots + length > ROOM:
            with self.unchanged(), pytest.raises(ValueError, match="max_cache_len"):
                self.forward(ids, mask)
            return
        logits = self.forward(ids, mask)
        self.ids, self.mask = torch.cat([self.ids, ids], dim=1), whole
        self.counts, self.removed = whole.sum(-1), 0
        if not self.recording:
            ends = past + (new.sum(-1).clamp(min=1) if self.padded else length)
            self.lost = torch.maximum(self.lost, ends - KEPT)
        for row, visible in enumerate(new.bool()):
            if visible.any():
                alone = logits_alone(self.model, self.ids[row][self.mask[row].bool()])
                assert_same_logits(logits[row][visible], alone[-int(visible.sum()) :])
        assert logits.isfinite().all()

    @torch.no_grad()
    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, cache=self.cache).logits

    def unchanged(self):
        return _Unchanged(self.cache)

    @precondition(lambda self: self.padded and self.slots > 2)
    @rule(data=st.data())
    def take_out_the_end_of_a_row(self, data):
        """As the mask of the next turn does, for a row that ended early; more than the slack is refused."""
        row = data.draw(st.integers(0, len(self.ids) - 1), label="row")
        mask = self.mask.clone()
        mask[row, self.slots - data.draw(st.integers(1, min(self.slots, 8)), label="slots") :] = 0
        if bool(self.reaches(mask.sum(-1)).all()):
            self.mask = mask
            return
        new = torch.ones(len(self.ids), 2, dtype=torch.long)
        if self.fixed and self.slots + 2 > ROOM:
            return
        with self.unchanged(), pytest.raises(ValueError, match="must show the cached tokens"):
            self.forward(draw_ids(len(new), 2), torch.cat([mask, new], dim=1))

    @precondition(lambda self: self.padded and not self.mask.all())
    @rule()
    def show_what_was_padding(self):
        new = torch.ones(len(self.ids), 2, dtype=torch.long)
        whole = torch.cat([torch.ones_like(self.mask), new], dim=1)
        if bool((self.slots > self.counts).any()) and not (self.fixed and self.slots + 2 > ROOM):
            with self.unchanged(), pytest.raises(ValueError, match="must show the cached tokens"):
                self.forward(draw_ids(len(new), 2), whole)

    # Rollback.

    @precondition(lambda self: self.slots)
    @rule(past=st.sampled_from([0, 1]))
    def crop_to_the_edge_or_past_it(self, past):
        """As many as may be undone, or one more."""
        most = [n for n in range(self.slots + 1) if bool(self.reaches((self.assumed() - n).clamp(min=0)).all())]
        self.crop_tokens(max(most, default=0) + past)

    @rule(tokens=st.integers(0, 7))
    def crop(self, tokens):
        self.crop_tokens(tokens)

    def crop_tokens(self, tokens):
        if tokens > self.slots:
            with self.unchanged(), pytest.raises(ValueError, match="number of tokens to remove"):
                self.cache.crop(-tokens)
            return
        if not bool(self.reaches((self.assumed() - tokens).clamp(min=0)).all()):
            with self.unchanged(), pytest.raises(RuntimeError, match="activate_past_recording"):
                self.cache.crop(-tokens)
            return
        self.cache.crop(-tokens)
        self.removed += tokens
        if self.recording:
            # What the next mask may still count as tokens is kept beyond the rest.
            kept = KEPT + self.removed if self.padded else KEPT
            self.lost = torch.maximum(self.lost, (self.counts if self.padded else self.assumed()) - kept)
        self.ids, self.mask = self.ids[:, : self.slots - tokens], self.mask[:, : self.slots - tokens]

    @precondition(lambda self: not self.fixed and not self.recording)
    @rule()
    def record(self):
        self.cache.activate_past_recording()
        self.recording = True

    @precondition(lambda self: self.slots > 20)
    @rule()
    def reset(self):
        with self.unchanged(), pytest.raises(ValueError, match="number of tokens to remove"):
            self.cache.crop(1)
        self.cache.reset()
        self.clear(len(self.ids))

    # Rows.

    def move_rows(self, rows):
        for name in ("ids", "mask", "lost", "counts"):
            setattr(self, name, getattr(self, name)[rows])

    @rule(data=st.data(), how=st.sampled_from(["reorder", "repeat", "select"]))
    def reorder_repeat_or_select(self, data, how):
        batch = len(self.ids)
        row = st.integers(0, batch - 1)
        if how == "repeat" and batch < 3:
            rows = [row for row in range(batch) for _ in range(2)]
            self.cache.batch_repeat_interleave(2)
        elif how == "select":
            rows = data.draw(st.lists(row, min_size=1, max_size=3), label="rows")
            self.cache.batch_select_indices(torch.tensor(rows))
        else:
            rows = data.draw(st.lists(row, min_size=batch, max_size=batch), label="rows")
            self.cache.reorder_cache(torch.tensor(rows))
        self.move_rows(rows)

    # Copies.

    @rule(how=st.sampled_from([copy.deepcopy, HySparseCache.fork, lambda cache: pickle.loads(pickle.dumps(cache))]))
    def go_on_with_a_copy(self, how):
        """What then happens to the original does not reach the copy."""
        original, self.cache = self.cache, how(self.cache)
        if not (self.fixed and self.slots + 3 > ROOM):
            with torch.no_grad():
                self.model(draw_ids(len(self.ids), 3, seed=999), cache=original)
        original.reset()

    @precondition(lambda self: not self.fixed)
    @rule(layer=st.integers(0, 4))
    def offload_and_prefetch(self, layer):
        for index in range(len(self.cache)):
            self.cache.offload(index)
        self.cache.prefetch(layer % len(self.cache))

    @stateful.invariant()
    def length_and_bytes_are_those_of_the_rows(self):
        if hasattr(self, "cache"):
            assert int(self.cache.get_seq_length()) == self.slots
            assert measure_cache_bytes(self.cache)["used"] <= measure_cache_bytes(self.cache)["allocated"]


class _Unchanged:
    """What an operation that is refused must leave: the length, the bytes and the tensors themselves."""

    def __init__(self, cache):
        self.cache = cache

    def state(self):
        tensors = [t.clone() for layer in self.cache.layers for t in (layer.keys, layer.values) if t is not None]
        counts = [c.clone() for c in (self.cache.row_counts, self.cache.row_lost) if c is not None]
        return int(self.cache.get_seq_length()), int(self.cache.removed), tensors + counts

    def __enter__(self):
        self.before = self.state()

    def __exit__(self, kind, error, trace):
        if kind is None:
            after = self.state()
            assert after[:2] == self.before[:2]
            assert all(torch.equal(a, b) for a, b in zip(after[2], self.before[2], strict=True))


def run_machine(examples, steps):
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    stateful.run_state_machine_as_test(CacheMachine, settings=settings)


def test_operations_in_any_order():
    run_machine(examples=20, steps=30)


@pytest.mark.slow
def test_thousands_of_operations_in_any_order():
    run_machine(examples=250, steps=60)
