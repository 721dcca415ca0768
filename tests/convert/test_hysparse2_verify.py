"""`hysparse verify` on a conversion to the second generation: its ladder, and the faults that it names."""

import json

import pytest
import torch

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, cli, convert, verify
from hysparse_hf.conversion.bridge_faults import bridge_faults, plan_faults
from hysparse_hf.conversion.ladder import BRIDGED_LADDER, load_rung, rungs_of
from hysparse_hf.conversion.quality import attention_errors, record_attention
from hysparse_hf.conversion.source import open_source
from hysparse_hf.modeling.modeling_hysparse2 import HySparse2Model


# Of seven layers 0 and 1 are full and 2 and 5 read what 1 reads; or 0 keeps a window too.
PLAN, PLAN_WITH_WINDOW = "0,1/2,5", "1/2,5"
GROUPS = ["0", "1", "2", "self full", "self window"]


@pytest.fixture
def make_converted(make_source, convert_naive):
    """Factory: a source of seven layers and its conversion: `(folder, model, out)`."""

    def make(plan=PLAN, **options):
        source, model = make_source(num_hidden_layers=7, attention_bias=True)
        given = {"architecture": "hysparse2", "plan": plan, "budget": 13, "gates": (0.3, 0.8)}
        return source, model, convert_naive(source, **given | options)

    return make


def test_report_of_a_right_conversion(make_converted, token_ids):
    source, _, out = make_converted(PLAN_WITH_WINDOW)
    report = verify(source, out, text=token_ids, samples=0)
    assert report["faults"] == []
    assert report["tensors"] == {"equal": 7 * 13 + 3 - 3 * 4, "new": 4 * 3, "fitted": {}}
    assert [rung["rung"] for rung in report["ladder"]] == list(range(7))
    divergences = [rung["kl"] for rung in report["ladder"]]
    assert divergences[0] < 1e-6
    assert divergences[:4] == sorted(divergences[:4]), "windows, selection and sharing add something each"
    assert divergences[6] == pytest.approx(divergences[5], rel=1e-4)
    for rung in report["ladder"]:
        assert list(rung["errors_by_position"]) == GROUPS
        assert rung["errors_by_position"]["self full"] < 1e-6
        # Until the bridge is there, full layers are the source's own.
        assert (rung["errors_by_position"]["0"] < 1e-6) == (rung["rung"] < 4)
    early = report["early_exit"]
    assert early["kl"] < 1e-6
    assert early["difference"]["largest"] < 1e-5 * early["difference"]["largest_logit"]
    # Two rows of 64 tokens, each in four passes of 16 rows.
    assert (early["rows"], early["processed_tokens"]) == (128, {"self": 4 * 128, "cross": 128})


def test_only_the_rungs_asked_for_are_measured(make_converted, token_ids):
    source, _, out = make_converted()
    report = verify(source, out, text=token_ids, samples=0, rungs=[5])
    assert [rung["rung"] for rung in report["ladder"]] == [5]
    assert "early_exit" not in report
    with pytest.raises(ValueError, match="among 0 to 6, where this checkpoint's ladder ends"):
        verify(source, out, text=token_ids, rungs=[7])


