"""The paper's two models, built without memory: parameters, layer plan, cache."""

import pytest
import torch
from models.tiny import assert_same_logits

from hysparse_hf import HySparseConfig, HySparseForCausalLM, predict_cache_bytes


# Total and active parameters in billions, embeddings in the first, not in the second.
PAPER = {
    "7b": (HySparseConfig.paper_7b, 7.06, 6.01),
    "80b-a3b": (HySparseConfig.paper_80b_a3b, 79.68, 3.05),
}


@pytest.mark.parametrize(("make", "total", "active"), PAPER.values(), ids=PAPER)
def test_parameters_are_those_advertised(make, total, active):
    config = make()
    with torch.device("meta"):
        model = HySparseForCausalLM(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert round(sum(sizes.values()) / 1e9, 2) == total
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = experts - experts * config.num_experts_per_tok // max(config.num_experts, 1)
    embeddings = sizes["model.embed_tokens.weight"] + sizes["lm_head.weight"]
    assert round((sum(sizes.values()) - idle - embeddings) / 1e9, 2) == active


def test_layer_plans():
    plans = [config.layer_plan for config in (HySparseConfig.paper_7b(), HySparseConfig.paper_80b_a3b())]
    full = [[i for i, kind in enumerate(plan) if kind == "full"] for plan in plans]
    assert full == [[*range(0, 36, 4), 35], [0, 12, 24, 36, 48]]
    assert [len(plan) for plan in plans] == [36, 49]
    assert HySparseConfig.paper_80b_a3b().moe_plan == [False] + [True] * 48


@pytest.mark.parametrize("make", [make for make, *_ in PAPER.values()], ids=PAPER)
def test_stated_sizes(make):
    config = make()
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 640000.0}
    assert (config.oracle_block_size, config.oracle_budget, config.sliding_window) == (64, 1024, 128)
    heads = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert heads == ((4096, 32, 8, 128) if make == HySparseConfig.paper_7b else (2048, 64, 4, 128))


@pytest.mark.parametrize(
    ("changes", "gigabytes"),
    [({}, 5.374), ({"head_dim": 192}, 6.718)],
    ids=["d128", "d192-as-in-the-second-paper"],
)
def test_cache_at_one_million_tokens_in_fp8(changes, gigabytes):
    config = HySparseConfig.paper_80b_a3b(v_head_dim=128, **changes)
    used = predict_cache_bytes(config, 1, 1_048_576, torch.float8_e4m3fn, slack=0)["used"]
    assert round(used / 1e9, 3) == gigabytes


def test_a_narrow_one_runs():
    narrow = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61}
    config = HySparseConfig.paper_80b_a3b(num_experts=16, moe_intermediate_size=32, intermediate_size=48, **narrow)
    model = HySparseForCausalLM(config).eval()
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        assert_same_logits(model(ids[:, :30], use_cache=False).logits, whole[:, :30])
