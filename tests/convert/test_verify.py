"""`hysparse verify` and `hysparse compare`: what they report against plain loops, and what they refuse."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from hysparse_hf import HySparseConfig, HySparseForCausalLM, cli, compare, convert, verify
from hysparse_hf.conversion.faults import dense_difference, module_faults, sha256_of_tensor, weight_faults
from hysparse_hf.conversion.ladder import LADDER, load_rung, rung_config, rungs_of
from hysparse_hf.conversion.quality import (
    Figures,
    attention_errors,
    compare_predictions,
    predict,
    record_attention,
    total_of,
)
from hysparse_hf.conversion.source import open_source
from hysparse_hf.conversion.texts import Text


# Only Qwen2's later layers have a window.
FIRST_LAYERS_WHOLE = {"Qwen2": {"use_sliding_window": True, "max_window_layers": 2}}
O_PROJ = "model.layers.2.self_attn.o_proj.weight"


@pytest.fixture
def converted(make_source, convert_naive):
    source, model = make_source(attention_bias=True)
    return source, model, convert_naive(source, gates=(0.3, 0.8))


def test_report_of_a_right_conversion(converted, token_ids):
    source, model, out = converted
    report = verify(source, out, text=token_ids, samples=0)
    assert report["faults"] == []
    assert report["tensors"] == {"equal": len(model.state_dict()), "new": 18, "fitted": {}}
    difference = report["dense_difference"]
    # Looser on a GPU, where the kernels have float32 sums of their own; `test_parity` has the rule of 1e-5.
    assert difference["largest"] < (1e-4 if torch.cuda.is_available() else 1e-5) * difference["largest_logit"]
    assert [rung["rung"] for rung in report["ladder"]] == [0, 1, 2, 3]
    divergences = [rung["kl"] for rung in report["ladder"]]
    assert divergences[0] < 1e-6
    assert divergences == sorted(divergences), "each rung adds something"
    for rung in report["ladder"]:
        assert list(rung["errors_by_position"]) == ["0", "1", "2", "3"]
        # Full layers are the source's own on every rung.
        assert rung["errors_by_position"]["0"] < 1e-6


def test_only_the_rungs_asked_for_are_measured(converted, token_ids):
    source, _, out = converted
    whole = verify(source, out, text=token_ids, samples=0)
    part = verify(source, out, text=token_ids, samples=0, rungs=[3, 1])
    assert part["ladder"] == [whole["ladder"][1], whole["ladder"][3]]
    assert part["dense_difference"] == whole["dense_difference"]
    with pytest.raises(ValueError, match="among 0 to 3, where this checkpoint's ladder ends"):
        verify(source, out, text=token_ids, rungs=[4])


def naive_figures(first, second, windows):
    """Mean KL, both perplexities and the share of equal top tokens, in float64, token by token."""
    kl = loss_first = loss_second = same = tokens = 0
    for window in windows:
        one, other = (model.double()(window[None], use_cache=False).logits[0] for model in (first, second))
        for place in range(len(window) - 1):
            p, q = (torch.log_softmax(logits[place], 0).tolist() for logits in (one, other))
            kl += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
            following = window[place + 1]
            loss_first, loss_second = loss_first - p[following], loss_second - q[following]
            same += p.index(max(p)) == q.index(max(q))
            tokens += 1
    return kl / tokens, math.exp(loss_first / tokens), math.exp(loss_second / tokens), same / tokens, tokens


@torch.no_grad()
def test_figures_are_those_of_a_naive_loop(converted, token_ids, monkeypatch):
    source, model, out = converted
    # Several pieces per window, the last one short.
    monkeypatch.setattr("hysparse_hf.conversion.quality.CHUNK_ELEMENTS", 97 * 10)
    windows = (token_ids[0], token_ids[1, :37])
    texts = [Text("a", windows[:1]), Text("b", windows[1:])]
    student = HySparseForCausalLM.from_pretrained(out).eval()
    figures = compare_predictions(predict(model, texts, ""), predict(student, texts, ""), texts)
    for part, window in zip(figures, windows, strict=True):
        expected = naive_figures(model, student, [window])
        model.float()
        student.float()
        assert tuple(part.record().values()) == pytest.approx(expected, rel=1e-4)
    figures[0].add(figures[1])
    expected = naive_figures(model, student, windows)
    assert tuple(figures[0].record().values()) == pytest.approx(expected, rel=1e-4)


def test_model_that_changes_its_logits_is_refused(converted, token_ids):
    _, model, _ = converted
    model.lm_head.register_forward_hook(lambda module, inputs, output: output if inputs[0].dim() == 2 else output / 2)
    shape = model.lm_head.weight.shape
    head = torch.nn.Linear(shape[1], shape[0], bias=False)
    head.weight = model.lm_head.weight
    model.get_output_embeddings = lambda: head
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM changes them"):
        predict(model, [Text("a", (token_ids[0],))], "")


@torch.no_grad()
def test_attention_errors_are_those_of_each_layer_alone(converted, token_ids):
    """By hand: a sparse layer on the dense model's input, with the keys, values and blocks of its full layer there."""
    source, _, out = converted
    window = token_ids[0]
    dense = load_rung(LADDER[0], open_source(source), out)
    student = load_rung(LADDER[3], open_source(source), out)
    states = record_attention(dense, window)
    errors = attention_errors(student, window, states)
    hidden = dense.model.embed_tokens(window[None])
    from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS, layout_of_length

    layout = layout_of_length(0, len(window), hidden.device, PLAIN_ROWS)
    options = {"layout": layout, "rotations": dense.model._rotations(hidden, layout.positions)}
    shared = (None, None, None)
    for index, (layer, other) in enumerate(zip(dense.model.layers, student.model.layers, strict=True)):
        normed = layer.input_layernorm(hidden)
        expected = layer.self_attn(normed, **options)[0]
        got, _, *given = other.self_attn(normed, *shared, **options)
        shared = tuple(given) if other.self_attn.kind == "full" else shared
        error = (got - expected).norm() / expected.norm()
        assert errors[index] == pytest.approx(error.item(), abs=1e-6)
        hidden = layer(hidden, **options)[0]
    assert errors[0] < 1e-6 < errors[1]


