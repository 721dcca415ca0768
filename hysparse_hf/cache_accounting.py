"""How many bytes a cache takes: predicted from a configuration, and measured on a cache.

Objects are read by their attributes, never by class: a checkpoint's own copy of the code has classes of its own.
"""

from typing import Any

import torch


def predict_cache_bytes(
    config: Any, batch_size: int, length: int, dtype: torch.dtype, slack: int | None = None
) -> dict[str, int]:
    """Bytes of keys and values that a model of this configuration caches.

    Args:
        config (`HySparseConfig`): the configuration.
        batch_size (`int`): rows.
        length (`int`): tokens per row.
        dtype (`torch.dtype`): of the cached states.
        slack (`int`, *optional*): tokens that window layers keep beyond the window; default: the cache's own.
    Returns:
        `dict[str, int]`: `full`, `window` and their sum `used`; and `allocated`, what the cache reserves when it grows
        to this length one token at a time or at once: rounded up to pages, with room for a quarter more.
    Raises:
        ValueError: a negative length or batch size.
    """
    from hysparse_hf.modeling.cache_hysparse import PAGE, WINDOW_SLACK, capacity_for

    for name, value in (("batch_size", batch_size), ("length", length)):
        if value < 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}.")
    kept = config.sliding_window + (WINDOW_SLACK if slack is None else slack)
    per_token = batch_size * config.num_key_value_heads * (config.head_dim + config.v_head_dim) * dtype.itemsize
    plan = config.cache_plan
    full = per_token * plan.count("full") * length
    window = per_token * plan.count("window") * min(length, kept)
    reserved = plan.count("full") * capacity_for(length) + plan.count("window") * (kept + PAGE)
    return {"full": full, "window": window, "used": full + window, "allocated": per_token * reserved}


def measure_cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes that a cache holds.

    Args:
        cache (`HySparseCache`): any cache whose `layers` have `keys` and `values`.
    Returns:
        `dict[str, int]`: `full`, `window` and their sum `used` count the stored states; `allocated` counts each
        storage behind them once, spare room included.
    """
    parts = {"full": 0, "window": 0}
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            if states is None:
                continue
            parts["window" if layer.is_sliding else "full"] += states.numel() * states.element_size()
            storage = states.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return {**parts, "used": sum(parts.values()), "allocated": sum(storages.values())}
