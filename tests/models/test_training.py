"""Training: losses, gradients through shared keys and values, gradient checkpointing, autocast, Trainer."""

import warnings

import naive_model
import pytest
import torch
import transformers
from models.tiny import SWITCHES, draw_ids, tiny_model
from torch.nn.utils.rnn import pad_sequence

from hysparse_hf import HySparseForCausalLM
from hysparse_hf.modeling import decoder_hysparse
from hysparse_hf.modeling.compat_transformers import cache_of


ROW = draw_ids(1, 36)


def labelled(batch=2, length=36):
    """Ids and labels, some of them ignored."""
    ids = draw_ids(batch, length)
    labels = ids.clone()
    labels[0, :7] = -100
    labels[-1, -5:] = -100
    return ids, labels


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class TestLoss:
    @pytest.mark.parametrize("kind", ["none", "int", "tensor"])
    def test_is_the_summed_cross_entropy_over_the_item_count_F02(self, kind):
        model = tiny_model(torch.float64)
        ids, labels = labelled()
        items = int((labels[:, 1:] != -100).sum()) if kind == "none" else 17
        given = {"none": {}, "int": {"num_items_in_batch": 17}, "tensor": {"num_items_in_batch": torch.tensor(17)}}
        output = model(ids, labels=labels, use_cache=False, **given[kind])
        expected = naive_model.cross_entropy_sum(output.logits, labels) / items
        torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=1e-6)

    def test_shifted_labels_may_be_given(self):
        model = tiny_model()
        ids, labels = labelled()
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        one = model(ids, labels=labels, use_cache=False).loss
        other = model(ids, labels=labels, shift_labels=shifted, use_cache=False).loss
        torch.testing.assert_close(one, other)

    def test_padding_does_not_enter_the_loss(self):
        model = tiny_model()
        ids, labels = labelled(1)
        alone = model(ids, labels=labels, use_cache=False).loss
        padded = torch.nn.functional.pad(ids, (0, 9))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 9))
        wide = torch.nn.functional.pad(labels, (0, 9), value=-100)
        together = model(padded, attention_mask=mask, labels=wide, use_cache=False).loss
        torch.testing.assert_close(alone, together)


class TestGradients:
    @pytest.mark.parametrize(
        "switches",
        ["default", "headwise_full_gate", "window_layers", "wide_values", "merged_own", "own_oracle", "shared_window"],
    )
    def test_equal_those_of_the_loops(self, switches):
        model = tiny_model(torch.float64, **SWITCHES[switches])
        labels = ROW
        naive_model.cross_entropy_sum(naive_model.forward(model, ROW).logits, labels).backward()
        expected = gradients(model)
        model.zero_grad()
        logits = model(ROW, use_cache=False).logits
        naive_model.cross_entropy_sum(logits, labels).backward()
        for name, grad in gradients(model).items():
            scale = expected[name].abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(
                grad, expected[name], rtol=0, atol=1e-9 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )

    @pytest.mark.parametrize("name", ["k_proj", "v_proj"])
    def test_a_full_layers_projection_learns_from_its_sparse_layers(self, name):
        # The same loss with the shared tensors cut off gives another gradient.
        model = tiny_model(torch.float64, layer_plan=["full", "sparse"])
        weight = getattr(model.model.layers[0].self_attn, name).weight
        whole = torch.autograd.grad(model(ROW, labels=ROW, use_cache=False).loss, weight)[0]
        model.model.layers[1].register_forward_pre_hook(
            lambda module, args: (args[0], *(part.detach() for part in args[1:]))
        )
        cut = torch.autograd.grad(model(ROW, labels=ROW, use_cache=False).loss, weight)[0]
        assert (whole - cut).norm() > 1e-2 * whole.norm()


