"""Layers of one model on two cards: what a sparse layer reads follows it to its own device."""

import pytest
import torch
from accelerate import dispatch_model
from models.generations import both_generations
from models.tiny import draw_ids
from transformers import AutoModelForCausalLM


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

# Blocks of 16, so that every operation runs on its kernel.
SIZES = {"oracle_block_size": 16, "oracle_budget": 32}


def twelve_tokens(model):
    ids = draw_ids(2, 70).to("cuda:0")
    return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0).cpu()


@both_generations
def test_a_full_layer_and_its_sparse_layers_on_two_cards_B05(generation):
    """The bridge of the second generation begins and ends on the first card, between layers on the second."""
    model = generation.tiny_model(**SIZES).to("cuda:0")
    expected = twelve_tokens(model)
    places = {f"model.layers.{i}": int(kind != "full") for i, kind in enumerate(model.config.layer_plan)}
    others = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], 0)
    model = dispatch_model(model.cpu(), device_map={**places, **others})
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
    assert torch.equal(twelve_tokens(model), expected)


@both_generations
def test_automatic_placement_over_two_cards_D11(generation, tmp_path):
    model = generation.tiny_model(**SIZES)
    model.save_pretrained(tmp_path)
    size = sum(parameter.nbytes for parameter in model.parameters())
    expected = twelve_tokens(model.to("cuda:0"))
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={0: int(0.6 * size), 1: 2 * size}
    )
    assert {parameter.device.index for parameter in split.parameters()} == {0, 1}
    assert torch.equal(twelve_tokens(split), expected)
