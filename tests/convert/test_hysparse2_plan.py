"""Measured plans of the self-decoder: what each window costs, the cheapest plan, and what the commands say of it."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, cli, convert, measure_plan
from hysparse_hf.conversion.calibration import repeated_pieces
from hysparse_hf.conversion.damage import Damage
from hysparse_hf.conversion.halves_damage import HalvesDamagePass, check_halves, measured_halves
from hysparse_hf.conversion.job import Job, Options
from hysparse_hf.conversion.source import open_source


IDS = torch.randint(3, 97, (3, 64), generator=torch.Generator().manual_seed(2))
OPTIONS = {"architecture": "hysparse2", "ratio": "1:2", "budget": 13, "window": 12, "calibrate": IDS}


def make_job(source):
    given = {"plan": "auto", "max_sparse_run": None, "keep_kv": False, "block_size": 8, "gates": (0.05, 0.95)}
    given |= {"gate_granularity": "headwise", "init": "fitted", "dtype": None, "ratio": "1:2"}
    return Job(open_source(source), Options(**given, budget=13, window=12, architecture="hysparse2"))


@torch.no_grad()
def divergence(model, layer, outputs):
    """KL of the source from itself with other attention outputs in one layer, `(length, hidden)` per window."""
    ids = torch.cat([IDS, torch.stack(repeated_pieces(IDS, 3, 32))])
    expected = F.log_softmax(model(ids).logits, -1)
    attention = model.model.layers[layer].self_attn
    handle = attention.register_forward_hook(lambda module, args, out: (torch.stack(outputs), *out[1:]))
    changed = F.log_softmax(model(ids).logits, -1)
    handle.remove()
    return F.kl_div(changed, expected, log_target=True, reduction="none").sum(-1).mean().item()


def test_damage_is_the_divergence_that_each_window_makes(make_source, monkeypatch):
    source, model = make_source(num_hidden_layers=7, attention_bias=True)
    outputs = []
    replacements = HalvesDamagePass.replacements

    def keep(self, *arguments):
        found = replacements(self, *arguments)
        outputs.extend(found)
        return found

    monkeypatch.setattr(HalvesDamagePass, "replacements", keep)
    job = make_job(source)
    damage = HalvesDamagePass(job.config, job.mapped, tuple(IDS), refit=True, tokens=384, stride=1).run()
    # The fourth layer is the bridge's.
    assert damage.matrix.shape == (3, 3)
    expected = [divergence(model, layer, output) for layer, output in enumerate(outputs)]
    assert damage.matrix.diagonal().tolist() == pytest.approx(expected, rel=1e-3)
    assert [*damage.record()["kl"].values()] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def random_damage(layers, seed):
    factor = torch.randn(layers, 3, generator=torch.Generator().manual_seed(seed)).double()
    scale = torch.rand(layers, generator=torch.Generator().manual_seed(seed)).double() + 0.2
    return Damage(factor @ factor.T * 0.05 + torch.diag(scale), {}, kind="window")


def longest_run(plan):
    return max((len(list(run)) for kind, run in itertools.groupby(plan) if kind != "full"), default=0)


@pytest.mark.parametrize("seed", range(4))
def test_measured_plan_is_the_cheapest_one(seed):
    """Of every self-decoder with as many full layers, and runs as short; the cross-decoder stays."""
    config = HySparse2Config(
        self_layer_plan=["full", "window", "window", "full", "full"], cross_layer_plan=["full", "sparse", "sparse"]
    )
    damage = random_damage(4, seed)
    plans = [[*kinds, "full"] for kinds in itertools.product(("full", "window"), repeat=4)]
    plans = [plan for plan in plans if plan.count("full") == 3 and longest_run(plan) <= 2]
    cheapest = min(plans, key=lambda plan: damage.of_plan(plan + config.cross_layer_plan))
    assert measured_halves(damage, config, 2) == {
        "self_layer_plan": cheapest,
        "cross_layer_plan": config.cross_layer_plan,
    }


def test_two_layers_have_one_plan(make_source):
    source, _ = make_source(num_hidden_layers=2)
    job = make_job(source)
    damage = HalvesDamagePass(job.config, job.mapped, tuple(IDS), refit=True).run()
    assert measured_halves(damage, job.config, 1) == {"self_layer_plan": ["full"], "cross_layer_plan": ["full"]}


def test_runs_are_those_of_the_self_decoder():
    config = HySparse2Config(
        self_layer_plan=["window", "window", "full"], cross_layer_plan=["full", "sparse", "sparse", "sparse"]
    )
    check_halves(config, 2)
    with pytest.raises(ValueError, match="at least 2 for 1 full layers of 3, got 1"):
        check_halves(config, 1)


def test_four_layers_have_nothing_to_measure(make_source, tmp_path):
    source, _ = make_source(num_hidden_layers=4)
    options = OPTIONS | {"ratio": "1:3"}
    with pytest.raises(ValueError, match="got '1:3' for 4 layers"):
        measure_plan(source, **options)
    assert convert(source, tmp_path / "out", **options)["damage"] is None


def test_plan_is_that_of_a_conversion(make_source, tmp_path):
    source, _ = make_source(num_hidden_layers=9)
    report = measure_plan(source, **OPTIONS)
    record = convert(source, tmp_path / "out", **OPTIONS)
    config = HySparse2ForCausalLM.from_pretrained(tmp_path / "out").config
    assert config.layer_plan == record["plan"]
    full = [layer for layer, kind in enumerate(record["plan"]) if kind == "full"]
    assert report["plans"]["auto"]["full"] == full
    assert report["plans"]["regular"]["full"] == [0, 3, 4, 5, 8]
    border = len(config.self_layer_plan)
    assert config.bridge_map == [border - 1] * config.cross_layer_plan.count("full")
    first, second = ([str(layer) for layer in full if (layer < border) == is_self] for is_self in (True, False))
    assert report["plans"]["auto"]["option"] == f"{','.join(first)}/{','.join(second)}"
    assert report["plans"]["auto"]["estimate"] <= report["plans"]["regular"]["estimate"]
    assert [*record["damage"]["kl"].values()] == pytest.approx(report["damage"], abs=1e-5)
    again = convert(source, tmp_path / "again", **OPTIONS | {"plan": report["plans"]["auto"]["option"]})
    assert again["plan"] == record["plan"]
    assert again["fit"] == record["fit"]


def test_command_prints_each_window_and_the_plan_to_give(make_source, letters, tmp_path, capsys):
    source, _ = make_source()
    letters.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("Layers differ in what they are worth. " * 40)
    options = ["--window", "12", "--budget", "13", "--calibrate", str(text)]
    options += ["--calibration-tokens", "192", "--calibration-length", "96", "--architecture", "hysparse2"]
    assert cli.main(["plan", str(source), *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["layer", "KL", "regular", "auto"]
    assert [line.split()[0] for line in printed[2:-1]] == ["0", "1", "all"]
    # Of five layers at 1:3 the third is the bridge's, the fourth is full and the last is sparse.
    assert printed[-1] == "--plan 0,2/3" or printed[-1] == "--plan 1,2/3"