@torch.no_grad()
def test_rungs_are_what_they_say(converted, token_ids):
    source, model, out = converted
    opened = open_source(source)
    expected = model(token_ids).logits
    plain, reuse, branches, shared = (load_rung(rung, opened, out)(token_ids).logits for rung in LADDER)
    assert (plain - expected).abs().max() < 1e-5 * expected.abs().max()
    own = HySparseForCausalLM.from_pretrained(out)
    assert torch.equal(shared, own(token_ids).logits)
    assert torch.equal(branches, HySparseForCausalLM.from_pretrained(out, share_full_kv=False)(token_ids).logits)
    assert not torch.allclose(reuse, expected, atol=0.1)


@torch.no_grad()
def test_rung_1_with_room_for_everything_is_the_source(make_source, convert_naive, token_ids):
    """Nothing but the selection separates rung 1 from the source; the fitted weights have no part in it."""
    source, model = make_source()
    out = convert_naive(source, budget=64)
    tensors = load_file(out / "model.safetensors")
    reuse = load_rung(LADDER[1], open_source(source), out)
    assert not [name for name in reuse.state_dict() if "gate_global" in name or "sink" in name]
    expected = model(token_ids).logits
    assert (reuse(token_ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert any("sink" in name for name in tensors)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"share_full_kv": False}, [0, 1, 2]),
        (LADDER[1].switches, [0, 1]),
        ({**LADDER[1].switches, "gate_granularity": "headwise"}, [0, 1, 2]),
    ],
    ids=["shared", "own", "own-without-branches", "own-with-gates"],
)
def test_ladder_ends_at_the_checkpoint(changes, numbers):
    config = HySparseConfig(num_hidden_layers=5, **changes)
    rungs = rungs_of(config)
    assert [rung.number for rung in rungs] == numbers
    last = rung_config(rungs[-1], config)
    assert all(getattr(last, field) == getattr(config, field) for field in LADDER[0].switches | LADDER[1].switches)


