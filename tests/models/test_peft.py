"""Adapters: LoRA and its relatives, prompts, merging and reloading, wrapped linear layers, training of parts."""

import pytest
import torch
from models.generations import both_generations
from models.tiny import assert_same_logits, draw_ids, tiny_model
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from hysparse_hf import load_parts, lora_targets, save_parts, train_parts


IDS = draw_ids(2, 36)
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ALL = ("attention", "gates", "mlp")


def adapted(model, targets="all-linear", **options):
    """The model with LoRA on `targets`; the adapters, and copies of modules, are drawn so that each matters."""
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=targets, **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(0, 0.05)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return wrapped.eval()


@torch.no_grad()
def logits_of(model):
    return model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits


def adapted_names(model):
    """Last part of each adapted module's name."""
    return {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}


class TestTargets:
    @both_generations
    def test_without_targets_peft_says_what_to_give_G01(self, generation):
        with pytest.raises(ValueError, match="Please specify `target_modules`"):
            get_peft_model(generation.tiny_model(), LoraConfig())

    @pytest.mark.parametrize("switches", [{}, EXPERTS, {"full_layer_gate": True}], ids=["default", "moe", "full-gate"])
    @both_generations
    def test_documented_names_are_all_linear_layers_but_the_head_G01(self, generation, switches):
        automatic = adapted(generation.tiny_model(**switches))
        named = adapted(generation.tiny_model(**switches), lora_targets(*ALL))
        parameters = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (automatic, named)]
        assert parameters[0] == parameters[1]
        assert {"q_proj", "gate_global_proj", "gate_local_proj"} <= adapted_names(named)
        assert "lm_head" not in adapted_names(named)

    @pytest.mark.parametrize("part", ALL)
    @both_generations
    def test_a_part_is_adapted_alone_and_learns_G01(self, generation, part):
        model = adapted(generation.tiny_model(), lora_targets(part)).train()
        expected = set(lora_targets(part)) - {"gate_full_proj"}
        assert adapted_names(model) == expected
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert all(p.grad.any() for p in model.parameters() if p.requires_grad)

    @pytest.mark.parametrize("parts", [(), ("sinks",), ("attention", "gate")], ids=["none", "sinks", "unknown"])
    def test_parts_without_linear_layers_are_refused(self, parts):
        with pytest.raises(ValueError, match="`parts` must be one or more of"):
            lora_targets(*parts)

    @both_generations
    def test_fused_experts_are_adapted_as_parameters_G01(self, generation):
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        switches = {"initializer_range": 0.1, **EXPERTS}
        model = adapted(generation.tiny_model(**switches), lora_targets("attention"), target_parameters=names)
        expected = logits_of(model)
        assert (
            expected - logits_of(adapted(generation.tiny_model(**switches), lora_targets("attention")))
        ).abs().max() > 0.05
        assert_same_logits(logits_of(model.merge_and_unload()), expected)


