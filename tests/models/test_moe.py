"""Mixtures of experts: equal to the library's blocks and models, in every back end, checkpoint layout and wrapper."""

import copy

import pytest
import torch
import transformers
from models.tiny import (
    assert_same_logits,
    draw_ids,
    logits_alone,
    padded_mask,
    run_in_chunks,
    spread,
    tiny_config,
    tiny_model,
    uncached_greedy,
)
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, HySparseConfig, HySparseForCausalLM
from hysparse_hf.modeling.moe_hysparse import HySparseMoE


# Layer 1 has no experts; widths differ, so that none can stand in for another.
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "mlp_only_layers": [1],
}
IDS = draw_ids(2, 40)
BACKENDS = ("eager", "grouped_mm", "batched_mm")


def moe_model(dtype=torch.float32, **changes):
    """A tiny model with experts; in float64 they run in the library's plain form, as its fused one has no kernel."""
    model = tiny_model(dtype, **(MOE | changes))
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model


def naive_moe(block, config, tokens):
    """What the block means, token by token."""
    rows = []
    for token in tokens:
        probabilities = torch.softmax(block.gate.weight @ token, 0)
        weights, chosen = probabilities.topk(config.num_experts_per_tok)
        if config.norm_topk_prob:
            weights = weights / weights.sum()
        row = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            row = row + weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        if config.shared_expert_intermediate_size:
            row = row + torch.sigmoid(block.shared_expert_gate.weight @ token) * block.shared_expert(token)
        rows.append(row)
    return torch.stack(rows)


def compare_with_gradients(block, config, expected, dtype, bound):
    """Output and every gradient of `block` against the function `expected(block, tokens)` on the same weights."""
    torch.manual_seed(1)
    block = block.to(dtype)
    states = torch.randn(2, 9, config.hidden_size, dtype=dtype, requires_grad=True)
    seed = torch.randn(18, config.hidden_size, dtype=dtype)
    results = []
    for run in (lambda states: block(states)[0].flatten(0, 1), lambda states: expected(states.flatten(0, 1))):
        output = run(states)
        inputs = (states, *block.parameters())
        results.append((output, *torch.autograd.grad(output, inputs, seed)))
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=bound * max(1.0, wanted.abs().max().item()))


class TestMeaning:
    @pytest.mark.parametrize("shared", [0, 56], ids=["no-shared-expert", "shared-expert"])
    @pytest.mark.parametrize("norm", [True, False], ids=["normalised", "as-they-are"])
    def test_equals_the_loops_in_float64(self, norm, shared):
        model = moe_model(torch.float64, norm_topk_prob=norm, shared_expert_intermediate_size=shared)
        block, config = model.model.layers[0].mlp, model.config
        compare_with_gradients(block, config, lambda tokens: naive_moe(block, config, tokens), torch.float64, 1e-10)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_every_back_end_equals_the_loops(self, backend):
        model = moe_model()
        model.set_experts_implementation(backend)
        assert model.model.layers[0].mlp.experts.config._experts_implementation == backend
        block, config = model.model.layers[0].mlp, model.config
        compare_with_gradients(block, config, lambda tokens: naive_moe(block, config, tokens), torch.float32, 1e-5)

    def test_fused_experts_are_the_default(self):
        assert moe_model().config._experts_implementation == "grouped_mm"

    def test_a_token_uses_its_experts_and_no_other(self):
        model = moe_model(shared_expert_intermediate_size=0)
        block = model.model.layers[0].mlp
        states = torch.randn(1, 1, 64)
        chosen = block.gate(states[0])[2]
        block(states)[0].sum().backward()
        used = block.experts.down_proj.grad.flatten(1).any(-1).nonzero().flatten()
        assert used.tolist() == sorted(chosen.flatten().tolist())


