"""What is saved and loaded with the package installed: classes, names and completeness of the state dict, dtypes."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from models import tiny, tiny2
from models.generations import both_generations, over_settings
from models.tiny import SWITCHES, draw_ids, tiny_model
from safetensors.torch import load_file

from hysparse_hf import (
    HySparse2Config,
    HySparse2ForCausalLM,
    HySparse2Model,
    HySparseConfig,
    HySparseForCausalLM,
    HySparseForSequenceClassification,
    HySparseModel,
)


IDS = draw_ids(2, 40)
CLASSES = {
    tiny: (HySparseConfig, HySparseForCausalLM, HySparseModel),
    tiny2: (HySparse2Config, HySparse2ForCausalLM, HySparse2Model),
}


class TestInstalledPackage:
    @pytest.fixture
    def folder(self, tmp_path):
        tiny_model().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    @pytest.mark.parametrize("trust", [True, False], ids=["trusting", "not-trusting"])
    @both_generations
    def test_wins_over_the_code_in_the_folder(self, generation, tmp_path, trust):
        generation.tiny_model().save_pretrained(tmp_path)
        loaded = [
            getattr(transformers, name).from_pretrained(tmp_path, trust_remote_code=trust)
            for name in ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
        ]
        assert tuple(map(type, loaded)) == CLASSES[generation]

    def test_registering_twice_loads_the_same_class(self, folder):
        from hysparse_hf import register

        register()
        register()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is HySparseForCausalLM

    def test_saving_drops_references_to_another_repository_E09(self, folder, tmp_path):
        model = HySparseForCausalLM.from_pretrained(folder)
        prefixed = {name: f"org/repo--{target}" for name, target in model.config.auto_map.items()}
        model.config.auto_map = {**prefixed, "AutoModelForTokenClassification": "other.Thing"}
        model.save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]
        assert [target for target in written.values() if "--" in target] == []
        assert written["AutoModelForTokenClassification"] == "other.Thing"


# Per switch setting, parts of parameter names that the specification leaves without a gradient.
WITHOUT_GRADIENT = {"dense": ("gate_", "sink_")}


class TestStateDict:
    @over_settings(fast=("default", "residual", "self_output", "yoco_baseline"))
    def test_loads_completely_and_unchanged_B07_E01(self, generation, switch, tmp_path):
        model = generation.tiny_model(**generation.MODELS[switch])
        model.save_pretrained(tmp_path)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert {name: list(info[f"{name}_keys"]) for name in ("missing", "unexpected", "mismatched")} == {
            "missing": [],
            "unexpected": [],
            "mismatched": [],
        }
        found = loaded.state_dict()
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())

    @over_settings(fast=tiny2.SWITCHES)
    def test_every_parameter_gets_a_gradient_B07(self, generation, switch):
        model = generation.tiny_model(**generation.MODELS[switch]).train()
        model(IDS, labels=IDS).loss.backward()
        unused = {
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is None or not (parameter.grad != 0).any()
        }
        allowed = WITHOUT_GRADIENT.get(switch, ())
        assert {name for name in unused if not any(f"self_attn.{part}" in name for part in allowed)} == set()

    @pytest.mark.parametrize("switches", ["no_window", "shared_window", "merged_shared"])
    def test_layers_that_only_read_have_no_keys_and_values_B07(self, switches):
        names = tiny_model(**SWITCHES[switches]).state_dict()
        own = {int(name.split(".")[2]) for name in names if ".k_proj" in name or ".v_proj" in name}
        assert own == {0, 3}

    def test_sparse_layers_have_no_keys_and_values_B07(self):
        names = tiny2.tiny_model().state_dict()
        assert {int(name.split(".")[2]) for name in names if ".k_proj" in name or ".v_proj" in name} == {0, 1, 2, 3}

    def test_one_gate_and_one_sink_per_window_and_sparse_layer(self):
        names = [name for name in tiny2.tiny_model().state_dict() if "self_attn.gate_" in name or "sink_" in name]
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
        names = tiny2.tiny_model(**tiny2.MODELS[switch]).state_dict()
        assert sorted(name for name in names if "bridge_norm" in name) == norms

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @both_generations
    def test_no_undeclared_storage_is_shared_F11(self, generation, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        places: dict[int, list[str]] = {}
        for name, tensor in model.state_dict().items():
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        shared = [sorted(names) for names in places.values() if len(names) > 1]
        assert shared == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @both_generations
    def test_tied_and_untied_heads_survive_E04(self, generation, tmp_path, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        model.save_pretrained(tmp_path)
        assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        same = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert same is tied
        assert torch.equal(loaded(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


BASE, CAUSAL = transformers.AutoModel, transformers.AutoModelForCausalLM
EVERY_CLASS = pytest.mark.parametrize(
    ("generation", "auto", "model_class"),
    [
        pytest.param(tiny, BASE, HySparseModel, id="T1-base"),
        pytest.param(tiny, CAUSAL, HySparseForCausalLM, id="T1-causal"),
        pytest.param(
            tiny,
            transformers.AutoModelForSequenceClassification,
            HySparseForSequenceClassification,
            id="T1-classification",
        ),
        pytest.param(tiny2, BASE, HySparse2Model, id="T2-base"),
        pytest.param(tiny2, CAUSAL, HySparse2ForCausalLM, id="T2-causal"),
    ],
)


class TestClasses:
    @over_settings(("default",), ("self_output",), fast=("self_output",))
    def test_head_checkpoint_loads_as_base_model_E05(self, generation, switch, tmp_path):
        model = generation.tiny_model(**generation.MODELS[switch])
        model.save_pretrained(tmp_path)
        base, info = CLASSES[generation][2].from_pretrained(tmp_path, output_loading_info=True)
        assert list(info["missing_keys"]) == []
        states = model.model(IDS, use_cache=False).last_hidden_state
        assert torch.equal(base(IDS, use_cache=False).last_hidden_state, states)

    def test_base_checkpoint_loads_under_a_head_E05(self, tmp_path):
        model = tiny_model(tie_word_embeddings=True)
        model.model.save_pretrained(tmp_path)
        loaded = HySparseForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)

    @EVERY_CLASS
    def test_every_class_runs_post_init_E05(self, generation, auto, model_class):
        assert isinstance(model_class(generation.tiny_config()).all_tied_weights_keys, dict)

    @EVERY_CLASS
    def test_every_auto_class_loads_its_own_E05(self, generation, auto, model_class, tmp_path):
        model_class(generation.tiny_config()).save_pretrained(tmp_path)
        model, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is model_class
        assert {kind: list(info[f"{kind}_keys"]) for kind in ("missing", "unexpected")} == {
            "missing": [],
            "unexpected": [],
        }

    @both_generations
    def test_generate_is_mixed_in_behind_the_model_E11(self, generation):
        model_class = CLASSES[generation][1]
        order = [parent.__name__ for parent in model_class.__mro__]
        assert order.index("PreTrainedModel") < order.index("GenerationMixin")
        assert hasattr(model_class, "generate")

    @EVERY_CLASS
    @pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
    def test_no_split_names_a_class_that_exists_F08(self, generation, auto, model_class, experts):
        config = generation.tiny_config(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=24)
        names = {type(module).__name__ for module in model_class(config).modules()}
        assert set(model_class._no_split_modules) <= names


@both_generations
class TestDtype:
    @pytest.fixture
    def folder(self, generation, tmp_path):
        generation.tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
        return Path(tmp_path)

    @pytest.mark.parametrize(
        ("given", "dtype"),
        [
            pytest.param({}, torch.bfloat16, id="default"),
            pytest.param({"dtype": "auto"}, torch.bfloat16, id="auto"),
            pytest.param({"torch_dtype": "auto"}, torch.bfloat16, id="older-spelling-auto"),
            pytest.param({"dtype": torch.float16}, torch.float16, id="float16"),
            pytest.param({"torch_dtype": torch.float16}, torch.float16, id="older-spelling-float16"),
            pytest.param({"dtype": torch.float32}, torch.float32, id="float32"),
        ],
    )
    def test_parameters_have_the_one_asked_for_E16(self, generation, folder, given, dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.config.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_rotary_frequencies_stay_float32_E16(self, generation, folder, dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        buffers = dict(model.named_buffers())
        assert buffers
        assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}
        for name, buffer in generation.tiny_model().named_buffers():
            assert torch.equal(buffers[name], buffer)
