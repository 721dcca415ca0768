"""A HySparse model written as one straight loop over layers and queries, from the specification.

It reads a model's weights by name and shares no code with it; attention is that of `naive`.
"""

from dataclasses import dataclass, field

import naive
import torch
from torch.nn import functional


@dataclass
class Trace:
    """What one forward computed, per layer."""

    logits: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    indices: dict[int, torch.Tensor] = field(default_factory=dict)
    maps: dict[int, torch.Tensor] = field(default_factory=dict)


def forward(model, input_ids: torch.Tensor) -> Trace:
    """Run one row of ids `(1, length)` through a model of the default switches, in the dtype of its weights."""
    config = model.config
    weights = dict(model.named_parameters())
    trace = Trace(logits=torch.empty(0))
    states = weights["model.embed_tokens.weight"][input_ids]
    shared = None
    for layer, kind in enumerate(config.layer_plan):
        prefix = f"model.layers.{layer}."
        normed = _norm(states, weights[f"{prefix}input_layernorm.weight"], config.rms_norm_eps)
        if kind == "full":
            attended, shared = _full_layer(config, weights, f"{prefix}self_attn.", normed, trace, layer)
        else:
            attended = _reading_layer(config, weights, f"{prefix}self_attn.", normed, kind, shared, trace, layer)
        states = states + functional.linear(
            attended, weights[f"{prefix}self_attn.o_proj.weight"], weights.get(f"{prefix}self_attn.o_proj.bias")
        )
        normed = _norm(states, weights[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (functional.linear(normed, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        states = states + functional.linear(functional.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])
    states = _norm(states, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    trace.logits = functional.linear(states, head)
    return trace


def _full_layer(config, weights, prefix, normed, trace, layer):
    query, key, value = (_heads(config, weights, prefix, normed, name) for name in "qkv")
    query, key = (_turn(part, config.rope_for("full")) for part in (query, key))
    output, _, indices, maps = naive.full_attention(
        query,
        key,
        value,
        block_size=config.oracle_block_size,
        n_selected=config.oracle_budget // config.oracle_block_size,
        block_reduction=config.oracle_block_reduction,
        head_reduction=config.oracle_head_reduction,
        forced_first_blocks=config.oracle_forced_first_blocks,
        forced_local_blocks=config.oracle_forced_local_blocks,
    )
    output, maps = _gated(config, weights, prefix, "full", normed, output, maps)
    trace.keys[layer], trace.values[layer], trace.indices[layer], trace.maps[layer] = key, value, indices, maps
    return output, (key, value, indices)


def _reading_layer(config, weights, prefix, normed, kind, shared, trace, layer):
    """A sparse layer (global and local branch) or a window layer (local branch alone)."""
    query, key, value = (_heads(config, weights, prefix, normed, name) for name in "qkv")
    local = naive.sliding_window_attention(
        _turn(query, config.rope_for(kind)),
        _turn(key, config.rope_for(kind)),
        value,
        window=config.sliding_window,
        sink=weights.get(f"{prefix}sink_local"),
    )
    branches = {"local": local}
    if kind == "sparse":
        shared_key, shared_value, indices = shared
        branches["global"] = naive.block_sparse_attention(
            _turn(query, config.rope_for("full")),
            shared_key,
            shared_value,
            indices,
            block_size=config.oracle_block_size,
            sink=weights.get(f"{prefix}sink_global"),
        )
    parts = [
        _gated(config, weights, prefix, name, normed, output, maps) for name, (output, _, maps) in branches.items()
    ]
    trace.keys[layer], trace.values[layer] = key, value
    trace.maps[layer] = sum(maps for _, maps in parts)
    return sum(output for output, _ in parts)


def _gated(config, weights, prefix, branch, normed, output, maps):
    """A branch's output as `(batch, length, heads * v_head_dim)` and its map, both times its gate if it has one."""
    output = output.transpose(1, 2)
    weight = weights.get(f"{prefix}gate_{branch}_proj.weight")
    if weight is not None:
        gate = torch.sigmoid(functional.linear(normed, weight, weights[f"{prefix}gate_{branch}_proj.bias"]))
        gate = gate.unflatten(-1, (config.num_attention_heads, -1))
        output, maps = output * gate, maps * gate.mean(-1).transpose(1, 2)[..., None]
    return output.flatten(2), maps


def _norm(states, weight, eps):
    return weight * (states / torch.sqrt(states.pow(2).mean(-1, keepdim=True) + eps))


def _heads(config, weights, prefix, normed, name):
    states = functional.linear(
        normed, weights[f"{prefix}{name}_proj.weight"], weights.get(f"{prefix}{name}_proj.bias")
    )
    states = states.unflatten(-1, (-1, config.v_head_dim if name == "v" else config.head_dim))
    if config.use_qk_norm and name != "v":
        states = _norm(states, weights[f"{prefix}{name}_norm.weight"], config.rms_norm_eps)
    return states.transpose(1, 2)


def _turn(states, rope):
    """Rotate channel pairs `(i, i + half)` by `position * theta ** (-2 i / width)`; None leaves them alone."""
    if rope is None:
        return states
    width = int(states.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    # Float32 up to the cosine, as the library defines it; the factors then take the dtype of the states.
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(states.shape[2]).float()[:, None] * frequencies
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    one, two = states[..., : width // 2], states[..., width // 2 : width]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, states[..., width:]], dim=-1)


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed loss of the next token, row by row, -100 left out."""
    total = logits.new_zeros(())
    for row, targets in zip(logits, labels, strict=True):
        for position, target in enumerate(targets[1:].tolist()):
            if target != -100:
                total = total + torch.logsumexp(row[position], 0) - row[position, target]
    return total
