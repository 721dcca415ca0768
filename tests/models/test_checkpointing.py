"""Gradient checkpointing, the library's and that of wrappers: the same gradients, and no cache written twice."""

import functools
import warnings

import pytest
import torch
from models.generations import both_generations, over_settings
from models.tiny import draw_ids, tiny_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from hysparse_hf.modeling.compat_transformers import cache_of


ROW = draw_ids(1, 36)


def labelled():
    """Ids and labels, some of them ignored."""
    ids = draw_ids(2, 36)
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    @over_settings(
        ("default", "merged_own", "shared_window", "own_oracle", "own_kv", "window_layers"),
        ("default", "two_bridges", "own_kv", "residual", "branch", "yoco_baseline"),
    )
    def test_loss_and_gradients_are_those_without_B02(self, generation, switch, reentrant):
        model = generation.tiny_model(torch.float64, **generation.MODELS[switch]).train()
        ids, labels = labelled()
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        plain = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        plain.backward()
        expected = gradients(model)
        model.zero_grad()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=0, atol=1e-10)
        for name, grad in gradients(model).items():
            assert (grad is None) == (expected[name] is None), name
            if grad is not None:
                torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")

    @both_generations
    def test_layers_are_really_replayed(self, generation):
        model = generation.tiny_model().train()
        calls = []
        model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
        model.gradient_checkpointing_enable()
        model(ROW, labels=ROW).loss.backward()
        assert len(calls) == 2

    @both_generations
    def test_no_cache_is_made_F05(self, generation):
        model = generation.tiny_model().train()
        model.gradient_checkpointing_enable()
        assert cache_of(model(ROW, labels=ROW, use_cache=True)) is None

    @both_generations
    @pytest.mark.parametrize("implementation", CheckpointImpl, ids=lambda choice: choice.name)
    def test_wrapped_layers_are_replayed_without_a_cache_F05(self, generation, implementation):
        # As accelerate does it: the model does not know, and its configuration asks for a cache.
        model = generation.tiny_model(torch.float64).train()
        ids, labels = labelled()
        model(ids, labels=labels).loss.backward()
        expected = gradients(model)
        model.zero_grad()
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
            check_fn=lambda module: type(module).__name__ in model._no_split_modules,
        )
        output = model(ids, labels=labels)
        output.loss.backward()
        assert cache_of(output) is None
        for name, grad in gradients(model).items():
            assert torch.equal(grad, expected[name.replace("_checkpoint_wrapped_module.", "")]), name

    @both_generations
    def test_a_training_step_makes_a_cache_only_when_asked(self, generation):
        model = generation.tiny_model().train()
        assert cache_of(model(ROW, labels=ROW)) is None
        assert cache_of(model(ROW, labels=ROW, use_cache=True)).get_seq_length() == 36
        assert cache_of(model(ROW)).get_seq_length() == 36
        assert cache_of(model.eval()(ROW, labels=ROW)).get_seq_length() == 36

    @both_generations
    def test_a_cache_that_is_given_is_refused_F05(self, generation):
        model = generation.tiny_model()
        with torch.no_grad():
            cache = cache_of(model(ROW[:, :20], use_cache=True))
        model.train().gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="gradient checkpointing"):
            model(ROW[:, 20:], cache=cache)
        assert cache.get_seq_length() == 20

    @both_generations
    @pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
    def test_generate_between_training_steps_A21(self, generation, checkpointing):
        model = generation.tiny_model().train()
        expected = generation.tiny_model().generate(ROW[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0)
        if checkpointing:
            model.gradient_checkpointing_enable()
        with torch.no_grad():
            assert torch.equal(model.generate(ROW[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0), expected)
        model(ROW, labels=ROW).loss.backward()

    @both_generations
    def test_generate_and_train_in_turn_F06(self, generation, caplog):
        model = generation.tiny_model(initializer_range=0.05).train()
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                tokens = model.generate(ROW[:, :9], max_new_tokens=16, do_sample=False, pad_token_id=0)
                with torch.no_grad():
                    again = model.eval()(tokens, use_cache=False).logits[0, 8:-1].argmax(-1)
                assert torch.equal(tokens[0, 9:], again)
                model.train()
                loss = model(ROW, labels=ROW).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        messages = [str(warning.message) for warning in caught] + [record.getMessage() for record in caplog.records]
        assert len(messages) == len(set(messages))

    def test_tensors_with_gradients_are_positional(self):
        # Keyword tensors lose their gradient under reentrant checkpointing.
        model = tiny_model().train()
        seen = []

        def record(module, args, kwargs):
            seen.append(args)
            values = list(kwargs.values()) + [
                part for value in kwargs.values() if isinstance(value, dict) for part in value.values()
            ]
            assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

        for layer in model.model.layers:
            layer.register_forward_pre_hook(record, with_kwargs=True)
        model(ROW, labels=ROW, use_cache=False)
        sparse = [args for args, kind in zip(seen, model.config.layer_plan, strict=True) if kind == "sparse"]
        assert [len(args) for args in sparse] == [5] * 4
        assert all(args[1].requires_grad and args[2].requires_grad for args in sparse)
        assert all(args[3].dtype == torch.int32 for args in sparse)
