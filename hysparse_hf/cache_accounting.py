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
) -> dict[str, int]:
    """Bytes that a `HySparseCache` holds for `batch_size` rows of `length` tokens.

    Args:
        config (`HySparseConfig`): a configuration with a `cache_plan`; its class does not matter.
        batch_size (`int`): rows.
        length (`int`): tokens per row, padding included.
        dtype (`torch.dtype` or `str`): of keys and values; `torch.float8_e4m3fn` stands for one byte per element.
        slack (`int`, *optional*): tokens that window layers keep beyond the window; default: the cache's own.
        max_cache_len (`int`, *optional*): of a pre-allocated cache; default: one that grows.
    Returns:
        `dict[str, int]`: `full` and `window`: bytes in use by layers of that kind; `used`: their sum, exactly
        `batch * kv_heads * (head_dim + v_head_dim) * bytes * (full layers * n + window layers * min(n, window +
        slack))`; `allocated`: the same with room to grow, an upper bound of what `measure_cache_bytes` finds, and
        exactly that for a pre-allocated cache.
    Raises:
        ValueError: a configuration without a `cache_plan`, a negative size, more tokens than fit, or a name that is no
            dtype.
    Source: HySparse (arXiv:2602.03560), section 3.3.
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
    parts = {"full": full * length, "window": window * min(length, kept)}
    # Counts of the rows' tokens; a pre-allocated cache also counts its slots there.
    counters = COUNTER_BYTES * 2 * (batch_size if max_cache_len is None else batch_size + 1)
    columns = capacity_for(length) if max_cache_len is None else max_cache_len
    room = full * columns + window * kept + counters if length else 0
    return {**parts, "used": sum(parts.values()), "allocated": room}


def measure_cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes that a cache holds now.

    Args:
        cache (`HySparseCache`): or another cache whose `layers` have `keys` and `values`.
    Returns:
        `dict[str, int]`: `full` and `window`: bytes of the keys and values in use by layers of that kind; `used`:
        their sum; `allocated`: every storage that the cache holds on to, counted once, spare room included.
    """
    # Buffers of a pre-allocated cache are longer than what is in them.
    length = int(cache.get_seq_length())
    parts = {"full": 0, "window": 0}
    storages: dict[tuple[torch.device, int], int] = {}
    for layer in cache.layers:
        kind = "window" if layer.is_sliding else "full"
        for states in _tensors((layer.keys, layer.values)):
            parts[kind] += states[:, :, :length].numel() * states.element_size()
        for tensor in _tensors(vars(layer)):
            storages[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
    others = {name: value for name, value in vars(cache).items() if name != "layers"}
    for tensor in _tensors(others):
        storages[_storage_id(tensor)] = tensor.untyped_storage().nbytes()
    return {**parts, "used": sum(parts.values()), "allocated": sum(storages.values())}


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
