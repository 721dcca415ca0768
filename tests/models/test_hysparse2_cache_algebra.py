"""Operations on a second generation cache in any order, calls that run nothing of the cross-decoder among them."""

import functools

import pytest
import torch
from models.test_cache_algebra import ROOM, SLACK, CacheMachine
from models.tiny2 import SWITCHES, tiny_model

from hysparse_hf.modeling.cache_hysparse import HySparseCache


hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")

PLANS = {
    "eager": {},
    "lazy": {"bridge_materialization": "lazy", "rope_parameters": {"rope_theta": 1e4}},
    "lazy_own_kv": {"bridge_materialization": "lazy", **SWITCHES["own_kv"]},
    "branch": SWITCHES["branch"],
}
NO_LOGITS = torch.tensor([], dtype=torch.long)


@functools.cache
def model_of(plan):
    return tiny_model(torch.float64, **PLANS[plan])


class SecondGenerationMachine(CacheMachine):
    """As the first generation's; a quiet call gives its logits on a copy, and none on the cache that goes on."""

    @stateful.initialize(
        plan=st.sampled_from(sorted(PLANS)), fixed=st.booleans(), padded=st.booleans(), batch=st.integers(1, 3)
    )
    def begin(self, plan, fixed, padded, batch):
        self.model, self.fixed, self.padded = model_of(plan), fixed, padded
        self.has_windows = True
        self.cache = HySparseCache(self.model.config, max_cache_len=ROOM if fixed else None, slack=SLACK)
        self.seed, self.recording, self.quiet = 0, False, False
        self.clear(batch)

    @stateful.rule(quiet=st.booleans())
    def change_what_calls_ask_for(self, quiet):
        self.quiet = quiet

    @torch.no_grad()
    def forward(self, ids, mask):
        if not self.quiet:
            return super().forward(ids, mask)
        logits = self.model(ids, attention_mask=mask, cache=self.cache.fork()).logits
        self.model(ids, attention_mask=mask, cache=self.cache, logits_to_keep=NO_LOGITS)
        return logits


def run_machine(examples, steps):
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    stateful.run_state_machine_as_test(SecondGenerationMachine, settings=settings)


def test_operations_in_any_order():
    run_machine(examples=8, steps=25)


@pytest.mark.slow
def test_thousands_of_operations_in_any_order():
    run_machine(examples=150, steps=50)
