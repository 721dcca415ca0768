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
    """Run one row of ids `(1, length)` through a model, in the dtype of its weights."""
    config = model.config
    weights = dict(model.named_parameters())
    trace = Trace(logits=torch.empty(0))
    states = weights["model.embed_tokens.weight"][input_ids]
    shared = None
    for layer, kind in enumerate(config.layer_plan):
        prefix = f"model.layers.{layer}."
        normed = _norm(states, weights[f"{prefix}input_layernorm.weight"], config.rms_norm_eps)
        if kind == "full" or config.dense:
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
    query, key = (_turn(part, config.rope_for(config.layer_plan[layer])) for part in (query, key))
    output, _, indices, maps = _select(config, query, key, value)
    output, maps = _gated(config, weights, prefix, "full", normed, output, maps)
    trace.keys[layer], trace.values[layer], trace.indices[layer], trace.maps[layer] = key, value, indices, maps
    return output, (key, value, indices)


def _select(config, query, key, value):
    """Full attention that chooses blocks as the configuration says."""
    return naive.full_attention(
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


def _reading_layer(config, weights, prefix, normed, kind, shared, trace, layer):
    """A sparse layer (global and local branch) or a window layer (local branch alone)."""
    query = _heads(config, weights, prefix, normed, "q")
    own = None
    if f"{prefix}k_proj.weight" in weights:
        key, value = (_heads(config, weights, prefix, normed, name) for name in "kv")
        own = (_turn(query, config.rope_for(kind)), _turn(key, config.rope_for(kind)), value)
        trace.keys[layer], trace.values[layer] = key, value
    sinks = {name: weights.get(f"{prefix}sink_{name}") for name in ("global", "local")}
    if kind == "window":
        branches = {"local": naive.sliding_window_attention(*own, window=config.sliding_window, sink=sinks["local"])}
    else:
        history = own
        if config.share_full_kv:
            history = (_turn(query, config.rope_for("full")), *shared[:2])
        indices = shared[2] if config.share_oracle else _select(config, *history)[2]
        branches = _sparse_branches(config, own, history, indices, sinks)
    parts = [
        _gated(config, weights, prefix, name, normed, output, maps) for name, (output, _, maps) in branches.items()
    ]
    trace.maps[layer] = sum(maps for _, maps in parts)
    return sum(output for output, _ in parts)


def _sparse_branches(config, own, history, indices, sinks):
    """Output, log-sum-exp and map of each branch, for every `window_branch`."""
    window, block_size = config.sliding_window, config.oracle_block_size
    if config.window_branch == "merged_own" and config.share_full_kv:
        return {"global": _one_softmax(history, own, indices, block_size, window, sinks["global"])}
    merged = window if config.window_branch.startswith("merged") else 0
    branches = {
        "global": naive.block_sparse_attention(
            *history, indices, block_size=block_size, window=merged, sink=sinks["global"]
        )
    }
    if config.window_branch in ("own", "shared_kv"):
        local = own if config.window_branch == "own" else history
        branches["local"] = naive.sliding_window_attention(*local, window=window, sink=sinks["local"])
    return branches


def _one_softmax(history, own, indices, block_size, window, sink):
    """One softmax over the selected shared keys and the layer's own window, each with its own query."""
    (shared_query, shared_key, shared_value), (query, key, value) = history, own
    _, heads, length, dim = query.shape
    group = heads // key.shape[1]
    outputs, maps = [], query.new_zeros(1, heads, length, length)
    for head in range(heads):
        for position in range(length):
            listed = set(indices[0, head // group, position].tolist())
            chosen = [column for column in range(position + 1) if column // block_size in listed]
            near = list(range(max(0, position - window + 1), position + 1))
            logits = [
                shared_key[0, head // group, chosen] @ shared_query[0, head, position],
                key[0, head // group, near] @ query[0, head, position],
            ]
            everything = torch.cat(logits) * dim**-0.5
            if sink is not None:
                everything = torch.cat([everything, sink[head, None]])
            shares = torch.softmax(everything, 0)[: len(chosen) + len(near)].split([len(chosen), len(near)])
            states = (shared_value[0, head // group, chosen], value[0, head // group, near])
            outputs.append(shares[0] @ states[0] + shares[1] @ states[1])
            maps[0, head, position, chosen] += shares[0].detach()
            maps[0, head, position, near] += shares[1].detach()
    return torch.stack(outputs).view(1, heads, length, -1), None, maps


def _gated(config, weights, prefix, branch, normed, output, maps):
    """A branch's output as `(batch, length, heads * v_head_dim)` and its map, both times its gate if it has one."""
    output = output.transpose(1, 2)
    weight = weights.get(f"{prefix}gate_{branch}_proj.weight")
    if weight is not None and not config.dense:
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
