"""Which parts of a model to train, for LoRA and without it, and how to save only those.

Everything goes by parameter names, so it also works on a model that peft has wrapped, and on a checkpoint's own copy
of the model code.
"""

import os
import re
from collections.abc import Iterator

import torch
from safetensors.torch import load_file, save_file


# Part of a model -> the names of its linear layers, in every layer that has them.
LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "gates": ("gate_full_proj", "gate_global_proj", "gate_local_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
# Part of a model -> the names of which one occurs in the path of each of its parameters.
PARTS: dict[str, tuple[str, ...]] = {
    **LORA_TARGETS,
    "mlp": ("mlp",),
    "sinks": ("sink_global", "sink_local"),
    "norms": ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "bridge_norm", "norm"),
    "embeddings": ("embed_tokens", "lm_head"),
}


def lora_targets(*parts: str) -> list[str]:
    """Names for `target_modules` of a `peft.LoraConfig` (peft knows no default for this model type).

    Args:
        parts (`str`): among `"attention"`, `"gates"` and `"mlp"`; `target_modules="all-linear"` means all three.
            The fused experts of a mixture are no linear layers; peft adapts them by `target_parameters`.
    Raises:
        ValueError: no part, or one that has no linear layers.

    ```python
    >>> from hysparse_hf import lora_targets
    >>> lora_targets("attention", "gates")[:5]
    ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_full_proj']
    ```
    """
    _check_parts(parts, tuple(LORA_TARGETS))
    return [name for part in parts for name in LORA_TARGETS[part]]


def train_parts(model: torch.nn.Module, *parts: str, freeze_rest: bool = True) -> list[str]:
    """Make the parameters of some parts trainable.

    Args:
        model (`torch.nn.Module`): a HySparse model, also inside a `PeftModel`.
        parts (`str`): names in `PARTS`, for example `"gates", "sinks"`: what a dense checkpoint does not have.
        freeze_rest (`bool`): freeze everything else; False leaves it as it is. With adapters in place False is what
            one wants: `train_parts(peft_model, "sinks", freeze_rest=False)` trains the sinks beside them.
    Returns:
        `list[str]`: the names of the parameters that these parts have.
    Raises:
        ValueError: no part, an unknown one, or parts of which the model has no parameter.
    """
    _check_parts(parts, tuple(PARTS))
    chosen = dict(_parameters_of(model, parts))
    if not chosen:
        raise ValueError(
            f"`parts` must name something that this model has, got {parts}, of which it has no parameter; a "
            "configuration without gates or sinks has none of these to train."
        )
    for parameter in model.parameters() if freeze_rest else ():
        parameter.requires_grad_(False)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return list(chosen)


def save_parts(model: torch.nn.Module, path: str | os.PathLike, *parts: str) -> None:
    """Write the parameters of some parts to one safetensors file, under the names of the model without peft.

    Args:
        path (`str` or `os.PathLike`): the file to write.
        model, parts: as in `train_parts`.
    Raises:
        ValueError: no part, or an unknown one.
    """
    _check_parts(parts, tuple(PARTS))
    tensors = {_own_name(name): parameter.detach() for name, parameter in _parameters_of(model, parts)}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_parts(model: torch.nn.Module, path: str | os.PathLike) -> list[str]:
    """Read a file of `save_parts` into a model.

    Args:
        model (`torch.nn.Module`): of the same configuration, with or without peft.
        path (`str` or `os.PathLike`): the file.
    Returns:
        `list[str]`: the names that were read.
    Raises:
        ValueError: the file names a parameter that the model has not, or has in another shape.
    """
    tensors = load_file(path)
    own = {_own_name(name): parameter for name, parameter in _parameters_of(model, tuple(PARTS))}
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            found = tuple(own[name].shape) if name in own else None
            raise ValueError(
                f"the model must have every parameter of {os.fspath(path)!r} in its shape; {name!r} is "
                f"{tuple(tensor.shape)} there and {found} here; build the model from the same configuration."
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return list(tensors)


def _check_parts(parts: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    unknown = [part for part in parts if part not in allowed]
    if unknown or not parts:
        raise ValueError(f"`parts` must be one or more of {allowed}, got {unknown or 'none'}; name some of these.")


def _parameters_of(model: torch.nn.Module, parts: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of the parts, without adapters; where peft trains a copy of a module, the copy in use."""
    words = {name for part in parts for name in PARTS[part]}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        if words.intersection(path) and "original_module" not in path and not any("lora_" in word for word in path):
            yield name, parameter


def _own_name(name: str) -> str:
    """The parameter's name in the model that peft wrapped."""
    return re.sub(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.)", "", name.removeprefix("base_model.model."))