LIBRARY_BLOCKS = {
    "mixtral": (MixtralSparseMoeBlock, "MixtralConfig", {"intermediate_size": 40, "num_local_experts": 6}),
    "qwen2-moe": (Qwen2MoeSparseMoeBlock, "Qwen2MoeConfig", {**MOE, "norm_topk_prob": False}),
    "qwen3-moe": (Qwen3MoeSparseMoeBlock, "Qwen3MoeConfig", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-not-normalised": (Qwen3MoeSparseMoeBlock, "Qwen3MoeConfig", {**MOE, "norm_topk_prob": False}),
}


class TestAgainstTheLibrary:
    @pytest.mark.parametrize(("block_class", "config_class", "fields"), LIBRARY_BLOCKS.values(), ids=LIBRARY_BLOCKS)
    def test_block(self, block_class, config_class, fields):
        fields = {"hidden_size": 64, "num_experts_per_tok": 2, **fields}
        config = getattr(transformers, config_class)(**fields, experts_implementation="eager")
        theirs = block_class(config)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        has_shared = block_class is Qwen2MoeSparseMoeBlock
        ours = tiny_config(
            **MOE
            | {
                "norm_topk_prob": fields.get("norm_topk_prob", True),
                "shared_expert_intermediate_size": 56 if has_shared else 0,
            }
        )
        ours._experts_implementation = "eager"
        block = HySparseMoE(ours)
        block.load_state_dict(theirs.state_dict())
        states = torch.randn(2, 9, 64, requires_grad=True)
        seed = torch.randn(2, 9, 64)
        results = []
        for module, run in ((theirs, theirs), (block, lambda states: block(states)[0])):
            output = run(states)
            named = dict(module.named_parameters())
            results.append(
                (output, *torch.autograd.grad(output, (states, *(named[name] for name in sorted(named))), seed))
            )
        for theirs_part, ours_part in zip(*results, strict=True):
            torch.testing.assert_close(ours_part, theirs_part, rtol=0, atol=1e-5 * theirs_part.abs().max().item())

    @pytest.mark.parametrize("mask", [None, padded_mask("right", [31, 40], 40)], ids=["all-visible", "right-padded"])
    def test_loss_with_balance_and_its_gradients(self, mask):
        fields = {name: MOE[name] for name in ("num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers")}
        config = transformers.Qwen3MoeConfig(
            **fields,
            num_experts=6,
            vocab_size=61,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            norm_topk_prob=True,
            initializer_range=0.3,
            router_aux_loss_coef=0.1,
            output_router_logits=True,
            rms_norm_eps=1e-6,
        )
        theirs = transformers.Qwen3MoeForCausalLM(config)
        ours = tiny_model(
            **fields,
            num_experts=6,
            layer_plan=["full", "full", "full"],
            use_qk_norm=True,
            router_aux_loss_coef=0.1,
            output_router_logits=True,
            dense=True,
        )
        ours.load_state_dict(theirs.state_dict())
        labels = IDS if mask is None else IDS.masked_fill(mask == 0, -100)
        results = []
        for model in (theirs, ours):
            output = model(IDS, attention_mask=mask, labels=labels, use_cache=False)
            output.loss.backward()
            results.append((output, dict(model.named_parameters())))
        (expected, their_parameters), (actual, our_parameters) = results
        torch.testing.assert_close(actual.aux_loss, expected.aux_loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=0)
        assert [part.shape for part in actual.router_logits] == [part.shape for part in expected.router_logits]
        for name, parameter in their_parameters.items():
            bound = 1e-5 * max(1.0, parameter.grad.abs().max().item())
            torch.testing.assert_close(our_parameters[name].grad, parameter.grad, rtol=0, atol=bound)


class TestModel:
    def test_only_the_chosen_layers_have_experts(self):
        config = tiny_config(**MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
        assert config.moe_plan == [False, True, False, False, False, True]
        layers = HySparseForCausalLM(config).model.layers
        assert [isinstance(layer.mlp, HySparseMoE) for layer in layers] == config.moe_plan

    def test_router_logits_and_balance_come_when_asked_for(self):
        model = moe_model()
        plain, asked = model(IDS), model(IDS, output_router_logits=True)
        assert plain.router_logits is plain.aux_loss is None
        assert [tuple(part.shape) for part in asked.router_logits] == [(80, 6)] * 5
        # Six experts of which each token uses two: 2 where they are used equally, 6 where two do all the work.
        assert 2 <= asked.aux_loss <= 6
        assert tiny_model()(IDS, output_router_logits=True).router_logits is None

    def test_balance_counts_no_padding(self):
        model = moe_model(torch.float64)
        mask = padded_mask("holes", [30, 30], 40)
        padded = model(spread(IDS[:, :30], mask), attention_mask=mask, output_router_logits=True)
        alone = model(IDS[:, :30], output_router_logits=True)
        torch.testing.assert_close(padded.aux_loss, alone.aux_loss, rtol=1e-6, atol=0)

    def test_balance_of_new_tokens_on_a_cache(self):
        model = moe_model()
        with torch.no_grad():
            whole = model(IDS, attention_mask=torch.ones_like(IDS), use_cache=True)
            more = draw_ids(2, 3)
            cached = model(
                more,
                attention_mask=torch.ones(2, 43, dtype=torch.long),
                output_router_logits=True,
                past_key_values=whole[1],
            )
        assert [tuple(part.shape) for part in cached.router_logits] == [(6, 6)] * 5
        assert cached.aux_loss.isfinite()

    @pytest.mark.parametrize("kind", ["left", "right", "holes"])
    def test_a_padded_row_gives_what_it_gives_alone(self, kind):
        model = moe_model(torch.float64)
        mask = padded_mask(kind, [25, 40], 40)
        rows = [IDS[0, :25], IDS[1]]
        with torch.no_grad():
            logits = model(spread(rows, mask), attention_mask=mask).logits
        for row, tokens in enumerate(rows):
            assert_same_logits(logits[row, mask[row].bool()], logits_alone(model, tokens))

    def test_chunks_and_generate_equal_the_uncached_run(self):
        model = moe_model(torch.float64)
        logits, _ = run_in_chunks(model, IDS, [17, 1, 9, 13])
        assert_same_logits(logits, model(IDS, use_cache=False).logits.detach())
        tokens = model.generate(IDS[:, :12], max_new_tokens=8, do_sample=False)
        assert torch.equal(tokens, uncached_greedy(model, IDS[:, :12], 8))

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    def test_checkpointing_keeps_the_gradients_of_the_balance(self, reentrant):
        model = moe_model(torch.float64, output_router_logits=True, router_aux_loss_coef=1.0).train()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model(IDS, labels=IDS).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-10, msg=name)

    def test_forward_is_one_graph(self):
        model = moe_model(layer_plan=["full", "sparse", "full"])
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        try:
            with torch.no_grad():
                assert_same_logits(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)
        finally:
            torch._dynamo.reset()

    @pytest.mark.slow
    @pytest.mark.skipif(
        not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"),
        reason="this transformers cannot trace the backward pass of its own experts",
    )
    def test_training_step_is_one_graph(self):
        model = moe_model(output_router_logits=True).train()
        expected = model(IDS, labels=IDS, use_cache=False).loss
        expected.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        try:
            loss = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS, labels=IDS, use_cache=False).loss
            loss.backward()
        finally:
            torch._dynamo.reset()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            bound = 1e-5 * max(1.0, gradients[name].abs().max().item())
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=bound, msg=name)

    def test_autocast_trains_with_float32_parameters(self):
        model = moe_model(initializer_range=0.05, output_router_logits=True).train()
        plain = model(IDS, labels=IDS, use_cache=False).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=0.02, atol=0.02)
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert parameter.grad.isfinite().all(), name

    def test_bfloat16_stays_near_float32(self):
        model = moe_model(initializer_range=0.05)
        with torch.no_grad():
            expected = model(IDS).logits.log_softmax(-1)
            actual = model.to(torch.bfloat16)(IDS).logits.float().log_softmax(-1)
        assert (expected.exp() * (expected - actual)).sum(-1).mean() < 1e-3


