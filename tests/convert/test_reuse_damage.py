"""Measured reuse: the divergence of a model in which one layer alone reads what another chose, and the plan of it."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.job import Job, Options
from hysparse_hf.conversion.layer_stream import AttentionInputs
from hysparse_hf.conversion.plan import reuse_layer_plan
from hysparse_hf.conversion.reuse_damage import ReuseDamage, ReusePass, repeated
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
        expected, found = (F.log_softmax(model(ids).logits, -1) for model in (teacher, student))
    return F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean().item()


@pytest.fixture
def quiet_source(make_source):
    """A source whose attentions add little to the residual stream, so that changes of them are small."""
    source, model = make_source(attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
    model.save_pretrained(source)
    return source, model


@pytest.mark.parametrize("layer", [1, 2, 3, 4])
def test_damage_is_that_of_the_converted_model_with_one_sparse_layer(quiet_source, layer):
    """Windows of one token more than is read: the last query alone leaves something out, and no sum is split."""
    source, model = quiet_source
    ids = draw_ids(600, 17).where(torch.arange(17) < 8, 5)
    job = job_of(source)
    measured = ReusePass(job.config, job.mapped, tuple(ids), longest_run=1, count=600, length=17)
    measured.budget = 16
    found = measured.run().matrix[layer - 1, layer].item()
    seen = torch.cat([ids[::2], torch.stack([repeated(row) for row in ids[1::2]])])
    plan = ["sparse" if index == layer else "full" for index in range(5)]
    assert found == pytest.approx(divergence(model, job.config, plan, seen), rel=0.2)
