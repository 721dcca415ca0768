"""Measured plans of both halves: what each replacement costs, the cheapest plan, and what the commands say of it."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, cli, convert, measure_plan
from hysparse_hf.conversion.cross_fit import CrossFitter
from hysparse_hf.conversion.halves_damage import HalvesDamage, HalvesDamagePass, check_halves, measured_halves
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
    expected = F.log_softmax(model(IDS).logits, -1)
    attention = model.model.layers[layer].self_attn
    handle = attention.register_forward_hook(lambda module, args, out: (torch.stack(outputs), *out[1:]))
    changed = F.log_softmax(model(IDS).logits, -1)
    handle.remove()
    return F.kl_div(changed, expected, log_target=True, reduction="none").sum(-1).mean().item()


def test_damage_is_the_divergence_that_each_replacement_makes(make_source, monkeypatch):
    source, model = make_source(num_hidden_layers=7, attention_bias=True)
    outputs = {}
    replacements = HalvesDamagePass.replacements

    def keep(self, index, layer, inputs):
        before = len(self.tried)
        found = replacements(self, index, layer, inputs)
        outputs.update(zip(self.tried[before:], found, strict=True))
        return found

    monkeypatch.setattr(HalvesDamagePass, "replacements", keep)
    job = make_job(source)
    damage = HalvesDamagePass(job.config, job.mapped, tuple(IDS), refit=True, tokens=192, stride=1).run()
    tried = [(layer, "window") for layer in range(3)] + [(4, "full")]
    tried += [(layer, kind) for layer in (5, 6) for kind in ("full", "sparse")]
    assert list(damage.tried) == tried
    for row, (layer, kind) in enumerate(tried):
        assert damage.matrix[row, row].item() == pytest.approx(
            divergence(model, layer, outputs[layer, kind]), rel=1e-3
        )
        assert damage.record()[kind][str(layer)] == pytest.approx(damage.matrix[row, row].item(), abs=1e-5)


def test_sparse_layers_are_tried_on_what_the_layer_before_them_would_give(make_source, monkeypatch):
    source, _ = make_source(num_hidden_layers=7)
    given, read = {}, {}
    full, sparse = CrossFitter.fit_full, CrossFitter.fit_sparse

    def keep_full(self, layer, inputs, offered):
        fit = full(self, layer, inputs, offered)
        given[layer.self_attn.layer_idx] = fit.given
        return fit

    def keep_sparse(self, layer, inputs, others):
        read[layer.self_attn.layer_idx] = others
        return sparse(self, layer, inputs, others)

    monkeypatch.setattr(CrossFitter, "fit_full", keep_full)
    monkeypatch.setattr(CrossFitter, "fit_sparse", keep_sparse)
    job = make_job(source)
    HalvesDamagePass(job.config, job.mapped, tuple(IDS), refit=False).run()
    assert read.keys() == {5, 6}
    assert all(read[layer] is given[layer - 1] for layer in read)


def random_damage(config, seed):
    border, layers = len(config.self_layer_plan), len(config.layer_plan)
    tried = [(layer, "window") for layer in range(border - 1)]
    tried += [(layer, "full") for layer in range(border, layers)]
    tried += [(layer, "sparse") for layer in range(border + 1, layers)]
    factor = torch.randn(len(tried), 3, generator=torch.Generator().manual_seed(seed)).double()
    scale = torch.rand(len(tried), generator=torch.Generator().manual_seed(seed)).double() + 0.2
    return HalvesDamage(factor @ factor.T * 0.05 + torch.diag(scale), tuple(tried))


def longest_run(plan):
    return max((len(list(run)) for kind, run in itertools.groupby(plan) if kind != "full"), default=0)


@pytest.mark.parametrize("seed", range(4))
def test_measured_plan_is_the_cheapest_one(seed):
    """Of every plan with as many full layers in each half, and runs as short."""
    config = HySparse2Config(
        self_layer_plan=["full", "window", "window", "full", "full"],
        cross_layer_plan=["full", "sparse", "sparse", "full", "sparse"],
    )
    damage = random_damage(config, seed)
    found = measured_halves(damage, config, 2)
    halves = []
    for other, plan, end in (("window", config.self_layer_plan, -1), ("sparse", config.cross_layer_plan, 0)):
        count = plan.count("full")
        plans = (list(kinds) for kinds in itertools.product(("full", other), repeat=5))
        halves.append([p for p in plans if p.count("full") == count and p[end] == "full" and longest_run(p) <= 2])
    cross = ["full"] * 5
    costs = [(damage.of_plan(first + cross), first) for first in halves[0]]
    assert found["self_layer_plan"] == min(costs)[1]
    windowless = ["full"] * 5
    costs = [(damage.of_plan(windowless + second), second) for second in halves[1]]
    assert found["cross_layer_plan"] == min(costs)[1]


def test_two_layers_have_one_plan():
    config = HySparse2Config(self_layer_plan=["full"], cross_layer_plan=["full"])
    damage = HalvesDamage(torch.ones(1, 1).double(), ((1, "full"),))
    assert measured_halves(damage, config, 1) == {"self_layer_plan": ["full"], "cross_layer_plan": ["full"]}


def test_runs_are_checked_in_each_half():
    config = HySparse2Config(
        self_layer_plan=["window", "window", "full"], cross_layer_plan=["full", "sparse", "sparse", "sparse"]
    )
    check_halves(config, 3)
    with pytest.raises(ValueError, match="at least 3 for 1 full layers of 4, got 2"):
        check_halves(config, 2)


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
    for kind, column in report["damage"].items():
        assert [*record["damage"][kind].values()] == pytest.approx([*column.values()], abs=1e-5)
    again = convert(source, tmp_path / "again", **OPTIONS | {"plan": report["plans"]["auto"]["option"]})
    assert again["plan"] == record["plan"]
    assert again["fit"] == record["fit"]


def test_command_prints_a_column_per_replacement_and_the_plan_to_give(make_source, letters, tmp_path, capsys):
    source, _ = make_source()
    letters.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("Layers differ in what they are worth. " * 40)
    options = ["--window", "12", "--budget", "13", "--calibrate", str(text)]
    options += ["--calibration-tokens", "192", "--calibration-length", "96", "--architecture", "hysparse2"]
    assert cli.main(["plan", str(source), *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["layer", "window", "full", "sparse", "regular", "auto"]
    assert [line.split()[0] for line in printed[2:-1]] == ["0", "1", "3", "4", "all"]
    # Of five layers at 1:3 the third is the bridge's, the fourth is full and the last is sparse.
    assert printed[-1] == "--plan 0,2/3" or printed[-1] == "--plan 1,2/3"
