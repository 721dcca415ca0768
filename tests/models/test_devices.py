"""Where parameters stand: dispatch hooks, layers offloaded to the CPU or the disk, and shapes nobody may ask for."""

import functools

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from models.generations import both_generations, over_settings
from models.tiny import draw_ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM


IDS = draw_ids(2, 36)
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
OTHERS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
FIRST, SECOND = ("default", "window_layers", "wide_values"), ("default", "two_bridges", "own_kv")
settings = over_settings(FIRST, SECOND, fast=SECOND)


class OneDevice(TorchDispatchMode):
    """Fails at an operation on tensors of several devices; the meta device's own operations do not all look."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        assert len(devices) <= 1, f"{function} on {devices}"
        return function(*args, **(kwargs or {}))


def places(model, **moved):
    """A device map that lists every layer: on the CPU, but for those that are moved."""
    layers = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    return {**dict.fromkeys((*layers, *OTHERS), "cpu"), **moved}


def assert_as_before(model, plain):
    with torch.no_grad():
        for kept in (0, torch.tensor([3, 20])):
            logits = [m(IDS, attention_mask=MASK, logits_to_keep=kept).logits for m in (model, plain)]
            assert torch.equal(*logits)
    asked = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **asked), plain.generate(IDS, **asked))


class TestDispatch:
    @settings
    def test_forced_hooks_change_nothing_B04(self, generation, switch):
        model = generation.tiny_model(**generation.MODELS[switch])
        model = accelerate.dispatch_model(model, places(model), force_hooks=True)
        assert_as_before(model, generation.tiny_model(**generation.MODELS[switch]))

    @both_generations
    def test_the_cache_is_passed_on_by_itself_under_both_names_B04(self, generation):
        assert {"cache", "past_key_values"} <= set(generation.tiny_model()._skip_keys_device_placement)

    @both_generations
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_some_layers_on_the_disk_B04(self, generation, tmp_path, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        moved = places(model, **{"model.layers.1": "disk", "model.layers.3": "disk"})
        model = accelerate.dispatch_model(model, moved, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
        assert model.model.layers[3].self_attn.k_proj.weight.device.type == "meta"
        assert_as_before(model, generation.tiny_model(tie_word_embeddings=tied))

    @both_generations
    def test_loaded_with_some_layers_on_the_disk_B04(self, generation, tmp_path):
        plain = generation.tiny_model()
        plain.save_pretrained(tmp_path / "saved")
        moved = places(plain, **{"model.layers.0": "disk", "model.layers.2": "disk"})
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=moved, offload_folder=tmp_path / "offload"
        )
        assert model.model.layers[2].self_attn.sink_local.device.type == "meta"
        assert_as_before(model, plain)

    @over_settings(("window_layers", "wide_values"), ("own_kv", "wide_values"), fast=("own_kv", "wide_values"))
    def test_all_parameters_offloaded_B04(self, generation, tmp_path, switch):
        for offload in (accelerate.cpu_offload, functools.partial(accelerate.disk_offload, offload_dir=tmp_path)):
            model = offload(generation.tiny_model(**generation.MODELS[switch]), execution_device=torch.device("cpu"))
            assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
            assert_as_before(model, generation.tiny_model(**generation.MODELS[switch]))

    @settings
    @pytest.mark.parametrize("mask", [None, MASK], ids=["plain", "padded"])
    @pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
    @pytest.mark.parametrize("kept", [0, 1], ids=["whole", "last"])
    def test_all_that_a_layer_reads_follows_it_B04_B05(self, generation, switch, mask, use_cache, kept):
        """Sparse layers stand apart from their full layer, and in the second generation from the bridge's source."""
        # The meta device stands for a second card.
        model = generation.tiny_model(**generation.MODELS[switch])
        for module in (*model.model.layers[2:], model.model.norm, model.lm_head):
            hook = AlignDevicesHook(execution_device="meta", skip_keys=model._skip_keys_device_placement)
            add_hook_to_module(module.to("meta"), hook)
        with OneDevice():
            logits = model(IDS, attention_mask=mask, use_cache=use_cache, logits_to_keep=kept).logits
        assert logits.device.type == "meta"
        assert logits.shape == (2, kept or 36, 61)


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@settings
def test_an_automatic_map_never_splits_a_layer_E12(generation, switch, experts):
    model = generation.tiny_model(**generation.MODELS[switch], **experts)
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)
    split = set()
    # Up to twice a layer, in steps that pass every place where a layer might be cut.
    for room in range(1000, 2 * largest, largest // 20):
        found = accelerate.infer_auto_device_map(
            model, {"cpu": room, "disk": 10**9}, no_split_module_classes=model._no_split_modules
        )
        assert set(found.values()) <= {"cpu", "disk"}
        split |= {name for name in found if name.startswith("model.layers.") and name.count(".") > 2}
    assert split == set()


@over_settings((*FIRST, "headwise_full_gate"), (*SECOND, "self_output"), fast=(*SECOND, "self_output"))
def test_building_asks_no_parameter_for_its_shape_F10(generation, switch, monkeypatch):
    """As under ZeRO-3: parameters are empty as soon as their module is built; sizes come from the configuration."""
    plain = generation.tiny_model(**generation.MODELS[switch])
    owners = {type(module) for module in plain.modules() if list(module.parameters(recurse=False))}
    builders = {base for owner in owners for base in owner.__mro__ if "__init__" in vars(base)}

    def emptied(build):
        @functools.wraps(build)
        def wrapper(self, *args, **kwargs):
            build(self, *args, **kwargs)
            for parameter in self.parameters():
                parameter.data = torch.empty(0)

        return wrapper

    for builder in builders - {torch.nn.Module, object}:
        monkeypatch.setattr(builder, "__init__", emptied(builder.__init__))
    config = generation.tiny_config(**{**generation.MODELS[switch], "pad_token_id": None})
    model = type(plain)(config).eval()
    assert {parameter.numel() for parameter in model.parameters()} == {0}
    monkeypatch.undo()
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.data = whole.data
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