class TestWrappers:
    @pytest.mark.parametrize(
        "targets",
        [
            {"target_modules": "all-linear"},
            {
                "target_modules": ["q_proj"],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
        ],
        ids=["all-linear", "experts"],
    )
    def test_lora_trains_and_reloads_G01(self, tmp_path, targets):
        peft = pytest.importorskip("peft")
        base = moe_model()
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **targets))
        optimizer = torch.optim.SGD((part for part in model.parameters() if part.requires_grad), lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] < losses[0]
        model.eval().save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)

    def test_trainer_evaluates_with_the_balance_in_the_loss_F04(self, tmp_path):
        model = moe_model(output_router_logits=True, router_aux_loss_coef=1.0)
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        settings = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[], disable_tqdm=True)
        shapes = {"compute_metrics": lambda found: {"rows": found.predictions.shape[0]}}
        found = transformers.Trainer(model, settings, eval_dataset=rows, **shapes).evaluate()
        with torch.no_grad():
            plain, with_balance = (model(IDS, labels=IDS, output_router_logits=asked) for asked in (False, True))
        assert found["eval_rows"] == 2
        assert found["eval_loss"] == pytest.approx((plain.loss + with_balance.aux_loss).item(), rel=1e-5)


class TestCheckpoints:
    def test_each_expert_is_stored_by_itself(self, tmp_path):
        model = moe_model()
        model.save_pretrained(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        experts = model.model.layers[0].mlp.experts
        for number in range(6):
            name = f"model.layers.0.mlp.experts.{number}"
            gate, up = experts.gate_up_proj[number].chunk(2)
            assert torch.equal(stored[f"{name}.gate_proj.weight"], gate)
            assert torch.equal(stored[f"{name}.up_proj.weight"], up)
            assert torch.equal(stored[f"{name}.down_proj.weight"], experts.down_proj[number])
        assert not [key for key in stored if "gate_up_proj" in key]

    @pytest.mark.parametrize("fused", [False, True], ids=["per-expert", "fused"])
    def test_both_layouts_load_and_give_the_same_logits_H07(self, tmp_path, fused):
        model = moe_model()
        model.save_pretrained(tmp_path)
        if fused:
            save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded, report = HySparseForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        loaded.save_pretrained(tmp_path / "again")
        assert torch.equal(HySparseForCausalLM.from_pretrained(tmp_path / "again")(IDS).logits, model(IDS).logits)

    def test_the_second_generation_stores_them_alike_H07(self, tmp_path):
        fields = {"self_layer_plan": ["window", "full"], "cross_layer_plan": ["full", "sparse"]}
        tiny = tiny_config(**MOE).to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "initializer_range")
        model = HySparse2ForCausalLM(HySparse2Config(**MOE, **fields, **{name: tiny[name] for name in names})).eval()
        model.save_pretrained(tmp_path)
        assert "model.layers.0.mlp.experts.5.up_proj.weight" in load_file(tmp_path / "model.safetensors")
        loaded, report = HySparse2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)

    def test_a_missing_expert_is_reported_H06(self, tmp_path):
        model = moe_model()
        model.save_pretrained(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        lost = [key for key in stored if ".layers.2.mlp.experts." in key]
        save_file({key: stored[key] for key in stored if key not in lost}, tmp_path / "model.safetensors")
        _, report = HySparseForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        name = "model.layers.2.mlp.experts"
        assert report["missing_keys"] == {f"{name}.gate_up_proj", f"{name}.down_proj"}

    def test_parameters_absent_from_a_checkpoint_are_initialised(self, tmp_path):
        dense = tiny_model(initializer_range=0.02)
        dense.save_pretrained(tmp_path)
        model = HySparseForCausalLM.from_pretrained(tmp_path, **MOE)
        block = model.model.layers[0].mlp
        for parameter in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj):
            assert 0.015 < parameter.std() < 0.025


