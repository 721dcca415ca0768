"""Conversion to the second generation: both halves, dropped keys and values, and the source under the dense switch."""

import hashlib
import json

import pytest
import torch
from fresh_process import run_isolated
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import import_rules
from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, cli, convert
from hysparse_hf.conversion.faults import checkpoint_map, dense_difference, module_faults, same_bits, weight_faults
from hysparse_hf.conversion.halves import half_plans
from hysparse_hf.conversion.ladder import LADDER, load_rung
from hysparse_hf.conversion.sinks import HeadSums, fit_local_sink
from hysparse_hf.conversion.source import FolderSource


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ROTARY = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
SOURCES = {
    "llama": ("Llama", {}),
    "llama-biases-tied-rope": (
        "Llama",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": ROTARY},
    ),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
# Layers 3 and 4 read the keys of layer 2, and layer 6 those of layer 5.
PLAN = "0,1/2,5"
KEYLESS = {3, 4, 6}


@pytest.fixture
def make_converted(make_source, convert_naive):
    """Factory: a source of seven layers and its conversion by `PLAN`: `(folder, model, out)`."""

    def make(name="llama", **options):
        family, fields = SOURCES[name]
        source, model = make_source(family, num_hidden_layers=7, **fields)
        given = {"architecture": "hysparse2", "plan": PLAN, "budget": 13}
        return source, model, convert_naive(source, **given | options)

    return make


def keys_of(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


class TestHalves:
    """Which layers are in which half, and which are full."""

    @pytest.mark.parametrize("plan", [None, "regular"])
    def test_by_default_the_larger_half_ends_with_the_layer_that_the_other_reads(self, plan):
        halves = half_plans(plan, 11, 3)
        assert halves == {
            "self_layer_plan": ["full", "window", "window", "window", "full", "full"],
            "cross_layer_plan": ["full", "sparse", "sparse", "sparse", "full"],
        }
        assert HySparse2Config(**halves).bridge_map == [5, 5]

    @pytest.mark.parametrize("plan", ["1/3,5", "1 / 3, 5", [[1], [3, 5]], ((1,), (3, 5))])
    def test_lists_name_the_full_layers_and_the_border(self, plan):
        assert half_plans(plan, 7, 3) == {
            "self_layer_plan": ["window", "full", "window"],
            "cross_layer_plan": ["full", "sparse", "full", "sparse"],
        }

    @pytest.mark.parametrize("plan", ["", "0,3", "0/3/5", "0/x", "/3", [0, 3], [[0], [None]]])
    def test_what_is_no_pair_of_lists_is_refused(self, plan):
        with pytest.raises(ValueError, match="full layers of both halves such as 0,7/15,19"):
            half_plans(plan, 7, 3)

    @pytest.mark.parametrize("plan", ["0,3/3", "4/2", "0/7", "-1/3", "0,0/3", [[], [3]], [[0], []]])
    def test_lists_out_of_order_or_range_are_refused(self, plan):
        with pytest.raises(ValueError, match=r"layers of the source \(0 to 6\) in ascending order"):
            half_plans(plan, 7, 3)

    def test_one_layer_has_no_halves(self):
        with pytest.raises(ValueError, match="at least 2 layers"):
            half_plans(None, 1, 3)


@pytest.mark.parametrize("name", SOURCES)
def test_dense_switch_equals_the_source(make_converted, token_ids, name):
    source, model, out = make_converted(name)
    scale = model(token_ids).logits.abs().max().item()
    assert scale > 1, "logits too small to compare"
    assert dense_difference(model, out, token_ids) < 1e-5 * scale
    assert module_faults(model, out, token_ids) == {}
    assert weight_faults(source, out) == []
    rung = load_rung(LADDER[0], FolderSource(source), out)
    assert isinstance(rung, HySparse2ForCausalLM)
    assert (rung(token_ids).logits - model(token_ids).logits).abs().max() < 1e-5 * scale


@pytest.mark.parametrize("name", ["llama-biases-tied-rope", "qwen3", "qwen3-moe"])
def test_inverse_gives_the_source_but_for_keys_and_values_dropped_by_name(make_converted, name):
    source, _, out = make_converted(name)
    original, converted = FolderSource(source), FolderSource(out)
    key_map = checkpoint_map(original, HySparse2Config.from_pretrained(out))
    expected = {
        key
        for key in original.tensors
        if any(f".layers.{layer}.self_attn.{part}" in key for layer in KEYLESS for part in ("k_", "v_"))
    }
    assert len(expected) == len(KEYLESS) * {"llama-biases-tied-rope": 4, "qwen3": 5, "qwen3-moe": 3}[name]
    reason = "the layer reads the keys and values of the full layer before it"
    assert key_map.dropped == dict.fromkeys(expected, reason)
    assert json.loads((out / "provenance.json").read_text())["keys"]["dropped"] == key_map.dropped
    for entry in key_map.entries:
        if entry.target is not None:
            inverted = key_map.source_tensor(entry, converted.tensor(entry.target))
            assert same_bits(inverted, original.tensor(entry.source)), entry.source
    assert keys_of(out) == {entry.target for entry in key_map.entries if entry.target} | key_map.new.keys()


def test_bridged_layers_project_with_their_own_weights_and_the_source_turns_all_kinds(make_converted, token_ids):
    _, model, out = make_converted("llama-biases-tied-rope")
    student, report = HySparse2ForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    config = student.config
    assert (config.bridge_map, config.num_key_value_heads) == ([1, 1], 2)
    assert all(config.rope_for(kind) == ROTARY for kind in ("full", "sparse", "window"))
    held = {}
    student.model.layers[1].self_attn.register_forward_pre_hook(lambda _, inputs: held.setdefault("states", inputs[0]))
    output = student(token_ids, use_cache=True)
    cache = output.cache if "cache" in output else output.past_key_values
    for layer in (2, 5):
        projection = model.model.layers[layer].self_attn.v_proj
        expected = projection(held["states"]).unflatten(-1, (2, 24)).transpose(1, 2)
        torch.testing.assert_close(cache.layers[layer].values, expected, rtol=1e-5, atol=1e-5)


def test_new_parameters_have_the_values_that_are_documented(make_converted):
    _, _, out = make_converted(gates=(0.3, 0.8), plan="0/2,5")
    converted = FolderSource(out)
    for layer, branch, opening in ((1, "local", 0.8), *((layer, "global", 0.3) for layer in KEYLESS)):
        attention = f"model.layers.{layer}.self_attn"
        assert not converted.tensor(f"{attention}.sink_{branch}").any()
        assert not converted.tensor(f"{attention}.gate_{branch}_proj.weight").any()
        gate = torch.sigmoid(converted.tensor(f"{attention}.gate_{branch}_proj.bias"))
        torch.testing.assert_close(gate, torch.full((4 * 24,), opening))
    new = {key for key in keys_of(out) if "sink" in key or "gate_global" in key or "gate_local" in key}
    assert len(new) == 3 * 4


@pytest.mark.parametrize("granularity", ["headwise", "none"])
def test_window_layers_are_fitted_as_in_the_first_generation(make_source, token_ids, tmp_path, granularity):
    source, model = make_source(num_hidden_layers=5)
    calibration = torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(2))
    options = {"budget": 13, "window": 12, "gate_granularity": granularity, "calibrate": calibration}
    record = convert(source, tmp_path / "out", architecture="hysparse2", plan="0/2", **options)
    assert list(record["fit"]) == ["1", "2", "3", "4"]
    # Gates of one half pass a branch as it is through the doubled output projection.
    hashes = record["fitted_tensors"]["model.layers.1.self_attn.o_proj.weight"]
    assert (hashes["sha256"] == hashes["mapped_sha256"]) == (granularity == "none")
    assert weight_faults(source, tmp_path / "out") == []
    scale = model(token_ids).logits.abs().max().item()
    assert dense_difference(model, tmp_path / "out", token_ids) < 1e-5 * scale
    converted = FolderSource(tmp_path / "out")
    sink = converted.tensor("model.layers.1.self_attn.sink_local")
    torch.testing.assert_close(sink, naive_sink(model, calibration, layer=1, window=12), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def naive_sink(model, calibration, layer, window):
    """The closed-form sink of a layer's window, from the attention maps of the source."""
    model.set_attn_implementation("eager")
    attention = model.model.layers[layer].self_attn
    parts, values = [], []
    attention.v_proj.register_forward_hook(lambda *call: values.append(call[2]))
    queries, keys = [], []
    attention.q_proj.register_forward_hook(lambda *call: queries.append(call[2]))
    attention.k_proj.register_forward_hook(lambda *call: keys.append(call[2]))
    for ids in calibration:
        weights = model(ids[None], output_attentions=True).attentions[layer][0]
        length = len(ids)
        value = values[-1][0].unflatten(-1, (2, 24)).transpose(0, 1).repeat_interleave(2, dim=0)
        rotated = rotated_scores(model, queries[-1], keys[-1])
        near = torch.ones(length, length).tril().bool() & ~torch.ones(length, length).tril(-window).bool()
        scores = rotated.masked_fill(~near, float("-inf"))
        lse = scores.logsumexp(-1)
        local = (scores - lse[..., None]).exp() @ value
        dense = weights @ value
        parts.append(HeadSums.of(dense.transpose(0, 1), local.transpose(0, 1), lse, skip=window))
    return fit_local_sink(HeadSums.join(parts))[0]


def rotated_scores(model, query, key):
    """Scores `(heads, length, length)` of one row, queries and keys turned by the source's own rotary module."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = (part.unflatten(-1, (-1, 24)).transpose(1, 2) for part in (query, key))
    turned = model.model.rotary_emb(query, torch.arange(query.shape[2])[None])
    query, key = apply_rotary_pos_emb(query, key, *turned)
    return (query @ key.repeat_interleave(2, dim=1).mT)[0] * 24**-0.5


def test_command_converts_and_says_what_the_halves_are(make_source, tmp_path, capsys):
    source, _ = make_source(num_hidden_layers=7)
    command = ["convert", str(source), str(tmp_path / "out"), "--architecture", "hysparse2", "--plan", PLAN]
    assert cli.main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "dropped: the layer reads the keys and values of the full layer before it" in printed
    assert not (tmp_path / "out").exists()
    assert cli.main([*command, "--init", "naive"]) == 0
    assert "full layers [0, 1, 2, 5]" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert record["options"]["architecture"] == "hysparse2"
    for name, entry in record["source"]["files"].items():
        assert entry["sha256"] == hashlib.sha256((source / name).read_bytes()).hexdigest()


def test_missing_key_is_named_although_it_would_be_dropped(make_source, convert_naive, edit):
    source, _ = make_source(num_hidden_layers=7)
    key = "model.layers.3.self_attn.k_proj.weight"
    edit.tensors(source / "model.safetensors", lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.k_proj\.weight \(48, 64\) is missing in the source"):
        convert_naive(source, architecture="hysparse2", plan=PLAN)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keep-kv"], "whose sparse layers have no keys and values"),
        (["--plan", "0,3"], "full layers of both halves"),
    ],
)
def test_wrong_option_is_explained_before_any_work(make_source, tmp_path, capsys, arguments, words):
    source, _ = make_source(num_hidden_layers=7)
    command = ["convert", str(source), str(tmp_path / "out"), "--architecture", "hysparse2", *arguments]
    assert cli.main(command) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_unknown_architecture_is_refused(make_source, tmp_path):
    source, _ = make_source()
    with pytest.raises(ValueError, match=r"`architecture` must be one of .*, got 'hysparse3'"):
        convert(source, tmp_path / "out", architecture="hysparse3")


USE = """
folder = argument["folder"]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.arange(3, 43)[None]
torch.save(model(ids).logits, argument["logits"])
print(json.dumps({
    "model_type": AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type,
    "base": type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__,
    "new_tokens": model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape[1] - 40,
}))
"""


@pytest.mark.slow
def test_E06_loads_without_the_package(make_converted, tmp_path):
    _, _, out = make_converted("qwen3-moe")
    here = AutoModelForCausalLM.from_pretrained(out)(torch.arange(3, 43)[None]).logits
    logits = tmp_path / "logits.pt"
    report = run_isolated(USE, tmp_path / "modules", folder=str(out), logits=str(logits))
    assert report == {"model_type": "hysparse2", "base": "HySparse2Model", "new_tokens": 3}
    assert torch.equal(torch.load(logits), here)


def test_E07_code_is_the_models_own(make_converted):
    _, _, out = make_converted()
    wanted = {path.name: path.read_text() for path in import_rules.modeling_files() if path.stem != "__init__"}
    assert {path.name: path.read_text() for path in out.glob("*.py")} == wanted
    fields = json.loads((out / "config.json").read_text())
    assert fields["architectures"] == ["HySparse2ForCausalLM"]
    assert fields["auto_map"]["AutoModelForCausalLM"] == "modeling_hysparse2.HySparse2ForCausalLM"