@pytest.mark.parametrize("changes", [{"dense": True}, {"share_oracle": False}, {"window_branch": "merged_shared"}])
def test_control_experiments_are_no_rungs(changes):
    with pytest.raises(ValueError, match="use `compare`"):
        rungs_of(HySparseConfig(num_hidden_layers=5, **changes))


def test_wrong_setting_in_the_configuration_is_a_fault(converted, token_ids, edit):
    source, _, out = converted
    edit.json(out / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    report = verify(source, out, text=token_ids, samples=0)
    assert len(report["faults"]) == 1
    assert report["faults"][0].startswith("logits: rung 0 differs from the source by ")
    assert "rotary, attention or activation settings" in report["faults"][0]
    assert report["ladder"] == []


def plant_fit(out, edit, change=lambda tensor: 2 * tensor + 0.1):
    """Change an output projection and record it as fitted; returns the tensor before."""
    before = load_file(out / "model.safetensors")[O_PROJ]
    edit.tensors(out / "model.safetensors", lambda tensors: tensors.update({O_PROJ: change(before)}))
    hashes = {"mapped_sha256": sha256_of_tensor(before), "sha256": sha256_of_tensor(change(before))}
    edit.json(out / "provenance.json", fitted_tensors={O_PROJ: hashes})
    return before


def test_fitted_tensor_is_reported_with_the_size_of_its_change(converted, token_ids, edit):
    source, model, out = converted
    before = plant_fit(out, edit)
    report = verify(source, out, text=token_ids, samples=0)
    assert report["faults"] == []
    assert report["tensors"]["equal"] == len(model.state_dict()) - 1
    change = ((before + 0.1).norm() / before.norm()).item()
    assert report["tensors"]["fitted"] == {O_PROJ: pytest.approx(change, rel=1e-4)}
    assert report["ladder"][0]["kl"] < 1e-6, "rung 0 has the source's projection"


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        pytest.param("out", "is not what was fitted", id="changed-since"),
        pytest.param("source", f"was fitted in place of another {O_PROJ}", id="another-source"),
    ],
)
def test_fitted_tensor_is_held_to_its_hashes(converted, edit, spoilt, words):
    source, _, out = converted
    plant_fit(out, edit)
    assert weight_faults(source, out) == []
    file = {"out": out, "source": source}[spoilt] / "model.safetensors"
    edit.tensors(file, lambda tensors: tensors.update({O_PROJ: -tensors[O_PROJ]}))
    faults = weight_faults(source, out)
    assert len(faults) == 1
    assert faults[0].startswith(f"{O_PROJ}: ")
    assert words in faults[0]


def test_new_parameter_that_is_not_finite_is_named(converted, edit):
    source, _, out = converted
    name = "model.layers.1.self_attn.sink_local"
    edit.tensors(out / "model.safetensors", lambda tensors: tensors[name].fill_(math.nan))
    assert weight_faults(source, out) == [f"{name}: holds values that are not finite"]


def test_fitted_conversion_passes_with_its_projections_named(make_source, tmp_path, token_ids):
    source, model = make_source()
    calibration = torch.randint(3, 97, (10, 64), generator=torch.Generator().manual_seed(2))
    convert(source, tmp_path / "out", plan=[0, 2], calibrate=calibration, budget=16, block_size=8, window=12)
    report = verify(source, tmp_path / "out", text=token_ids, samples=0)
    assert report["faults"] == []
    fitted = report["tensors"]["fitted"]
    assert list(fitted) == [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (1, 3, 4)]
    assert all(change > 0.1 for change in fitted.values())
    assert report["tensors"]["equal"] + len(fitted) == len(model.state_dict())
    assert dense_difference(source, tmp_path / "out", token_ids) < 1e-5 * report["dense_difference"]["largest_logit"]
    assert module_faults(source, tmp_path / "out", token_ids) == {}


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_H06_mixture_of_experts_has_a_ladder(make_source, convert_naive, token_ids, family):
    experts = {"num_local_experts": 4} if family == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 40}
    source, _ = make_source(family, num_experts_per_tok=2, **experts)
    report = verify(source, convert_naive(source), text=token_ids, samples=0, rungs=[0, 3])
    assert report["faults"] == []
    assert report["ladder"][0]["kl"] < 1e-6 < report["ladder"][1]["kl"]


