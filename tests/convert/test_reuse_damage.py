"""Measured reuse: the divergence of a model in which one layer alone reads what another chose, and its best plan."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.job import Job, Options
from hysparse_hf.conversion.plan import reuse_layer_plan
from hysparse_hf.conversion.reuse_damage import ReuseDamage, ReusePass
from hysparse_hf.conversion.source import open_source


def job_of(source, **options):
    given = {"ratio": "1:3", "plan": "regular", "max_sparse_run": None, "keep_kv": True, "budget": 16, "dtype": None}
    given |= {"block_size": 8, "window": 4, "gates": (0.05, 0.95), "gate_granularity": "headwise", "init": "fitted"}
    return Job(open_source(source), Options(**given | options))


def draw_ids(windows, length, seed=2):
    return torch.randint(3, 97, (windows, length), generator=torch.Generator().manual_seed(seed))


def divergence(teacher, config, plan, ids):
    """KL of the converted model of a plan from the source, mean over all positions."""
    config = copy.deepcopy(config)
    config.layer_plan = plan
    student = HySparseForCausalLM(config).eval()
    student.load_state_dict(teacher.state_dict())
    with torch.no_grad():
        expected, found = (F.log_softmax(model.double()(ids).logits, -1) for model in (teacher, student))
    return F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean().item()


@pytest.mark.parametrize(("donor", "layer"), [(0, 1), (3, 4), (1, 3), (0, 4)])
def test_damage_is_that_of_the_converted_model_with_one_sparse_layer(make_source, monkeypatch, donor, layer):
    """Attentions are small beside the residual stream, and those between the two layers nothing, so that it does not
    matter what they read. A repeated piece is one token longer than what is read: the last query alone leaves
    something out. In the place of random mixtures of the logits comes each of them once, for the same piece.
    """
    source, model = make_source(attention_bias=True)
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            block.self_attn.o_proj.weight.mul_(0.0 if donor < index < layer else 0.1)
    model.save_pretrained(source)
    monkeypatch.setattr("hysparse_hf.conversion.reuse_damage.LARGEST_PART", 1)
    mixtures = iter(torch.eye(97))
    monkeypatch.setattr(torch, "randn", lambda shape, generator: next(mixtures).expand(shape))
    job, ids = job_of(source, budget=15, block_size=5), draw_ids(1, 8).repeat(97, 2)
    measured = ReusePass(job.config, job.mapped, tuple(ids), longest_run=4, pieces=97).run()
    assert measured.text == {"pieces": 97, "tokens": 8, "repeated": 2, "budget": 15}
    plan = ["sparse" if donor < index <= layer else "full" for index in range(5)]
    found = 97 * measured.matrix[donor, layer].item()
    assert found == pytest.approx(divergence(model, job.config, plan, ids[:1]), rel=0.03)


def test_pairs_are_measured_as_far_apart_as_runs_may_be(make_source):
    source, _ = make_source()
    job = job_of(source)
    damage = ReusePass(job.config, job.mapped, tuple(draw_ids(3, 64)), longest_run=2).run()
    near = {(layer - distance, layer) for layer in range(5) for distance in (1, 2) if distance <= layer}
    assert {tuple(pair) for pair in damage.matrix.isfinite().nonzero().tolist()} == near
    assert (damage.matrix[damage.matrix.isfinite()] > 0).all()
    assert damage.record()["kl"]["3"].keys() == {"1", "2"}
    assert [list(column) for column in damage.alone().values()] == [[1, 2, 3, 4], [2, 3, 4]]
    assert damage.of_plan(["full", "sparse", "sparse", "full", "sparse"]) == pytest.approx(
        damage.matrix[0, 1] + damage.matrix[0, 2] + damage.matrix[3, 4]
    )


@pytest.mark.parametrize(("length", "budget", "expected"), [(64, 16, 16), (64, 32, 16), (64, 8, 8), (20, 16, 8)])
def test_at_most_a_quarter_of_a_window_is_read(make_source, length, budget, expected):
    source, _ = make_source()
    job = job_of(source, budget=budget)
    assert ReusePass(job.config, job.mapped, tuple(draw_ids(2, length)), longest_run=2).budget == expected


def test_windows_no_longer_than_a_block_are_refused(make_source, tmp_path):
    source, _ = make_source()
    with pytest.raises(ValueError, match=r"longer than a block \(`block_size` 16\) .* got two halves of 8 tokens"):
        convert(source, tmp_path / "out", budget=16, block_size=16, window=4, keep_kv=True, calibrate=draw_ids(2, 16))
    assert list(tmp_path.iterdir()) == [source]


def test_pieces_are_taken_evenly_and_stand_twice(make_source, monkeypatch):
    source, _ = make_source()
    job, ids = job_of(source), draw_ids(9, 40)
    embedded = []
    monkeypatch.setattr("hysparse_hf.conversion.layer_stream.LayerStream.embed", lambda _, ids: embedded.extend(ids))
    ReusePass(job.config, job.mapped, tuple(ids), longest_run=2, pieces=3, length=16)
    assert torch.equal(torch.stack(embedded), ids[[0, 3, 6], :16].repeat(1, 2))
    embedded.clear()
    ReusePass(job.config, job.mapped, tuple(ids[:2]), longest_run=2, length=64)
    assert torch.equal(torch.stack(embedded), ids[:2].reshape(4, 20).repeat(1, 2))


def best_plan(damage, num_full, longest_run):
    """Every plan tried."""
    layers = len(damage)
    plans = ([0, *rest] for rest in itertools.combinations(range(1, layers), num_full - 1))
    kinds = (["full" if layer in full else "sparse" for layer in range(layers)] for full in plans)
    return min(kinds, key=ReuseDamage(damage, {}).of_plan)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_full", "longest_run"), [(3, 4), (4, 3), (4, 9)])
def test_plan_is_the_best_of_all(seed, num_full, longest_run):
    damage = torch.rand(11, 11, generator=torch.Generator().manual_seed(seed)).double()
    apart = torch.arange(11) - torch.arange(11)[:, None]
    damage[(apart < 1) | (apart > longest_run)] = torch.inf
    assert reuse_layer_plan(damage, num_full, longest_run) == best_plan(damage, num_full, longest_run)


def test_runs_that_so_few_full_layers_cannot_break_are_refused():
    with pytest.raises(ValueError, match="`max_sparse_run` must be at least 3 for 3 full layers of 11, got 2"):
        reuse_layer_plan(torch.zeros(11, 11), 3, 2)


def test_pieces_come_from_all_of_the_text_and_one_short_window_gives_none(make_source, monkeypatch):
    source, _ = make_source()
    job, embedded = job_of(source), []
    monkeypatch.setattr("hysparse_hf.conversion.layer_stream.LayerStream.embed", lambda _, ids: embedded.extend(ids))
    windows = (*(torch.full((32,), number) for number in range(5)), torch.full((9,), 5))
    entry = ReusePass(job.config, job.mapped, windows, longest_run=2, pieces=8, length=16)
    assert [int(piece[0]) for piece in embedded] == [0, 0, 1, 1, 2, 3, 3, 4]
    assert entry.text == {"pieces": 8, "tokens": 16, "repeated": 2, "budget": 8}
