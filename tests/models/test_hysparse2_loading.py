"""Saving and loading a second generation model, with the package and without it, and its parameters by name."""

import json

import pytest
import torch
import transformers
from fresh_process import run_isolated
from models.test_loading import save_tokenizer
from models.tiny import draw_ids
from models.tiny2 import MODELS, SWITCHES, over_models, tiny_config, tiny_model
from safetensors.torch import load_file, save_file

import import_rules
from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, HySparse2Model


IDS = draw_ids(2, 30)

WITHOUT_THE_PACKAGE = """
folder, again = argument["folder"], argument["again"]
ids = torch.tensor(argument["ids"])
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    torch.save({"logits": model(ids).logits, "states": base(ids).last_hidden_state}, argument["results"])
tokens = model.generate(ids[:1, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
words = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("one two")["input_ids"]
model.save_pretrained(again)
print(json.dumps({
    "tokens": tokens[0].tolist(),
    "words": words,
    "modules": sorted({type(part).__module__.split(".")[0] for part in (config, model, base)}),
    "loaded": sorted({"hysparse_hf", "triton"} & set(sys.modules)),
}))
"""


@over_models(("default", "yoco_baseline"))
def test_a_checkpoint_runs_without_the_package_and_saves_its_code_again_D03_E06_E09_E10(tmp_path, switch):
    model = tiny_model(**MODELS[switch])
    model.save_pretrained(tmp_path / "first")
    save_tokenizer(tmp_path / "first")
    with torch.no_grad():
        expected = {"logits": model(IDS).logits, "states": model.model(IDS).last_hidden_state}
    tokens = model.generate(IDS[:1, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
    for number, (folder, again) in enumerate([("first", "second"), ("second", "third")]):
        results = tmp_path / f"results{number}.pt"
        report = run_isolated(
            WITHOUT_THE_PACKAGE,
            tmp_path / f"modules{number}",
            folder=str(tmp_path / folder),
            again=str(tmp_path / again),
            ids=IDS.tolist(),
            results=str(results),
        )
        assert report == {
            "tokens": tokens[0].tolist(),
            "words": [2, 3],
            "modules": ["transformers_modules"],
            "loaded": [],
        }
        save_tokenizer(tmp_path / again)
        seen = torch.load(results)
        assert all(torch.equal(seen[name], expected[name]) for name in expected)
    files = {path.name: path.read_text() for path in (tmp_path / "first").glob("*.py")}
    assert files == {path.name: path.read_text() for path in (tmp_path / "third").glob("*.py")}


def test_the_files_shipped_are_the_model_code_E06_E07(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    wanted = {path.name: path.read_text() for path in import_rules.modeling_files() if path.stem != "__init__"}
    assert {path.name: path.read_text() for path in tmp_path.glob("*.py")} == wanted
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_hysparse2.HySparse2Config",
        "AutoModel": "modeling_hysparse2.HySparse2Model",
        "AutoModelForCausalLM": "modeling_hysparse2.HySparse2ForCausalLM",
    }


def test_the_installed_package_wins_over_the_code_in_the_folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    loaded = [
        getattr(transformers, name).from_pretrained(tmp_path, trust_remote_code=True)
        for name in ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
    ]
    assert [type(part) for part in loaded] == [HySparse2Config, HySparse2ForCausalLM, HySparse2Model]


class TestStateDict:
    @over_models(fast=("default", "residual", "self_output", "yoco_baseline"))
    def test_loads_completely_and_unchanged_B07_E01(self, tmp_path, switch):
        model = tiny_model(**MODELS[switch])
        model.save_pretrained(tmp_path)
        loaded, info = HySparse2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert {name: list(info[f"{name}_keys"]) for name in ("missing", "unexpected", "mismatched")} == {
            "missing": [],
            "unexpected": [],
            "mismatched": [],
        }
        found = loaded.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())

    def test_sparse_layers_have_no_keys_and_values_B07(self):
        names = tiny_model().state_dict()
        assert {int(name.split(".")[2]) for name in names if ".k_proj" in name or ".v_proj" in name} == {0, 1, 2, 3}

    def test_one_gate_and_one_sink_per_window_and_sparse_layer(self):
        names = [name for name in tiny_model().state_dict() if "self_attn.gate_" in name or "sink_" in name]
        layers = {(0, "local"), (2, "local"), (4, "global"), (5, "global")}
        assert {(int(name.split(".")[2]), name.split("_proj")[0].split("_")[-1]) for name in names} == layers
        assert len(names) == 3 * len(layers)

    @pytest.mark.parametrize(
        ("switch", "norms"),
        [
            ("default", []),
            ("residual", ["model.layers.3.self_attn.bridge_norm.weight"]),
            ("own_kv", [f"model.layers.{layer}.self_attn.bridge_norm.weight" for layer in (3, 4, 5)]),
            ("self_output", ["model.bridge_norm.weight"]),
        ],
    )
    def test_who_has_a_norm_of_the_bridge(self, switch, norms):
        assert sorted(name for name in tiny_model(**MODELS[switch]).state_dict() if "bridge_norm" in name) == norms


@pytest.mark.parametrize("switch", ["default", "residual", "self_output", "two_bridges"])
def test_every_parameter_missing_in_a_file_is_initialised_E01(tmp_path, nan_filled_empty, switch):
    tiny_model(**MODELS[switch]).save_pretrained(tmp_path)
    kept = {name: part for name, part in load_file(tmp_path / "model.safetensors").items() if "embed" in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name, parameter in HySparse2ForCausalLM.from_pretrained(tmp_path).named_parameters():
        if "self_attn.gate_" in name or "sink_" in name:
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "embed_tokens" not in name:
            assert 0.2 < parameter.std() < 0.4, name


class TestClasses:
    def test_head_checkpoint_loads_as_base_model_E05(self, tmp_path):
        model = tiny_model(**SWITCHES["self_output"])
        model.save_pretrained(tmp_path)
        base, info = HySparse2Model.from_pretrained(tmp_path, output_loading_info=True)
        assert list(info["missing_keys"]) == []
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)

    def test_no_split_names_a_class_that_exists_F08(self):
        names = {type(module).__name__ for module in tiny_model().modules()}
        assert HySparse2ForCausalLM._no_split_modules == ["HySparse2DecoderLayer"]
        assert "HySparse2DecoderLayer" in names

    def test_generate_is_mixed_in_E11(self):
        order = [parent.__name__ for parent in HySparse2ForCausalLM.__mro__]
        assert order.index("PreTrainedModel") < order.index("GenerationMixin")

    def test_config_types_of_the_classes(self):
        assert HySparse2ForCausalLM.config_class is HySparse2Config
        assert type(HySparse2ForCausalLM(tiny_config()).model) is HySparse2Model
