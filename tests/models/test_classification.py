"""Sequence classification: the score is read at each row's last visible token, whatever the padding."""

import copy

import pytest
import torch
import transformers
from fresh_process import run_isolated
from models.tiny import assert_same_logits, draw_ids, padded_mask, spread, tiny_config, tiny_model
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from hysparse_hf import HySparseForSequenceClassification
from hysparse_hf.modeling.compat_transformers import cache_of


IDS = draw_ids(3, 40)
LENGTHS = [40, 23, 31]


def classifier(dtype=torch.float64, num_labels=4, **changes):
    """A tiny classifier on the decoder of `tiny_model`, whose gates and sinks matter."""
    config = tiny_config(**changes)
    config.num_labels = num_labels
    torch.manual_seed(0)
    model = HySparseForSequenceClassification(config).eval()
    model.model.load_state_dict(tiny_model(**changes).model.state_dict())
    return model.to(dtype)


def scores_alone(model, tokens):
    """Scores `(num_labels,)` of one row: those of the last state of the decoder run on it alone."""
    with torch.no_grad():
        return model.score(model.model(tokens[None], use_cache=False).last_hidden_state[0, -1])


class TestPooling:
    @pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
    @pytest.mark.parametrize("kind", ["left", "right", "holes"])
    def test_reads_each_rows_last_visible_token(self, kind, given):
        model = classifier()
        mask = padded_mask(kind, LENGTHS, 44)
        rows = [tokens[:length] for tokens, length in zip(IDS, LENGTHS, strict=True)]
        ids = spread(rows, mask)
        inputs = {"input_ids": ids} if given == "input_ids" else {"inputs_embeds": model.model.embed_tokens(ids)}
        with torch.no_grad():
            output = model(**inputs, attention_mask=mask)
        assert isinstance(output, SequenceClassifierOutputWithPast)
        assert_same_logits(output.logits, torch.stack([scores_alone(model, row) for row in rows]))

    def test_the_mask_has_the_last_word_over_the_padding_token(self):
        model = classifier(pad_token_id=int(IDS[0, -1]))
        with torch.no_grad():
            scores = model(IDS[:1], attention_mask=torch.ones_like(IDS[:1])).logits[0]
        assert_same_logits(scores, scores_alone(model, IDS[0]))

    def test_without_a_mask_rows_end_before_their_padding_tokens(self):
        model = classifier(pad_token_id=0)
        ids = spread([IDS[0, :23], IDS[1]], padded_mask("right", [23, 40], 40))
        with torch.no_grad():
            scores = model(ids).logits
        assert_same_logits(scores, torch.stack([scores_alone(model, IDS[0, :23]), scores_alone(model, IDS[1])]))

    def test_one_row_needs_neither_mask_nor_padding_token(self):
        model = classifier(pad_token_id=None)
        with torch.no_grad():
            assert_same_logits(model(IDS[:1]).logits[0], scores_alone(model, IDS[0]))

    def test_several_rows_need_a_mask_or_a_padding_token(self):
        model = classifier(pad_token_id=None)
        with pytest.raises(ValueError, match=r"several rows \(3\) need `attention_mask` or `config.pad_token_id`"):
            model(IDS)
        with torch.no_grad():
            scores = model(IDS, attention_mask=torch.ones_like(IDS)).logits
        assert_same_logits(scores, torch.stack([scores_alone(model, row) for row in IDS]))

    def test_a_row_without_a_new_token_behind_a_cache_is_an_error(self):
        model = classifier()
        mask = torch.ones(len(IDS), 40, dtype=torch.long)
        first = model(IDS[:, :30], attention_mask=mask[:, :30], use_cache=True)
        mask[0, 30:] = 0
        with pytest.raises(ValueError, match="must show a new token in every row that is classified"):
            model(IDS[:, 30:], attention_mask=mask, past_key_values=cache_of(first))

    def test_a_cached_prefix_is_read_on(self):
        model = classifier()
        mask = padded_mask("right", [40, 33, 38], 40)
        with torch.no_grad():
            first = model(IDS[:, :30], attention_mask=mask[:, :30], use_cache=True)
            scores = model(IDS[:, 30:], attention_mask=mask, past_key_values=cache_of(first)).logits
        expected = [scores_alone(model, row[:length]) for row, length in zip(IDS, [40, 33, 38], strict=True)]
        assert_same_logits(scores, torch.stack(expected))

    @pytest.mark.parametrize(
        "packing",
        [
            {"position_ids": torch.cat([torch.arange(25), torch.arange(15)])[None]},
            {"cu_seq_lens_q": torch.tensor([0, 25, 40], dtype=torch.int32)},
        ],
        ids=lambda value: next(iter(value)),
    )
    def test_packed_documents_are_refused(self, packing):
        with pytest.raises(ValueError, match="cannot be classified: a row has one label"):
            classifier()(IDS[:1], use_cache=False, **packing)

    def test_plain_positions_are_no_packing(self):
        model = classifier()
        with torch.no_grad():
            scores = model(IDS[:1], position_ids=torch.arange(40)[None], use_cache=False).logits[0]
        assert_same_logits(scores, scores_alone(model, IDS[0]))


