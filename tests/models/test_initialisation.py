"""What building and loading put into parameters and buffers, and what they leave as it is."""

import pytest
import torch
import transformers
from models import tiny, tiny2
from models.generations import case
from models.tiny import draw_ids, tiny_config, tiny_model
from safetensors.torch import load_file, save_file

from hysparse_hf import HySparseForCausalLM


IDS = draw_ids(2, 40)


class TestInitialisation:
    @pytest.mark.parametrize(
        ("generation", "switch"),
        [case(tiny, name) for name in ("default", "window_layers", "headwise_full_gate", "wide_values")]
        + [case(tiny2, name) for name in ("default", "residual", "self_output", "two_bridges")],
    )
    def test_every_parameter_missing_in_a_file_is_initialised_E01(
        self, generation, switch, tmp_path, nan_filled_empty
    ):
        generation.tiny_model(**generation.MODELS[switch]).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "embed_tokens" in name}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        for name, parameter in model.named_parameters():
            if "self_attn.gate_" in name or "sink_" in name or name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif "norm" in name:
                assert (parameter == 1).all(), name
            elif "embed_tokens" not in name:
                assert 0.2 < parameter.std() < 0.4, name
                assert abs(parameter.mean()) < 0.05, name

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 500.0},
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.1] * 12,
                "long_factor": [3.3] * 12,
                "original_max_position_embeddings": 64,
            },
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_every_buffer_loaded_equals_the_built_one(self, tmp_path, nan_filled_empty, rope):
        switches = {"rope_parameters": {"full": rope, "sparse": {"rope_theta": 77.0}}}
        model = tiny_model(**switches)
        model.save_pretrained(tmp_path)
        loaded = HySparseForCausalLM.from_pretrained(tmp_path)
        built, found = dict(model.named_buffers()), dict(loaded.named_buffers())
        assert built.keys() == found.keys()
        assert built
        for name, buffer in built.items():
            assert torch.equal(found[name], buffer), name
        assert torch.equal(loaded(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)

    @pytest.mark.parametrize(
        ("switches", "count"),
        [
            pytest.param({}, 4 * 2 * 3, id="default"),
            pytest.param({"attention_sink": False}, 4 * 2 * 2, id="no-sinks"),
            pytest.param({"full_layer_gate": True}, 4 * 2 * 3 + 2 * 2, id="full-layer-gate"),
        ],
    )
    def test_building_initialises_gates_and_sinks_to_zero(self, nan_filled_empty, switches, count):
        model = HySparseForCausalLM(tiny_config(**switches))
        named = {n: p for n, p in model.named_parameters() if "self_attn.gate_" in n or "sink_" in n}
        assert len(named) == count
        assert [name for name, parameter in named.items() if (parameter != 0).any()] == []

    @pytest.mark.parametrize("missing", ["self_attn.sink_local", "self_attn.gate_local_proj.bias"])
    def test_a_missing_parameter_resets_no_other_of_its_module_E01(self, tmp_path, missing):
        model = tiny_model()
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(missing)}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found = HySparseForCausalLM.from_pretrained(tmp_path).state_dict()
        kept = {name for name, tensor in model.state_dict().items() if torch.equal(found[name], tensor)}
        assert found.keys() - kept == {name for name in found if name.endswith(missing)}
        assert all((found[name] == 0).all() for name in found.keys() - kept)
