"""HySparse, first generation (arXiv:2602.03560): full layers choose key blocks, sparse layers read them."""

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_hysparse import HySparseCache
from .compat_transformers import CACHE_ARGUMENT, accepts_cache_names, cache_of, checkpointing_is_active, with_cache
from .configuration_hysparse import HySparseConfig
from .decoder_hysparse import HySparseAttention, HySparseDecoderLayer, HySparseGate
from .inputs_hysparse import check_cache, check_generation_cache, check_logits_to_keep, last_tokens, read_inputs
from .layers_hysparse import HySparseRMSNorm, HySparseRotaryEmbedding, Rotation
from .moe_hysparse import HySparseExperts, HySparseRouter, balance_loss
from .prompt_end_hysparse import kept_rows, prompt_end, tokens_at
from .rows_hysparse import TokenLayout


# Auto class -> file and class in a checkpoint folder.
AUTO_MAP = {
    "AutoConfig": "configuration_hysparse.HySparseConfig",
    "AutoModel": "modeling_hysparse.HySparseModel",
    "AutoModelForCausalLM": "modeling_hysparse.HySparseForCausalLM",
    "AutoModelForSequenceClassification": "modeling_hysparse.HySparseForSequenceClassification",
}


# Outputs that have a row per new token, and so need all of them to run.
WHOLE_OUTPUTS = ("output_hidden_states", "output_attentions", "output_selected_indices", "output_router_logits")


@dataclass
class HySparseModelOutputWithPast(BaseModelOutputWithPast):
    """As the library's, and `selected_indices`: per full layer int32 `(batch, kv_heads, q_len, n_selected)`;
    `router_logits`: per mixture-of-experts layer `(batch * q_len, experts)`.
    """

    selected_indices: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class HySparseCausalLMOutputWithPast(CausalLMOutputWithPast):
    """As the library's, and `selected_indices`: per full layer int32 `(batch, kv_heads, q_len, n_selected)`;
    `router_logits`: per mixture-of-experts layer `(batch * q_len, experts)`; `aux_loss`: their balance.
    """

    selected_indices: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None


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
    _auto_map = AUTO_MAP

    def save_pretrained(self, *args, **kwargs) -> None:
        """As the library's; names every Auto class in `auto_map`, of which it would write only this object's own."""
        if self._auto_class is not None:
            # Ours last: a config that came from a hub repository names the files there, and these are saved here.
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **self._auto_map}
        super().save_pretrained(*args, **kwargs)

    def init_parallel_plans(self) -> None:
        """As the library's; leaves out rules for parts that this configuration lacks, which it would warn about."""
        super().init_parallel_plans()
        names = [name for name, _ in (*self.named_modules(), *self.named_parameters())]
        present = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        self._tp_plan = {rule: style for rule, style in self._tp_plan.items() if rule in present}

    def needs_all_rows(self, asked: dict) -> bool:
        """Whether `asked`, forward's keyword arguments, or the configuration name an output with a row per token."""
        return any(
            getattr(self.config, name, False) if asked.get(name) is None else asked[name] for name in WHOLE_OUTPUTS
        )

    def _wants_cache(self, use_cache: bool | None, labels: torch.Tensor | None) -> bool | None:
        """`use_cache`; where it is not given, a training step makes none: replayed layers would write to it again."""
        return False if use_cache is None and labels is not None and self.training else use_cache

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """True: the library looks for its decorator in this file, and the experts stand in another."""
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Gates start at one half and sinks at zero, as in the paper's architecture from scratch. Each module fills its
        # own parameters only: the library passes over modules that have none.
        if isinstance(module, (HySparseAttention, HySparseGate)):
            for parameter in module.parameters(recurse=False):
                init.zeros_(parameter)
        elif isinstance(module, (HySparseExperts, HySparseRouter)):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, HySparseRotaryEmbedding):
            module.reset_buffers()