class TestConfiguration:
    def test_local_experts_are_experts(self):
        config = tiny_config(num_local_experts=4, num_experts_per_tok=2)
        assert config.num_experts == config.num_local_experts == 4
        assert config.moe_intermediate_size == config.intermediate_size

    def test_fields_survive_saving(self, tmp_path):
        config = tiny_config(**MOE)
        config.save_pretrained(tmp_path)
        again = HySparseConfig.from_pretrained(tmp_path)
        assert {name: getattr(again, name) for name in MOE} == MOE
        assert again.moe_plan == config.moe_plan

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_experts": -1}, "`num_experts` must be at least 0, got -1"),
            ({"num_experts_per_tok": 0}, r"between 1 and `num_experts` \(6\), got 0"),
            ({"num_experts_per_tok": 7}, r"between 1 and `num_experts` \(6\), got 7"),
            ({"moe_intermediate_size": 0}, "at least 1 and .* got 0 and 56"),
            ({"shared_expert_intermediate_size": -1}, "got 40 and -1"),
            ({"decoder_sparse_step": 0}, r"must be at least 1 .* got 0 and \[1\]"),
            ({"mlp_only_layers": [6]}, r"layers from 0 to 5, got 1 and \[6\]"),
            ({"mlp_bias": True}, "`mlp_bias` must be False"),
        ],
        ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
    )
    def test_contradictions_are_explained(self, changes, words):
        with pytest.raises(ValueError, match=words):
            tiny_config(**MOE | changes)
