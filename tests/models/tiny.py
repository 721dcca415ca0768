"""Small HySparse models and the uncached runs that cached ones are compared with; imported as `models.tiny`."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager

import torch

from hysparse_hf import HySparseConfig, HySparseForCausalLM
from hysparse_hf.modeling.compat_transformers import cache_of


# Both names of the cache argument; each works in `forward` on every supported transformers.
CACHE_NAMES = ("cache", "past_key_values")
VOCAB_SIZE = 61

# Switch settings that change what is computed or cached, by test id.
SWITCHES: dict[str, dict] = {
    "default": {},
    "no_window": {"window_branch": "none"},
    "shared_window": {"window_branch": "shared_kv"},
    "merged_shared": {"window_branch": "merged_shared"},
    "merged_own": {"window_branch": "merged_own"},
    "own_kv": {"share_full_kv": False},
    "own_kv_no_window": {"share_full_kv": False, "window_branch": "none"},
    "own_kv_merged": {"share_full_kv": False, "window_branch": "merged_own"},
    "own_oracle": {"share_oracle": False},
    "dense": {"dense": True},
    "headwise_full_gate": {"full_layer_gate": True, "gate_granularity": "headwise"},
    "window_layers": {
        "layer_plan": ["window", "full", "window", "sparse", "full", "sparse"],
        "window_layer_gate": True,
        "rope_parameters": {"full": {"rope_theta": 1e4}, "sparse": {"rope_theta": 500.0}, "window": None},
    },
    "sum_mean_forced": {
        "oracle_block_reduction": "sum",
        "oracle_head_reduction": "mean",
        "oracle_forced_first_blocks": 1,
        "oracle_forced_local_blocks": 1,
        "oracle_budget": 16,
    },
    "wide_values": {"v_head_dim": 40, "use_qk_norm": True, "attention_bias": True},
}
# Arguments of `tiny_model` by test id; the second generation has baselines beside its switches.
MODELS = SWITCHES


def tiny_config(**switches) -> HySparseConfig:
    """Configuration T1: six layers full, sparse, sparse twice; blocks of 4, two selected; window 6."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "layer_plan": ["full", "sparse", "sparse"] * 2,
        "oracle_block_size": 4,
        "oracle_budget": 8,
        "sliding_window": 6,
        "initializer_range": 0.3,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        **switches,
    }
    settings.setdefault("num_hidden_layers", len(settings["layer_plan"]))
    return HySparseConfig(**settings)


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **switches) -> HySparseForCausalLM:
    """A model of `tiny_config(**switches)` in eval mode, its gates and sinks drawn so that each of them matters."""
    torch.manual_seed(seed)
    model = HySparseForCausalLM(tiny_config(**switches)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn.gate_" in name or "sink_" in name or name.endswith("_proj.bias"):
                parameter.normal_(0, 0.5)
    return model.to(dtype)


def default_sizes() -> dict:
    """The paper's block of 64 and window of 128 on a narrow model; 129 tokens exceed the budget."""
    return {
        "layer_plan": ["full", "sparse", "sparse", "full"],
        "oracle_block_size": 64,
        "oracle_budget": 128,
        "sliding_window": 128,
    }


def draw_ids(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    """Random token ids `(batch, length)` that are neither padding nor a special token."""
    return torch.randint(2, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded_mask(kind: str, lengths: Sequence[int], total: int, seed: int = 5) -> torch.Tensor:
    """Mask `(rows, total)` with `lengths[b]` visible slots in row b: `"left"`, `"right"` padded or with `"holes"`."""
    mask = torch.zeros(len(lengths), total, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        slots = {
            "left": torch.arange(total - length, total),
            "right": torch.arange(length),
            "holes": torch.randperm(total, generator=generator)[:length],
        }[kind]
        mask[row, slots] = 1
    return mask


def spread(rows: Iterable[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Put each row's ids `(length,)` into the visible slots of `mask`; padding is token 0."""
    ids = torch.zeros_like(mask)
    for row, tokens in enumerate(rows):
        ids[row, mask[row].bool()] = tokens
    return ids


@torch.no_grad()
def logits_alone(model: HySparseForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `(length, vocabulary)` of one row without padding, mask or cache."""
    return model(tokens[None], use_cache=False).logits[0]


@torch.no_grad()
def run_in_chunks(
    model: HySparseForCausalLM,
    ids: torch.Tensor,
    chunks: Iterable[int],
    attention_mask: torch.Tensor | None = None,
    cache=None,
    name: str = "cache",
) -> tuple[torch.Tensor, object]:
    """Feed `ids` piece by piece into one cache (a new one if None); returns all logits, and the cache."""
    outputs = []
    done = start = 0 if cache is None else int(cache.get_seq_length())
    for size in chunks:
        mask = None if attention_mask is None else attention_mask[:, : done + size]
        piece = ids[:, done - start : done - start + size]
        output = model(piece, attention_mask=mask, use_cache=True, **{name: cache})
        cache = cache_of(output)
        outputs.append(output.logits)
        done += size
    assert done - start == ids.shape[1], "the chunks must add up to the length"
    return torch.cat(outputs, dim=1), cache


def greedy(model: HySparseForCausalLM, ids, new_tokens: int = 12, attention_mask=None, **arguments):
    """Prompts `ids` and the likeliest new tokens by `generate()`, which also takes `arguments`."""
    if attention_mask is None and ids is not None:
        # Without a mask `generate()` would take a 0 that the model itself wrote for padding.
        attention_mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=attention_mask, max_new_tokens=new_tokens, do_sample=False, **arguments)


@torch.no_grad()
def uncached_greedy(
    model: HySparseForCausalLM, ids: torch.Tensor, new_tokens: int, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """REF of the known faults: a full forward without cache on the growing sequence, argmax each step."""
    for _ in range(new_tokens):
        logits = model(ids, attention_mask=attention_mask, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(ids), 1)], dim=1)
    return ids


def assert_same_caches(one, other):
    """Keys and values of every layer, columns in use."""
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length()
        for name in ("keys", "values"):
            states, expected = getattr(ours, name, None), getattr(theirs, name, None)
            assert (states is None) == (expected is None)
            if states is not None:
                torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equality of the specification: float64 within 1e-10, float32 within 1e-5 of the largest logit."""
    assert actual.shape == expected.shape, f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    assert actual.isfinite().all(), "logits are not finite"
    assert expected.isfinite().all(), "expected logits are not finite"
    relative = {torch.float64: 1e-10, torch.float32: 1e-5}[expected.dtype]
    bound = relative * max(1.0, expected.abs().max().item())
    worst = (actual - expected).abs().max().item()
    assert worst <= bound, f"logits differ by {worst:.3e}, allowed is {bound:.3e}"


@contextmanager
def recorded_forwards(model: HySparseForCausalLM):
    """List of the tokens `(batch, q_len)` that reach the decoder in each forward call inside the context."""
    shapes: list[tuple[int, ...]] = []

    def record(module, args: tuple, kwargs: dict) -> None:
        states = kwargs.get("input_ids")
        states = kwargs.get("inputs_embeds") if states is None else states
        shapes.append(tuple(states.shape[:2]))

    handle = model.model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


@contextmanager
def changed_layer_output(model: HySparseForCausalLM, layer: int, change: Callable[[list], None]):
    """Let `change` edit what decoder layer `layer` returns: `[hidden_states, key, value, indices]`."""

    def hook(module, args, output):
        parts = list(output)
        change(parts)
        return tuple(parts)

    handle = model.model.layers[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
