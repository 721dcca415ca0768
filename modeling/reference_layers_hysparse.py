"""What surrounds attention in a layer, in plain torch, any float dtype and device: the meaning of the kernels."""

import torch


def rms_norm(states: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """See `layers_hysparse.rms_norm`; the statistics are float32, or float64 for float64 states."""
    wide = states if states.dtype == torch.float64 else states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `layers_hysparse.rotate`; products and their sum have the wider dtype of states and cosines."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(states.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `layers_hysparse.swiglu`."""
    return torch.nn.functional.silu(gate) * up
