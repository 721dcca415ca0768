"""Bytes of a key and value cache: predicted from a configuration, and measured on a cache.

Both read attributes only; a checkpoint's own copy of the code has other classes than the installed package.
"""

from collections.abc import Iterator
from typing import Any

import torch

from hysparse_hf.modeling.cache_layers_hysparse import WINDOW_SLACK, capacity_for


# One token count.
COUNTER_BYTES = 8


def predict_cache_bytes(
    config: Any,
    batch_size: int,
    length: int,
    dtype: torch.dtype | str,
    slack: int | None = None,
    max_cache_len: int | None = None,
    pending: int = 0,
) -> dict[str, int]:
    """Bytes that a `HySparseCache` holds for `batch_size` rows of `length` tokens.

    Args:
        config (`HySparseConfig`): a configuration with a `cache_plan`; its class does not matter.
        batch_size (`int`): rows.
        length (`int`): tokens per row, padding included.
        dtype (`torch.dtype` or `str`): of keys and values; `torch.float8_e4m3fn` stands for one byte per element.
        slack (`int`, *optional*): tokens that window layers keep beyond the window; default: the cache's own.
        max_cache_len (`int`, *optional*): of a pre-allocated cache; default: one that grows.
        pending (`int`): how many of the tokens, the last ones, wait as states of the self-decoder, in one call's
            states or several; second generation with `bridge_materialization="lazy"`.
    Returns:
        `dict[str, int]`: `full` and `window`: bytes in use by layers of that kind; `pending`: of waiting states;
        `used`: their sum, exactly `batch * kv_heads * (head_dim + v_head_dim) * bytes * (full layers * n + window
        layers * min(n, window + slack))` where nothing waits; `allocated`: the same with room to grow, and with the
        rotations of waiting states, an upper bound of what `measure_cache_bytes` finds, and exactly that for a
        pre-allocated cache in which nothing waits.
    Raises:
        ValueError: a configuration without a `cache_plan`, a negative size, more tokens than fit, tokens that cannot
            wait, or a name that is no dtype.
    Source: HySparse (arXiv:2602.03560), section 3.3; HySparse2 (arXiv:2609.26368), for what waits.
    """
    plan = getattr(config, "cache_plan", None)
    if plan is None:
        raise ValueError(
            f"`config` must have a `cache_plan`, got model_type {getattr(config, 'model_type', None)!r}; pass a "
            "HySparseConfig (with `dense=True` for a model that keeps every layer's keys and values)."
        )
    slack = WINDOW_SLACK if slack is None else slack
    if batch_size < 0 or length < 0 or slack < 0:
        raise ValueError(
            f"`batch_size`, `length` and `slack` must be at least 0, got {batch_size}, {length} and {slack}."
        )
    if max_cache_len is not None and length > max_cache_len:
        raise ValueError(f"`length` must be at most `max_cache_len` ({max_cache_len}), got {length}.")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`dtype` must be a torch.dtype or its name, got {dtype!r}; use for example 'bfloat16'.")
    token_bytes = batch_size * config.num_key_value_heads * (config.head_dim + config.v_head_dim) * dtype.itemsize
    kept = config.sliding_window + slack
    full, window = (plan.count(kind) * token_bytes for kind in ("full", "window"))
    readers, sources = _readers_of_waiting_states(config, pending, length)
    bridged = readers * token_bytes
    waiting = batch_size * pending * sources * config.hidden_size * dtype.itemsize if pending else 0
    parts = {"full": full * length - bridged * pending, "window": window * min(length, kept), "pending": waiting}
    # Counts of the rows' tokens; a pre-allocated cache also counts its slots there.
    counters = COUNTER_BYTES * 2 * (batch_size if max_cache_len is None else batch_size + 1)
    columns, projected = (
        capacity_for(n) if max_cache_len is None else max_cache_len for n in (length, length - pending)
    )
    # With states wait a cosine and a sine per channel for two kinds of layers, and where each call of a row began.
    turned = batch_size * pending * (2 * 2 * config.head_dim * dtype.itemsize + COUNTER_BYTES)
    room = (full - bridged) * columns + bridged * projected + window * kept + counters + waiting + turned
    return {**parts, "used": sum(parts.values()), "allocated": room if length else 0}


def measure_cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes that a cache holds now.

    Args:
        cache (`HySparseCache`): or another cache whose `layers` have `keys` and `values`.
    Returns:
        `dict[str, int]`: `full` and `window`: bytes of the keys and values in use by layers of that kind; `pending`:
        of states that a second generation model has yet to project keys and values from; `used`: their sum;
        `allocated`: every storage that the cache holds on to, counted once, spare room included.
    """
    # Buffers of a pre-allocated cache are longer than what is in them.
    length = int(cache.get_seq_length())
    calls = getattr(cache, "pending", [])
    waiting = [part for call in calls for part in call.states.values()]
    parts = {"full": 0, "window": 0, "pending": sum(part.numel() * part.element_size() for part in waiting)}
    bridged = cache.bridged if calls else [False] * len(cache.layers)
    storages: dict[tuple[torch.device, int], int] = {}
    for layer, is_bridged in zip(cache.layers, bridged, strict=True):
        held = length - is_bridged * sum(call.length for call in calls)
        kind = "window" if layer.is_sliding else "full"
        for states in _tensors((layer.keys, layer.values)):
            parts[kind] += states[:, :, :held].numel() * states.element_size()
        for tensor in _tensors(vars(layer)):
            storages[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
    others = {name: value for name, value in vars(cache).items() if name != "layers"}
    for tensor in _tensors(others):
        storages[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
    return {**parts, "used": sum(parts.values()), "allocated": sum(storages.values())}


def _readers_of_waiting_states(config: Any, pending: int, length: int) -> tuple[int, int]:
    """How many layers wait for their keys, and from how many layers' states they will be projected."""
    if not pending:
        return 0, 0
    sources = [source for source in getattr(config, "bridge_plan", []) if source is not None]
    if not 0 < pending <= length or not sources or config.bridge_materialization != "lazy":
        raise ValueError(
            f"`pending` must lie between 0 and `length` ({length}), and be 0 where no bridge is lazy, got {pending}; "
            "only `bridge_materialization='lazy'` lets tokens wait."
        )
    return len(sources), len(set(sources))


def _storage_id(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in a value, also in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
