"""The closed-form sinks: what they recover, what they improve, and the streaming pass that they come from."""

import json
import math
import weakref

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.calibration import calibration_for, sample_text
from hysparse_hf.conversion.damage import DamagePass
from hysparse_hf.conversion.faults import sha256_of_tensor
from hysparse_hf.conversion.fit import FittingPass, naive_value
from hysparse_hf.conversion.job import Job, Options
from hysparse_hf.conversion.sinks import HeadSums, fit_local_sink
from hysparse_hf.conversion.source import open_source


SETTINGS = {"budget": 16, "block_size": 8, "window": 12}


def naive(**changes):
    options = {
        "ratio": "1:3",
        "plan": None,
        "max_sparse_run": None,
        "keep_kv": False,
        "gates": (0.05, 0.95),
        "gate_granularity": "headwise",
        "init": "naive",
    }
    return Options(**(options | SETTINGS | {"dtype": None} | changes))


def calibration_ids(windows=4, length=64, seed=2):
    return torch.randint(3, 97, (windows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_streaming_pass_is_the_teacher(make_source, family):
    source, model = make_source(family, attention_bias=True)
    job = Job(open_source(source), naive())
    ids = calibration_ids()
    fitting = FittingPass(job.config, job.mapped, tuple(ids), refit=False)
    fitting.run()
    expected = model(ids, output_hidden_states=True).hidden_states[-1]
    final = model.model.norm(torch.cat(fitting.states))
    assert (final - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("make_pass", [FittingPass, DamagePass])
def test_passes_read_each_tensor_once_and_hold_two_layers(make_source, make_pass):
    """When a layer is read, all but the one before it are gone."""
    source, _ = make_source()
    job = Job(open_source(source), naive())
    alive, order = [], []

    def read(key):
        tensor = job.mapped(key).clone()
        if key.startswith("model.layers."):
            index = int(key.split(".")[2])
            assert all(reference() is None for other, reference in alive if other < index - 1), key
            alive.append((index, weakref.ref(tensor)))
        order.append(key)
        return tensor

    make_pass(job.config, read, tuple(calibration_ids()), refit=False).run()
    layers = [int(key.split(".")[2]) for key in order if key.startswith("model.layers.")]
    assert layers == sorted(layers)
    # The head shares no weight with the embedding here; the fit needs neither norm nor head.
    assert len(order) == len(set(order)) == len(job.entry_of) - 2 * (make_pass is FittingPass)


def test_fit_of_a_model_is_that_of_its_own_operations(make_source):
    """The sink of a layer from the streaming pass against one computed from the source's own projections."""
    from hysparse_hf.modeling.attention_hysparse import sliding_window_attention

    source, model = make_source()
    job = Job(open_source(source), naive())
    ids = calibration_ids(windows=1)
    fits = FittingPass(job.config, job.mapped, tuple(ids), refit=False).run()
    assert sorted(fits) == [1, 2, 3]
    caught = {}
    attention = model.model.layers[2].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).register_forward_hook(
            lambda module, inputs, output, name=name: caught.update({name: output.unflatten(-1, (-1, 24))})
        )
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: caught.update(dense=inputs[0]))
    model(ids)
    query, key, value = (caught[name].transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj"))
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.model.rotary_emb(query, torch.arange(64)[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    local, lse = sliding_window_attention(query, key, value, window=12, return_lse=True)
    dense = caught["dense"].unflatten(-1, (4, 24))[0]
    expected = fit_local_sink(HeadSums.of(dense, local[0].transpose(0, 1), lse[0], skip=12))[0]
    assert torch.allclose(fits[2].values.sinks[1], expected, atol=1e-4)


def test_fitted_sinks_beat_none_on_other_text(make_source, tmp_path):
    """Distance of the sparse model's logits from the source's, on tokens that were not fitted on."""
    source, model = make_source()
    ids = calibration_ids(seed=9)
    distance = {}
    for init in ("fitted", "naive"):
        options = {"init": init, "plan": "regular", "calibrate": calibration_ids(windows=32)}
        record = convert(source, tmp_path / init, **options, **SETTINGS)
        student = HySparseForCausalLM.from_pretrained(tmp_path / init)
        if init == "naive":
            # The comparison is with a window without sinks, not with a sink of 0.
            with torch.no_grad():
                for name, parameter in student.named_parameters():
                    if "sink" in name:
                        parameter.fill_(-math.inf)
        else:
            fit = record["fit"]
            assert all(layer["error_with"] < layer["error_without"] for layer in fit.values())
            assert sorted(fit) == ["1", "2", "3"]
        distance[init] = (student(ids).logits - model(ids).logits)[:, 12:].square().mean().sqrt().item()
    assert distance["fitted"] < distance["naive"], distance


@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "none"])
@pytest.mark.parametrize("windows", [4, 12], ids=["gates", "gates and o_proj"])
def test_written_layer_makes_the_error_that_the_fit_says(make_source, tmp_path, granularity, windows):
    """Layer 1 follows a full layer, so its input is the teacher's, and its output shows what was written."""
    source, model = make_source(attention_bias=True)
    ids = calibration_ids(windows=windows)
    record = convert(source, tmp_path / "out", plan="regular", gate_granularity=granularity, calibrate=ids, **SETTINGS)
    student = HySparseForCausalLM.from_pretrained(tmp_path / "out")
    outputs = []
    for module in (model.model.layers[1].self_attn, student.model.layers[1].self_attn):
        module.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    model(ids)
    student(ids)
    bias = model.model.layers[1].self_attn.o_proj.bias
    error = (outputs[1] - outputs[0]).norm() / (outputs[0] - bias).norm()
    figures = record["fit"]["1"]
    steps = ["error_constant"] + ["error_gates"] * (granularity != "none") + ["error_refit"] * (windows == 12)
    assert [name for name in figures if name.startswith("error_") and "with" not in name] == steps
    assert [figures[name] for name in steps] == sorted((figures[name] for name in steps), reverse=True)
    assert error.item() == pytest.approx(figures[steps[-1]], abs=2e-4)


def test_fitted_global_gates_are_open_far_enough_to_learn(make_source, tmp_path):
    """Layer 1 follows a full layer, so its input is the teacher's: no head's gate is below the bound in the mean."""
    source, _ = make_source()
    ids = calibration_ids(windows=8)
    convert(source, tmp_path / "out", plan="regular", calibrate=ids, **SETTINGS)
    student = HySparseForCausalLM.from_pretrained(tmp_path / "out")
    logits = []
    gate = student.model.layers[1].self_attn.gate_global_proj
    gate.register_forward_hook(lambda module, inputs, output: logits.append(output))
    student(ids)
    means = torch.sigmoid(logits[0]).unflatten(-1, (4, 24)).mean((0, 1, 3))
    assert (means > 0.05 - 1e-4).all(), means
    assert means.min() < 0.05 + 1e-3, "no gate is held by the bound"


def test_output_projections_keep_the_source_values_under_too_little_text(make_source, tmp_path, caplog):
    """Only the headroom doubles them, without rounding; the log says what text it takes."""
    source, model = make_source()
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.job"):
        record = convert(source, tmp_path / "out", plan="regular", calibrate=calibration_ids(), **SETTINGS)
    assert "takes 640 tokens" in caplog.text
    assert "there are 256" in caplog.text
    student = HySparseForCausalLM.from_pretrained(tmp_path / "out")
    for index in (1, 2, 3):
        mapped, fitted = (net.model.layers[index].self_attn.o_proj.weight for net in (model, student))
        assert torch.equal(fitted, 2 * mapped)
    assert sorted(record["fitted_tensors"]) == [f"model.layers.{i}.self_attn.o_proj.weight" for i in (1, 2, 3)]
    hashes = record["fitted_tensors"]["model.layers.2.self_attn.o_proj.weight"]
    assert hashes["sha256"] == sha256_of_tensor(fitted_weight(student, 2))
    assert hashes["mapped_sha256"] == sha256_of_tensor(fitted_weight(model, 2))


def fitted_weight(model, layer):
    return model.model.layers[layer].self_attn.o_proj.weight


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_gates_start_constant_at_what_was_asked(make_source, convert_naive, granularity):
    source, _ = make_source()
    out = convert_naive(source, gates=(0.1, 0.8), gate_granularity=granularity)
    attention = HySparseForCausalLM.from_pretrained(out).model.layers[1].self_attn
    for branch, opening in (("global", 0.1), ("local", 0.8)):
        gate = getattr(attention, f"gate_{branch}_proj")
        assert not gate.weight.any()
        assert torch.allclose(torch.sigmoid(gate.bias), torch.tensor(opening))


def test_naive_sinks_are_zero():
    assert not naive_value("sink_local", (3,), (0.05, 0.95)).any()


def test_calibration_tensor_is_recorded_by_hash(make_source, tmp_path):
    source, _ = make_source()
    records = [
        convert(source, tmp_path / str(seed), calibrate=calibration_ids(seed=seed), **SETTINGS)["calibration"]
        for seed in (0, 1)
    ]
    assert records[0]["kind"] == "tokens"
    assert records[0]["tokens"] == 256
    assert records[0]["tokens_sha256"] != records[1]["tokens_sha256"]


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.zeros(0, 64, dtype=torch.long), r"token ids \(windows, length\), got \(0, 64\)"),
        (torch.full((2, 64), 97), r"ids of the source \(0 to 96\), got 97 to 97"),
        (torch.full((2, 64), -1), r"ids of the source \(0 to 96\), got -1 to -1"),
    ],
    ids=["empty", "beyond", "negative"],
)
def test_ids_that_the_source_does_not_have_are_refused(make_source, tmp_path, ids, match):
    source, _ = make_source()
    with pytest.raises(ValueError, match=match):
        convert(source, tmp_path / "out", calibrate=ids, **SETTINGS)


