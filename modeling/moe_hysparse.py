"""Mixture of experts in place of a feed-forward network: our router, the library's fused experts.

In memory the experts of a layer are two tensors; in a checkpoint each expert has its own three. The library's loader
reads both forms and writes the second.
"""

import torch
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, load_balancing_loss_func

from .configuration_hysparse import HySparseConfig
from .layers_hysparse import HySparseMLP


# Under our model types, of both generations, so that it also holds for a checkpoint's own copy of the code.
for _model_type in (HySparseConfig.model_type, "hysparse2"):
    register_checkpoint_conversion_mapping(_model_type, get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True)


class HySparseExperts(Qwen3MoeExperts):
    """The library's experts, with its back ends (`experts_implementation`); no biases.

    Parameters: `gate_up_proj` `(experts, 2 * moe_intermediate, hidden)` and `down_proj` `(experts, hidden,
    moe_intermediate)`.
    """


class HySparseRouter(nn.Module):
    """Chooses each token's experts and weighs them by their probabilities, which are float32 at least."""

    def __init__(self, config: HySparseConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns `(logits, weights, chosen)` of tokens `(n, hidden)`: `(n, experts)` and twice `(n, top_k)`."""
        logits = nn.functional.linear(tokens, self.weight)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights, chosen = logits.softmax(-1, dtype=dtype).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen


class HySparseMoE(nn.Module):
    """A token's chosen experts, and where the configuration has one, a gated expert that every token shares."""

    def __init__(self, config: HySparseConfig):
        super().__init__()
        self.gate = HySparseRouter(config)
        self.experts = HySparseExperts(config)
        self.has_shared_expert = config.shared_expert_intermediate_size > 0
        if self.has_shared_expert:
            self.shared_expert = HySparseMLP(config, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `(output, router_logits)`: shaped like hidden_states, and `(batch * length, experts)`."""
        tokens = hidden_states.flatten(0, 1)
        router_logits, weights, chosen = self.gate(tokens)
        output = self.experts(tokens, chosen, weights)
        if self.has_shared_expert:
            output = output + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return output.unflatten(0, hidden_states.shape[:2]), router_logits


def balance_loss(
    config: HySparseConfig, router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """The library's load balancing loss, 1 times `num_experts_per_tok` where every expert is used equally.

    Args:
        router_logits (`tuple[torch.Tensor]`): per mixture-of-experts layer `(batch * q_len, experts)`.
        attention_mask (`torch.Tensor`, *optional*): as in the model's forward; padding is not counted.
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        q_len = len(router_logits[0]) // len(attention_mask)
        attention_mask = attention_mask[:, -q_len:]
    else:
        attention_mask = None
    sizes = (config.num_experts, config.num_experts_per_tok)
    # The library annotates a tuple of one layer, and an int for none.
    return load_balancing_loss_func(router_logits, *sizes, attention_mask)  # type: ignore[arg-type, return-value]


__all__ = ["HySparseExperts", "HySparseMoE", "HySparseRouter", "balance_loss"]
