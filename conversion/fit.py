"""Closed-form initial values from one streaming pass of the dense teacher over calibration text.

A plain window throws away the mass that dense attention puts outside it, most of all on the first tokens, and its
output is then about twice too large. The sink of the local branch takes that mass back: per head, with the dense
output Y, the window's output o and its log-sum-exp z, all without a sink,

    sink = argmin over b of  sum over t >= window of  |Y_t - sigmoid(z_t - b) o_t|^2

On SmolLM2-135M-Instruct (regular plan, window 128, 8,192 tokens of two manuals) this takes the relative error of the
window branch's heads from 0.94 to 0.37, the mean of 21 layers; the window then keeps 51 % of the mass.

The sink of the global branch has no such target: the selected keys belong to another layer, and the best that its
output can do for this one at the start is nearly nothing. A fit would close the branch, which has to learn from there.
So it is set where it takes a tenth of the mass at the median position: the branch is open, the sink has a gradient.
With the gate at 0.05 the choice hardly shows at the start: a sink of 0 gives KL 0.725 and 0.434 on two texts, this
one 0.722 and 0.432 (2,048 tokens, budget 512).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import logging

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
)
from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.decoder_hysparse import HySparseDecoderLayer
from hysparse_hf.modeling.layers_hysparse import HySparseRotaryEmbedding, Rotation, rotate


GRID_POINTS, GRID_BELOW, GRID_ABOVE = 73, -8.0, 10.0
GLOBAL_SINK_SHARE = 0.1
# Of each window the last positions, which see the most, stand for all.
GLOBAL_SINK_POSITIONS = 256

ReadTarget = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class SinkFit:
    """Sinks `(heads,)` of one sparse layer and what they do.

    `local_share` is the mean mass that the window keeps; the errors are those of the window branch's heads against
    the dense ones, relative, without a sink and with it.
    """

    sink_local: torch.Tensor
    sink_global: torch.Tensor
    local_share: float
    error_without: float
    error_with: float

    def summary(self) -> dict[str, float]:
        """The figures, rounded for a record."""
        return {name: round(getattr(self, name), 4) for name in ("local_share", "error_without", "error_with")}


@dataclass
class HeadSums:
    """What the fit needs of each position: `<Y, o>`, `|o|^2`, `|Y|^2` and z, each `(heads, positions)`."""

    dot: torch.Tensor
    square: torch.Tensor
    target: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def of(dense: torch.Tensor, local: torch.Tensor, lse: torch.Tensor, skip: int) -> "HeadSums":
        """From `(1, heads, length, head_dim)` outputs, leaving out the first `skip` positions."""
        dense, local = dense[0, :, skip:].float(), local[0, :, skip:].float()
        return HeadSums((dense * local).sum(-1), local.square().sum(-1), dense.square().sum(-1), lse[0, :, skip:])

    @staticmethod
    def join(parts: "list[HeadSums]") -> "HeadSums":
        """All positions of several windows."""
        names = ("dot", "square", "target", "lse")
        return HeadSums(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in names))


def fit_local_sink(sums: HeadSums) -> tuple[torch.Tensor, float, float, float]:
    """The best sink per head on a grid around the median log-sum-exp.

    Returns:
        `(sink, share, error_without, error_with)`: sink `(heads,)`; the mean share of mass that the window keeps;
        relative errors of the outputs, without and with the sink.
    """
    grid = sums.lse.median(dim=1).values[:, None] + torch.linspace(
        GRID_BELOW, GRID_ABOVE, GRID_POINTS, device=sums.lse.device
    )
    errors = torch.stack(
        [
            (share.square() * sums.square - 2 * share * sums.dot).sum(1)
            for share in (torch.sigmoid(sums.lse - sink[:, None]) for sink in grid.T)
        ],
        dim=1,
    )
    lowest, index = errors.min(dim=1)
    sink = grid.gather(1, index[:, None])[:, 0]
    total = sums.target.sum()
    without = (sums.square - 2 * sums.dot).sum()
    share = torch.sigmoid(sums.lse - sink[:, None]).mean().item()
    return sink, share, _relative(total + without, total), _relative(total + lowest.sum(), total)


def _relative(error: torch.Tensor, total: torch.Tensor) -> float:
    return math.sqrt(max(0.0, (error / total).item()))


def sink_for_share(lse: torch.Tensor, share: float = GLOBAL_SINK_SHARE) -> torch.Tensor:
    """The sink per head that takes `share` of the mass at the median position of `lse` `(heads, positions)`."""
    return lse.median(dim=1).values + math.log(share / (1 - share))


class TeacherPass:
    """The dense teacher over all windows, one layer at a time; only one layer's weights are in memory.

    Args:
        config (`HySparseConfig`): of the converted model; its plan says which layers are fitted.
        read (`ReadTarget`): target key -> tensor, of the mapped weights.
        windows (`tuple[torch.Tensor, ...]`): token ids, each `(length,)`.
    """

    def __init__(self, config: HySparseConfig, read: ReadTarget, windows: tuple[torch.Tensor, ...]):
        self.config, self.read = config, read
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dense = copy.deepcopy(config)
        self.dense.layer_plan = ["full"] * config.num_hidden_layers
        self.dense.dense = True
        embedding = read("model.embed_tokens.weight")
        self.states = [embedding[ids][None].to(self.device, torch.float32) for ids in windows]
        self.rotary = HySparseRotaryEmbedding(self.dense, "full").to(self.device)
        self.given: list[tuple[torch.Tensor, ...]] = []

    @torch.no_grad()
    def run(self) -> dict[int, SinkFit]:
        """Layer index -> fit, for every sparse layer."""
        fits = {}
        progress = logging.tqdm(range(self.config.num_hidden_layers), desc="fitting sinks", unit="layer")
        for index in progress:
            layer = self._layer(index)
            # The windows of a full layer replace what the one before it gave.
            given, self.given = self.given, [] if self.config.layer_plan[index] == "full" else self.given
            parts = [self._advance(layer, index, number, given) for number in range(len(self.states))]
            sums = [part for part in parts if part is not None]
            if sums:
                local = HeadSums.join([local for local, _ in sums])
                sink, *figures = fit_local_sink(local)
                fits[index] = SinkFit(sink, sink_for_share(torch.cat([lse for _, lse in sums], dim=1)), *figures)
        return fits

    def _layer(self, index: int) -> HySparseDecoderLayer:
        with torch.device("meta"):
            layer = HySparseDecoderLayer(self.dense, index)
        names = list(layer.state_dict())
        state = {name: self.read(f"model.layers.{index}.{name}").to(self.device, torch.float32) for name in names}
        layer.load_state_dict(state, assign=True)
        return layer

    def _advance(self, layer: HySparseDecoderLayer, index: int, number: int, given: list[tuple[torch.Tensor, ...]]):
        """Take one window through one layer; what the layer's sinks need of it, if the layer is sparse."""
        config, hidden = self.config, self.states[number]
        positions = torch.arange(hidden.shape[1], device=self.device)[None]
        query, key, value = _projected(layer, layer.input_layernorm(hidden), self.rotary(hidden, positions))
        dense = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        size, last = config.oracle_block_size, query[:, :, -GLOBAL_SINK_POSITIONS:]
        sums = None
        if config.layer_plan[index] == "full":
            indices = full_attention_with_oracle(
                last, key, value, block_size=size, n_selected=config.oracle_budget // size, **_choices(config)
            )[2]
            assert indices is not None
            self.given.append((key, value, indices))
        else:
            local, lse = sliding_window_attention(query, key, value, window=config.sliding_window, return_lse=True)
            _, lse_global = block_sparse_attention(last, *given[number], block_size=size, return_lse=True)
            sums = HeadSums.of(dense, local, lse, config.sliding_window), lse_global[0]
        hidden = hidden + layer.self_attn.o_proj(dense.transpose(1, 2).flatten(-2))
        self.states[number] = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return sums


