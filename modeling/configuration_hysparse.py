"""Configuration of HySparse, first generation (arXiv:2602.03560).

Keep this file free of relative imports and of registrations: a checkpoint folder loads it as a separate copy.
"""

import copy
from typing import Any

import transformers


# A checkpoint's code begins here: under another library the names below may be absent, or mean something else.
if not (5, 17) <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (6,):
    raise ImportError(
        f"HySparse needs transformers>=5.17,<6, got {transformers.__version__}; "
        'pip install "transformers>=5.17,<6" installs one.'
    )

from huggingface_hub.dataclasses import strict  # noqa: E402 - after the check
from transformers.activations import ACT2FN  # noqa: E402
from transformers.configuration_utils import PreTrainedConfig  # noqa: E402


LAYER_KINDS = ("full", "sparse", "window")
CHOICES = {
    "hidden_act": tuple(sorted(ACT2FN)),
    "oracle_block_reduction": ("max", "sum"),
    "oracle_head_reduction": ("max", "mean"),
    "gate_granularity": ("elementwise", "headwise", "none"),
    "window_branch": ("own", "shared_kv", "none", "merged_shared", "merged_own"),
}
ROPE_TYPES_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
# Heads go to ranks by KV group, so each rank chooses blocks for its own groups. The norms inside the heads are whole
# on every rank, but see only its heads: their gradients are summed.
TENSOR_PARALLEL_PLAN = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.gate_full_proj": "colwise",
    "layers.*.self_attn.gate_global_proj": "colwise",
    "layers.*.self_attn.gate_local_proj": "colwise",
    "layers.*.self_attn.sink_global": "colwise",
    "layers.*.self_attn.sink_local": "colwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    # Every rank has a part of each expert; the router chooses alike on all.
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}

# Of both models of the paper, after training on long texts.
_LONG_CONTEXT = {
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0},
    "oracle_block_size": 64,
    "oracle_budget": 1024,
    "sliding_window": 128,
}


def regular_layer_plan(num_layers: int, sparse_layers_per_full: int) -> list[str]:
    """One full layer, then `sparse_layers_per_full` sparse ones, repeated; the last layer is full.

    Args:
        num_layers (`int`): layers in the model.
        sparse_layers_per_full (`int`): N of the 1:N ratio; 0 makes every layer full.
    Raises:
        ValueError: a negative ratio.
    Source: HySparse (arXiv:2602.03560), section 3; reproduces its 5 full layers of 49 at 1:11.
    """
    if sparse_layers_per_full < 0:
        raise ValueError(
            f"`sparse_layers_per_full` must be at least 0, got {sparse_layers_per_full}; 0 makes every layer full."
        )
    period = sparse_layers_per_full + 1
    return ["full" if i % period == 0 or i == num_layers - 1 else "sparse" for i in range(num_layers)]


