"""Parts of a decoder layer that are not about sparsity: norm, rotary embedding, feed-forward network.

Their operations choose a back end as those of attention do (see `dispatch_hysparse`).
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_hysparse import HySparseConfig
from .dispatch_hysparse import Operations, backend_of
from .reference_layers_hysparse import rms_norm as rms_norm_reference
from .reference_layers_hysparse import rotate as rotate_reference
from .reference_layers_hysparse import swiglu as swiglu_reference


Rotation = tuple[torch.Tensor, torch.Tensor] | None


def _load_kernels() -> dict[str, Callable[..., torch.Tensor]]:
    from .triton_rms_norm import rms_norm
    from .triton_rotary import rotate
    from .triton_swiglu import swiglu

    return {"rms_norm": rms_norm, "rotate": rotate, "swiglu": swiglu}


OPERATIONS = Operations(
    {"rms_norm": rms_norm_reference, "rotate": rotate_reference, "swiglu": swiglu_reference}, _load_kernels
)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: str = "auto") -> torch.Tensor:
    """Root mean square normalisation of the last dimension.

    Args:
        states (`torch.Tensor`): `(..., width)`, floating point; the statistics are float32 (float64 for float64).
        weight (`torch.Tensor`): `(width,)`, multiplies the normalised values, which are rounded to the states' dtype.
        eps (`float`): added to the mean of the squares.
        backend (`str`): `"auto"`, `"reference"` or `"triton"`.
    Returns:
        `torch.Tensor`: shaped like `states`, in the wider dtype of both.
    Raises:
        NotImplementedError: valid, but the back end asked for cannot do it.
    """
    return OPERATIONS.run(backend, "rms_norm", states, weight, eps=eps)


def rotate(states: torch.Tensor, rotation: Rotation, *, backend: str = "auto") -> torch.Tensor:
    """Apply a rotary embedding to `(batch, heads, length, head_dim)`; channels beyond its width pass through.

    Args:
        rotation (`tuple[torch.Tensor, torch.Tensor]`, *optional*): cosines and sines `(batch or 1, length, width)`;
            None leaves the states as they are.
        backend (`str`): `"auto"`, `"reference"` or `"triton"`.
    Returns:
        `torch.Tensor`: in the dtype of `states`: under autocast the cosines are float32 and the projections are not.
    Raises:
        NotImplementedError: valid, but the back end asked for cannot do it.
    """
    return states if rotation is None else OPERATIONS.run(backend, "rotate", states, *rotation)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """`silu(gate) * up`, both of one shape; the first factor is rounded to the dtype of `gate`.

    Raises:
        NotImplementedError: valid, but the back end asked for cannot do it.
    """
    return OPERATIONS.run(backend, "swiglu", gate, up)


class HySparseRMSNorm(nn.Module):
    """Root mean square normalisation, on the back end that `config`, where it is given, asks for."""

    def __init__(self, size: int, eps: float, config: HySparseConfig | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.config = config

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps, backend=backend_of(self.config))

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


class HySparseMLP(nn.Module):
    """Gated feed-forward network; its width is the configuration's unless given."""

    def __init__(self, config: HySparseConfig, intermediate_size: int | None = None):
        super().__init__()
        self.config = config
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if self.config.hidden_act == "silu":
            return self.down_proj(swiglu(gate, up, backend=backend_of(self.config)))
        return self.down_proj(self.act_fn(gate) * up)
