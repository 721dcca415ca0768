"""Measured damage: the divergence of a model in which that layer alone is a window, and of pairs."""

import copy

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.calibration import repeated_pieces
from hysparse_hf.conversion.damage import DamagePass
from hysparse_hf.conversion.fit import fit_layer
from hysparse_hf.conversion.job import Job, Options
from hysparse_hf.conversion.source import open_source


OPTIONS = {
    "ratio": "1:3",
    "plan": "regular",
    "max_sparse_run": None,
    "keep_kv": False,
    "budget": 16,
    "block_size": 8,
    "window": 12,
    "gates": (0.05, 0.95),
    "gate_granularity": "headwise",
    "init": "fitted",
    "dtype": None,
}


def draw_ids(windows=3, length=64, seed=2):
    return torch.randint(3, 97, (windows, length), generator=torch.Generator().manual_seed(seed))


class Measured:
    """A source whose attentions are scaled, its damage, and the windows that replaced its layers."""

    def __init__(self, source, model, monkeypatch, refit):
        self.model, self.ids = model, draw_ids()
        self.job = Job(open_source(source), Options(**OPTIONS))
        self.windows = {}

        def keep(*args, **kwargs):
            fit = fit_layer(*args, **kwargs)
            self.windows[len(self.windows) + 1] = fit.values
            return fit

        monkeypatch.setattr("hysparse_hf.conversion.damage.fit_layer", keep)
        self.damage = DamagePass(
            self.job.config, self.job.mapped, tuple(self.ids), refit=refit, tokens=384, stride=1
        ).run()
        assert self.damage.text == {"plain": 3, "repeated": 3, "tokens": 64}

    def divergence(self, layers):
        """KL of the source from itself with the attention of some layers replaced by their windows."""
        config = copy.deepcopy(self.job.config)
        config.layer_plan = ["window" if layer in layers else "full" for layer in range(5)]
        config.window_layer_gate = True
        student = HySparseForCausalLM(config).eval()
        student.load_state_dict(self.model.state_dict(), strict=False)
        for layer in layers:
            attention, values = student.model.layers[layer].self_attn, self.windows[layer]
            attention.sink_local.data = values.sinks[0]
            attention.o_proj.weight.data = values.weight
            attention.gate_local_proj.weight.data = values.logits[0, :, :-1]
            attention.gate_local_proj.bias.data = values.logits[0, :, -1]
        # Measured on as many pieces that stand twice, and fitted without them.
        ids = torch.cat([self.ids, torch.stack(repeated_pieces(self.ids, 3, 32))])
        with torch.no_grad():
            teacher, changed = (F.log_softmax(net(ids).logits, -1) for net in (self.model, student))
        return F.kl_div(changed, teacher, log_target=True, reduction="none").sum(-1).mean().item()


@pytest.fixture
def measure(make_source, monkeypatch):
    """Factory of `Measured` from the scale of the attentions beside the residual stream."""

    def make(scale, refit=False):
        source, model = make_source(attention_bias=True)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(scale)
        model.save_pretrained(source)
        return Measured(source, model, monkeypatch, refit)

    return make


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_damage_of_a_layer_is_the_divergence_that_its_window_makes(measure, scale, refit):
    measured = measure(scale, refit)
    for layer in (1, 2, 3, 4):
        assert measured.damage.of([layer]) == pytest.approx(measured.divergence([layer]), rel=1e-3)
    assert measured.damage.matrix[0].abs().max() == 0


def test_windows_are_fitted_on_plain_text_alone(make_source, monkeypatch):
    source, _ = make_source()
    job, fitted = Job(open_source(source), Options(**OPTIONS)), []

    def keep(evidence, *args, **kwargs):
        fitted.append(evidence)
        return fit_layer(evidence, *args, **kwargs)

    monkeypatch.setattr("hysparse_hf.conversion.damage.fit_layer", keep)
    entry = DamagePass(job.config, job.mapped, tuple(draw_ids()), refit=False)
    entry.run()
    assert len(entry.teacher) == 6
    assert [len(evidence.inputs) for evidence in fitted] == [3 * 64] * 4


