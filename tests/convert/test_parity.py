"""The mapped weights under the dense switch give the source's logits, whatever the source looks like."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hysparse_hf import HySparseForCausalLM
from hysparse_hf.conversion.faults import dense_difference, module_faults, weight_faults


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(12)],
    "long_factor": [1.0 + 0.5 * i for i in range(12)],
    "original_max_position_embeddings": 48,
    "rope_theta": 5000.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}

VARIATIONS = {
    "llama-plain": ("Llama", {}),
    "H04-llama-attention-biases": ("Llama", {"attention_bias": True}),
    "H05-llama-all-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "H01-llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "llama-derived-head-dim": ("Llama", {"head_dim": None}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 48}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "H18-mistral-window-past-the-context": ("Mistral", {"sliding_window": 4096}),
    "H04-qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "H05-qwen3-norms-and-biases": ("Qwen3", {"attention_bias": True}),
}


@pytest.mark.parametrize(("family", "overrides"), VARIATIONS.values(), ids=VARIATIONS)
def test_dense_switch_equals_the_source(make_source, convert_naive, token_ids, family, overrides):
    source, model = make_source(family, **overrides)
    out = convert_naive(source)
    scale = model(token_ids).logits.abs().max().item()
    assert scale > 1, "logits too small to compare"
    assert dense_difference(model, out, token_ids) < 1e-5 * max(1.0, scale)
    assert module_faults(model, out, token_ids) == {}
    assert weight_faults(source, out) == []


# Every option that a family has, at once. A head of 18 channels is no power of two, and half of it is odd.
EVERYTHING_ON = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 18},
    "Mistral": {"sliding_window": None, "head_dim": 18},
    "Qwen2": {"hidden_size": 72},
    "Qwen3": {"attention_bias": True, "head_dim": 18},
}
LONGROPE_FACTORS = {name: [1.0 + step * i for i in range(9)] for name, step in (("short", 0.05), ("long", 0.5))}
ROPE_TYPES = {
    "default": {"rope_type": "default", "rope_theta": 777.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "dynamic": DYNAMIC,
    "yarn": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "llama3": LLAMA3,
    "longrope": LONGROPE | {f"{name}_factor": factors for name, factors in LONGROPE_FACTORS.items()},
}
# Single, sharded, sharded without an index; tied and untied: each combination several times over the families.
STORED = [(size, index, tied) for size, index in ((None, True), ("60KB", True), ("60KB", False)) for tied in (0, 1)]
COMBINED = {
    f"{family}-{rope}": (family, rope, *STORED[(i + j) % len(STORED)])
    for i, family in enumerate(EVERYTHING_ON)
    for j, rope in enumerate(ROPE_TYPES)
}


@pytest.mark.parametrize(("family", "rope", "shard", "has_index", "tied"), COMBINED.values(), ids=COMBINED)
def test_H01_H05_every_option_at_once(make_source, convert_naive, token_ids, family, rope, shard, has_index, tied):
    options = EVERYTHING_ON[family] | {"rope_parameters": ROPE_TYPES[rope], "tie_word_embeddings": bool(tied)}
    # Half the text is past the length where `dynamic` and `longrope` change.
    options |= {"max_position_embeddings": 48} if rope == "dynamic" else {}
    source, model = make_source(family, max_shard_size=shard or "1GB", **options)
    shards = sorted(source.glob("model-*.safetensors"))
    assert bool(shards) == bool(shard)
    if not has_index:
        (source / "model.safetensors.index.json").unlink()
    out = convert_naive(source)
    scale = model(token_ids).logits.abs().max().item()
    assert dense_difference(model, out, token_ids) < 1e-5 * max(1.0, scale)
    assert weight_faults(source, out) == []


def test_every_rope_type_of_the_library_is_known_or_refused(make_source, convert_naive, token_ids):
    """A type that a later version adds must not pass untested."""
    assert set(ROPE_INIT_FUNCTIONS) - set(ROPE_TYPES) == {"proportional"}
    rope = {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    source, _ = make_source(rope_parameters=rope)
    with pytest.raises(NotImplementedError, match="partial_rotary_factor"):
        convert_naive(source)


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 3.0}}, id="type"),
        pytest.param({"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}, id="rope_type"),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}}, id="rope_parameters"
        ),
    ],
)
def test_every_rope_spelling_means_the_same(make_source, convert_naive, token_ids, edit, spelling):
    expected = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
    source, model = make_source(rope_parameters=expected)
    raw = json.loads((source / "config.json").read_text())
    raw.pop("rope_parameters")
    (source / "config.json").write_text(json.dumps(raw | spelling))
    out = convert_naive(source)
    assert HySparseForCausalLM.from_pretrained(out).config.rope_parameters == expected
    assert dense_difference(model, out, token_ids) < 1e-5 * model(token_ids).logits.abs().max().item()


def test_H01_tied_source_without_head_loads_with_nothing_missing(make_source, convert_naive):
    source, _ = make_source(tie_word_embeddings=True)
    with safe_open(source / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - the handle is no dict
    out = convert_naive(source)
    model, report = HySparseForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_H02_redundant_equal_head_of_a_tied_source_is_dropped_by_name(
    make_source, convert_naive, token_ids, edit, tmp_path
):
    source, model = make_source(tie_word_embeddings=True)

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit.tensors(source / "model.safetensors", add_head)
    out = convert_naive(source)
    dropped = json.loads((out / "provenance.json").read_text())["keys"]["dropped"]
    assert dropped == {"lm_head.weight": "tied: equals model.embed_tokens.weight"}
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - the handle is no dict
    assert dense_difference(model, out, token_ids) < 1e-5 * model(token_ids).logits.abs().max().item()


def test_H02_different_head_of_a_tied_source_is_refused(make_source, convert_naive, edit, tmp_path):
    source, _ = make_source(tie_word_embeddings=True)
    edit.tensors(
        source / "model.safetensors",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}),
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal .*tie_word_embeddings"):
        convert_naive(source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["missing", None, 0, 4096])
def test_H18_sliding_window_of_the_source(make_source, convert_naive, token_ids, edit, value):
    source, model = make_source("Mistral", sliding_window=None)
    raw = json.loads((source / "config.json").read_text())
    raw.pop("sliding_window", None)
    if value != "missing":
        raw["sliding_window"] = value
    (source / "config.json").write_text(json.dumps(raw))
    out = convert_naive(source)
    assert HySparseForCausalLM.from_pretrained(out).config.sliding_window == 12
    assert dense_difference(model, out, token_ids) < 1e-5 * model(token_ids).logits.abs().max().item()


def test_H18_window_inside_the_context_is_warned_about(make_source, convert_naive, caplog):
    source, _ = make_source("Mistral", sliding_window=32)
    logger = "hysparse_hf.conversion.families"
    with caplog.at_level("WARNING", logger=logger):
        convert_naive(source)
    assert "agree up to 32 tokens" in caplog.text


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float16, torch.float32, torch.float32),
    ],
)
def test_H14_dtype_of_tensors_and_config(make_source, convert_naive, stored, asked, expected):
    source, _ = make_source(dtype=stored)
    out = convert_naive(source, dtype=asked)
    assert json.loads((out / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert weight_faults(source, out) == []


def test_H14_tensors_of_a_mixed_source_keep_their_own_dtype(make_source, convert_naive, edit):
    source, _ = make_source(dtype=torch.bfloat16)

    def widen_norms(tensors):
        tensors.update({key: tensor.float() for key, tensor in tensors.items() if "norm" in key})

    edit.tensors(source / "model.safetensors", widen_norms)
    out = convert_naive(source)
    with safe_open(out / "model.safetensors", "pt") as file:
        dtypes = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118 - the handle is no dict
    assert all((dtype == torch.float32) == ("norm" in key) for key, dtype in dtypes.items())


def test_keys_without_the_model_prefix_are_understood(make_source, convert_naive, token_ids, edit):
    source, model = make_source(tie_word_embeddings=True)

    def strip(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    edit.tensors(source / "model.safetensors", strip)
    out = convert_naive(source)
    assert dense_difference(model, out, token_ids) < 1e-5 * model(token_ids).logits.abs().max().item()


@pytest.mark.parametrize("rope", [YARN, LLAMA3, LONGROPE], ids=lambda rope: rope["rope_type"])
def test_original_length_beside_the_rotary_settings_is_theirs(make_source, convert_naive, token_ids, edit, rope):
    """Phi-like files hold it there, and the library's models prefer it."""
    source, _ = make_source()
    name = "original_max_position_embeddings"
    inside = {key: value for key, value in rope.items() if key != name}
    edit.json(source / "config.json", rope_parameters=inside, **{name: rope[name]})
    out = convert_naive(source)
    assert json.loads((out / "config.json").read_text())["rope_parameters"][name] == rope[name]
    expected = AutoModelForCausalLM.from_pretrained(source)(token_ids).logits
    assert dense_difference(source, out, token_ids) < 1e-5 * expected.abs().max()
