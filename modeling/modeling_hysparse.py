"""HySparse, first generation (arXiv:2602.03560): full layers choose key blocks, sparse layers read them."""

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    merge_branches,
    sliding_window_attention,
)
from .cache_hysparse import HySparseCache
from .compat_transformers import CACHE_ARGUMENT, accepts_cache_names, cache_of, checkpointing_is_active, with_cache
from .configuration_hysparse import HySparseConfig
from .layers_hysparse import HySparseMLP, HySparseRMSNorm, HySparseRotaryEmbedding, Rotation, rotate
from .rows_hysparse import PLAIN_ROWS, Rows, TokenLayout, layout_of_length, layout_of_mask, packed_rows


# Query, key and value of one branch.
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Auto class -> file and class in a checkpoint folder.
AUTO_MAP = {
    "AutoConfig": "configuration_hysparse.HySparseConfig",
    "AutoModel": "modeling_hysparse.HySparseModel",
    "AutoModelForCausalLM": "modeling_hysparse.HySparseForCausalLM",
}


@dataclass
class HySparseModelOutputWithPast(BaseModelOutputWithPast):
    """As the library's, and `selected_indices`: per full layer int32 `(batch, kv_heads, q_len, n_selected)`."""

    selected_indices: tuple[torch.Tensor, ...] | None = None


@dataclass
class HySparseCausalLMOutputWithPast(CausalLMOutputWithPast):
    """As the library's, and `selected_indices`: per full layer int32 `(batch, kv_heads, q_len, n_selected)`."""

    selected_indices: tuple[torch.Tensor, ...] | None = None


class HySparseGate(nn.Linear):
    """Projection of a gate, with bias; zero from scratch."""


