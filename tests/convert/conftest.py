"""Tiny random dense checkpoints to convert, with large weights and biases so that a lost tensor shows."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hysparse_hf import convert


# Every size differs from every other, so that a swapped axis cannot pass: 4 heads of 24 are not the hidden size 64.
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_SPARSITY = {"budget": 16, "block_size": 8, "window": 12}

transformers.utils.logging.disable_progress_bar()


def dense_model(family: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """A dense model of a family with every parameter random, norms included."""
    values = TINY | overrides
    if family == "Qwen2":
        values.pop("head_dim")  # this family derives it
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith("bias"):
                parameter.copy_(noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


@pytest.fixture
def make_source(tmp_path):
    """Factory: save a `dense_model`, return `(folder, model)`."""

    def make(family="Llama", *, name="source", max_shard_size="1GB", **overrides):
        model = dense_model(family, **overrides)
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder, model

    return make


def letter_tokenizer():
    """One token per printable character and line break: 97 with the one for all others."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = ["<unk>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.fixture
def letters():
    """A tokenizer of `TINY`'s vocabulary."""
    return letter_tokenizer()


@pytest.fixture
def convert_naive(tmp_path):
    """Factory: convert a folder with small sparsity settings and without a fit, return the target folder."""

    def run(source, name="out", **options):
        out = tmp_path / name
        convert(source, out, **({"init": "naive"} | SMALL_SPARSITY | options))
        return out

    return run


@pytest.fixture
def token_ids():
    """Two rows of 64 tokens: several blocks and windows of the small settings."""
    return torch.randint(3, TINY["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(1))


def edit_json(path, **changes):
    """Set fields of a JSON file; None as a value stays None."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path, change):
    """Apply `change(dict of tensors)` to a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})


@pytest.fixture
def edit():
    """The two editors, for tests (which cannot import this file)."""

    class Edit:
        json = staticmethod(edit_json)
        tensors = staticmethod(edit_tensors)

    return Edit