@both_generations
class TestMerging:
    CASES = {
        "all-linear": ({}, {}),
        "dora": ({}, {"use_dora": True}),
        "untied-copies": ({}, {"modules_to_save": ["lm_head", "embed_tokens"]}),
        "tied-copies": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head", "embed_tokens"]}),
        "tied-head-copy": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
        "tied-copies-kept-tied": (
            {"tie_word_embeddings": True},
            {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        ),
    }

    @pytest.mark.parametrize(
        ("case", "dtype"),
        [("all-linear", torch.float32), *((name, torch.float64) for name in CASES)],
        ids=str,
    )
    def test_merged_saved_and_reloaded_models_equal_the_adapter_G03_G04(self, generation, tmp_path, case, dtype):
        switches, options = self.CASES[case]
        # Weights this small keep the rounding of a merged product from growing from layer to layer.
        switches = {"initializer_range": 0.1, **switches}
        model = adapted(generation.tiny_model(dtype, **switches), **options)
        expected = logits_of(model)
        assert (expected - logits_of(generation.tiny_model(dtype, **switches))).abs().max() > 0.05
        model.save_pretrained(tmp_path / "adapter")
        reloaded = PeftModel.from_pretrained(generation.tiny_model(dtype, **switches), tmp_path / "adapter").eval()
        assert torch.equal(logits_of(reloaded), expected)

        merged = model.merge_and_unload()
        assert_same_logits(logits_of(merged), expected)
        with torch.no_grad():
            last = merged(IDS, attention_mask=MASK, logits_to_keep=2).logits
        assert_same_logits(last, expected[:, -2:])
        is_tied = merged.lm_head.weight is merged.get_input_embeddings().weight
        assert merged.config.tie_word_embeddings is is_tied
        merged.save_pretrained(tmp_path / "merged")
        loaded, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=dtype, output_loading_info=True
        )
        assert torch.equal(logits_of(loaded), logits_of(merged))
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    def test_offline_save_with_a_resized_vocabulary_G08(self, generation, tmp_path, monkeypatch):
        generation.tiny_model().save_pretrained(tmp_path / "base")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("the network was asked"))

        def resized():
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            base.resize_token_embeddings(70, mean_resizing=False)
            return base

        model = adapted(resized())
        model.save_pretrained(tmp_path / "adapter")
        expected = logits_of(model)
        loaded = PeftModel.from_pretrained(resized(), tmp_path / "adapter").eval()
        assert expected.shape[-1] == 70
        # The rows that the resizing draws are in the adapter's folder too.
        assert torch.equal(logits_of(loaded), expected)


@both_generations
class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    @pytest.mark.parametrize("inputs_require", [True, False], ids=["inputs-require-grad", "as-it-is"])
    def test_adapters_get_the_gradients_of_a_plain_run_B02(self, generation, reentrant, inputs_require):
        model = adapted(generation.tiny_model(torch.float64)).train()
        steps = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if checkpointing and inputs_require:
                model.enable_input_require_grads()
            model.zero_grad()
            model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
            steps.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        for name, grad in steps[0].items():
            assert torch.equal(steps[1][name], grad), name


@both_generations
class TestPrompts:
    @pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig], ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
    def test_trains_and_generates_G05(self, generation, kind, checkpointing):
        options = {"encoder_hidden_size": 16} if kind is PromptEncoderConfig else {}
        model = generation.tiny_model().train()
        prompted = get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=5, **options))
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        prompted(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
        assert all(p.grad.any() for p in prompted.parameters() if p.requires_grad)
        prompted.eval()
        asked = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(prompted.generate(**asked), prompted.generate(**asked, use_cache=False))

    @pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
    def test_prefixes_are_refused_G05(self, generation, checkpointing):
        model = generation.tiny_model().train()
        prefixed = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
        if checkpointing:
            model.gradient_checkpointing_enable()
        with pytest.raises(TypeError, match="must be a HySparseCache, got DynamicCache"):
            prefixed(input_ids=IDS, attention_mask=MASK, labels=IDS)
        with pytest.raises(TypeError, match="must be a HySparseCache, got DynamicCache"):
            prefixed.eval().generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=2, pad_token_id=0)

    def test_scaling_vectors_train_and_merge(self, generation):
        targets = ["k_proj", "v_proj", "down_proj"]
        model = get_peft_model(
            generation.tiny_model(initializer_range=0.1),
            IA3Config(target_modules=targets, feedforward_modules=["down_proj"]),
        )
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    assert parameter.grad.any()
                    parameter.sub_(parameter.grad)
        expected = logits_of(model.eval())
        assert_same_logits(logits_of(model.merge_and_unload()), expected)


