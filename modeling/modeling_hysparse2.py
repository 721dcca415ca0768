"""HySparse2, second generation (arXiv:2609.26368): a self-decoder whose states also feed a cross-decoder's keys.

The cross-decoder's keys and values exist as soon as the self-decoder has run. So of a prompt only the positions whose
logits are asked for go through the cross-decoder.
"""

import torch

from .cache_hysparse import HySparseCache
from .cache_pending_hysparse import PendingStates
from .configuration_hysparse2 import CROSS_LAYER_KINDS, SELF_OUTPUT, HySparse2Config
from .decoder_hysparse2 import HySparse2Attention, HySparse2DecoderLayer
from .inputs_hysparse import check_logits_to_keep
from .layers_hysparse import HySparseRMSNorm, Rotation
from .modeling_hysparse import (
    HySparseForCausalLM,
    HySparseModel,
    HySparsePreTrainedModel,
)
from .prompt_end_hysparse import rotations_at, tokens_at
from .rows_hysparse import TokenLayout


class HySparse2PreTrainedModel(HySparsePreTrainedModel):
    config: HySparse2Config
    config_class = HySparse2Config
    _no_split_modules = ["HySparse2DecoderLayer"]
    _can_record_outputs = {"hidden_states": HySparse2DecoderLayer, "attentions": HySparse2Attention}
    _auto_map = {
        "AutoConfig": "configuration_hysparse2.HySparse2Config",
        "AutoModel": "modeling_hysparse2.HySparse2Model",
        "AutoModelForCausalLM": "modeling_hysparse2.HySparse2ForCausalLM",
    }


class HySparse2Model(HySparse2PreTrainedModel, HySparseModel):
    """The decoder without a head.

    `forward` takes `logits_to_keep` too: a number n or a tensor of positions. Then `last_hidden_state` holds the last
    n positions (0: all), or these. Where `config.leaves_early`, and unless an output with a row per token is asked
    for, only they run through the cross-decoder; of an empty tensor none does, and a cache is filled all the same.
    A `logits_to_keep` that is no such number or tensor is a `ValueError`.
    """

    layer_class = HySparse2DecoderLayer

    def __init__(self, config: HySparse2Config):
        super().__init__(config)
        if SELF_OUTPUT in config.bridge_plan:
            self.bridge_norm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps, config)
            # Once more, for the part that is new.
            self.post_init()

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
        whole = {"output_selected_indices": output_selected_indices, "output_attentions": output_attentions}
        border, q_len = len(self.config.self_layer_plan), hidden_states.shape[1]
        check_logits_to_keep(logits_to_keep, q_len)
        leaves_early = self.config.leaves_early and not self.needs_all_rows({**kwargs, **whole})
        if isinstance(logits_to_keep, torch.Tensor) and len(logits_to_keep) > q_len:
            # With so many repeats every position once is less.
            leaves_early = False
        plan = self.config.bridge_plan
        queries = {"layout": layout, "rotations": rotations}
        bridge: dict[int | str, torch.Tensor] = {}
        shared: tuple = (None, None, None, None)
        selected, routed = [], []
        pending: list[PendingStates] = []
        layers = self._used_layers()
        if cache is not None:
            cache.count_processed("self", *hidden_states.shape[:2])
        for index, (kind, layer) in enumerate(layers):
            if index == border:
                if SELF_OUTPUT in plan:
                    bridge[SELF_OUTPUT] = self.bridge_norm(hidden_states)
                if leaves_early:
                    hidden_states, queries = _kept(hidden_states, layout, rotations, logits_to_keep)
                if cache is not None:
                    cache.count_processed("cross", *hidden_states.shape[:2])
                    if self.config.bridge_materialization == "lazy" and not hidden_states.shape[1]:
                        turned = {kind: rotations[kind] for kind in CROSS_LAYER_KINDS}
                        cache.pending.append(PendingStates.of(bridge, layout, turned))
                        break
                    pending, cache.pending = cache.pending, []
            residual = hidden_states
            hidden_states, *given, normed, router_logits = layer(
                hidden_states,
                *shared,
                bridge.get(plan[index]),
                **queries,
                key_layout=layout,
                key_rotations=rotations,
                pending=pending,
                cache=cache,
                output_attentions=output_attentions or self.config.output_attentions,
                output_selected_indices=output_selected_indices,
            )
            if index in plan:
                bridge[index] = residual if normed is None else normed
            if kind == "full":
                shared = tuple(given)
                if output_selected_indices and given[2] is not None:
                    selected.append(layout.hide_padding(layout.restore(given[2])))
            if router_logits is not None:
                routed.append(router_logits)
        if not leaves_early or len(layers) <= border:
            hidden_states, _ = _kept(hidden_states, layout, rotations, logits_to_keep)
        return hidden_states, selected, routed


def _kept(
    hidden_states: torch.Tensor,
    layout: TokenLayout,
    rotations: dict[str, Rotation],
    logits_to_keep: int | torch.Tensor,
) -> tuple[torch.Tensor, dict]:
    """The states whose logits are wanted, and the layout and rotations of these alone."""
    q_len, device = hidden_states.shape[1], layout.positions.device
    if isinstance(logits_to_keep, torch.Tensor):
        slots = logits_to_keep.to(device)
        slots = slots.nonzero()[:, 0] if slots.dtype == torch.bool else torch.where(slots < 0, slots + q_len, slots)
    elif 0 < logits_to_keep < q_len:
        slots = torch.arange(q_len - logits_to_keep, q_len, device=device)
    else:
        return hidden_states, {"layout": layout, "rotations": rotations}
    queries = {
        "layout": layout.kept(slots, isinstance(logits_to_keep, int)),
        "rotations": rotations_at(rotations, slots[None]),
    }
    return tokens_at(hidden_states, slots[None]), queries


class HySparse2ForCausalLM(HySparse2PreTrainedModel, HySparseForCausalLM):
    """The decoder with a language modelling head."""

    model_class = HySparse2Model


__all__ = ["HySparse2ForCausalLM", "HySparse2Model", "HySparse2PreTrainedModel"]
