"""The mode without training: nothing new, nothing fitted, and the source itself where the budget covers the text."""

import pytest
import torch

from hysparse_hf import HySparseForCausalLM, convert
from hysparse_hf.conversion.faults import weight_faults


SETTINGS = {"block_size": 8, "window": 12, "keep_kv": True}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_every_block_selected_is_the_source(make_source, token_ids, tmp_path, family):
    source, model = make_source(family, attention_bias=True)
    record = convert(source, tmp_path / "out", plan="regular", budget=64, **SETTINGS)
    assert record["calibration"] is None
    assert (record["keys"]["new"], record["fitted_tensors"], record["fit"]) == ({}, {}, {})
    assert weight_faults(source, tmp_path / "out") == []
    expected = model(token_ids).logits
    student = HySparseForCausalLM.from_pretrained(tmp_path / "out")
    assert (student(token_ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_sparse_layers_read_the_selected_blocks_of_their_own_keys(make_source, token_ids, tmp_path):
    """Its attention maps cover the full layer's selection and nothing else, and its cache keeps every layer whole."""
    source, model = make_source()
    convert(source, tmp_path / "out", plan="regular", budget=16, **SETTINGS)
    student = HySparseForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    output = student(token_ids, output_attentions=True, output_selected_indices=True)
    indices = output.selected_indices[0]
    chosen = torch.zeros(*indices.shape[:3], 9, dtype=torch.bool).scatter_(3, indices.long() % 9, True)[..., :8]
    columns = chosen.repeat_interleave(8, dim=-1).repeat_interleave(2, dim=1) & torch.ones(64, 64).tril().bool()
    assert torch.equal(output.attentions[1] > 0, columns)
    assert student.config.cache_plan == ["full"] * 5
    assert not torch.allclose(output.logits, model(token_ids).logits, atol=1e-3)


def test_plan_is_measured_too(make_source, tmp_path):
    source, _ = make_source()
    ids = torch.randint(3, 97, (3, 64), generator=torch.Generator().manual_seed(2))
    record = convert(source, tmp_path / "out", budget=16, calibrate=ids, **SETTINGS)
    assert sorted(record["damage"]) == ["0", "1", "2", "3", "4"]
    assert record["plan"].count("full") == 2
    assert record["fit"] == {}
