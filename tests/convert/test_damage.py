"""Measured damage: the divergence of a model in which that layer alone is a window, and of pairs."""

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.damage import DamagePass
from hysparse_hf.conversion.fit import FittingPass
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


def divergence(model, job, windowed, sinks, ids):
    """KL of the source from itself with some layers replaced by windows with sinks."""
    plan = ["window" if layer in windowed else "full" for layer in range(5)]
    job.config.layer_plan = plan
    student = HySparseForCausalLM(job.config).eval()
    student.load_state_dict(model.state_dict(), strict=False)
    for layer in windowed:
        student.model.layers[layer].self_attn.sink_local.data = sinks[layer]
    with torch.no_grad():
        teacher, changed = (F.log_softmax(net(ids).logits, -1) for net in (model, student))
    return F.kl_div(changed, teacher, log_target=True, reduction="none").sum(-1).mean().item()


@pytest.fixture
def measured(make_source):
    """A source whose attentions are small beside the residual stream, its damage, and the sinks of layers 1 to 3."""

    def make(scale):
        source, model = make_source()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(scale)
        model.save_pretrained(source)
        job = Job(open_source(source), Options(**OPTIONS))
        ids = draw_ids()
        fits = FittingPass(job.config, job.mapped, tuple(ids), refit=False).run()
        sinks = {layer: fit.values.sinks[1] for layer, fit in fits.items()}
        return model, job, ids, DamagePass(job.config, job.mapped, tuple(ids)).run(), sinks

    return make


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_damage_of_a_layer_is_the_divergence_that_its_window_makes(measured, scale):
    model, job, ids, damage, sinks = measured(scale)
    for layer in (1, 2, 3):
        assert damage.of([layer]) == pytest.approx(divergence(model, job, [layer], sinks, ids), rel=1e-3)
    assert damage.matrix[0].abs().max() == 0


def test_damage_of_pairs_is_that_of_both_windows(measured):
    """For small changes; for comparison, what adding the two would say is off by more."""
    model, job, ids, damage, sinks = measured(0.05)
    for pair in ([1, 2], [1, 3], [2, 3]):
        together = divergence(model, job, pair, sinks, ids)
        assert damage.of(pair) == pytest.approx(together, rel=0.03)
        added = damage.of(pair[:1]) + damage.of(pair[1:])
        assert abs(damage.of(pair) - together) < 0.5 * abs(added - together)


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
    assert max(record["damage"], key=record["damage"].get) == "3"
    assert HySparseForCausalLM.from_pretrained(tmp_path / "out").config.layer_plan == record["plan"]
    assert record == convert(source, tmp_path / "again", **settings)