def _projected(layer: HySparseDecoderLayer, states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
    attention = layer.self_attn
    query, key, value = (
        projection(states).unflatten(-1, (-1, attention.head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.config.use_qk_norm:
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return rotate(query, rotation), rotate(key, rotation), value


def _choices(config: HySparseConfig) -> dict:
    return {
        "block_reduction": config.oracle_block_reduction,
        "head_reduction": config.oracle_head_reduction,
        "forced_first_blocks": config.oracle_forced_first_blocks,
        "forced_local_blocks": config.oracle_forced_local_blocks,
    }


def initial_value(name: str, shape: tuple[int, ...], gates: tuple[float, float], fit: SinkFit | None) -> torch.Tensor:
    """A new parameter's initial value, float32.

    Args:
        name (`str`): of the value, as in `key_map.NEW_PARAMETERS`.
        shape (`tuple[int, ...]`): of the parameter.
        gates (`tuple[float, float]`): opening of the global and of the local gate, between 0 and 1.
        fit (`SinkFit`, *optional*): of the parameter's layer; without it sinks are 0.
    """
    if name in ("gate_global", "gate_local"):
        opening = gates[0] if name == "gate_global" else gates[1]
        return torch.full(shape, math.log(opening / (1 - opening)))
    if name in ("sink_global", "sink_local") and fit is not None:
        return getattr(fit, name).float().cpu()
    return torch.zeros(shape)
