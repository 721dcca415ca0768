"""A HySparse2 model written as one straight loop over layers and queries, from the specification.

It reads a model's weights by name and shares no code with it; attention is that of `naive`, and what the generations
have in common that of `naive_model`.
"""

import naive
import naive_model
import torch
from naive_model import Trace
from torch.nn import functional


def forward(model, input_ids: torch.Tensor) -> Trace:
    """Run one row of ids `(1, length)` through a model, in the dtype of its weights."""
    config = model.config
    weights = dict(model.named_parameters())
    trace = Trace(logits=torch.empty(0))
    states = weights["model.embed_tokens.weight"][input_ids]
    halves = [("self", kind) for kind in config.self_layer_plan] + [
        ("cross", kind) for kind in config.cross_layer_plan
    ]
    inputs, normed_inputs, shared, source = {}, {}, None, None
    full_of_cross = -1
    for layer, (half, kind) in enumerate(halves):
        if layer == len(config.self_layer_plan):
            inputs["self_output"] = states
        prefix = f"model.layers.{layer}."
        normed = _norm(config, states, weights[f"{prefix}input_layernorm.weight"])
        inputs[layer], normed_inputs[layer] = states, normed
        if half == "cross" and kind == "full":
            full_of_cross += 1
            source = config.bridge_map[full_of_cross]
        bridged = normed
        if half == "cross" and config.bridge and not config.dense:
            bridged = _bridged(config, weights, source, inputs, normed_inputs, f"{prefix}self_attn.bridge_norm.weight")
        attention = f"{prefix}self_attn."
        if kind == "full" or config.dense:
            attended, given = _full_layer(config, weights, attention, kind, normed, bridged, trace, layer)
            shared = given if half == "cross" else None
        elif kind == "window":
            attended = _window_layer(config, weights, attention, normed, trace, layer)
        else:
            attended = _sparse_layer(config, weights, attention, normed, bridged, shared, trace, layer)
        states = states + functional.linear(
            attended, weights[f"{attention}o_proj.weight"], weights.get(f"{attention}o_proj.bias")
        )
        normed = _norm(config, states, weights[f"{prefix}post_attention_layernorm.weight"])
        gate, up = (functional.linear(normed, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        states = states + functional.linear(functional.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])
    states = _norm(config, states, weights["model.norm.weight"])
    trace.logits = functional.linear(states, weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))
    return trace


def _norm(config, states, weight):
    return naive_model._norm(states, weight, config.rms_norm_eps)


def _bridged(config, weights, source, inputs, normed_inputs, own_norm):
    """The self-decoder's states that a layer of the cross-decoder projects its keys and values from."""
    if source == "self_output":
        return _norm(config, inputs[source], weights["model.bridge_norm.weight"])
    if config.bridge_source == "normed":
        return normed_inputs[source]
    return _norm(config, inputs[source], weights[own_norm]) if own_norm in weights else None


def _project(config, weights, prefix, states, names, kind):
    rope = config.rope_for(kind)
    parts = [naive_model._heads(config, weights, prefix, states, name) for name in names]
    return [part if name == "v" else naive_model._turn(part, rope) for part, name in zip(parts, names, strict=True)]


def _select(config, query, key, value):
    """Output and map of full attention, and what it selects."""
    if config.selection == "all":
        output, _, _, maps = naive.full_attention(query, key, value)
        return output, maps, None
    if config.selection == "block":
        output, _, indices, maps = naive_model._select(config, query, key, value)
        return output, maps, indices
    output, _, indices, maps = naive.full_attention_with_token_oracle(
        query,
        key,
        value,
        n_selected=config.oracle_budget,
        window=config.sliding_window if config.recent_window == "forced" else 0,
        head_reduction=config.oracle_head_reduction,
    )
    return output, maps, indices


def _full_layer(config, weights, prefix, kind, normed, bridged, trace, layer):
    (query,) = _project(config, weights, prefix, normed, "q", kind)
    key, value = _project(config, weights, prefix, bridged, "kv", kind)
    output, maps, indices = _select(config, query, key, value)
    output, maps = naive_model._gated(config, weights, prefix, "full", normed, output, maps)
    trace.keys[layer], trace.values[layer], trace.indices[layer], trace.maps[layer] = key, value, indices, maps
    return output, (key, value, indices)


def _window_layer(config, weights, prefix, normed, trace, layer):
    query, key, value = _project(config, weights, prefix, normed, "qkv", "window")
    trace.keys[layer], trace.values[layer] = key, value
    output, _, maps = naive.sliding_window_attention(
        query, key, value, window=config.sliding_window, sink=weights.get(f"{prefix}sink_local")
    )
    output, trace.maps[layer] = naive_model._gated(config, weights, prefix, "local", normed, output, maps)
    return output


def _sparse_layer(config, weights, prefix, normed, bridged, shared, trace, layer):
    window = config.sliding_window
    sinks = {name: weights.get(f"{prefix}sink_{name}") for name in ("global", "local")}
    if config.share_full_kv:
        (query,) = _project(config, weights, prefix, normed, "q", "full")
        key, value = shared[:2]
    else:
        (query,) = _project(config, weights, prefix, normed, "q", "sparse")
        key, value = _project(config, weights, prefix, bridged, "kv", "sparse")
        trace.keys[layer], trace.values[layer] = key, value
    indices = shared[2] if config.share_oracle else _select(config, query, key, value)[2]
    branch = config.window_branch if config.recent_window == "branch" else "joined"
    own = None
    if branch in ("own", "merged_own"):
        own = (query, key, value)
        if config.share_full_kv:
            own = _project(config, weights, prefix, normed, "qkv", "sparse")
            trace.keys[layer], trace.values[layer] = own[1:]
    history = (query, key, value)
    if branch == "merged_own" and not config.share_full_kv:
        # The layer's own keys are what its selection reads, too: each counts once.
        branch = "merged_shared"
    if branch == "merged_own":
        size = config.oracle_block_size if config.selection == "block" else 1
        branches = {"global": naive_model._one_softmax(history, own, indices, size, window, sinks["global"])}
    else:
        joined = window if branch in ("joined", "merged_shared") else 0
        branches = {"global": _selected(config, history, indices, joined, sinks["global"])}
        if branch in ("own", "shared_kv"):
            local = own if branch == "own" else history
            branches["local"] = naive.sliding_window_attention(*local, window=window, sink=sinks["local"])
    parts = [
        naive_model._gated(config, weights, prefix, name, normed, output, maps)
        for name, (output, _, maps) in branches.items()
    ]
    trace.maps[layer] = sum(maps for _, maps in parts)
    return sum(output for output, _ in parts)


def _selected(config, history, indices, window, sink):
    """Output, log-sum-exp and map over the selection and a window in the same softmax."""
    if config.selection == "all":
        output, lse, _, maps = naive.full_attention(*history, sink=sink)
        return output, lse, maps
    if config.selection == "block":
        size = config.oracle_block_size
        return naive.block_sparse_attention(*history, indices, block_size=size, window=window, sink=sink)
    return naive.token_sparse_attention(*history, indices, window=window, sink=sink)