class HySparseAttention(nn.Module):
    """Attention of one layer; `layer_plan[layer_idx]` says which kind.

    A full layer returns its keys, values and selected blocks beside its output. A sparse layer takes them and adds,
    gated, a global branch over the selected blocks and a local branch over its own window. The tensors between the
    two are compact (see `TokenLayout`): one column per content position.
    """

    def __init__(self, config: HySparseConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.kind = config.layer_plan[layer_idx]
        self.is_causal = True
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = self.head_dim**-0.5
        self.turns_as_full = config.rope_for(self.kind) == config.rope_for("full")
        self.is_read_by_others = not config.dense and layer_idx in config.donor_plan
        self.branches = self._branches()

        hidden, bias = config.hidden_size, config.attention_bias
        kv_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        if config.cache_plan[layer_idx] != "none":
            self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
            self.v_proj = nn.Linear(hidden, kv_heads * self.v_head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=config.attention_output_bias)
        if config.use_qk_norm:
            self.q_norm = HySparseRMSNorm(self.head_dim, config.rms_norm_eps)
            if config.cache_plan[layer_idx] != "none":
                self.k_norm = HySparseRMSNorm(self.head_dim, config.rms_norm_eps)

        widths = {"elementwise": self.num_heads * self.v_head_dim, "headwise": self.num_heads, "none": 0}
        for branch in self._gated_branches(widths[config.gate_granularity]):
            setattr(self, f"gate_{branch}_proj", HySparseGate(hidden, widths[config.gate_granularity]))
        for branch in self.branches if config.attention_sink and self.kind != "full" else ():
            setattr(self, f"sink_{branch}", nn.Parameter(torch.empty(self.num_heads)))

    @property
    def n_selected(self) -> int:
        """Blocks selected per query and KV head."""
        return self.config.oracle_budget // self.config.oracle_block_size

    def _branches(self) -> tuple[str, ...]:
        if self.kind == "full":
            return ("full",)
        if self.kind == "window":
            return ("local",)
        # A window merged into the global softmax has no gate or sink of its own.
        return ("global", "local") if self.config.window_branch in ("own", "shared_kv") else ("global",)

    def _gated_branches(self, width: int) -> tuple[str, ...]:
        gated = {"full": self.config.full_layer_gate, "window": self.config.window_layer_gate, "sparse": True}
        return self.branches if width and gated[self.kind] else ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        shared_key: torch.Tensor | None = None,
        shared_value: torch.Tensor | None = None,
        shared_indices: torch.Tensor | None = None,
        *,
        layout: TokenLayout,
        rotations: dict[str, Rotation],
        cache: HySparseCache | None = None,
        output_attentions: bool = False,
        output_selected_indices: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns `(output, weights, key, value, indices)`; the last three are None except where others read them.

        Shapes: hidden_states `(batch, q_len, hidden)`; shared_key `(batch, kv_heads, kv_len, head_dim)`;
        shared_indices int32 `(batch, kv_heads, q_len, n_selected)`; weights `(batch, heads, q_len, kv_len)`.
        """
        layout = layout.to(hidden_states.device)
        query = self._heads(self.q_proj, hidden_states, "q_norm")
        key = value = indices = None
        options = {"return_weights": output_attentions, "backend": self._backend()}
        own_rotation = rotations[self.kind]
        own_query = layout.compact(rotate(query, own_rotation))
        if hasattr(self, "k_proj"):
            key = layout.compact(rotate(self._heads(self.k_proj, hidden_states, "k_norm"), own_rotation))
            value = layout.compact(self._heads(self.v_proj, hidden_states))
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx, layout=layout)

        own = (own_query, key, value)
        if self.kind == "full" or self.config.dense:
            selects = (self.is_read_by_others and self.config.share_oracle) or output_selected_indices
            n_selected = self.n_selected if selects and self.kind == "full" else 0
            output, indices, weights = self._full(own, layout, n_selected, options)
            results = {"full": (output, weights)}
        elif self.kind == "window":
            results = {"local": self._window_of_own(own, layout, options)}
        else:
            shared_query = own_query if self.turns_as_full else layout.compact(rotate(query, rotations["full"]))
            shared = (shared_query, shared_key, shared_value)
            results = self._sparse(own, shared, shared_indices, layout, options)

        gated = [self._gate(branch, hidden_states, layout, *result) for branch, result in results.items()]
        output = self.o_proj(sum(part for part, _ in gated))
        weights = sum(part for _, part in gated) if output_attentions else None
        read = self.is_read_by_others
        return output, weights, key if read else None, value if read else None, indices

    def _backend(self) -> str:
        return "reference" if self.config._attn_implementation == "eager" else "auto"

    def _heads(self, projection: nn.Module, hidden_states: torch.Tensor, norm: str = "") -> torch.Tensor:
        dim = self.v_head_dim if norm == "" else self.head_dim
        states = projection(hidden_states).unflatten(-1, (-1, dim))
        if self.config.use_qk_norm and norm:
            # A float32 norm under autocast must not set queries and keys apart from the values.
            states = getattr(self, norm)(states).to(states.dtype)
        return states.transpose(1, 2)

    def _full(self, states: States, layout: TokenLayout, n_selected: int, options: dict):
        output, _, indices, *weights = full_attention_with_oracle(
            *states,
            block_size=self.config.oracle_block_size,
            n_selected=n_selected,
            scaling=self.scaling,
            rows=layout.rows,
            block_reduction=self.config.oracle_block_reduction,
            head_reduction=self.config.oracle_head_reduction,
            forced_first_blocks=self.config.oracle_forced_first_blocks,
            forced_local_blocks=self.config.oracle_forced_local_blocks,
            **options,
        )
        return output, indices, weights[0] if weights else None

    def _local(self, states: States, rows: Rows, options: dict, **asked):
        return sliding_window_attention(
            *states,
            window=self.config.sliding_window,
            scaling=self.scaling,
            rows=rows,
            **options | asked,
        )

    def _global(self, states: States, indices: torch.Tensor, layout: TokenLayout, options: dict, **asked):
        return block_sparse_attention(
            *states,
            indices,
            block_size=self.config.oracle_block_size,
            scaling=self.scaling,
            rows=layout.rows,
            **options | asked,
        )

    def _window_of_own(self, own: States, layout: TokenLayout, options: dict):
        """The local branch over the window cache's states; its map is placed among all columns."""
        rows = layout.window_rows(own[1].shape[2])
        result = self._local(own, rows, options, sink=getattr(self, "sink_local", None))
        output, weights = _with_weights(result)
        return output, None if weights is None else layout.window_in_history(weights)

    def _sparse(self, own: States, shared: States, indices: torch.Tensor, layout: TokenLayout, options: dict) -> dict:
        """Branches of a sparse layer, each `(output, weights)`, from its own states and the full layer's."""
        branch = self.config.window_branch
        history = shared if self.config.share_full_kv else own
        if not self.config.share_oracle:
            detached = (history[0].detach(), history[1].detach(), history[2].detach())
            indices = self._full(detached, layout, self.n_selected, {**options, "return_weights": False})[1]
        sinks = {name: getattr(self, f"sink_{name}", None) for name in self.branches}
        if branch == "merged_own" and self.config.share_full_kv:
            return {"global": self._merged(own, history, indices, sinks["global"], layout, options)}
        merged = self.config.sliding_window if branch.startswith("merged") else 0
        result = self._global(history, indices, layout, options, sink=sinks["global"], window=merged)
        results = {"global": _with_weights(result)}
        if branch == "own" and self.config.share_full_kv:
            results["local"] = self._window_of_own(own, layout, options)
        elif branch in ("own", "shared_kv"):
            results["local"] = _with_weights(self._local(history, layout.rows, options, sink=sinks["local"]))
        return results

    def _merged(self, own: States, history: States, indices, sink, layout: TokenLayout, options: dict):
        """One softmax over selected shared keys and the layer's own window (control experiment 11)."""
        parts = (
            self._global(history, indices, layout, options, return_lse=True),
            self._local(own, layout.window_rows(own[1].shape[2]), options, return_lse=True),
        )
        output, shares = merge_branches((parts[0][0], parts[1][0]), (parts[0][1], parts[1][1]), sink)
        if not options["return_weights"]:
            return output, None
        maps = [share[..., None] * part[2] for share, part in zip(shares, parts, strict=True)]
        return output, maps[0] + layout.window_in_history(maps[1])

    def _gate(self, branch: str, hidden_states: torch.Tensor, layout: TokenLayout, output, weights):
        """Bring a branch back into slot order, `(batch, q_len, heads * v_head_dim)`, times its gate."""
        output = layout.restore(output).transpose(1, 2)
        projection = getattr(self, f"gate_{branch}_proj", None)
        gate = None
        if projection is not None and not self.config.dense:
            gate = torch.sigmoid(projection(hidden_states)).unflatten(-1, (self.num_heads, -1))
            output = output * gate
        if weights is not None:
            weights = layout.restore_weights(weights)
            if gate is not None:
                weights = weights * gate.mean(-1).transpose(1, 2)[..., None]
        return output.flatten(-2), weights


def _with_weights(result):
    return result if isinstance(result, tuple) else (result, None)


class HySparseDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, config: HySparseConfig, layer_idx: int):
        super().__init__()
        self.self_attn = HySparseAttention(config, layer_idx)
        self.mlp = HySparseMLP(config)
        self.input_layernorm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        shared_key: torch.Tensor | None = None,
        shared_value: torch.Tensor | None = None,
        shared_indices: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns `(hidden_states, key, value, indices)`, as `HySparseAttention` does.

        Tensors with gradients from another layer are positional: keyword tensors lose theirs under reentrant
        checkpointing.
        """
        attended, _, *shared = self.self_attn(
            self.input_layernorm(hidden_states), shared_key, shared_value, shared_indices, **kwargs
        )
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, *shared


class HySparsePreTrainedModel(PreTrainedModel):
    config: HySparseConfig
    config_class = HySparseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HySparseDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HySparseDecoderLayer, "attentions": HySparseAttention}

    def save_pretrained(self, *args, **kwargs) -> None:
        """As the library's; names every Auto class in `auto_map`, of which it would write only this object's own."""
        if self._auto_class is not None:
            # Ours last: a config that came from a hub repository names the files there, and these are saved here.
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **AUTO_MAP}
        super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Gates start at one half and sinks at zero, as in the paper's architecture from scratch. Each module fills its
        # own parameters only: the library passes over modules that have none.
        if isinstance(module, (HySparseAttention, HySparseGate)):
            for parameter in module.parameters(recurse=False):
                init.zeros_(parameter)
        elif isinstance(module, HySparseRotaryEmbedding):
            module.reset_buffers()


class HySparseModel(HySparsePreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: HySparseConfig):
        config.check()
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([HySparseDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps)
        kinds = ["full"] + [kind for kind in ("sparse", "window") if config.rope_for(kind) != config.rope_for("full")]
        self.rotary_emb = nn.ModuleDict(
            {kind: HySparseRotaryEmbedding(config, kind) for kind in kinds if config.rope_for(kind) is not None}
        )
        self.gradient_checkpointing = False
        self.post_init()

    def _rotations(self, states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Rotation]:
        """Cosines and sines per layer kind; kinds with equal settings share one pair."""
        rotations: dict[str, Rotation] = {name: emb(states, position_ids) for name, emb in self.rotary_emb.items()}
        full = self.config.rope_for("full")
        for kind in ("full", "sparse", "window"):
            if kind not in rotations:
                same = self.config.rope_for(kind) == full and full is not None
                rotations[kind] = rotations["full"] if same else None
        return rotations

    def _check_cache(self, cache) -> None:
        # By name: a checkpoint's own copy of the code has a cache class of its own.
        if cache is not None and type(cache).__name__ != "HySparseCache":
            raise TypeError(
                f"`{CACHE_ARGUMENT}` must be a HySparseCache, got {type(cache).__name__}; pass "
                "`HySparseCache(model.config)`, or leave it out and use the one in the output."
            )
        if cache is not None and len(cache) != len(self.layers):
            raise ValueError(
                f"`{CACHE_ARGUMENT}` must have one layer per model layer ({len(self.layers)}), got {len(cache)}; make "
                "it from this model's config."
            )

    def _masked_layout(
        self, states: torch.Tensor, attention_mask, cu_seqlens, cache: HySparseCache | None
    ) -> TokenLayout | None:
        """The layout that a mask describes, if there is one; `ValueError` for a mask that cannot be what was meant."""
        if attention_mask is None:
            return None
        if not isinstance(attention_mask, torch.Tensor):
            raise TypeError(
                f"`attention_mask` must be a tensor, got {type(attention_mask).__name__}; pass the tokenizer's mask "
                "with `return_tensors='pt'`."
            )
        (batch, q_len), device = states.shape[:2], states.device
        past = cache.get_seq_length() if cache is not None else 0
        rows, length = attention_mask.shape[0], attention_mask.shape[-1]
        is_one_for_all = attention_mask.dim() == 4 and rows == 1
        fits = length == past + q_len and (rows == batch or is_one_for_all)
        if attention_mask.dim() not in (2, 4) or not fits:
            raise ValueError(
                f"`attention_mask` must be ({batch}, {past + q_len}) or ({batch} or 1, 1 or heads, {q_len}, "
                f"{past + q_len}): {past} cached and {q_len} new tokens; got {tuple(attention_mask.shape)}. "
                "Pass the mask of all tokens, cached ones included."
            )
        if cu_seqlens is not None:
            raise ValueError(
                "`attention_mask` and `cu_seq_lens_q` both say where rows begin, got both; leave out the mask: "
                "packed documents have no padding."
            )
        if attention_mask.dim() == 2:
            return layout_of_mask(attention_mask.to(device), q_len)
        if cache is not None and cache.row_counts is not None:
            raise ValueError(
                f"a 4-D `attention_mask` counts slots, but the `{CACHE_ARGUMENT}` holds rows that came with a "
                "(batch, length) mask and are stored without their padding; keep to one kind of mask per cache."
            )
        return layout_of_length(past, q_len, device, Rows(visibility=_visibility(attention_mask.to(device))))

    @accepts_cache_names
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: HySparseCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_selected_indices: bool = False,
        **kwargs,
    ) -> HySparseModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids (`torch.LongTensor`), inputs_embeds (`torch.FloatTensor`): exactly one; `(batch, q_len)` ids or
                `(batch, q_len, hidden)` states.
            attention_mask (`torch.Tensor`, *optional*): `(batch, cached + q_len)`, 0 at padding, which may stand
                anywhere; or `(batch, 1 or heads, q_len, cached + q_len)`, a caller's own visibility.
            position_ids (`torch.LongTensor`, *optional*): rotary positions `(batch or 1, q_len)`; default: content
                positions. Where they restart a packed document begins.
            cache (`HySparseCache`, *optional*): also under this version's other name. A cache that is given is
                read and extended whatever `use_cache` says.
            use_cache (`bool`, *optional*): make a cache when none is given. Packed input makes none.
            output_selected_indices (`bool`): also return each full layer's selected blocks.
        Raises:
            ValueError: inputs that contradict each other.
            TypeError: a cache of another class, or a mask that is no tensor.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given; pass one of them.")
        self._check_cache(cache)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if cache is not None and checkpointing_is_active(self):
            raise ValueError(
                f"`{CACHE_ARGUMENT}` cannot be used with gradient checkpointing while gradients are on: the backward "
                "pass would write into it again; leave it out, or use torch.no_grad()."
            )
        q_len, device = inputs_embeds.shape[1], inputs_embeds.device
        if position_ids is not None and position_ids.shape[1:] != (q_len,):
            raise ValueError(
                f"`position_ids` must be (batch or 1, {q_len}), one per new token, got {tuple(position_ids.shape)}."
            )
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        layout = self._masked_layout(inputs_embeds, attention_mask, cu_seqlens, cache)
        documents = packed_rows(position_ids, cu_seqlens, q_len, layout)
        if cache is not None and documents is not None and restarts(documents, while_tracing=False):
            raise ValueError(
                f"packed documents (restarting `position_ids` or `cu_seq_lens_q`) cannot be added to a "
                f"`{CACHE_ARGUMENT}`; leave it out, or give each document a row of its own."
            )
        if use_cache and cache is None and (documents is None or not restarts(documents, while_tracing=True)):
            cache, documents = HySparseCache(self.config), None
        if layout is None and cache is not None:
            layout = cache.layout_without_mask(q_len, device)
        elif layout is None:
            layout = layout_of_length(0, q_len, device, documents or PLAIN_ROWS)
        elif cache is None and documents is not None:
            layout = replace(layout, rows=documents)
        if cache is not None and layout.past and inputs_embeds.shape[1] > 1:
            # Decoding only adds to the mask, and is spared the look at it.
            cache.check_rows(layout)
        rotations = self._rotations(inputs_embeds, layout.positions if position_ids is None else position_ids)
        hidden_states = inputs_embeds
        shared: tuple[torch.Tensor | None, ...] = (None, None, None)
        selected = []
        # Self-speculation (`assistant_early_exit`) lowers the number of layers for the time of a draft.
        layers = list(zip(self.config.layer_plan, self.layers, strict=True))[: self.config.num_hidden_layers]
        for kind, layer in layers:
            hidden_states, *given = layer(
                hidden_states,
                *shared,
                layout=layout,
                rotations=rotations,
                cache=cache,
                output_attentions=kwargs.get("output_attentions") or self.config.output_attentions,
                output_selected_indices=output_selected_indices,
            )
            if kind == "full":
                shared = tuple(given)
                if output_selected_indices:
                    selected.append(layout.hide_padding(layout.restore(given[2])))
        if cache is not None:
            cache.record_rows(layout)
        return with_cache(
            HySparseModelOutputWithPast,
            cache,
            last_hidden_state=self.norm(hidden_states),
            selected_indices=tuple(selected) if output_selected_indices else None,
        )


class HySparseForCausalLM(HySparsePreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HySparseConfig):
        super().__init__(config)
        self.model = HySparseModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @accepts_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: HySparseCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_selected_indices: bool = False,
        **kwargs,
    ) -> HySparseCausalLMOutputWithPast:
        """Run the decoder and the head; arguments as in `HySparseModel.forward`, and:

        Args:
            labels (`torch.LongTensor`, *optional*): `(batch, q_len)`, -100 is ignored; shifted inside.
            logits_to_keep (`int` or `torch.Tensor`): logits of the last n positions (0: all), or of these positions.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_selected_indices=output_selected_indices,
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return with_cache(
            HySparseCausalLMOutputWithPast,
            cache_of(outputs),
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            selected_indices=outputs.selected_indices,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict, *args):
        """Make a `HySparseCache` for `generate()`; refuse caches that would lose shared state."""
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"`cache_implementation` must be None or 'dynamic' for this model, got {implementation!r}; leave it "
                "out, and a HySparseCache is made."
            )
        if model_kwargs.get(CACHE_ARGUMENT) is None and generation_config.use_cache is not False:
            cache = HySparseCache(self.config)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs[CACHE_ARGUMENT] = cache
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]


def restarts(rows: Rows, while_tracing: bool) -> bool:
    """Whether there is more than one document. Reads the data, or answers `while_tracing` when it cannot."""
    return while_tracing if torch.compiler.is_compiling() else bool(rows.first_key.any())


def _visibility(attention_mask: torch.Tensor) -> torch.Tensor:
    """A 4-D mask as bool: additive float masks hide with -10,000 or less, which no bias reaches."""
    if attention_mask.is_floating_point():
        return attention_mask > -1e4
    return attention_mask.bool()


__all__ = ["AUTO_MAP", "HySparseForCausalLM", "HySparseModel", "HySparsePreTrainedModel"]
