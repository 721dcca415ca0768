"""Bytes of a key and value cache: predicted from a configuration, and measured on a cache.

Both read attributes only; a checkpoint's own copy of the code has other classes than the installed package.
"""

from collections.abc import Iterator
from typing import Any

import torch

from hysparse_hf.modeling.cache_layers_hysparse import PAGE, WINDOW_SLACK, capacity_for


def predict_cache_bytes(
    config: Any, batch_size: int, length: int, dtype: torch.dtype | str, slack: int | None = None
) -> dict[str, int]:
    """Bytes that a `HySparseCache` holds for `batch_size` rows of `length` tokens.

    Args:
        config (`HySparseConfig`): a configuration with a `cache_plan`; its class does not matter.
        batch_size (`int`): rows.
        length (`int`): tokens per row, padding included.
        dtype (`torch.dtype` or `str`): of keys and values; `torch.float8_e4m3fn` stands for one byte per element.
        slack (`int`, *optional*): tokens that window layers keep beyond the window; default: the cache's own.
    Returns:
        `dict[str, int]`: `full` and `window`: bytes in use by layers of that kind; `used`: their sum, exactly
        `batch * kv_heads * (head_dim + v_head_dim) * bytes * (full layers * n + window layers * min(n, window +
        slack))`; `allocated`: the same with room to grow, an upper bound of what `measure_cache_bytes` finds.
    Raises:
        ValueError: a configuration without a `cache_plan`, a negative size, or a name that is no dtype.
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
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`dtype` must be a torch.dtype or its name, got {dtype!r}; use for example 'bfloat16'.")
    token_bytes = batch_size * config.num_key_value_heads * (config.head_dim + config.v_head_dim) * dtype.itemsize
    kept = config.sliding_window + slack
    full, window = (plan.count(kind) * token_bytes for kind in ("full", "window"))
    parts = {"full": full * length, "window": window * min(length, kept)}
    room = full * capacity_for(length) + window * (kept + PAGE) if length else 0
    return {**parts, "used": sum(parts.values()), "allocated": room}


def measure_cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes that a cache holds now.

    Args:
        cache (`HySparseCache`): or another cache whose `layers` have `keys` and `values`.
    Returns:
        `dict[str, int]`: `full` and `window`: bytes of the keys and values in use by layers of that kind; `used`:
        their sum; `allocated`: every storage that the cache holds on to, counted once, spare room included.
    """
    parts = {"full": 0, "window": 0}
    storages: dict[tuple[torch.device, int], int] = {}
    for layer in cache.layers:
        kind = "window" if layer.is_sliding else "full"
        parts[kind] += sum(states.numel() * states.element_size() for states in _tensors((layer.keys, layer.values)))
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