class HySparseModel(HySparsePreTrainedModel):
    """The decoder without a head."""

    layer_class: type[HySparseDecoderLayer] = HySparseDecoderLayer

    def __init__(self, config: HySparseConfig):
        config.check()
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps, config)
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
        output_router_logits: bool | None = None,
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
            output_router_logits (`bool`, *optional*): also return the router's logits of each mixture of experts;
                default: the configuration's.
            logits_to_keep (`int` or `torch.Tensor`): `last_hidden_state` holds the last n positions alone (0: all), or
                these positions. For the last n, what they do not read is not computed, unless an output with a row per
                token is asked for; at padding they mean nothing.
        Raises:
            ValueError: inputs that contradict each other, or a `logits_to_keep` that is no such number or tensor.
            TypeError: a cache of another class, or a mask that is no tensor.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given; pass one of them.")
        check_cache(cache, len(self.layers))
        if cache is not None and checkpointing_is_active(self):
            raise ValueError(
                f"`{CACHE_ARGUMENT}` cannot be used with gradient checkpointing while gradients are on: the backward "
                "pass would write into it again; leave it out, or use torch.no_grad()."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        layout, cache = read_inputs(
            self.config,
            inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
            cache=cache,
            use_cache=use_cache,
        )
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        rotations = self._rotations(inputs_embeds, layout.positions if position_ids is None else position_ids)
        hidden_states, selected, routed = self._run_layers(
            inputs_embeds,
            layout=layout,
            rotations=rotations,
            cache=cache,
            output_selected_indices=output_selected_indices,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        if cache is not None:
            cache.record_rows(layout)
        return with_cache(
            HySparseModelOutputWithPast,
            cache,
            last_hidden_state=self.norm(hidden_states),
            selected_indices=tuple(selected) if output_selected_indices else None,
            router_logits=tuple(routed) if output_router_logits and routed else None,
        )

    def _run_layers(
        self,
        hidden_states: torch.Tensor,
        *,
        layout: TokenLayout,
        rotations: dict[str, Rotation],
        cache: HySparseCache | None,
        output_selected_indices: bool,
        output_attentions: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The last layer's hidden states that are kept, each full layer's selection if asked for, routers' logits."""
        shared: tuple = (None, None, None, None)
        selected, routed = [], []
        layers = self._used_layers()
        asked = {"output_selected_indices": output_selected_indices, "output_attentions": output_attentions, **kwargs}
        q_len, end = hidden_states.shape[1], None
        check_logits_to_keep(logits_to_keep, q_len)
        # The number first: a step of one token is spared the look at the configuration.
        if isinstance(logits_to_keep, int) and 0 < logits_to_keep < q_len and not self.needs_all_rows(asked):
            end = prompt_end(self.config, len(layers), layout, rotations, cache, logits_to_keep)
        for index, (kind, layer) in enumerate(layers):
            ends_here = end is not None and index == end.layer_idx
            hidden_states, *given, router_logits = layer(
                hidden_states,
                *shared,
                layout=layout,
                rotations=rotations,
                cache=cache,
                output_attentions=output_attentions or self.config.output_attentions,
                output_selected_indices=output_selected_indices,
                end=end if ends_here else None,
            )
            if ends_here:
                layout, rotations = end.layout, end.rotations
            if kind == "full":
                shared = tuple(given)
                if output_selected_indices:
                    selected.append(layout.hide_padding(layout.restore(given[2])))
            if router_logits is not None:
                routed.append(router_logits)
        if end is not None:
            return tokens_at(hidden_states, end.asked), selected, routed
        return kept_rows(hidden_states, logits_to_keep), selected, routed

    def _used_layers(self) -> list[tuple[str, nn.Module]]:
        """Kinds and layers; self-speculation (`assistant_early_exit`) lowers their number for the time of a draft."""
        return list(zip(self.config.layer_plan, self.layers, strict=True))[: self.config.num_hidden_layers]


class HySparseForCausalLM(HySparsePreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head."""

    model_class: type[HySparseModel] = HySparseModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: HySparseConfig):
        super().__init__(config)
        self.model = self.model_class(config)
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
            labels (`torch.LongTensor`, *optional*): `(batch, q_len)`, -100 is ignored; shifted inside. Where all are,
                the loss is NaN and the gradients are 0, as in the library.
            use_cache (`bool`, *optional*): default: the configuration's; with labels in training mode, none is made.
            logits_to_keep (`int` or `torch.Tensor`): logits of the last n positions (0: all), or of these positions.

        With `output_router_logits` the balance of a mixture of experts is `aux_loss`, and a part of the loss.
        """
        outputs, hidden_states = self._run_model(
            logits_to_keep,
            labels is not None,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=self._wants_cache(use_cache, labels),
            output_selected_indices=output_selected_indices,
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        aux_loss = None
        if outputs.router_logits is not None:
            aux_loss = balance_loss(self.config, outputs.router_logits, attention_mask)
            loss = None if loss is None else loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return with_cache(
            HySparseCausalLMOutputWithPast,
            cache_of(outputs),
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            selected_indices=outputs.selected_indices,
            router_logits=outputs.router_logits,
            aux_loss=aux_loss,
        )

    def _run_model(
        self, logits_to_keep: int | torch.Tensor, has_labels: bool, **kwargs
    ) -> tuple[HySparseModelOutputWithPast, torch.Tensor]:
        """The decoder's output, and the hidden states `(batch, kept, hidden)` that the head reads."""
        states = kwargs["inputs_embeds"] if kwargs["input_ids"] is None else kwargs["input_ids"]
        # Without any the decoder says what is wrong.
        q_len = 0 if states is None else states.shape[1]
        if q_len:
            check_logits_to_keep(logits_to_keep, q_len)
        keeps_all = isinstance(logits_to_keep, int) and not 0 < logits_to_keep < q_len
        if not (has_labels or keeps_all or self.needs_all_rows(kwargs)):
            outputs = self.model(logits_to_keep=logits_to_keep, **kwargs)
            return outputs, outputs.last_hidden_state
        outputs = self.model(**kwargs)
        return outputs, kept_rows(outputs.last_hidden_state, logits_to_keep)

    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs) -> dict:
        """As the library's, with the cache under its older name: peft looks there, or adds its prompt at each step."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if CACHE_ARGUMENT in inputs:
            inputs["past_key_values"] = inputs.pop(CACHE_ARGUMENT)
        return inputs

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse the library's paged cache, behind `generate_batch()`: its requests would fail one by one, unseen."""
        raise NotImplementedError(
            "continuous batching (`generate_batch`) keeps keys in pages of its own, layer by layer, and sparse layers "
            "read a full layer's; call `generate()` with a padded batch."
        )

    def create_masks_for_generate(self, *, attention_mask, inputs_embeds, is_first_iteration=False, **kwargs):
        """The mask that `generate()` passes with a pre-allocated cache: of the new tokens alone, once rows are known.

        So its shape is the same at every step. The library would build 4-D masks here, which count slots.
        """
        if attention_mask is None or is_first_iteration:
            return attention_mask
        # A copy: the strides of a view would tell the length.
        return attention_mask[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict, mode, batch_size, max_cache_length):
        """Make a `HySparseCache` for `generate()`; refuse caches that lose shared state or cannot be rolled back.

        Args: as the library's; `max_cache_length` is the number of tokens that will be cached at most.
        Raises:
            ValueError: a `cache_implementation` that this model has not, a cache that is too short, or drafts on a
                pre-allocated cache.
        """
        given = model_kwargs.get(CACHE_ARGUMENT)
        implementation = generation_config.cache_implementation
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_cache_length)  # type: ignore[misc]
        elif implementation == "static":
            # Room for later calls, if asked for, spares them a new graph.
            room = max(max_cache_length, generation_config.max_cache_len or 0)
            model_kwargs[CACHE_ARGUMENT] = HySparseCache(self.config, max_cache_len=room)
        elif implementation in (None, "dynamic", "offloaded"):
            model_kwargs[CACHE_ARGUMENT] = HySparseCache(self.config, offloading=implementation == "offloaded")
        else:
            raise ValueError(
                "`cache_implementation` must be None, 'dynamic', 'static' or 'offloaded' for this model, got "
                f"{implementation!r}; leave it out for a cache that grows."
            )
        check_generation_cache(
            model_kwargs.get(CACHE_ARGUMENT), max_cache_length, mode == GenerationMode.ASSISTED_GENERATION
        )
        if given is None and generation_config.is_assistant:
            model_kwargs[CACHE_ARGUMENT].activate_past_recording()


class HySparseForSequenceClassification(HySparsePreTrainedModel):
    """The decoder with one score per label, read at each row's last visible token."""

    model_class: type[HySparseModel] = HySparseModel
    # The loss is a mean over rows: Trainer divides it by the number of accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: HySparseConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
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
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """Score rows `(batch, num_labels)`; arguments as in `HySparseModel.forward`, and:

        Args:
            labels (`torch.Tensor`, *optional*): `(batch,)` class ids, `(batch,)` or `(batch, num_labels)` numbers to
                regress on, or `(batch, num_labels)` zeros and ones; `config.problem_type` says which, or is found.
        Raises:
            ValueError: packed documents, or several rows without a mask and without a padding token.
        """
        # Each row's own last token is read, so all are kept.
        kwargs.pop("logits_to_keep", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=self._wants_cache(use_cache, labels),
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )
        last = last_tokens(
            self.config,
            input_ids,
            inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
        )
        hidden_states = outputs.last_hidden_state
        last = last.to(hidden_states.device)
        logits = self.score(hidden_states[torch.arange(len(last), device=last.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return with_cache(
            SequenceClassifierOutputWithPast,
            cache_of(outputs),
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = [
    "AUTO_MAP",
    "HySparseForCausalLM",
    "HySparseForSequenceClassification",
    "HySparseModel",
    "HySparsePreTrainedModel",
]