class TestCheckpointing:
    SETTINGS = ("default", "merged_own", "shared_window", "own_oracle", "own_kv", "window_layers")

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    @pytest.mark.parametrize("switches", SETTINGS)
    def test_loss_and_gradients_are_those_without_B02(self, switches, reentrant):
        model = tiny_model(torch.float64, **SWITCHES[switches]).train()
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

    def test_layers_are_really_replayed(self):
        model = tiny_model().train()
        calls = []
        model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
        model.gradient_checkpointing_enable()
        model(ROW, labels=ROW).loss.backward()
        assert len(calls) == 2

    def test_no_cache_is_made_F05(self):
        model = tiny_model().train()
        model.gradient_checkpointing_enable()
        assert cache_of(model(ROW, labels=ROW, use_cache=True)) is None

    def test_a_cache_that_is_given_is_refused_F05(self):
        model = tiny_model()
        with torch.no_grad():
            cache = cache_of(model(ROW[:, :20], use_cache=True))
        model.train().gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="gradient checkpointing"):
            model(ROW[:, 20:], cache=cache)
        assert cache.get_seq_length() == 20

    @pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
    def test_generate_between_training_steps_A21(self, checkpointing):
        model = tiny_model().train()
        expected = tiny_model().generate(ROW[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0)
        if checkpointing:
            model.gradient_checkpointing_enable()
        with torch.no_grad():
            assert torch.equal(model.generate(ROW[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0), expected)
        model(ROW, labels=ROW).loss.backward()

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
        assert [len(args) for args in sparse] == [4] * 4
        assert all(args[1].requires_grad and args[2].requires_grad for args in sparse)
        assert all(args[3].dtype == torch.int32 for args in sparse)


class TestAutocast:
    @pytest.mark.parametrize("switches", ["default", "wide_values", "merged_own"])
    def test_bfloat16_trains_with_float32_parameters_C18(self, switches):
        model = tiny_model(initializer_range=0.05, **SWITCHES[switches]).train()
        ids, labels = labelled()
        plain = model(ids, labels=labels, use_cache=False).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=0.02, atol=0.02)
        for name, grad in gradients(model).items():
            assert grad.dtype == torch.float32, name
            assert grad.isfinite().all(), name

    def test_generate_runs_C18(self):
        model = tiny_model()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens = model.generate(ROW[:, :9], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert tokens.shape == (1, 13)

    @pytest.mark.parametrize("switches", ["default", "wide_values", "merged_own", "window_layers"])
    def test_operations_receive_one_dtype_C18(self, switches, monkeypatch):
        """Kernels take no mixture: rotation and norm, which are float32 under autocast, must not make one."""
        seen = set()
        for name in ("full_attention_with_oracle", "block_sparse_attention", "sliding_window_attention"):
            operation = getattr(decoder_hysparse, name)

            def recorded(query, key, value, *others, operation=operation, **options):
                seen.add((query.dtype, key.dtype, value.dtype))
                return operation(query, key, value, *others, **options)

            monkeypatch.setattr(decoder_hysparse, name, recorded)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tiny_model(**SWITCHES[switches])(ROW)
        assert seen == {(torch.bfloat16,) * 3}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_low_precision_model_trains(self, dtype):
        model = tiny_model(dtype, initializer_range=0.05).train()
        model(*[ROW], labels=ROW, use_cache=False).loss.backward()
        for name, grad in gradients(model).items():
            assert grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("value", "open_gate"), [(1e4, True), (-1e4, False)], ids=["open", "shut"])
def test_gates_saturate_without_nan_C25(dtype, value, open_gate):
    model = tiny_model(dtype, layer_plan=["full", "sparse"], initializer_range=0.05).train()
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for branch in ("global", "local"):
            getattr(attention, f"gate_{branch}_proj").bias.fill_(value)
    inputs = []
    attention.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(ROW, labels=ROW, use_cache=False).loss.backward()
    assert bool((inputs[0] != 0).any()) is open_gate
    for name, grad in gradients(model).items():
        assert grad.isfinite().all(), name


LENGTHS = [33, 12, 25, 40, 8, 36, 17, 29]


class Samples(torch.utils.data.Dataset):
    """Eight rows of unequal length."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"input_ids": draw_ids(1, LENGTHS[index], seed=index)[0]}


def collate(samples):
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def trainer_for(model, folder, batch=4, accumulation=1, **arguments):
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    return transformers.Trainer(
        model=model, args=settings, train_dataset=Samples(), eval_dataset=Samples(), data_collator=collate
    )


class TestTrainer:
    def test_accumulation_gives_the_gradients_of_one_batch_F01(self, tmp_path):
        steps = []
        for batch, accumulation in ((4, 1), (1, 4)):
            model = tiny_model(torch.float64)
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            trainer_for(model, tmp_path, batch, accumulation, seed=1, data_seed=1).train()
            steps.append({name: parameter.detach() - before[name] for name, parameter in model.named_parameters()})
        assert max(step.abs().max() for step in steps[0].values()) > 1e-2
        for name, step in steps[0].items():
            torch.testing.assert_close(steps[1][name], step, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    def test_evaluate_and_predict_leave_the_cache_out_F04(self, tmp_path):
        trainer = trainer_for(tiny_model(), tmp_path)
        trainer.compute_metrics = lambda outputs: {"shape": list(outputs.predictions.shape)}
        assert trainer.evaluate()["eval_shape"] == [8, 40, 61]
        assert trainer.predict(Samples()).predictions.shape == (8, 40, 61)

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_saves_tied_and_untied_models_E04_F11(self, tmp_path, tied):
        model = tiny_model(tie_word_embeddings=tied)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            trainer_for(model, tmp_path / "run").save_model(str(tmp_path / "saved"))
        loaded = HySparseForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(loaded(ROW, use_cache=False).logits, model(ROW, use_cache=False).logits)
