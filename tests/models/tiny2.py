"""Small HySparse2 models; imported as `models.tiny2`."""

from collections.abc import Iterable

import pytest
import torch
from models.tiny import VOCAB_SIZE

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM


PER_KIND = {"full": {"rope_theta": 1e4}, "sparse": {"rope_theta": 500.0}, "window": None}

# Switch settings that change what is computed or cached, by test id.
SWITCHES: dict[str, dict] = {
    "default": {},
    "residual": {"bridge_source": "residual"},
    "self_output": {"bridge_map": "self_output"},
    "two_bridges": {
        "self_layer_plan": ["full", "window", "full"],
        "cross_layer_plan": ["full", "sparse", "full", "sparse"],
        "bridge_map": [2, 0],
        "oracle_head_reduction": "mean",
    },
    "no_bridge": {"bridge": False},
    "own_kv": {"share_full_kv": False, "bridge_source": "residual", "rope_parameters": PER_KIND},
    "block": {"selection": "block", "oracle_budget": 8},
    "branch": {"recent_window": "branch", "rope_parameters": PER_KIND},
    "branch_shared_kv": {"recent_window": "branch", "window_branch": "shared_kv"},
    "branch_none": {"recent_window": "branch", "window_branch": "none"},
    "branch_merged_shared": {"recent_window": "branch", "window_branch": "merged_shared"},
    "branch_merged_own": {"recent_window": "branch", "window_branch": "merged_own"},
    "own_oracle": {"share_oracle": False},
    "dense": {"dense": True},
    "source_rope": {"rope_parameters": {"rope_theta": 1e4}, "bridge_materialization": "lazy"},
    "headwise_full_gate": {"full_layer_gate": True, "gate_granularity": "headwise"},
    "wide_values": {"v_head_dim": 40, "use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 1},
}
BASELINES = ("dense", "hybrid_swa", "yoco")
# Switch settings and baselines, as arguments of `tiny_model`.
MODELS: dict[str, dict] = {**SWITCHES, **{f"{name}_baseline": {"baseline": name} for name in BASELINES}}

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "oracle_block_size": 4,
    "oracle_budget": 5,
    "sliding_window": 6,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PLANS = {"self_layer_plan": ["window", "full", "window"], "cross_layer_plan": ["full", "sparse", "sparse"]}


def over_models(names: Iterable[str] = MODELS, fast: Iterable[str] = ("default", "two_bridges")):
    """Parametrise a test by `switch`; names that are not `fast` run only with the slow tests."""
    marked = [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("switch", marked)


def tiny_config(**switches) -> HySparse2Config:
    """Configuration T2: three layers of each half; five tokens selected beside a window of 6."""
    return HySparse2Config(**{**SIZES, **PLANS, **switches})


def tiny_baseline(name: str, **switches) -> HySparse2Config:
    """A baseline of six layers and the sizes of T2."""
    return HySparse2Config.baseline(name, 6, **{**SIZES, "sparse_layers_per_full": 2, **switches})


def tiny_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, baseline: str | None = None, **switches
) -> HySparse2ForCausalLM:
    """A model of T2 or of a baseline in eval mode, its gates, sinks and norms drawn so that each of them matters."""
    torch.manual_seed(seed)
    config = tiny_config(**switches) if baseline is None else tiny_baseline(baseline, **switches)
    model = HySparse2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn.gate_" in name or "sink_" in name or name.endswith("_proj.bias"):
                parameter.normal_(0, 0.5)
            elif "bridge_norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)
