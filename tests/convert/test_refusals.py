"""Refusals that no other test of a conversion is about: each by its message, with nothing left behind."""

import json
import sys

import pytest
import torch
import transformers

from hysparse_hf import cli, convert
from hysparse_hf.conversion.faults import weight_faults
from hysparse_hf.conversion.source import open_source


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init": "random"}, "`init` must be one of .* got 'random'"),
        ({"gate_granularity": "blockwise"}, "`gate_granularity` must be one of .* got 'blockwise'"),
        ({"dtype": "float8"}, "`dtype` must be one of .* got 'float8'"),
        ({"calibrate": torch.zeros(3, 4)}, r"must be token ids \(windows, length\), got \(3, 4\) of torch.float32"),
        ({"calibrate": []}, "must name at least one text file, got none"),
        ({"plan": 5}, "`plan` must be .* a list of full layers"),
        ({"plan": [[0, 2.5], [3]], "architecture": "hysparse2"}, "full layers of both halves"),
        ({"gates": ("a", "b")}, "`gates` must be two numbers"),
        ({"budget": 1024.0}, r"`budget` must be a whole number of tokens, at least 1, got 1024\.0"),
        ({"block_size": 0}, "`block_size` must be a whole number of tokens, at least 1, got 0"),
        ({"window": "128"}, "`window` must be a whole number of tokens, at least 1, got '128'"),
        ({"budget": 20}, r"`budget` must be a multiple of `block_size` \(64\), got 20; use 64\."),
        ({"max_sparse_run": "3"}, "`max_sparse_run` must be at least 1, got '3'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_from_python(make_source, tmp_path, options, match):
    source, _ = make_source()
    with pytest.raises(ValueError, match=match):
        convert(source, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_empty_text(make_source, letters, tmp_path):
    source, _ = make_source()
    letters.save_pretrained(source)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt must hold text, got none"):
        convert(source, tmp_path / "out", calibrate=tmp_path / "empty.txt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", "[]", r"config\.json must hold a JSON object, got a list"),
        ("model.safetensors.index.json", "{}", r"index\.json must hold a `weight_map`, got none"),
    ],
    ids=["config", "index"],
)
def test_json_of_another_kind(make_source, name, content, match):
    source, _ = make_source(max_shard_size="100KB")
    (source / name).write_text(content)
    with pytest.raises(ValueError, match=match):
        open_source(source)


def test_folder_without_a_configuration(make_source):
    source, _ = make_source()
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"source must be a checkpoint folder, and has no config\.json"):
        open_source(source)


def test_folder_of_a_gguf_file_is_told_to_name_the_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; name the file model\.gguf in it"):
        convert(tmp_path, tmp_path / "out")


def test_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint folder or a \.gguf file, got the file model\.onnx"):
        open_source(tmp_path / "model.onnx")


def test_gguf_file_without_its_reader(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ImportError, match=r'pip install "hysparse_hf\[gguf\]"'):
        open_source(tmp_path / "model.gguf")


def test_pickle_of_something_else(make_source):
    source, _ = make_source()
    (source / "model.safetensors").unlink()
    torch.save([torch.zeros(3)], source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin must hold a dict of tensors"):
        open_source(source)


def test_comparing_with_a_dense_checkpoint(make_source):
    source, _ = make_source()
    with pytest.raises(ValueError, match="must be a converted one, of type .*, got 'llama'"):
        weight_faults(source, source)


def test_recall_of_a_dense_checkpoint(make_source, letters, tmp_path, capsys):
    source, _ = make_source()
    letters.save_pretrained(source)
    (tmp_path / "text.txt").write_text("The river runs past the mill. " * 5)
    assert cli.main(["recall", str(source), "--text", str(tmp_path / "text.txt"), "--length", "64"]) == 1
    assert "must be a HySparse checkpoint, got source, of type 'llama'" in capsys.readouterr().err


def test_architecture_of_a_real_hybrid(tmp_path):
    """Gemma 3 attends in windows already; its folder is as the library writes it."""
    config = transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    with pytest.raises(NotImplementedError, match="got Gemma3ForCausalLM"):
        convert(tmp_path / "gemma", tmp_path / "out", init="naive")
    assert json.loads((tmp_path / "gemma" / "config.json").read_text())["model_type"] == "gemma3_text"
    assert [path.name for path in tmp_path.iterdir()] == ["gemma"]