def test_training_free_conversion_is_rung_1(make_source, convert_naive, token_ids):
    source, _ = make_source()
    out = convert_naive(source, keep_kv=True)
    report = verify(source, out, text=token_ids, samples=0)
    assert [rung["rung"] for rung in report["ladder"]] == [0, 1]
    assert report["ladder"][1]["kl"] == pytest.approx(compare(source, out, text=token_ids)["kl"], rel=1e-5)
    assert report["tensors"]["new"] == 0


@pytest.fixture
def with_tokenizer(make_source, convert_naive, letters, tmp_path):
    """A source that reads text, its conversion, and two texts."""
    source, _ = make_source(max_position_embeddings=1024)
    letters.save_pretrained(source)
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for number, file in enumerate(files, 2):
        file.write_text("\n".join(f"{i} times {number} is {number * i}." for i in range(300)))
    return source, convert_naive(source), files


def test_command_prints_and_writes_the_ladder(with_tokenizer, tmp_path, capsys):
    source, out, files = with_tokenizer
    arguments = ["--text", *map(str, files), "--length", "128", "--windows", "2", "--samples", "2"]
    report = tmp_path / "report.json"
    command = ["verify", str(source), str(out), *arguments, "--sample-length", "512", "--json", str(report)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    record = json.loads(report.read_text())
    assert record["text"] == [{"name": "one.txt", "tokens": 256}, {"name": "two.txt", "tokens": 256}]
    for rung in record["ladder"]:
        assert rung["name"] in printed
        assert f"{rung['perplexity']:.2f}" in printed
        assert rung["retrieval"]["samples"] == 2
        assert [text["name"] for text in rung["texts"]] == ["one.txt", "two.txt"]
    assert "error of attention outputs at r = 0, 1, 2, 3" in printed


def test_command_fails_on_a_wrong_tensor(with_tokenizer, edit, capsys):
    source, out, files = with_tokenizer
    edit.tensors(out / "model.safetensors", lambda tensors: tensors["model.norm.weight"].mul_(-1))
    assert cli.main(["verify", str(source), str(out), "--text", str(files[0])]) == 1
    assert "model.norm.weight: differs from the source's" in capsys.readouterr().out


def test_wrong_order_and_wrong_counts_are_explained(with_tokenizer, capsys):
    source, out, files = with_tokenizer
    text = ["--text", str(files[0]), "--length", "64"]
    for arguments, words in (
        (
            [str(out), str(source)],
            "of type hysparse or hysparse2, got 'llama'; name the folder that `hysparse convert` wrote; the source",
        ),
        ([str(source), str(out), *text, "--samples", "-1"], "`samples` must be at least 0, got -1"),
        ([str(source), str(out), *text, "--samples", "1"], "room for a sentence beside the secret"),
        ([str(source), str(out), *text, "--windows", "0"], "`windows` at least 1, got 64 and 0"),
    ):
        assert cli.main(["verify", *arguments]) == 1
        assert words in capsys.readouterr().err


def test_windows_inside_the_budget_are_warned_about(with_tokenizer, caplog):
    source, out, files = with_tokenizer
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.verify"):
        verify(source, out, text=files[0], length=16, samples=0)
    assert "Nothing is left out in text of 16 tokens, since a query reads 16" in caplog.text


def test_source_without_a_tokenizer_is_measured_without_passkeys(converted, token_ids, caplog):
    source, _, out = converted
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.verify"):
        report = verify(source, out, text=token_ids)
    assert "source has no tokenizer" in caplog.text
    assert all(rung["retrieval"] is None for rung in report["ladder"])


def test_without_text_the_source_samples_its_own_and_says_so(make_source, convert_naive, caplog):
    source, _ = make_source(max_position_embeddings=48, num_hidden_layers=2)
    out = convert_naive(source)
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.texts"):
        report = verify(source, out, samples=0, windows=2)
    assert "No text was given" in caplog.text
    assert report["text"] == [{"name": "sampled from the source", "tokens": 96}]


def test_compare_of_two_checkpoints(with_tokenizer, tmp_path, capsys):
    source, out, files = with_tokenizer
    report = tmp_path / "report.json"
    options = ["--text", *map(str, files), "--length", "64", "--json", str(report)]
    assert cli.main(["compare", str(source), str(out), *options]) == 0
    record = json.loads(report.read_text())
    assert f"{record['kl']:.4f}" in capsys.readouterr().out
    ladder = verify(source, out, text=files, length=64, samples=0)["ladder"]
    for field in ("kl", "perplexity", "first_perplexity", "same_token", "tokens"):
        assert record[field] == pytest.approx(ladder[-1][field], rel=1e-5)
    assert compare(out, out, text=files, length=64)["kl"] == 0


def test_compare_needs_one_vocabulary(make_source, token_ids):
    first, _ = make_source(name="first")
    second, _ = make_source(name="second", vocab_size=120)
    with pytest.raises(ValueError, match="97 tokens in first and 120 in second"):
        compare(first, second, text=token_ids)


def spoil_embedding(folder, edit, token):
    """A row of the embeddings that is not a number."""
    edit.tensors(
        folder / "model.safetensors", lambda tensors: tensors["model.embed_tokens.weight"][token].fill_(float("nan"))
    )


@pytest.mark.parametrize("place", [0, 40])
def test_nan_is_a_fault_and_no_perfect_match(make_source, convert_naive, token_ids, edit, place):
    source, _ = make_source()
    spoil_embedding(source, edit, token_ids[0, place])
    report = verify(source, convert_naive(source), text=token_ids[:1], samples=0)
    assert report["faults"] == [
        "logits: not finite on rung 0 or in the source; look for weights that are not finite in the source."
    ]


def test_nan_stays_nan_in_a_comparison(converted, token_ids, edit, tmp_path):
    source, model, out = converted
    spoil_embedding(out, edit, token_ids[0, 40])
    report = compare(source, out, text=token_ids[:1])
    assert math.isnan(report["kl"])
    assert math.isnan(report["perplexity"])
    assert math.isfinite(report["first_perplexity"])


def test_perplexity_beyond_any_float_is_infinite():
    figures = Figures(tokens=2, loss_second=2000.0)
    assert figures.record()["perplexity"] == math.inf


def test_largest_difference_keeps_a_nan_in_either_order():
    for pair in ((1.0, math.nan), (math.nan, 1.0)):
        total = total_of([Figures(largest_difference=value) for value in pair])
        assert math.isnan(total.largest_difference)


def test_another_plan_than_was_converted_is_a_fault(make_source, convert_naive, token_ids, edit):
    """Nothing else of such a checkpoint says which layers were full: its tensors fit every plan."""
    source, _ = make_source()
    out = convert_naive(source, keep_kv=True, plan="0,3")
    edit.json(out / "config.json", layer_plan=["full", "sparse", "full", "sparse", "sparse"])
    assert verify(source, out, text=token_ids, samples=0)["faults"] == [
        "model.layers.2: is full by config.json, and was made sparse, by provenance.json",
        "model.layers.3: is sparse by config.json, and was made full, by provenance.json",
    ]


def test_new_parameter_that_changed_is_named(converted, edit):
    source, _, out = converted
    name = "model.layers.1.self_attn.gate_local_proj.bias"
    edit.tensors(out / "model.safetensors", lambda tensors: tensors[name].add_(1.0))
    assert weight_faults(source, out) == [f"{name}: is not what was written, by the hash in provenance.json"]


def test_missing_provenance_is_said_beside_the_tensors_that_it_would_explain(converted, token_ids, edit):
    source, _, out = converted
    assert verify(source, out, text=token_ids, samples=0, rungs=[0])["faults"] == []
    plant_fit(out, edit)
    (out / "provenance.json").unlink()
    faults = verify(source, out, text=token_ids, samples=0)["faults"]
    assert faults[0].startswith(f"{O_PROJ}: differs from the source's")
    assert faults[1:] == ["provenance.json: missing, so a fitted tensor cannot be told from a wrong one"]


def test_wrong_setting_of_a_cast_checkpoint_is_not_blamed_on_its_rounding(make_source, convert_naive, token_ids, edit):
    source, _ = make_source()
    out = convert_naive(source, dtype="bfloat16")
    edit.json(out / "config.json", hidden_act="gelu")
    (fault,) = verify(source, out, text=token_ids, samples=0)["faults"]
    assert "each module agrees; rotary, attention or activation settings" in fault


@pytest.mark.parametrize("family", ["Mistral", "Qwen2"])
def test_H18_text_beyond_the_sources_window_is_refused_by_name(make_source, convert_naive, token_ids, family):
    source, _ = make_source(family, sliding_window=24, **FIRST_LAYERS_WHOLE.get(family, {}))
    out = convert_naive(source)
    with pytest.raises(ValueError, match=r"within the sliding window of source \(24 tokens\), got windows of 64"):
        verify(source, out, text=token_ids, samples=0)
    assert verify(source, out, text=token_ids[:, :24], samples=0)["faults"] == []


def test_H18_files_are_cut_to_the_sources_window(make_source, convert_naive, letters, tmp_path, caplog):
    source, _ = make_source("Mistral", sliding_window=24)
    letters.save_pretrained(source)
    (tmp_path / "text.txt").write_text("The river runs past the mill. " * 40)
    out = convert_naive(source)
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.calibration"):
        report = verify(source, out, text=tmp_path / "text.txt", length=64, samples=0)
    assert report["faults"] == []
    # As many windows as hold the tokens asked for.
    assert report["text"] == [{"name": "text.txt", "tokens": 3 * 24}]
    assert "cut to the sliding window of source, 24 tokens" in caplog.text


def test_report_is_printed_before_a_file_that_cannot_be_written(with_tokenizer, tmp_path, capsys):
    source, out, texts = with_tokenizer
    arguments = ["--text", str(texts[0]), "--length", "64", "--json", str(tmp_path / "nowhere" / "report.json")]
    assert cli.main(["verify", str(source), str(out), "--samples", "0", *arguments]) == 1
    assert cli.main(["compare", str(source), str(out), *arguments]) == 1
    printed = capsys.readouterr()
    assert "3 keys and values of the full layer" in printed.out
    assert "same token" in printed.out
    assert printed.err.count("nowhere") == 2


def test_compare_warns_of_text_inside_the_budget(converted, token_ids, caplog):
    source, _, out = converted
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.texts"):
        compare(source, out, text=token_ids)
        assert caplog.text == ""
        compare(source, out, text=token_ids[:, :16])
    assert "Nothing is left out in text for out of 16 tokens, since a query reads 16" in caplog.text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ([], "`text` must name at least one text file, got none"),
        (torch.full((1, 20), 5000), r"`text` must hold token ids of the source \(0 to 96\)"),
        (torch.full((1, 1), 5), "`text` must have a token to predict after another, got 1 of token ids"),
    ],
    ids=["none", "other-ids", "one-token"],
)
def test_text_that_cannot_be_measured_on_is_named(converted, text, match):
    source, _, out = converted
    with pytest.raises(ValueError, match=match):
        compare(source, out, text=text)