@torch.no_grad()
def test_rungs_are_what_they_say(make_converted, token_ids):
    source, model, out = make_converted()
    opened = open_source(source)
    logits = [load_rung(rung, opened, out)(token_ids).logits for rung in BRIDGED_LADDER]
    expected = model(token_ids).logits
    scale = expected.abs().max()
    # Without windows in the self-decoder the first two are the source, and a budget leaves something out.
    assert (logits[0] - expected).abs().max() < 1e-5 * scale
    assert (logits[1] - expected).abs().max() < 1e-5 * scale
    assert (logits[2] - expected).abs().max() > 1e-2 * scale
    assert torch.equal(logits[5], HySparse2ForCausalLM.from_pretrained(out)(token_ids).logits)
    opened_gates = HySparse2ForCausalLM.from_pretrained(out)
    for layer in (3, 4, 6):
        attention = opened_gates.model.layers[layer].self_attn
        attention.gate_global_proj.bias.fill_(30.0)
        attention.sink_global.fill_(-1e4)
    torch.testing.assert_close(logits[4], opened_gates(token_ids).logits, rtol=1e-5, atol=1e-5)
    opened_gates.config.bridge = False
    unbridged = HySparse2ForCausalLM(opened_gates.config)
    unbridged.load_state_dict(opened_gates.state_dict())
    torch.testing.assert_close(logits[3], unbridged(token_ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rung_2_with_room_for_everything_is_the_source(make_converted, token_ids):
    source, model, out = make_converted(budget=64)
    logits = load_rung(BRIDGED_LADDER[2], open_source(source), out)(token_ids).logits
    expected = model(token_ids).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_windows_of_rung_1_have_their_fitted_values_and_nothing_else_has(make_source, tmp_path, token_ids):
    source, model = make_source(num_hidden_layers=7)
    ids = torch.randint(3, 97, (12, 64), generator=torch.Generator().manual_seed(2))
    options = {"plan": PLAN_WITH_WINDOW, "budget": 13, "window": 12, "calibrate": ids}
    convert(source, tmp_path / "out", architecture="hysparse2", **options)
    rung = load_rung(BRIDGED_LADDER[1], open_source(source), tmp_path / "out").state_dict()
    held = HySparse2ForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name in ("o_proj.weight", "sink_local", "gate_local_proj.weight", "gate_local_proj.bias"):
        assert torch.equal(*(state[f"model.layers.0.self_attn.{name}"] for state in (rung, held)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(rung[name], tensor) == (name != "model.layers.0.self_attn.o_proj.weight"), name


@torch.no_grad()
def test_errors_are_of_each_layer_alone(make_converted, token_ids):
    """A bridged layer reads the dense model's states, so its keys have nothing of the errors before the bridge."""
    source, _, out = make_converted(PLAN_WITH_WINDOW)
    window = token_ids[0]
    states = record_attention(load_rung(BRIDGED_LADDER[0], open_source(source), out), window)
    student = load_rung(BRIDGED_LADDER[5], open_source(source), out)
    errors = attention_errors(student, window, states)
    projection = student.model.layers[2].self_attn.k_proj
    given = []
    handle = projection.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    assert attention_errors(student, window, states) == errors
    handle.remove()
    torch.testing.assert_close(given[0], states.inputs[1])
    assert errors[1] < 1e-6 < min(errors[0], *errors[2:])


ATTENTION = "model.layers.2.self_attn"


def swap_keys_and_values(tensors):
    for part in ("weight", "bias"):
        key, value = f"{ATTENTION}.k_proj.{part}", f"{ATTENTION}.v_proj.{part}"
        tensors[key], tensors[value] = tensors[value], tensors[key]


def permute_kv_heads(tensors):
    name = f"{ATTENTION}.k_proj.weight"
    tensors[name] = tensors[name].unflatten(0, (2, 24)).flip(0).flatten(0, 1)


def drop_bias(tensors):
    del tensors[f"{ATTENTION}.v_proj.bias"]


def project_with_the_source_layer(tensors):
    for name in ("k_proj", "v_proj"):
        tensors[f"{ATTENTION}.{name}.weight"] = tensors[f"model.layers.1.self_attn.{name}.weight"].clone()


PLANTED = {
    "swapped-k-and-v": (swap_keys_and_values, "k_proj.weight", f"holds the source's {ATTENTION}.v_proj.weight"),
    "permuted-kv-head": (permute_kv_heads, "k_proj.weight", "with its heads in the order [1, 0]"),
    "dropped-bias": (drop_bias, "v_proj.bias", "missing in the converted checkpoint"),
    "weights-of-the-wrong-layer": (
        project_with_the_source_layer,
        "v_proj.weight",
        "holds the source's model.layers.1.self_attn.v_proj.weight",
    ),
}


@pytest.mark.parametrize(("plant", "tensor", "words"), PLANTED.values(), ids=PLANTED)
def test_command_fails_and_names_the_tensor(make_converted, edit, capsys, plant, tensor, words):
    source, _, out = make_converted()
    edit.tensors(out / "model.safetensors", plant)
    assert cli.main(["verify", str(source), str(out)]) == 1
    printed = capsys.readouterr().out
    assert any(f"{ATTENTION}.{tensor}: " in line and words in line for line in printed.splitlines()), printed


@pytest.mark.parametrize(
    ("plant", "tensors", "words"),
    [
        (swap_keys_and_values, ("k_proj.weight", "v_proj.weight"), "is not what was fitted but that of " + ATTENTION),
        (permute_kv_heads, ("k_proj.weight",), "is not what was fitted, by the hashes"),
    ],
    ids=["swapped-k-and-v", "permuted-kv-head"],
)
def test_fitted_projections_are_known_by_their_hashes(make_converted, edit, plant, tensors, words):
    ids = torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(2))
    source, _, out = make_converted(init="fitted", calibrate=ids)
    edit.tensors(out / "model.safetensors", plant)
    faults = verify(source, out)["faults"]
    for tensor in tensors:
        assert any(line.startswith(f"{ATTENTION}.{tensor}: {words}") for line in faults), faults


def test_bridge_from_the_wrong_layer_is_named(make_converted, edit, capsys):
    source, _, out = make_converted()
    assert plan_faults(out) == []
    edit.json(out / "config.json", bridge_map=[1, 0])
    assert cli.main(["verify", str(source), str(out)]) == 1
    line = (
        "model.layers.5.self_attn.k_proj.weight: reads what layer 0 reads by config.json, and was made to read what "
        "layer 1 reads, by provenance.json"
    )
    assert line in capsys.readouterr().out
    edit.json(out / "config.json", bridge_map=[1, 1], bridge_source="residual")
    assert [fault.partition(" and ")[0] for fault in plan_faults(out)] == [
        f"model.layers.{layer}.self_attn.k_proj.weight: reads the residual stream before layer 1 by config.json,"
        for layer in (2, 5)
    ]


def test_code_that_bridges_from_the_wrong_layer_is_caught_without_the_table(make_converted, token_ids, monkeypatch):
    source, _, out = make_converted()
    model = HySparse2ForCausalLM.from_pretrained(out)
    assert bridge_faults(model, out, token_ids[0]) == []
    plan = HySparse2Config.bridge_plan.fget
    # Every entry of the plan moves to the other full layer when the model runs.
    run = HySparse2Model._run_layers

    def astray(self, *args, **kwargs):
        moved = property(lambda config: [None if source is None else 0 for source in plan(config)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HySparse2Config, "bridge_plan", moved)
            for layer in self.layers:
                patch.setattr(layer.self_attn, "offers_states", layer.self_attn.layer_idx == 0)
            return run(self, *args, **kwargs)

    monkeypatch.setattr(HySparse2Model, "_run_layers", astray)
    report = verify(source, out, text=token_ids, samples=0)
    assert report["faults"] == [
        f"model.layers.{layer}.self_attn.k_proj: is given other states than model.layers.1.self_attn.q_proj reads"
        for layer in (2, 5)
    ]
    assert [rung["rung"] for rung in report["ladder"]] == [0, 1, 2, 3]


def test_early_exit_that_computes_more_rows_is_a_fault(make_converted, token_ids, monkeypatch):
    source, _, out = make_converted()
    monkeypatch.setattr(HySparse2Model, "needs_all_rows", lambda self, asked: True)
    report = verify(source, out, text=token_ids, samples=0, rungs=[6])
    assert report["faults"] == ["early exit: the cross-decoder processed 512 tokens for the logits of 128"]


def test_early_exit_that_keeps_other_rows_is_a_fault(make_converted, token_ids, monkeypatch):
    from hysparse_hf.modeling import modeling_hysparse2

    kept = modeling_hysparse2._kept
    monkeypatch.setattr(
        modeling_hysparse2,
        "_kept",
        lambda states, layout, rotations, keep: kept(
            states, layout, rotations, keep.flip(0) if isinstance(keep, torch.Tensor) else keep
        ),
    )
    source, _, out = make_converted()
    report = verify(source, out, text=token_ids, samples=0, rungs=[6])
    assert len(report["faults"]) == 1
    assert report["faults"][0].startswith("early exit: predictions differ from those of whole passes by a KL of ")


@pytest.mark.parametrize(
    "changes",
    [
        {"dense": True},
        {"bridge": False},
        {"recent_window": "branch"},
        {"share_full_kv": False},
        {"share_oracle": False},
        {"selection": "block", "oracle_budget": 64},
        {"self_layer_plan": ["full"] * 4, "cross_layer_plan": []},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_control_experiment_has_no_ladder(changes):
    with pytest.raises(ValueError, match="a ladder leads to a converted model, with a cross-decoder"):
        rungs_of(HySparse2Config(**{"num_hidden_layers": 4} | changes))


def test_command_prints_ladder_and_where_quality_goes(make_converted, letters, tmp_path, capsys):
    source, _, out = make_converted(PLAN_WITH_WINDOW)
    letters.save_pretrained(source)
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("What is lost on the way is lost on one rung of the ladder. " * 20)
    options = ["--text", str(text), "--length", "64", "--samples", "0", "--json", str(report)]
    assert cli.main(["verify", str(source), str(out), *options]) == 0
    printed = capsys.readouterr().out
    assert "attention outputs at r = 0, 1, 2, self full, self window" in printed
    assert "early exit: 64 rows asked for, 64 of 256 tokens through the cross-decoder" in printed
    divergences = [rung["kl"] for rung in json.loads(report.read_text())["ladder"]]
    rises = [after - before for before, after in zip(divergences, divergences[1:], strict=False)]
    worst = rises.index(max(rises)) + 1
    assert f"most is lost on rung {worst}, {BRIDGED_LADDER[worst].name}: KL {max(rises):+.4f}" in printed
    # Between rungs that are not neighbours there is no telling.
    assert cli.main(["verify", str(source), str(out), *options, "--rungs", "5", "6"]) == 0
    assert "most is lost" not in capsys.readouterr().out


def test_recall_refuses_a_selection_of_tokens(make_converted, letters, tmp_path, capsys):
    _, _, out = make_converted()
    letters.save_pretrained(out)
    text = tmp_path / "text.txt"
    text.write_text("Single tokens are selected, and no blocks. " * 20)
    assert cli.main(["recall", str(out), "--text", str(text), "--length", "64"]) == 1
    assert "recall is of blocks, got a model of type 'hysparse2'" in capsys.readouterr().err