def test_what_stands_twice_is_other_text(make_source):
    """Else half of the calibration text would go unread, and the plan would not depend on it."""
    source, _ = make_source()
    job, ids = Job(open_source(source), Options(**OPTIONS)), tuple(draw_ids(windows=4))
    entry = DamagePass(job.config, job.mapped, ids, refit=False, tokens=128, length=32)
    assert list(entry.changed) == [0, 2, 4, 5]
    for place, window in ((4, 1), (5, 3)):
        (states,) = entry.stream.embed((ids[window][:16].repeat(2),))
        assert torch.equal(entry.teacher[place], states)
    alone = DamagePass(job.config, job.mapped, ids[:1], refit=False, tokens=64, length=32)
    (states,) = alone.stream.embed((ids[0][32:48].repeat(2),))
    assert torch.equal(alone.teacher[1], states)


def test_text_that_a_window_holds_twice_is_left_out(make_source):
    source, _ = make_source()
    job = Job(open_source(source), Options(**OPTIONS))
    entry = DamagePass(job.config, job.mapped, tuple(draw_ids()), refit=False, tokens=72, length=24)
    assert entry.text == {"plain": 3, "repeated": 0, "tokens": 24}


def test_damage_of_pairs_is_that_of_both_windows(measure):
    """For small changes; what adding the two would say is off by more."""
    measured = measure(0.05)
    for pair in ([1, 2], [1, 3], [2, 3]):
        together = measured.divergence(pair)
        assert measured.damage.of(pair) == pytest.approx(together, rel=0.03)
        added = measured.damage.of(pair[:1]) + measured.damage.of(pair[1:])
        assert abs(measured.damage.of(pair) - together) < 0.5 * abs(added - together)


def test_damage_is_measured_on_beginnings_that_are_spread_evenly(make_source):
    """Fits use whole windows, all of them: cutting the windows themselves gives another result."""
    source, _ = make_source()
    job = Job(open_source(source), Options(**OPTIONS))

    def measured(ids, tokens, length):
        entry = DamagePass(job.config, job.mapped, tuple(ids), refit=False, tokens=tokens, length=length)
        matrix = entry.run().matrix
        assert {states.shape[1] for changed in entry.changed.values() for states in changed} == {min(length, 64)}
        return list(entry.changed), matrix

    ids = draw_ids(windows=5)
    whole, half, cut = measured(ids, 999, 64), measured(ids, 128, 32), measured(ids[:, :32], 128, 32)
    # From 5 on stand the repeated ones.
    assert [places for places, _ in (whole, half, cut)] == [[*range(10)], [0, 2, 5, 6], [0, 2, 5, 6]]
    assert not torch.allclose(whole[1], half[1])
    assert not torch.allclose(cut[1], half[1])


def test_auto_plan_keeps_the_layer_that_is_missed_most(make_source, tmp_path):
    """Without its output projection a layer's attention does nothing, so its window misses nothing."""
    source, model = make_source()
    with torch.no_grad():
        for layer in (1, 2, 4):
            model.model.layers[layer].self_attn.o_proj.weight.mul_(0.01)
    model.save_pretrained(source)
    settings = {"budget": 16, "block_size": 8, "window": 12, "calibrate": draw_ids()}
    record = convert(source, tmp_path / "out", **settings)
    assert record["plan"] == ["full", "sparse", "sparse", "full", "sparse"]
    assert max(record["damage"]["kl"], key=record["damage"]["kl"].get) == "3"
    assert HySparseForCausalLM.from_pretrained(tmp_path / "out").config.layer_plan == record["plan"]
    assert record == convert(source, tmp_path / "again", **settings)


def test_one_short_window_does_not_shorten_the_others_beginnings(make_source):
    source, _ = make_source()
    job = Job(open_source(source), Options(**OPTIONS))
    windows = (*draw_ids(windows=3), draw_ids(windows=1, length=20)[0])
    entry = DamagePass(job.config, job.mapped, windows, refit=False, tokens=999, length=48)
    damage = entry.run()
    assert [entry.changed[number][0].shape[1] for number in range(4)] == [48, 48, 48, 20]
    assert damage.matrix.isfinite().all()
