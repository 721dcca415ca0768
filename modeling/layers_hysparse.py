"""Parts of a decoder layer that are not about sparsity: norm, rotary embedding, feed-forward network."""

import copy

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_hysparse import HySparseConfig


Rotation = tuple[torch.Tensor, torch.Tensor] | None


class HySparseRMSNorm(nn.Module):
    """Root mean square normalisation; the statistics are float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * states.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class HySparseRotaryEmbedding(nn.Module):
    """Cosines and sines of one layer kind, from the library's rotary types.

    Frequencies that depend on the length (`dynamic`, `longrope`) are computed from the positions at hand and never
    stored, so a call leaves no trace for the next one.
    """

    def __init__(self, config: HySparseConfig, kind: str):
        super().__init__()
        self.config = copy.copy(config)
        self.config.rope_parameters = config.rope_for(kind)
        self.rope_type = self.config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = self.frequencies()
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        if self.rope_type == "longrope":
            self.long_inv_freq = nn.Buffer(self.frequencies(long=True)[0], persistent=False)

    def frequencies(self, long: bool = False) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `(rotary_dim / 2,)` and the factor of cosines and sines."""
        parameters = self.config.rope_parameters
        if self.rope_type == "default":
            dim = int(self.config.head_dim * parameters.get("partial_rotary_factor", 1.0))
            return 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim), 1.0
        length = parameters["original_max_position_embeddings"] + 1 if long else None
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, seq_len=length)

    def reset_buffers(self) -> None:
        """Fill the buffers again after a model was built on the meta device."""
        init.copy_(self.inv_freq, self.frequencies()[0])
        if self.rope_type == "longrope":
            init.copy_(self.long_inv_freq, self.frequencies(long=True)[0])

    def _current(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies `(rotary_dim / 2,)`; where they follow the length `(batch or 1, 1, rotary_dim / 2)`."""
        if self.rope_type not in ("dynamic", "longrope"):
            return self.inv_freq
        # The length is each row's own: batched with a longer row, a row gives what it gives alone.
        last = position_ids.amax(-1, keepdim=True)
        if self.rope_type == "longrope":
            original = self.config.rope_parameters["original_max_position_embeddings"]
            return torch.where(last >= original, self.long_inv_freq, self.inv_freq)[:, None]
        return ROPE_INIT_FUNCTIONS["dynamic"](self.config, device=position_ids.device, seq_len=last + 1)[0][:, None]

    @torch.no_grad()
    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq = self._current(position_ids).to(device=states.device, dtype=torch.float)
        with torch.autocast(device_type=states.device.type, enabled=False):
            angles = position_ids[..., None].to(device=states.device, dtype=torch.float) * inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(states.dtype), sin.to(states.dtype)


def rotate(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply a rotary embedding to `(batch, heads, length, head_dim)`; channels beyond its width pass through.

    The result has the dtype of `states`: under autocast the cosines are float32 and the projections are not.
    """
    if rotation is None:
        return states
    cos, sin = (part.unsqueeze(1) for part in rotation)
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(states.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class HySparseMLP(nn.Module):
    """Gated feed-forward network; its width is the configuration's unless given."""

    def __init__(self, config: HySparseConfig, intermediate_size: int | None = None):
        super().__init__()
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
