"""Fine-tune with LoRA: adapters on attention and gates, the sinks beside them, packed documents, Trainer.

    python examples/finetune_lora.py                              # a tiny model that reads bytes; under a minute
    python examples/finetune_lora.py --model OUT --text my.txt    # a converted checkpoint and a text of one's own

Prints the loss on held-out text before and after, then loads what was saved into a fresh base model and merges it.
"""

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

from hysparse_hf import HySparseConfig, HySparseForCausalLM, load_parts, lora_targets, save_parts, train_parts


def tiny_model() -> HySparseForCausalLM:
    """A random model over bytes; documents of 128 tokens see more blocks than the budget holds."""
    torch.manual_seed(0)
    config = HySparseConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        oracle_block_size=8,
        oracle_budget=32,
        sliding_window=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return HySparseForCausalLM(config)


def documents(arguments: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Pieces of the text as ids; unequal lengths, because packing is what they are for."""
    text = arguments.text.read_text() if arguments.text else "\n".join(pydoc_data.topics.topics.values())
    if arguments.model:
        tokens = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=True)(text)["input_ids"]
    else:
        tokens = list(text.encode())
    lengths, pieces, start = (128, 50, 90, 20), [], 0
    while start < len(tokens) and len(pieces) < 4 * arguments.steps + 32:
        length = lengths[len(pieces) % len(lengths)]
        pieces.append({"input_ids": tokens[start : start + length]})
        start += length
    return pieces


def base_model(arguments: argparse.Namespace) -> torch.nn.Module:
    if not arguments.model:
        return tiny_model()
    return AutoModelForCausalLM.from_pretrained(arguments.model, trust_remote_code=True, dtype="float32")


def main(arguments: argparse.Namespace) -> tuple[float, float]:
    """Train, save, load again; returns the held-out losses before and after."""
    pieces = documents(arguments)
    held_out, training = pieces[:16], pieces[16:]
    # A random model has everything to learn, so there the copies of embeddings and head are trained as well.
    copies = None if arguments.model else ["embed_tokens", "lm_head"]
    adapters = LoraConfig(
        r=8, lora_alpha=16, target_modules=lora_targets("attention", "gates"), modules_to_save=copies
    )
    model = get_peft_model(base_model(arguments), adapters)
    train_parts(model, "sinks", freeze_rest=False)
    model.print_trainable_parameters()

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.out or scratch)
        settings = TrainingArguments(
            output_dir=str(folder),
            max_steps=arguments.steps,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=max(arguments.steps // 5, 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        # Each batch is one row of four documents; their borders are where `position_ids` restart.
        collator = DataCollatorWithFlattening()
        trainer = Trainer(model, settings, data_collator=collator, train_dataset=training, eval_dataset=held_out)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        print(f"held-out loss: {before:.3f} before, {after:.3f} after {arguments.steps} steps")

        # peft saves adapters and copies of modules; sinks are bare parameters, and go into a file beside them.
        model.save_pretrained(folder)
        save_parts(model, folder / "sinks.safetensors", "sinks")
        fresh = base_model(arguments)
        load_parts(fresh, folder / "sinks.safetensors")
        merged = PeftModel.from_pretrained(fresh, folder).merge_and_unload().eval()

    prompt = torch.tensor([held_out[0]["input_ids"]])
    with torch.no_grad():
        difference = (merged(prompt).logits - model.eval().cpu()(prompt).logits).abs().max().item()
    print(f"merged model against adapters: logits differ by {difference:.1e} at most")
    tokens = merged.generate(prompt[:, :64], max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 64:]
    print(f"generated: {tokens.tolist()}")
    return before, after


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a HySparse checkpoint with its tokenizer; default: a tiny model")
    parser.add_argument("--text", type=Path, help="text to learn; default: the topics of Python's documentation")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", help="folder for adapters and sinks; default: none is kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