@strict
class HySparseConfig(PreTrainedConfig):
    r"""
    Configuration of a HySparse decoder. Fields with the library's usual names mean what they mean in Llama.

    Args:
        v_head_dim (`int`, *optional*): channels per value head; default `head_dim`.
        use_qk_norm (`bool`): RMSNorm over each query and key head before the rotation (Qwen3).
        attention_output_bias (`bool`, *optional*): bias of `o_proj`; default `attention_bias` (Qwen2 sets False).
        rope_parameters (`dict`, *optional*): one dict for all layers, or one per layer kind:
            `{"full": {...}, "sparse": {...}, "window": {...}}`. `None` for a kind means no position encoding there.
        layer_plan (`list[str]`, *optional*): per layer `"full"`, `"sparse"` or `"window"`; a full layer must come
            before every sparse one. Default: regular, from `sparse_layers_per_full`.
        sparse_layers_per_full (`int`): N of the 1:N ratio; only read when `layer_plan` is not given.
        oracle_block_size (`int`): tokens per block of keys.
        oracle_budget (`int`): tokens selected per query and KV head; a multiple of `oracle_block_size`.
        oracle_block_reduction (`str`): `"max"` or `"sum"` of the probabilities inside a block.
        oracle_head_reduction (`str`): `"max"` or `"mean"` over the heads of a KV group.
        oracle_forced_first_blocks (`int`): leading blocks always selected, inside the budget.
        oracle_forced_local_blocks (`int`): blocks ending with the query's own, always selected, inside the budget.
        sliding_window (`int`): tokens seen by the window branch, the query's own included.
        gate_granularity (`str`): `"elementwise"` (one gate per value channel), `"headwise"` or `"none"`.
        attention_sink (`bool`): one learnable sink logit per head in the branches of sparse and window layers.
        full_layer_gate (`bool`), window_layer_gate (`bool`): gate the output of full / window layers too.
        share_full_kv (`bool`): sparse layers read the full layer's keys and values; False gives each its own.
        share_oracle (`bool`): sparse layers reuse the full layer's selection; False makes each select for itself.
        num_experts (`int`): experts of a mixture-of-experts layer, also `num_local_experts`; 0: there are none.
        num_experts_per_tok (`int`): experts that each token uses.
        moe_intermediate_size (`int`, *optional*): width of one expert; default `intermediate_size`.
        norm_topk_prob (`bool`): the weights of a token's experts add up to 1 (Mixtral).
        shared_expert_intermediate_size (`int`): width of a gated expert for all tokens (Qwen2-MoE); 0: there is none.
        decoder_sparse_step (`int`): with n, every n-th layer has experts.
        mlp_only_layers (`list[int]`, *optional*): layers that keep an ordinary feed-forward network.
        router_aux_loss_coef (`float`): weight of the load balancing loss, which `output_router_logits` turns on.
        window_branch (`str`): `"own"`, `"shared_kv"`, `"none"`, `"merged_shared"` or `"merged_own"`.
        dense (`bool`): sparsity off: every layer attends fully over its own keys and values, no gates, no sinks.

    Raises:
        ValueError: fields contradict each other; the message says what to change.

    ```python
    >>> from hysparse_hf import HySparseConfig
    >>> HySparseConfig(num_hidden_layers=5).layer_plan
    ['full', 'sparse', 'sparse', 'sparse', 'full']
    ```
    """

    model_type = "hysparse"
    # A list, because Trainer adds one to it.
    keys_to_ignore_at_inference = ["past_key_values", "cache", "router_logits", "aux_loss"]
    base_model_tp_plan = TENSOR_PARALLEL_PLAN
    attribute_map = {"num_local_experts": "num_experts"}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    use_qk_norm: bool = False

    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    router_aux_loss_coef: float | int = 0.001
    output_router_logits: bool = False

    layer_plan: list[str] | None = None
    sparse_layers_per_full: int = 3
    oracle_block_size: int = 64
    oracle_budget: int = 1024
    oracle_block_reduction: str = "max"
    oracle_head_reduction: str = "max"
    oracle_forced_first_blocks: int = 0
    oracle_forced_local_blocks: int = 0
    sliding_window: int = 128
    gate_granularity: str = "elementwise"
    attention_sink: bool = True
    full_layer_gate: bool = False
    window_layer_gate: bool = False
    share_full_kv: bool = True
    share_oracle: bool = True
    window_branch: str = "own"
    dense: bool = False

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.v_head_dim is None:
            self.v_head_dim = self.head_dim
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if self.layer_plan is None:
            self.layer_plan = regular_layer_plan(self.num_hidden_layers, self.sparse_layers_per_full)
        if self.mlp_only_layers is None:
            self.mlp_only_layers = []
        super().__post_init__(**kwargs)
        # Only now: `num_local_experts` is an attribute of the base class's making.
        if self.num_experts and self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        self.check()

    @classmethod
    def paper_7b(cls, **changes: Any) -> "HySparseConfig":
        """The paper's dense model of 7 billion parameters: 36 layers, 1:3.

        Stated there: layers, hidden size, heads, ratio, block, budget, window, rotary base. Not stated, and chosen so
        that the total is 7.06 billion: the vocabulary, `intermediate_size` and the gates' width. The length is ours.

        Args:
            changes: fields that shall differ.
        Source: HySparse (arXiv:2602.03560), its two models.
        """
        fields: dict[str, Any] = {
            "vocab_size": 128000,
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sparse_layers_per_full": 3,
            **_LONG_CONTEXT,
        }
        return cls(**fields | changes)

    @classmethod
    def paper_80b_a3b(cls, **changes: Any) -> "HySparseConfig":
        """The paper's mixture of experts of 80 billion parameters, 3 billion of them active: 49 layers, 1:11.

        Stated there: layers, hidden size, heads, experts, ratio, block, budget, window, rotary base. Not stated, and
        chosen so that the total is 79.7 billion, of which a token uses 3.05 billion beside the embeddings: the
        vocabulary, the experts' width, no shared expert, no experts in the first layer, and one gate per head (a gate
        per channel would add 1.5 billion to those in use). The length is ours.

        Args:
            changes: fields that shall differ.
        Source: HySparse (arXiv:2602.03560), its two models.
        """
        fields: dict[str, Any] = {
            "vocab_size": 128000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 49,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "mlp_only_layers": [0],
            "gate_granularity": "headwise",
            "sparse_layers_per_full": 11,
            **_LONG_CONTEXT,
        }
        return cls(**fields | changes)

    def check(self) -> None:
        """Raise `ValueError` when fields contradict each other. Models call it again: fields may be set later."""
        self._check_heads()
        self.validate_rope()
        self._check_plan()
        self._check_experts()
        self._check_selection()
        self._check_window()
        self._check_switches()

    def _check_heads(self) -> None:
        if min(self.num_attention_heads, self.num_key_value_heads) < 1:
            raise ValueError(
                f"`num_attention_heads` and `num_key_value_heads` must be at least 1, got {self.num_attention_heads} "
                f"and {self.num_key_value_heads}; give both, or leave the second out for one KV head per head."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads`, got {self.num_attention_heads} "
                f"and {self.num_key_value_heads}; give each KV head the same number of query heads."
            )
        if min(self.head_dim, self.v_head_dim) < 1:
            raise ValueError(
                f"`head_dim` and `v_head_dim` must be at least 1, got {self.head_dim} and {self.v_head_dim}; give "
                "both, or leave them out for `hidden_size // num_attention_heads`."
            )
        ranks = getattr(getattr(self, "distributed_config", None), "tp_size", None) or 1
        if self.num_key_value_heads % ranks:
            raise ValueError(
                f"`num_key_value_heads` ({self.num_key_value_heads}) must be a multiple of the tensor parallel size, "
                f"got {ranks}: the heads of a KV group choose their blocks together; use fewer ranks."
            )
        if self.attention_dropout:
            raise ValueError(
                f"`attention_dropout` must be 0, got {self.attention_dropout}: the oracle's probabilities choose the "
                "blocks, and dropping them would change the selection; set it to 0.0."
            )

    def _check_plan(self) -> None:
        plan = self.layer_plan
        if self.num_hidden_layers < 1:
            raise ValueError(f"`num_hidden_layers` must be at least 1, got {self.num_hidden_layers}; use 1 or more.")
        unknown = sorted(set(plan) - set(LAYER_KINDS))
        if unknown:
            raise ValueError(f"`layer_plan` entries must be among {LAYER_KINDS}, got {unknown}; correct them.")
        if len(plan) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_plan` must have one entry per layer ({self.num_hidden_layers}), got {len(plan)}; give both "
                "`num_hidden_layers` and a plan of that length, or `layer_plan=None` with a ratio."
            )
        if "sparse" in plan and "full" not in plan[: plan.index("sparse")]:
            raise ValueError(
                f"`layer_plan` must have a full layer before its first sparse layer (layer {plan.index('sparse')}), "
                f"got {plan}; a sparse layer reads the preceding full layer."
            )

    def _check_experts(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"`num_experts` must be at least 0, got {self.num_experts}; 0 means no experts.")
        if not self.num_experts:
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"`num_experts_per_tok` must lie between 1 and `num_experts` ({self.num_experts}), got "
                f"{self.num_experts_per_tok}; choose how many of them a token uses."
            )
        if self.moe_intermediate_size < 1 or self.shared_expert_intermediate_size < 0:
            raise ValueError(
                "`moe_intermediate_size` must be at least 1 and `shared_expert_intermediate_size` at least 0 (none), "
                f"got {self.moe_intermediate_size} and {self.shared_expert_intermediate_size}; give widths."
            )
        if self.decoder_sparse_step < 1 or not set(self.mlp_only_layers) <= set(range(self.num_hidden_layers)):
            raise ValueError(
                "`decoder_sparse_step` must be at least 1 and `mlp_only_layers` must name layers from 0 to "
                f"{self.num_hidden_layers - 1}, got {self.decoder_sparse_step} and {self.mlp_only_layers}; 1 and no "
                "such layers give every layer experts."
            )
        if self.mlp_bias:
            raise ValueError("`mlp_bias` must be False where there are experts, got True; they have no biases.")

    def _check_selection(self) -> None:
        size, budget = self.oracle_block_size, self.oracle_budget
        if size < 1:
            raise ValueError(f"`oracle_block_size` must be at least 1 token, got {size}; the default is 64.")
        if budget < size or budget % size:
            below, above = max(budget // size, 1) * size, (budget // size + 1) * size
            raise ValueError(
                f"`oracle_budget` must be a multiple of `oracle_block_size` ({size}), got {budget}; "
                f"use {' or '.join(str(n) for n in sorted({below, above}))}."
            )
        forced = self.oracle_forced_first_blocks + self.oracle_forced_local_blocks
        if self.oracle_forced_first_blocks < 0 or self.oracle_forced_local_blocks < 0 or forced > budget // size:
            raise ValueError(
                "`oracle_forced_first_blocks` + `oracle_forced_local_blocks` must lie between 0 and the "
                f"{budget // size} blocks of the budget, got {self.oracle_forced_first_blocks} + "
                f"{self.oracle_forced_local_blocks}; raise `oracle_budget` or force fewer."
            )

    def _check_window(self) -> None:
        if self.sliding_window < 1:
            raise ValueError(
                f"`sliding_window` must be at least 1 (the query's own token), got {self.sliding_window}; "
                "to drop the branch set `window_branch='none'`."
            )

    def _check_choices(self, choices_of: dict[str, tuple[str, ...]]) -> None:
        for field, choices in choices_of.items():
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"`{field}` must be one of {choices}, got {getattr(self, field)!r}; use one of these."
                )

    def _check_switches(self) -> None:
        self._check_choices(CHOICES)
        if not self.share_full_kv and self.window_branch in ("shared_kv", "merged_shared"):
            raise ValueError(
                f"`window_branch={self.window_branch!r}` reads the full layer's keys and values, which "
                "`share_full_kv=False` removes; use 'own', 'none' or 'merged_own'."
            )

    @property
    def donor_plan(self) -> list[int | None]:
        """Per layer the full layer whose blocks (and keys) a sparse layer reads; None for other layers."""
        donors, full = [], None
        for index, kind in enumerate(self.layer_plan):
            full = index if kind == "full" else full
            donors.append(full if kind == "sparse" else None)
        return donors

    @property
    def cache_plan(self) -> list[str]:
        """Per layer what it caches: `"full"` (every token), `"window"` (the last few) or `"none"`."""
        return [self._cached_by(kind) for kind in self.layer_plan]

    def _cached_by(self, kind: str) -> str:
        if self.dense or kind == "full":
            return "full"
        if kind == "window":
            return "window"
        if not self.share_full_kv:
            return "full"
        return "window" if self.window_branch in ("own", "merged_own") else "none"

    @property
    def moe_plan(self) -> list[bool]:
        """Per layer whether its feed-forward network is a mixture of experts."""
        step, without = self.decoder_sparse_step, self.mlp_only_layers
        return [self.num_experts > 0 and (i + 1) % step == 0 and i not in without for i in range(len(self.layer_plan))]

    @property
    def layer_types(self) -> list[str]:
        """The plan in the library's closed list of names (what masks and caches of the library would need)."""
        return ["full_attention" if kept == "full" else "sliding_attention" for kept in self.cache_plan]

    @layer_types.setter
    def layer_types(self, value: Any) -> None:
        # Derived from the plan; a value found in a saved file is a copy of what the plan says.
        pass

    @property
    def rope_is_per_kind(self) -> bool:
        return bool(self.rope_parameters) and set(self.rope_parameters) <= set(LAYER_KINDS)

    def rope_for(self, kind: str) -> dict | None:
        """Rotary settings of one layer kind; `None` means no position encoding."""
        if not self.rope_is_per_kind:
            return self.rope_parameters
        return self.rope_parameters[kind] if kind in self.rope_parameters else self.rope_parameters["full"]

    def convert_rope_params_to_dict(self, **kwargs):
        # Library versions disagree on which keys mark a per-kind dict, so the whole step is done here.
        parameters = copy.deepcopy(kwargs.pop("rope_scaling", None) or self.rope_parameters or {})
        theta = kwargs.pop("rope_theta", None)
        partial = kwargs.pop("partial_rotary_factor", None)
        per_kind = bool(parameters) and set(parameters) <= set(LAYER_KINDS)
        if not per_kind and any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError(
                f"`rope_parameters` given per layer kind must have keys among {LAYER_KINDS}, got "
                f"{sorted(parameters)}; rename them."
            )
        if per_kind and "full" not in parameters:
            raise ValueError(
                f"`rope_parameters` given per layer kind must include 'full', got {sorted(parameters)}; add it."
            )
        for entry in parameters.values() if per_kind else [parameters]:
            if entry is not None:
                self._standardize_rope(entry, theta, partial)
        self.rope_parameters = parameters
        return kwargs

    def _standardize_rope(self, entry: dict, theta: float | None, partial: float | None) -> None:
        entry["rope_type"] = entry.get("rope_type", entry.pop("type", "default"))
        entry.pop("type", None)
        entry.setdefault("rope_theta", 10000.0 if theta is None else theta)
        if partial is not None:
            entry.setdefault("partial_rotary_factor", partial)
        if entry["rope_type"] in ROPE_TYPES_WITH_ORIGINAL_LENGTH:
            original = getattr(self, "original_max_position_embeddings", None) or self.max_position_embeddings
            entry.setdefault("original_max_position_embeddings", original)

    def standardize_rope_params(self) -> None:
        """Called by the library's own rotary functions; the parameters are already in standard form."""

    def validate_rope(self) -> None:
        """Check each kind's rotary settings with the library's own rules."""
        entries = self.rope_parameters.values() if self.rope_is_per_kind else [self.rope_parameters]
        for entry in entries:
            if not entry:
                continue
            check = getattr(self, f"_validate_{entry['rope_type']}_rope_parameters", None)
            if check is None:
                raise ValueError(
                    f"`rope_type` {entry['rope_type']!r} is not known to this version of transformers; use one it "
                    "knows, such as 'default', or another version."
                )
            width = int(self.head_dim * entry.get("partial_rotary_factor", 1.0))
            if width % 2:
                raise ValueError(
                    f"`head_dim` ({self.head_dim}) times `partial_rotary_factor` must be even, got {width}; rotary "
                    "embeddings turn channels in pairs."
                )
            check(entry, ignore_keys={"partial_rotary_factor"})


__all__ = ["HySparseConfig"]
