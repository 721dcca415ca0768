"""Initial values of the cross-decoder: each closed form against its definition, and against a start without a fit."""

import json

import pytest
import torch
from torch.nn import functional as F

from hysparse_hf import HySparse2ForCausalLM, convert
from hysparse_hf.conversion.bridge_fit import BridgedFittingPass
from hysparse_hf.conversion.cross_fit import BRIDGE_RIDGE, ValueMoments
from hysparse_hf.conversion.faults import dense_difference, weight_faults
from hysparse_hf.conversion.fit import FittingPass
from hysparse_hf.conversion.job import Job, Options
from hysparse_hf.conversion.layer_stream import AttentionInputs
from hysparse_hf.conversion.query_fit import QUERY_RIDGE, fit_queries
from hysparse_hf.conversion.source import open_source
from hysparse_hf.modeling.layers_hysparse import rotate


OPTIONS = {"plan": "0,1/2,5", "budget": 13, "window": 12}
# Layers 3 and 4 read layer 2, and layer 6 reads layer 5.
FULL, SPARSE = (2, 5), (3, 4, 6)


def draw_ids(windows=12, length=64, seed=2):
    return torch.randint(3, 97, (windows, length), generator=torch.Generator().manual_seed(seed))


def make_job(source, **changes):
    given = {"ratio": "1:3", "max_sparse_run": None, "keep_kv": False, "block_size": 8, "gates": (0.05, 0.95)}
    given |= {"gate_granularity": "headwise", "init": "fitted", "dtype": None, "architecture": "hysparse2"}
    return Job(open_source(source), Options(**given | OPTIONS | changes))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_streaming_pass_is_the_teacher(make_source, family):
    """Nothing that is fitted on the way changes what later layers are fitted on."""
    source, model = make_source(family, num_hidden_layers=7, attention_bias=True)
    job, ids = make_job(source), draw_ids(2)
    fitting = BridgedFittingPass(job.config, job.mapped, tuple(ids), refit=True)
    fits = fitting.run()
    assert list(fits) == [2, 3, 4, 5, 6]
    assert FittingPass(job.config, job.mapped, tuple(ids), refit=True).run() == {}
    expected = model(ids, output_hidden_states=True).hidden_states[-1]
    final = model.model.norm(torch.cat(fitting.states))
    assert (final - expected).abs().max() < 1e-5 * expected.abs().max()


def inputs_of(model, ids):
    """Per layer what the source's attention reads, `(windows * length, hidden)`."""
    held = {}
    handles = [
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, inputs, i=index: held.update({i: inputs[0]}))
        for index, layer in enumerate(model.model.layers)
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return {index: states.flatten(0, 1) for index, states in held.items()}


@torch.no_grad()
def test_bridged_keys_are_a_ridge_regression_on_what_the_last_self_layer_reads(make_source):
    source, model = make_source(num_hidden_layers=7, attention_bias=True)
    job, ids = make_job(source), draw_ids()
    fits = BridgedFittingPass(job.config, job.mapped, tuple(ids), refit=False).run()
    read = inputs_of(model, ids)
    for layer in FULL:
        weight = model.model.layers[layer].self_attn.k_proj.weight
        given, target = read[1].double(), read[layer].double() @ weight.T.double()
        # By least squares on rows that ask for zero weights.
        rows = torch.cat([given, torch.eye(64).double() * (BRIDGE_RIDGE * given.square().sum(0).mean()).sqrt()])
        expected = torch.linalg.lstsq(rows, F.pad(target, (0, 0, 0, 64))).solution.T
        found = fits[layer].values.projections["k_proj.weight"].double()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        figures = fits[layer].figures
        assert figures["key_fitted"] < figures["key_copied"]
        error = (given @ expected.T - target).norm() / target.norm()
        assert figures["key_fitted"] == pytest.approx(error.item(), abs=2e-4)


@torch.no_grad()
def test_bridged_values_are_joint_ones_of_the_layers_that_read_them(make_source):
    source, model = make_source(num_hidden_layers=7, attention_bias=True)
    job, ids = make_job(source), draw_ids()
    fits = BridgedFittingPass(job.config, job.mapped, tuple(ids), refit=False).run()
    read = inputs_of(model, ids)
    for full, group in ((2, (2, 3, 4)), (5, (5, 6))):
        moments = ValueMoments([read[1][None]])
        for layer in group:
            projection = model.model.layers[layer].self_attn.v_proj
            value = projection(read[layer]).unflatten(-1, (2, 24)).transpose(0, 1)[None]
            moments.add([AttentionInputs(read[layer][None], value, value, value)], projection.bias)
        found, expected = (
            weight.unflatten(0, (2, 24))
            for weight in (fits[full].values.projections["v_proj.weight"], moments.joint_values())
        )
        # Directions have no sign, and those that tell alike may turn into one another.
        for head in range(2):
            left = found[head] - found[head] @ torch.linalg.pinv(expected[head]) @ expected[head]
            assert left.norm() < 0.05 * found[head].norm()


