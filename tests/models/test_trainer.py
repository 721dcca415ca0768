"""The library's Trainer: accumulation, evaluation, resuming, packed documents, its switches, and saving."""

import importlib.util
import warnings

import pytest
import safetensors.torch
import torch
import transformers
from models.generations import both_generations
from models.tiny import draw_ids
from torch.nn.utils.rnn import pad_sequence


ROW = draw_ids(1, 36)
LENGTHS = [33, 12, 25, 40, 8, 36, 17, 29]


class Samples(torch.utils.data.Dataset):
    """Eight rows of unequal length; the labels of the rows `ignored` are -100."""

    def __init__(self, ignored=()):
        self.ignored = ignored

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        ids = draw_ids(1, LENGTHS[index], seed=index)[0]
        return {"input_ids": ids, "labels": torch.full_like(ids, -100) if index in self.ignored else ids}


def collate(samples):
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def trainer_for(model, folder, batch=4, accumulation=1, collator=collate, samples=None, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 1,
        "data_seed": 1,
        **arguments,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings),
        train_dataset=samples or Samples(),
        eval_dataset=Samples(),
        data_collator=collator,
    )


def trained_step(generation, folder, dtype=torch.float64, **arguments):
    """What one step of SGD at rate 1 adds to each parameter: the negative gradient."""
    model = generation.tiny_model(dtype, initializer_range=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer_for(model, folder, **arguments).train()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def assert_same_steps(actual, expected, bound):
    assert max(step.abs().max() for step in expected.values()) > 1e-2
    for name, step in expected.items():
        torch.testing.assert_close(actual[name], step, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@both_generations
class TestTrainer:
    def test_accumulation_gives_the_gradients_of_one_batch_F01(self, generation, tmp_path):
        whole = trained_step(generation, tmp_path, torch.float32)
        parts = trained_step(generation, tmp_path, torch.float32, batch=1, accumulation=4)
        assert_same_steps(parts, whole, 1e-6)

    def test_rows_without_labels_weigh_nothing_in_accumulation_F01(self, generation, tmp_path):
        samples = Samples(ignored=range(0, 8, 2))
        whole = trained_step(generation, tmp_path, samples=samples, batch=8)
        parts = trained_step(generation, tmp_path, samples=samples, batch=1, accumulation=8)
        assert_same_steps(parts, whole, 1e-10)

    @pytest.mark.parametrize("bounds", [False, True], ids=["position_ids", "cu_seq_lens"])
    def test_packed_documents_give_the_gradients_of_padded_rows_F12(self, generation, tmp_path, bounds):
        packed = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=bounds, return_position_ids=not bounds
        )
        assert_same_steps(
            trained_step(generation, tmp_path, collator=packed), trained_step(generation, tmp_path), 1e-6
        )

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
    def test_checkpointing_switch_changes_no_gradient_B02(self, generation, tmp_path, reentrant):
        switched = trained_step(
            generation,
            tmp_path,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        assert_same_steps(switched, trained_step(generation, tmp_path), 1e-10)

    def test_bfloat16_switch_keeps_float32_parameters_C18(self, generation, tmp_path):
        model = generation.tiny_model(initializer_range=0.05)
        dtypes = []
        model.lm_head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        trainer = trainer_for(model, tmp_path, bf16=True, max_steps=4, learning_rate=0.1, logging_steps=1)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert set(dtypes) == {torch.bfloat16}
        assert len(losses) == 4
        assert losses[-1] < losses[0]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_evaluate_and_predict_leave_the_cache_out_F04(self, generation, tmp_path):
        trainer = trainer_for(generation.tiny_model(), tmp_path)
        trainer.compute_metrics = lambda outputs: {"shape": list(outputs.predictions.shape)}
        assert trainer.evaluate()["eval_shape"] == [8, 40, 61]
        assert trainer.predict(Samples()).predictions.shape == (8, 40, 61)

    def test_a_resumed_run_ends_bit_equal(self, generation, tmp_path):
        settings = {
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "max_grad_norm": 1.0,
            "max_steps": 6,
            "batch": 2,
            "save_strategy": "steps",
            "save_steps": 4,
        }
        whole = generation.tiny_model().train()
        trainer_for(whole, tmp_path, **settings).train()
        resumed = generation.tiny_model(seed=7).train()
        trainer_for(resumed, tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), name

    @pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger_kernel is not installed")
    def test_liger_kernels_leave_an_unknown_model_as_it_is_F15(self, generation, tmp_path):
        assert_same_steps(
            trained_step(generation, tmp_path, use_liger_kernel=True), trained_step(generation, tmp_path), 1e-10
        )


@both_generations
class TestSaving:
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_saves_tied_and_untied_models_E04_F11(self, generation, tmp_path, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            trainer_for(model, tmp_path / "run").save_model(str(tmp_path / "saved"))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(loaded(ROW, use_cache=False).logits, model(ROW, use_cache=False).logits)

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_safetensors_save_and_load_the_module_F11(self, generation, tmp_path, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        safetensors.torch.save_model(model, str(tmp_path / "module.safetensors"))
        loaded = generation.tiny_model(seed=7, tie_word_embeddings=tied)
        safetensors.torch.load_model(loaded, str(tmp_path / "module.safetensors"))
        assert torch.equal(loaded(ROW, use_cache=False).logits, model(ROW, use_cache=False).logits)

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_a_resized_vocabulary_is_trained_saved_and_used(self, generation, tmp_path, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        with torch.no_grad():
            before = model(ROW, use_cache=False).logits
        model.resize_token_embeddings(70, mean_resizing=False)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
        assert torch.equal(model(ROW, use_cache=False).logits[..., :61], before)
        new = torch.full((1, 4), 69)
        model.train()(new, labels=new).loss.backward()
        assert model.get_input_embeddings().weight.grad[69].any()
        model.eval().save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.config.vocab_size == 70
        assert torch.equal(loaded(ROW, use_cache=False).logits, model(ROW, use_cache=False).logits)
        tokens = [m.generate(new, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (model, loaded)]
        assert torch.equal(*tokens)
