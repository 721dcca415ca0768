"""The one place that knows which transformers version is running.

transformers 5.24 renamed the cache argument and output field from `past_key_values` to `cache`. Our code says
`cache` everywhere; this module translates at the three borders: forward's arguments, output objects, and `generate()`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast


SUPPORTED_TRANSFORMERS = ">=5.17,<6"

_CACHE_NAMES = ("cache", "past_key_values")
_OUTPUT_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}

# The name by which `generate()` passes the cache and reads it back.
CACHE_ARGUMENT = next((name for name in _CACHE_NAMES if name in _OUTPUT_FIELDS), None)
if CACHE_ARGUMENT is None:
    raise ImportError(
        f"hysparse needs transformers{SUPPORTED_TRANSFORMERS}, found {transformers.__version__}: its outputs have "
        f"none of the cache fields {_CACHE_NAMES}. Install a supported version: pip install 'transformers>=5.17,<6'."
    )


def accepts_cache_names(forward: Callable) -> Callable:
    """Let a `forward` written with `cache` also take `past_key_values`, and show the library the name it looks for.

    Args:
        forward (`Callable`): a method with a parameter called `cache`.
    Returns:
        `Callable`: the same method; its visible signature carries this version's name, so that `generate()` and
        the library's wrappers find it. Giving both names is an error.
    """
    signature = inspect.signature(forward)
    shown = [
        parameter.replace(name=CACHE_ARGUMENT) if name == "cache" else parameter
        for name, parameter in signature.parameters.items()
    ]

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if "past_key_values" in kwargs:
            legacy = kwargs.pop("past_key_values")
            if legacy is not None:
                if kwargs.get("cache") is not None:
                    raise ValueError(
                        "`cache` and `past_key_values` are two names of one argument, got both; pass one of them."
                    )
                kwargs["cache"] = legacy
        return forward(self, *args, **kwargs)

    wrapper.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return wrapper


def with_cache(output_class: type, cache: Any, **fields: Any) -> Any:
    """Build a model output whose cache field has this version's name."""
    return output_class(**fields, **{CACHE_ARGUMENT: cache})


def cache_of(output: Any) -> Any:
    """Read the cache from a model output of this version."""
    return getattr(output, CACHE_ARGUMENT)


def checkpointing_is_active(module: torch.nn.Module) -> bool:
    """Whether layers of `module` would be replayed in a backward pass right now."""
    return bool(getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled())
