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


def test_plan_is_measured_by_whose_choice_a_layer_reads(make_source, tmp_path):
    """Layers 1 and 2 attend to nothing that matters, so layer 3 is kept, and what is measured is written down."""
    source, model = make_source()
    with torch.no_grad():
        for layer in (1, 2, 4):
            model.model.layers[layer].self_attn.o_proj.weight.mul_(0.01)
    model.save_pretrained(source)
    ids = torch.randint(3, 97, (3, 64), generator=torch.Generator().manual_seed(2))
    record = convert(source, tmp_path / "out", budget=16, calibrate=ids, **SETTINGS)
    assert record["plan"] == ["full", "sparse", "sparse", "full", "sparse"]
    assert record["damage"]["text"] == {"pieces": 6, "tokens": 32, "repeated": 2, "budget": 16}
    assert {layer: [*pairs] for layer, pairs in record["damage"]["kl"].items()} == {
        str(layer): [str(donor) for donor in range(layer)] for layer in (1, 2, 3, 4)
    }
    assert (record["keys"]["new"], record["fit"]) == ({}, {})
    assert HySparseForCausalLM.from_pretrained(tmp_path / "out").config.layer_plan == record["plan"]
    assert record == convert(source, tmp_path / "again", budget=16, calibrate=ids, **SETTINGS)


def test_text_may_be_shorter_than_a_window_that_is_not_there(make_source, tmp_path):
    source, _ = make_source()
    options = {"budget": 16, "block_size": 8, "window": 128, "keep_kv": True}
    ids = torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(2))
    assert convert(source, tmp_path / "out", calibrate=ids, **options)["damage"]
    record = convert(source, tmp_path / "bare", plan="regular", init="naive", gate_granularity="none", **options)
    assert record["keys"]["new"] == {}