class PackedLinear(torch.nn.Module):
    """A linear layer as quantisers leave it: the weight is packed bytes, and only a call gives the product."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), False)
        self.bias = linear.bias
        self._product = [linear.weight]

    def forward(self, states):
        return torch.nn.functional.linear(states, self._product[0], self.bias)


def packed(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, PackedLinear(module))
    return model


@both_generations
class TestPackedLinear:
    @pytest.mark.parametrize("switches", [{}, {"share_full_kv": False}, {"full_layer_gate": True}], ids=str)
    def test_forward_and_generate_only_call_it_G07(self, generation, switches):
        plain, model = generation.tiny_model(**switches), packed(generation.tiny_model(**switches))
        assert torch.equal(logits_of(model), logits_of(plain))
        tokens = [m.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (plain, model)]
        assert torch.equal(*tokens)

    def test_gradients_pass_through_it_G07(self, generation):
        model = packed(generation.tiny_model()).train()
        model.gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        assert model.get_input_embeddings().weight.grad.any()


class TestParts:
    @pytest.mark.parametrize(
        ("parts", "count"), [(("gates",), 16), (("sinks",), 8), (("norms",), 13), (("embeddings",), 2)], ids=str
    )
    def test_the_rest_is_frozen(self, parts, count):
        model = tiny_model()
        names = train_parts(model, *parts)
        assert len(names) == count
        assert {name for name, p in model.named_parameters() if p.requires_grad} == set(names)

    def test_all_parts_are_all_parameters(self):
        for model in (tiny_model(), tiny_model(use_qk_norm=True, full_layer_gate=True, **EXPERTS)):
            parts = ("attention", "gates", "sinks", "mlp", "norms", "embeddings")
            assert set(train_parts(model, *parts)) == {name for name, _ in model.named_parameters()}

    def test_sinks_are_trained_saved_and_loaded_beside_adapters(self, tmp_path):
        model = adapted(tiny_model()).train()
        adapters = {name for name, p in model.named_parameters() if p.requires_grad}
        sinks = set(train_parts(model, "sinks", freeze_rest=False))
        assert {name for name, p in model.named_parameters() if p.requires_grad} == adapters | sinks
        model(input_ids=IDS, labels=IDS).loss.backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
        model.save_pretrained(tmp_path)
        save_parts(model, tmp_path / "sinks.safetensors", "sinks")
        base = tiny_model()
        assert len(load_parts(base, tmp_path / "sinks.safetensors")) == 8
        loaded = PeftModel.from_pretrained(base, tmp_path).eval()
        assert torch.equal(logits_of(loaded), logits_of(model.eval()))

    def test_a_trained_copy_is_saved_as_the_module_itself(self, tmp_path):
        model = adapted(tiny_model(), lora_targets("attention"), modules_to_save=["lm_head", "gate_global_proj"])
        save_parts(model, tmp_path / "parts.safetensors", "gates", "embeddings", "attention")
        plain = tiny_model()
        names = load_parts(plain, tmp_path / "parts.safetensors")
        assert set(names) == set(train_parts(plain, "gates", "embeddings", "attention"))
        copies = model.base_model.model
        assert torch.equal(plain.lm_head.weight, copies.lm_head.modules_to_save["default"].weight)
        gate = copies.model.layers[1].self_attn.gate_global_proj.modules_to_save["default"]
        assert torch.equal(plain.model.layers[1].self_attn.gate_global_proj.bias, gate.bias)

    def test_a_file_of_another_model_is_refused(self, tmp_path):
        save_parts(tiny_model(), tmp_path / "gates.safetensors", "gates")
        for other in (tiny_model(gate_granularity="none"), tiny_model(gate_granularity="headwise")):
            with pytest.raises(ValueError, match="the model must have every parameter"):
                load_parts(other, tmp_path / "gates.safetensors")

    def test_parts_that_the_model_has_not_are_refused(self):
        with pytest.raises(ValueError, match="`parts` must name something that this model has"):
            train_parts(tiny_model(attention_sink=False), "sinks")
        with pytest.raises(ValueError, match="`parts` must be one or more of"):
            train_parts(tiny_model(), "sink")