def test_a_window_longer_than_any_text_is_refused_before_sampling(make_source, monkeypatch):
    source, _ = make_source(max_position_embeddings=30)
    monkeypatch.setattr("hysparse_hf.conversion.calibration.sample_text", None)
    with pytest.raises(ValueError, match=r"longer than `window` \(30 tokens\), got 30"):
        calibration_for(open_source(source), None, tokens=64, length=64, window=30)


def test_without_text_the_source_samples_its_own_and_says_so(make_source, tmp_path, caplog):
    source, _ = make_source(max_position_embeddings=30, num_hidden_layers=3)
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.calibration"):
        record, again = (
            convert(source, tmp_path / name, calibration_tokens=240, **SETTINGS) for name in ("out", "again")
        )
    assert "--calibrate FILE" in caplog.text
    assert record["calibration"]["kind"] == "sampled from the source"
    assert record["calibration"]["tokens"] == 8 * 30
    assert record == again


@pytest.fixture
def source_with_tokenizer(make_source):
    """A source whose tokenizer knows 90 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    source, _ = make_source()
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 90)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(source)
    return source


def test_calibration_files_are_read_and_recorded(source_with_tokenizer, tmp_path):
    files = []
    for number in (1, 2):
        files.append(tmp_path / f"text{number}.txt")
        files[-1].write_text("\n".join(f"w{(i * 7 + number) % 89 + 1} w{i % 89 + 1}" for i in range(800)))
    options = {"calibration_tokens": 192, "calibration_length": 48}
    record = convert(source_with_tokenizer, tmp_path / "out", calibrate=files, **options, **SETTINGS)["calibration"]
    assert [file["name"] for file in record["files"]] == ["text1.txt", "text2.txt"]
    assert (record["windows"], record["tokens"]) == (4, 192)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert str(tmp_path) not in json.dumps(record)


def test_text_shorter_than_the_window_is_refused(source_with_tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    with pytest.raises(ValueError, match=r"longer than `window` \(12 tokens\), got 3"):
        convert(source_with_tokenizer, tmp_path / "out", calibrate=tmp_path / "short.txt", **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_files_need_a_tokenizer(make_source, tmp_path):
    source, _ = make_source()
    (tmp_path / "text.txt").write_text("words " * 100)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        calibration_for(open_source(source), [tmp_path / "text.txt"], tokens=64, length=64, window=12)


def test_plan_without_sparse_layers_needs_no_text(make_source, tmp_path):
    source, model = make_source()
    record = convert(source, tmp_path / "out", ratio="1:0", **SETTINGS)
    assert record["calibration"] is None
    assert record["plan"] == ["full"] * 5
    ids = calibration_ids()
    expected = model(ids).logits
    difference = HySparseForCausalLM.from_pretrained(tmp_path / "out")(ids).logits - expected
    assert difference.abs().max() < 1e-5 * expected.abs().max()


def test_a_text_short_of_the_tokens_asked_for_is_read_to_its_end(source_with_tokenizer, tmp_path):
    """Windows follow one another; what is left over is a window too where it is no scrap."""
    words = [f"w{i % 89 + 1}" for i in range(170)]
    (tmp_path / "text.txt").write_text(" ".join(words))
    opened = open_source(source_with_tokenizer)

    def windows_of(tokens, length=48):
        found = calibration_for(opened, [tmp_path / "text.txt"], tokens=tokens, length=length, window=12).windows
        return [[f"w{token}" for token in window.tolist()] for window in found]

    assert windows_of(480) == [words[:48], words[48:96], words[96:144], words[144:]]
    # Fewer are wanted than there are: at even distances, the last one at the end.
    assert windows_of(96) == [words[:48], words[-48:]]
    assert windows_of(480, length=80) == [words[:80], words[80:160]]


def test_sampled_text_does_not_depend_on_the_sources_generation_settings(make_source):
    source, _ = make_source(num_hidden_layers=2)

    def sampled(**settings):
        (source / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2} | settings))
        return sample_text(open_source(source), 2, 30).record["tokens_sha256"]

    plain = sampled()
    for settings in ({"repetition_penalty": 1.3}, {"max_time": 1e-9}, {"return_dict_in_generate": True}):
        assert sampled(**settings) == plain


def test_ids_of_any_integer_dtype_are_read(make_source, tmp_path):
    source, _ = make_source()
    records = [
        convert(source, tmp_path / str(dtype), plan="0,3", calibrate=calibration_ids().to(dtype), **SETTINGS)
        for dtype in (torch.int64, torch.uint8)
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize("asked", [{"calibration_tokens": 0}, {"calibration_length": 1}, {"calibration_tokens": 9.5}])
def test_no_text_is_refused(make_source, tmp_path, asked):
    source, _ = make_source()
    with pytest.raises(ValueError, match="`calibration_length` must be at least 2 and `calibration_tokens`"):
        convert(source, tmp_path / "out", **asked, **SETTINGS)


def test_record_says_what_was_asked_for(make_source, tmp_path):
    source, _ = make_source()
    record = convert(source, tmp_path / "out", calibrate=calibration_ids(), **SETTINGS)
    assert record["calibration"]["asked"] == {"tokens": 8192, "length": 2048}
    assert record["max_sparse_run"] == 5
    assert convert(source, tmp_path / "naive", init="naive", **SETTINGS)["max_sparse_run"] is None


def test_text_that_is_read_whole_is_warned_about(make_source, tmp_path, caplog):
    source, _ = make_source()
    with caplog.at_level("WARNING", logger="hysparse_hf.conversion.job"):
        convert(source, tmp_path / "out", plan="0,3", calibrate=calibration_ids(windows=10), **SETTINGS)
        assert caplog.text == ""
        options = SETTINGS | {"budget": 64}
        convert(source, tmp_path / "whole", plan="0,3", calibrate=calibration_ids(windows=10), **options)
    assert "reads whole, windows of 64 tokens where a query reads 64" in caplog.text


@pytest.mark.parametrize("options", [{"plan": "0,3"}, {"keep_kv": True}, {"architecture": "hysparse2"}], ids=str)
def test_weights_that_are_not_finite_are_refused_where_they_show(make_source, tmp_path, edit, options):
    source, _ = make_source()
    edit.tensors(
        source / "model.safetensors", lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].fill_(float("nan"))
    )
    with pytest.raises(ValueError, match="finite numbers on the calibration text, got NaN or infinity after layer 2"):
        convert(source, tmp_path / "out", calibrate=calibration_ids(), **SETTINGS, **options)
    assert not (tmp_path / "out").exists()