def test_joint_values_tell_most_of_all_layers_values():
    """No other projection of that width explains more: not each layer's own regression, nor a random one near it."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 400, 20, generator=generator)
    values = [torch.randn(20, 8, generator=generator) for _ in range(3)]
    moments = ValueMoments([states])
    for weight in values:
        value = (states @ weight).unflatten(-1, (2, 4)).transpose(1, 2)
        moments.add([AttentionInputs(states, value, value, value)], bias=None)

    def explained(projection):
        total = 0.0
        for head in range(2):
            found = states[0] @ projection[4 * head : 4 * head + 4].T
            for weight in values:
                wanted = states[0] @ weight[:, 4 * head : 4 * head + 4]
                wanted = wanted / wanted.square().mean().sqrt()
                left = wanted - found @ torch.linalg.lstsq(found, wanted).solution
                total += (wanted.square().sum() - left.square().sum()).item()
        return total

    joint = moments.joint_values()
    assert joint.shape == (8, 20)
    best = explained(joint)
    for other in (*(weight.T for weight in values), joint + 0.1 * torch.randn(joint.shape, generator=generator)):
        assert explained(other) < 0.999 * best


def test_values_of_one_layer_that_can_be_told_in_full_are_its_own():
    generator = torch.Generator().manual_seed(1)
    states, weight = torch.randn(1, 300, 20, generator=generator), torch.randn(20, 8, generator=generator)
    bias = torch.randn(8, generator=generator)
    value = (states @ weight + bias).unflatten(-1, (2, 4)).transpose(1, 2)
    moments = ValueMoments([states])
    moments.add([AttentionInputs(states, value, value, value)], bias)
    found = states[0] @ moments.joint_values().T
    for head in range(2):
        wanted = states[0] @ weight[:, 4 * head : 4 * head + 4]
        left = (
            wanted
            - found[:, 4 * head : 4 * head + 4]
            @ torch.linalg.lstsq(found[:, 4 * head : 4 * head + 4], wanted).solution
        )
        assert left.norm() < 1e-2 * wanted.norm()


class Heads:
    """Inputs, rotations, own queries and keys of two windows: 4 heads, 2 KV heads of 8 channels."""

    def __init__(self, length=40, width=12):
        generator = torch.Generator().manual_seed(3)
        self.weights = [torch.randn(size, width, generator=generator) * 0.5 for size in (32, 16, 16)]
        self.states = [torch.randn(1, length, width, generator=generator) for _ in range(2)]
        angles = torch.arange(length)[:, None] * 0.3 ** torch.arange(4)
        angles = torch.cat([angles, angles], -1)[None]
        self.rotations = [(angles.cos(), angles.sin())] * 2
        self.own = [
            AttentionInputs(states, *(self.heads(states, weight) for weight in self.weights)) for states in self.states
        ]

    def heads(self, states, weight):
        return rotate((states @ weight.T).unflatten(-1, (-1, 8)).transpose(1, 2), self.rotations[0])

    def fit(self, keys):
        return fit_queries([states[0] for states in self.states], self.own, keys, self.rotations, 8**-0.5)


def test_queries_for_the_layers_own_keys_give_its_own_logits(monkeypatch):
    monkeypatch.setattr("hysparse_hf.conversion.query_fit.QUERY_ITERATIONS", 40)
    monkeypatch.setattr("hysparse_hf.conversion.query_fit.QUERY_RIDGE", 1e-6)
    heads = Heads()
    assert heads.fit([own.key for own in heads.own])[1] < 1e-2


def test_queries_solve_the_weighted_least_squares(monkeypatch):
    """Against the normal equations, written out with one column per weight."""
    monkeypatch.setattr("hysparse_hf.conversion.query_fit.QUERY_ITERATIONS", 200)
    heads = Heads()
    keys = [heads.heads(states, heads.weights[2]) for states in heads.states]
    weight, error = heads.fit(keys)
    width = 12
    wrong = total = 0.0
    for head in range(4):
        normal, moment, squares = torch.zeros(8 * width, 8 * width).double(), torch.zeros(8 * width).double(), 0.0
        rows = []
        for states, own, key in zip(heads.states, heads.own, keys, strict=True):
            key = key[0, head // 2].double() * 8**-0.5
            squares += 10 * key.square().mean()
            for place in range(3, 40, 4):
                logits = (own.query[0, head, place] @ own.key[0, head // 2, : place + 1].T).double() * 8**-0.5
                shares = (logits.softmax(-1) + 1 / (place + 1)) / 2
                basis = torch.eye(8 * width).double().view(-1, 8, width) @ states[0, place].double()
                rotation = [part[:, place : place + 1].double() for part in heads.rotations[0]]
                found = rotate(basis[None, :, None], rotation)[0, :, 0] @ key[: place + 1].T
                found = found - (found * shares).sum(-1, keepdim=True)
                logits = logits - (logits * shares).sum()
                normal += (found * shares) @ found.T
                moment += (found * shares) @ logits
                rows.append((found, shares, logits))
        size = torch.cat([states[0] for states in heads.states]).double().square().mean()
        normal += QUERY_RIDGE * size * squares * torch.eye(8 * width).double()
        expected = torch.linalg.solve(normal, moment)
        torch.testing.assert_close(weight[8 * head : 8 * head + 8].flatten().double(), expected, rtol=1e-3, atol=1e-4)
        for found, shares, logits in rows:
            wrong += (shares * (expected @ found - logits).square()).sum().item()
            total += (shares * logits.square()).sum().item()
    assert error == pytest.approx((wrong / total) ** 0.5, rel=1e-3)


def loss_of(model, teacher, ids):
    with torch.no_grad():
        found, expected = (F.log_softmax(net(ids).logits, -1) for net in (model, teacher))
    return F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean().item()


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("granularity", ["elementwise", "none"])
def test_fitted_start_is_nearer_to_the_source_and_still_its_conversion(make_source, tmp_path, family, granularity):
    source, model = make_source(family, num_hidden_layers=7, attention_bias=True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.3)
    model.save_pretrained(source)
    settings = OPTIONS | {"gate_granularity": granularity, "architecture": "hysparse2"}
    convert(source, tmp_path / "naive", init="naive", **settings)
    record = convert(source, tmp_path / "fitted", calibrate=draw_ids(), **settings)
    ids = draw_ids(4, seed=5)
    naive, fitted = (
        loss_of(HySparse2ForCausalLM.from_pretrained(tmp_path / name).eval(), model, ids)
        for name in ("naive", "fitted")
    )
    assert fitted < 0.7 * naive
    assert weight_faults(source, tmp_path / "fitted") == []
    scale = model(ids).logits.abs().max().item()
    assert dense_difference(model, tmp_path / "fitted", ids) < 1e-5 * scale
    queries = set() if family == "Qwen3" else {"q_proj.weight", "q_proj.bias"}
    names = {layer: {"k_proj.weight", "v_proj.weight", "o_proj.weight"} for layer in FULL}
    names |= {layer: {"o_proj.weight"} | queries for layer in SPARSE}
    expected = {f"model.layers.{layer}.self_attn.{name}" for layer, parts in names.items() for name in parts}
    assert record["fitted_tensors"].keys() == expected
    assert json.loads((tmp_path / "fitted" / "provenance.json").read_text())["bridge"] == {"2": 1, "5": 1}
    for layer in SPARSE:
        figures = record["fit"][str(layer)]
        assert figures["error_refit"] < figures["error_read"]
        assert ("logits_error" in figures) == (family == "Llama")


@torch.no_grad()
def test_error_of_a_fit_is_that_of_the_converted_layer(make_source, tmp_path):
    """Each layer, loaded with its values and given the source's states, against what the source's attention gives."""
    source, model = make_source(num_hidden_layers=7, attention_bias=True)
    ids = draw_ids()
    record = convert(source, tmp_path / "out", architecture="hysparse2", calibrate=ids, **OPTIONS)
    student = HySparse2ForCausalLM.from_pretrained(tmp_path / "out").eval()
    states, wanted, found = {}, {}, {}
    for index, (theirs, ours) in enumerate(zip(model.model.layers, student.model.layers, strict=True)):
        theirs.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, i=index: states.update({i: kwargs["hidden_states"]}), with_kwargs=True
        )
        theirs.self_attn.register_forward_hook(lambda _, args, out, i=index: wanted.update({i: out[0]}))
        ours.self_attn.register_forward_pre_hook(lambda _, args, i=index: (states[i], *args[1:]))
        ours.self_attn.register_forward_hook(lambda _, args, out, i=index: found.update({i: out[0]}))
    model(ids)
    student(ids)
    for layer in range(2, 7):
        bias = student.model.layers[layer].self_attn.o_proj.bias
        error = (found[layer] - wanted[layer]).norm() / (wanted[layer] - bias).norm()
        assert error.item() == pytest.approx(record["fit"][str(layer)]["error_refit"], rel=1e-2, abs=1e-4)
