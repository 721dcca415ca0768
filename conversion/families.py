"""The families that can be converted: one table row each. All attend densely; some have mixtures of experts.

A family says which fields of its configuration carry over, which of ours it fixes, and which key map reads its
tensors. Everything that differs between families is in the table; nothing else branches on the family.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Field of either generation's configuration = source field of the same name, for every family.
COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
)

# Carried over where a family has them; the value is what their absence means.
OPTIONAL_FIELDS = {"head_dim": None}

# A rotary setting that older files hold beside the others; the library's models prefer that place.
ORIGINAL_LENGTH = "original_max_position_embeddings"

# Source fields without a place in ours, and why that loses nothing.
DROPPED_FIELDS = {
    "attention_dropout": "the oracle's probabilities choose blocks, so there is no dropout on them",
    "pretraining_tp": "says how the pretraining was parallelised",
    "sliding_window": "the window of the converted model is the `window` option",
    "use_sliding_window": "the window of the converted model is the `window` option",
    "max_window_layers": "the layer plan says which layers have a window",
    "layer_types": "derived from the layer plan",
    "router_jitter_noise": "noise on the router's input while pretraining",
    ORIGINAL_LENGTH: "part of `rope_parameters`",
    "quantization_config": "a GGUF file's weights are dequantised when it is read",
}


@dataclass(frozen=True)
class Family:
    """One dense architecture.

    Args:
        model_type (`str`): the `model_type` of its configuration.
        fields (`tuple[str, ...]`): fields that carry over beside `COMMON_FIELDS`.
        renamed (`dict[str, str]`): our field -> the source's, where the names differ.
        constants (`dict`): our fields that are the same for every model of the family.
        prefixes (`tuple[str, ...]`): what may stand before `layers.0` in its tensor names: with a head, without.
        key_map (`str`): the table in `key_map.KEY_MAPS` that reads its tensors.
    """

    model_type: str
    fields: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.", "")
    key_map: str = "dense_decoder"


ROUTER_FIELDS = ("num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")
QWEN_EXPERT_FIELDS = (
    *ROUTER_FIELDS,
    "num_experts",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)

# Architecture (`architectures` of config.json) -> family.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", fields=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family("mistral", constants={"attention_bias": False, "mlp_bias": False}),
    "Qwen2ForCausalLM": Family(
        "qwen2", constants={"attention_bias": True, "attention_output_bias": False, "mlp_bias": False}
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", fields=("attention_bias",), constants={"use_qk_norm": True, "mlp_bias": False}
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        fields=ROUTER_FIELDS,
        renamed={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        constants={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": True},
        key_map="mixture_of_experts",
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        fields=(*QWEN_EXPERT_FIELDS, "shared_expert_intermediate_size"),
        renamed={"attention_bias": "qkv_bias"},
        constants={"attention_output_bias": False, "mlp_bias": False},
        key_map="mixture_of_experts",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        fields=(*QWEN_EXPERT_FIELDS, "attention_bias"),
        constants={"use_qk_norm": True, "mlp_bias": False},
        key_map="mixture_of_experts",
    ),
}


def family_of(raw: dict[str, Any], where: str) -> tuple[str, Family]:
    """Architecture and family of a source, from its raw configuration.

    Args:
        raw (`dict`): the content of config.json.
        where (`str`): the source, for messages.
    Raises:
        NotImplementedError: a family, or a form of it, that cannot be converted; the message lists those that can.
    """
    named = raw.get("architectures")
    model_type = raw.get("model_type")
    if named is None:
        named = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    if len(named) != 1 or named[0] not in FAMILIES:
        raise NotImplementedError(
            f"{where}: the architecture must be one of {', '.join(sorted(FAMILIES))}, got "
            f"{', '.join(named) or 'none'} (model_type {model_type!r}); convert a dense checkpoint of those families."
        )
    return named[0], FAMILIES[named[0]]


def hysparse_fields(config: PreTrainedConfig, family: Family) -> dict[str, Any]:
    """The fields of `HySparseConfig`, and of the second generation's, that a source determines.

    Args:
        config (`PreTrainedConfig`): the source's, as transformers reads it: every spelling of the rotary settings is
            in its standard form, and fields missing in the file have the family's defaults.
    """
    values = {name: getattr(config, name) for name in (*COMMON_FIELDS, *family.fields)}
    values |= {name: getattr(config, theirs) for name, theirs in family.renamed.items()}
    values |= {name: getattr(config, name, absent) for name, absent in OPTIONAL_FIELDS.items()}
    original = getattr(config, ORIGINAL_LENGTH, None)
    if original is not None and ORIGINAL_LENGTH in (config.rope_parameters or {}):
        values["rope_parameters"] = {**config.rope_parameters, ORIGINAL_LENGTH: original}
    return values | family.constants


def longest_text(config: PreTrainedConfig) -> int:
    """Tokens of the longest text that a model was made for and, of a source with a window, attends to as a whole."""
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    is_source = config.model_type in {family.model_type for family in FAMILIES.values()}
    window = getattr(config, "sliding_window", None) if is_source and slides else None
    return min(config.max_position_embeddings, window or config.max_position_embeddings)


def dropped_fields(raw: dict[str, Any], kept: dict[str, Any]) -> dict[str, str]:
    """Fields of a raw source configuration that do not carry over, with the reason."""
    library = set(PreTrainedConfig().to_dict()) | {"torch_dtype", "rope_theta", "rope_scaling", "_name_or_path"}
    # Either name of the number of experts may stand in a file of any family.
    read = {*kept, *family_of(raw, "the source")[1].renamed.values(), "num_experts", "num_local_experts"}
    return {
        name: DROPPED_FIELDS.get(name, "not a field of the family")
        for name in sorted(raw)
        if name not in read and name not in library
    }


def check_supported(config: PreTrainedConfig, raw: dict[str, Any], where: str) -> None:
    """Refuse what would change the model without a word; warn where the converted model sees more than the source.

    Raises:
        NotImplementedError: a setting of `UNSUPPORTED` is on; the message says what to do.
    """
    for is_on, message in UNSUPPORTED:
        if is_on(config, raw):
            raise NotImplementedError(f"{where}: {message}")
    window = longest_text(config)
    if window < config.max_position_embeddings:
        logger.warning(
            f"{where} attends to its last {window} tokens only, in some or all layers; the full layers of the "
            f"converted model attend to everything. The two agree up to {window} tokens."
        )


UNSUPPORTED: tuple[tuple[Callable[[PreTrainedConfig, dict[str, Any]], bool], str], ...] = (
    (
        lambda config, raw: raw.get("quantization_config") is not None,
        "the weights are quantised (`quantization_config`), and packed weights cannot be mapped; convert the "
        "unquantised checkpoint, or a GGUF file, which is dequantised when read.",
    ),
    (
        lambda config, raw: (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0,
        "`partial_rotary_factor` is not 1, and the families here turn every channel of a head; remove it from "
        "config.json if the model was trained so.",
    ),
    (
        lambda config, raw: config.num_attention_heads % (config.num_key_value_heads or 1) != 0,
        "`num_attention_heads` is no multiple of `num_key_value_heads`; each KV head must serve the same number.",
    ),
)
