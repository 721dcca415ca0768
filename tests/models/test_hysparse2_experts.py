"""Mixtures of experts in a second generation model: which tokens they see when a prompt leaves early."""

import torch
from models.tiny import assert_same_logits, draw_ids, uncached_greedy
from models.tiny2 import tiny_model


IDS = draw_ids(2, 30)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def test_generate_with_an_early_exit():
    model = tiny_model(**EXPERTS)
    output = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False)
    assert torch.equal(output, uncached_greedy(model, IDS, 8))


def test_early_exit_gives_the_logits_of_the_full_pass():
    model = tiny_model(**EXPERTS)
    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        for kept in (torch.tensor([29]), torch.tensor([3, 20])):
            assert_same_logits(model(IDS, use_cache=False, logits_to_keep=kept).logits, whole[:, kept])
        assert_same_logits(model(IDS, use_cache=False, logits_to_keep=1).logits, whole[:, -1:])


def test_router_logits_are_those_of_every_token_B10():
    model = tiny_model(**EXPERTS).train()
    output = model(IDS, labels=IDS, output_router_logits=True)
    output.loss.backward()
    assert [tuple(part.shape) for part in output.router_logits] == [(60, 4)] * 6
    kept = model(IDS, output_router_logits=True, logits_to_keep=1, use_cache=False)
    assert [tuple(part.shape) for part in kept.router_logits] == [(60, 4)] * 6
    assert kept.logits.shape == (2, 1, 61)