class TestLoss:
    @pytest.mark.parametrize(
        ("num_labels", "labels", "kind", "expected"),
        [
            (1, torch.tensor([0.5, -1.0, 2.0]), "regression", lambda s, y: ((s[:, 0] - y) ** 2).mean()),
            (
                4,
                torch.tensor([3, 0, 2]),
                "single_label_classification",
                lambda s, y: -s.log_softmax(-1)[torch.arange(3), y].mean(),
            ),
            (
                4,
                torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]),
                "multi_label_classification",
                lambda s, y: -(y * torch.sigmoid(s).log() + (1 - y) * torch.sigmoid(-s).log()).mean(),
            ),
        ],
        ids=["regression", "single-label", "multi-label"],
    )
    def test_every_problem_type(self, num_labels, labels, kind, expected):
        model = classifier(num_labels=num_labels)
        labels = labels.double() if labels.is_floating_point() else labels
        output = model(IDS, labels=labels)
        torch.testing.assert_close(output.loss, expected(output.logits, labels), rtol=0, atol=1e-10)
        assert model.config.problem_type == kind
        output.loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


TRAIN = [{"input_ids": IDS[i % 3, : 20 + i].tolist(), "labels": i % 2} for i in range(8)]


def collate(rows):
    """Right padding, with a mask."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def trainer(model, folder, **arguments):
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", max_grad_norm=0, **arguments
    )
    metrics = {
        "compute_metrics": lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}
    }
    return transformers.Trainer(
        model, arguments, train_dataset=TRAIN, eval_dataset=TRAIN, data_collator=collate, **metrics
    )


class TestTraining:
    def test_trainer_learns_evaluates_and_predicts(self, tmp_path):
        model = classifier(torch.float32, num_labels=2, initializer_range=0.05)
        run = trainer(model, tmp_path, max_steps=12, per_device_train_batch_size=8, learning_rate=3e-3)
        before = run.evaluate()["eval_loss"]
        run.train()
        after = run.evaluate()
        assert after["eval_loss"] < before
        assert 0 <= after["eval_right"] <= 1
        assert run.predict(TRAIN).predictions.shape == (8, 2)

    def test_accumulated_steps_equal_one_large_step(self, tmp_path):
        start = classifier(torch.float32, num_labels=2, initializer_range=0.05)
        results = []
        for size, steps in ((8, 1), (2, 4)):
            model = copy.deepcopy(start)
            options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
            trainer(model, tmp_path, max_steps=1, learning_rate=0.1, optim="sgd", **options).train()
            results.append(model.state_dict())
        for name, expected in results[0].items():
            torch.testing.assert_close(results[1][name], expected, rtol=0, atol=1e-6, msg=name)

    @pytest.mark.parametrize("method", ["lora", "prompt"])
    def test_peft_trains_and_reloads(self, tmp_path, method):
        peft = pytest.importorskip("peft")
        base = classifier(torch.float32, num_labels=2)
        options = {
            "lora": lambda: peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]),
            "prompt": lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5),
        }
        model = peft.get_peft_model(copy.deepcopy(base), options[method]())
        optimizer = torch.optim.SGD((part for part in model.parameters() if part.requires_grad), lr=0.1)
        inputs = collate(TRAIN[:3])
        losses = []
        for _ in range(3):
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        model.eval().save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        inputs.pop("labels")
        with torch.no_grad():
            assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


USE_AND_SAVE_AGAIN = """
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(argument["folder"], trust_remote_code=True)
torch.save(model(torch.tensor(argument["ids"])).logits, argument["again"] + ".pt")
model.save_pretrained(argument["again"])
print(json.dumps(type(model).__module__.split(".")[0]))
"""


class TestLoading:
    def test_saved_loads_here_and_in_a_fresh_process(self, tmp_path):
        model = classifier(torch.float32, num_experts=4, num_experts_per_tok=2)
        model.save_pretrained(tmp_path / "first")
        folders = {"folder": str(tmp_path / "first"), "again": str(tmp_path / "again")}
        loaded_from = run_isolated(USE_AND_SAVE_AGAIN, tmp_path / "modules", ids=IDS.tolist(), **folders)
        assert loaded_from == "transformers_modules"
        with torch.no_grad():
            expected = model(IDS).logits
        assert torch.equal(torch.load(tmp_path / "again.pt"), expected)
        for folder in ("first", "again"):
            loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / folder)
            assert type(loaded) is HySparseForSequenceClassification
            assert loaded.num_labels == 4
            assert torch.equal(loaded(IDS).logits, expected)

    def test_starts_from_a_language_model(self, tmp_path):
        language_model = tiny_model()
        language_model.save_pretrained(tmp_path)
        model, report = HySparseForSequenceClassification.from_pretrained(
            tmp_path, num_labels=3, output_loading_info=True
        )
        assert report["missing_keys"] == {"score.weight"}
        assert report["unexpected_keys"] == {"lm_head.weight"}
        assert 0 < model.score.weight.std() < 1
        assert torch.equal(model.model.norm.weight, language_model.model.norm.weight)
