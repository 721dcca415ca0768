"""Initial values of sparse and window layers, from one streaming pass of the dense teacher over calibration text.

Layer by layer the teacher says what each attention gets and what it should give. Per layer, in this order:

1. sinks (`sinks`);
2. the output projection is doubled, so that a gate of one half passes a branch as it is: there a sigmoid is live and
   can move both ways;
3. gates, first constant, then reading the layer's input (`gates`);
4. the output projection once more, drawn towards what it was (`output_refit`), where there is text enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers.utils import logging

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    sliding_window_attention,
)
from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.decoder_hysparse import HySparseDecoderLayer

from .gates import constant_gates, fit_gates, gate_values
from .layer_stream import AttentionInputs, LayerStream, ReadTarget, by_token
from .output_refit import ridge_towards
from .sinks import HeadSums, fit_local_sink, sink_for_share


HEADROOM = 2.0
# A gate that starts closed gets no gradient, and the global branch has everything to learn.
LOWEST_GATES, HIGHEST_GATE = {"global": 0.05, "local": 0.02}, 0.98


# Key, value and block indices of a full layer, for one window.
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Evidence:
    """What a sparse layer is fitted on; positions of all windows joined.

    Args:
        inputs (`torch.Tensor`): `(positions, hidden)`, the layer's normalised input.
        outputs (`torch.Tensor`): `(positions, branches, heads, head_dim)`, of the global and the local branch, or of
            the local one alone; without sinks.
        lse (`torch.Tensor`): `(positions, branches, heads)`.
        target (`torch.Tensor`): `(positions, hidden)`, what the output projection should give, without its bias.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    lse: torch.Tensor
    target: torch.Tensor

    @staticmethod
    def join(parts: "Sequence[Evidence]") -> "Evidence":
        """All positions of several windows."""
        names = [field.name for field in fields(Evidence)]
        return Evidence(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class SparseValues:
    """Values of one sparse layer.

    Args:
        sinks (`torch.Tensor`): `(branches, heads)`, branches as in `Evidence`.
        weight (`torch.Tensor`): the output projection, `(hidden, heads * head_dim)`.
        logits (`torch.Tensor`, *optional*): of the gates, `(branches, heads, hidden + 1)`, the last column being the
            bias; None for a layer without gates.
        names (`tuple[str, ...]`): of the branches, in the model's words.
    """

    sinks: torch.Tensor
    weight: torch.Tensor
    logits: torch.Tensor | None = None
    names: tuple[str, ...] = ("global", "local")

    def branches(self, evidence: Evidence) -> torch.Tensor:
        """The branches with their sinks, `(positions, branches, heads, head_dim)`."""
        return evidence.outputs * torch.sigmoid(evidence.lse - self.sinks)[..., None]

    def gated(self, evidence: Evidence) -> torch.Tensor:
        """What the output projection reads, `(positions, heads * head_dim)`."""
        outputs = self.branches(evidence)
        if self.logits is not None:
            outputs = outputs * gate_values(evidence.inputs, self.logits)[..., None]
        return outputs.sum(1).flatten(1)

    def error(self, evidence: Evidence) -> float:
        """The error of the layer's attention, relative to the target."""
        difference = self.gated(evidence) @ self.weight.T - evidence.target
        return (difference.norm() / evidence.target.norm()).item()


@dataclass(frozen=True)
class LayerFit:
    """What a layer starts with, here `SparseValues`, and the figures that a record says of it."""

    values: Any
    figures: dict[str, float]


def evidence_of(
    inputs: AttentionInputs, weight: torch.Tensor, config: HySparseConfig, given: Given | None = None
) -> tuple[Evidence, HeadSums]:
    """What one window says about a layer.

    Args:
        inputs (`AttentionInputs`): of the layer's attention.
        weight (`torch.Tensor`): the source's output projection.
        config (`HySparseConfig`): gives window and block size.
        given (`Given`, *optional*): from the full layer before it; without it the local branch is the only one.
    """
    dense = inputs.dense()
    local, lse = sliding_window_attention(
        inputs.query, inputs.key, inputs.value, window=config.sliding_window, return_lse=True
    )
    branches: list[Any] = [(local, lse)]
    if given is not None:
        shared = block_sparse_attention(inputs.query, *given, block_size=config.oracle_block_size, return_lse=True)
        branches.insert(0, shared)
    evidence = Evidence(
        inputs.states[0],
        torch.stack([by_token(output) for output, _ in branches], dim=1),
        torch.stack([lse[0].T for _, lse in branches], dim=1),
        dense.flatten(1) @ weight.T,
    )
    return evidence, HeadSums.of(dense, by_token(local), lse[0], skip=config.sliding_window)


def fit_layer(evidence: Evidence, sums: HeadSums, weight: torch.Tensor, *, gated: bool, refit: bool) -> LayerFit:
    """Fit sinks, gates and, where asked for, the output projection of one layer.

    Args:
        evidence (`Evidence`): what the branches give and what they should.
        sums (`HeadSums`): of the window against the dense heads.
        weight (`torch.Tensor`): the source's output projection, `(hidden, heads * head_dim)`.
        gated (`bool`): whether the layer has gates.
        refit (`bool`): whether there is text enough for the output projection.
    """
    sink_local, share, without, with_sink = fit_local_sink(sums)
    figures = {"local_share": share, "error_without": without, "error_with": with_sink}
    shared = [sink_for_share(lse.T) for lse in evidence.lse.unbind(1)[:-1]]
    sinks = torch.stack([*shared, sink_local])
    # A layer with a window alone has the local branch alone.
    names = ("global", "local")[-len(sinks) :]
    if gated:
        values = fit_gated(evidence, SparseValues(sinks, HEADROOM * weight, names=names), figures)
    elif shared:
        values = _fit_shares(evidence, SparseValues(sinks, weight, names=names), figures)
    else:
        values = SparseValues(sinks, weight, names=names)
    if refit:
        refitted = ridge_towards(values.gated(evidence), evidence.target, values.weight)
        values = replace(values, weight=refitted)
        figures["error_refit"] = values.error(evidence)
    return LayerFit(values, {name: round(figure, 4) for name, figure in figures.items()})


def fit_gated(evidence: Evidence, values: SparseValues, figures: dict[str, float]) -> SparseValues:
    """Constant gates first, then gates that read the layer's input."""
    branches, sinks = values.branches(evidence), values.sinks
    lower = torch.tensor([LOWEST_GATES[name] for name in values.names], device=sinks.device)[:, None].expand_as(sinks)
    upper = torch.full_like(sinks, HIGHEST_GATE)
    logits = sinks.new_zeros(*sinks.shape, evidence.inputs.shape[1] + 1)
    logits[..., -1] = torch.logit(constant_gates(branches, values.weight, evidence.target, lower, upper)).to(sinks)
    values = replace(values, logits=logits)
    figures["error_constant"] = values.error(evidence)
    logits = fit_gates(evidence.inputs, branches, values.weight, evidence.target, logits, lower)
    values = replace(values, logits=logits)
    figures["error_gates"] = values.error(evidence)
    return values


def _fit_shares(evidence: Evidence, values: SparseValues, figures: dict[str, float]) -> SparseValues:
    """Without gates the window passes as it is, and the global branch's sink does what a constant gate would."""
    sinks = values.sinks
    bare = replace(values, sinks=torch.stack([torch.full_like(sinks[0], -math.inf), sinks[1]]))
    lower, upper = torch.ones_like(sinks), torch.ones_like(sinks)
    lower[0], upper[0] = LOWEST_GATES["global"], HIGHEST_GATE
    shares = constant_gates(bare.branches(evidence), values.weight, evidence.target, lower, upper)[0].to(sinks)
    median = evidence.lse[:, 0].median(dim=0).values
    values = replace(values, sinks=torch.stack([median - torch.logit(shares), sinks[1]]))
    figures["error_constant"] = values.error(evidence)
    return values


def fitted_layers(config: HySparseConfig) -> list[int]:
    """Layers that are fitted: those that read less than everything, and have keys and values of their own."""
    return [
        index
        for index, (kind, cached) in enumerate(zip(config.layer_plan, config.cache_plan, strict=True))
        if kind != "full" and cached != "none"
    ]


class FittingPass:
    """The dense teacher over all windows, one layer at a time; each of `fitted_layers` is fitted where it stands.

    Fitting on the student's own activations instead, whose errors grow from layer to layer, came out no better on
    SmolLM2-135M-Instruct (KL on three texts .290 .158 .160 against .286 .153 .150), and worse where the target made
    up for those errors (.330 .189 .180).

    Args:
        config (`HySparseConfig`): of the converted model; its plan says which layers are fitted.
        read (`ReadTarget`): gives the mapped weights.
        windows (`tuple[torch.Tensor, ...]`): token ids, each `(length,)`.
        refit (`bool`): whether output projections are fitted.
    """

    def __init__(self, config: HySparseConfig, read: ReadTarget, windows: tuple[torch.Tensor, ...], *, refit: bool):
        self.config, self.refit = config, refit
        self.stream = LayerStream(config, read)
        self.states = self.stream.embed(windows)
        # Per window what the last full layer gives to the sparse ones after it: key, value, block indices.
        self.given: list[Given] = []
        self.fitted = fitted_layers(config)
        self.donors = {config.donor_plan[index] for index in self.fitted}

    @torch.no_grad()
    def run(self) -> dict[int, LayerFit]:
        """Layer index -> fit, for all of `fitted_layers`."""
        fits = {}
        for index in logging.tqdm(range(self.config.num_hidden_layers), desc="fitting layers", unit="layer"):
            layer = self.stream.layer(index)
            inputs = [self.stream.attention_inputs(layer, hidden) for hidden in self.states]
            fit = self.fit_of(index, layer, inputs)
            if fit is not None:
                fits[index] = fit
            for number, part in enumerate(inputs):
                attended = layer.self_attn.o_proj(part.dense().flatten(1))
                self.states[number] = self.stream.after_attention(layer, self.states[number], attended)
        return fits

    def fit_of(self, index: int, layer: HySparseDecoderLayer, inputs: list[AttentionInputs]) -> LayerFit | None:
        """The fit of one layer, or None; keeps what later layers read of this one."""
        if index in self.donors:
            self.given = [self._given(part) for part in inputs]
        if index not in self.fitted:
            return None
        given = self.given if self.config.layer_plan[index] == "sparse" else [None] * len(inputs)
        return self._fit(layer.self_attn.o_proj.weight, inputs, given)

    def _given(self, inputs: AttentionInputs) -> Given:
        return inputs.key, inputs.value, inputs.with_choice(self.config, self.config.oracle_budget)[1]

    def _fit(self, weight: torch.Tensor, inputs: list[AttentionInputs], given: Sequence[Given | None]) -> LayerFit:
        parts, sums = zip(
            *(evidence_of(part, weight, self.config, shared) for part, shared in zip(inputs, given, strict=True)),
            strict=True,
        )
        gated = self.config.gate_granularity != "none"
        return fit_layer(Evidence.join(parts), HeadSums.join(sums), weight, gated=gated, refit=self.refit)


def fitted_tensor(name: str, values: SparseValues, config: HySparseConfig) -> torch.Tensor | None:
    """A fitted parameter by its name inside the layer; None where the fit gives none.

    Gates are fitted per head; an element-wise gate repeats its head's row for each of the head's channels.
    """
    if name == "self_attn.o_proj.weight":
        return values.weight
    branch = next((i for i, branch in enumerate(values.names) if f"_{branch}" in name), None)
    if branch is None:
        return None
    if "sink" in name:
        return values.sinks[branch]
    assert values.logits is not None
    repeats = config.v_head_dim if config.gate_granularity == "elementwise" else 1
    rows = values.logits[branch].repeat_interleave(repeats, dim=0)
    return rows[:, -1] if name.endswith("bias") else rows[:, :-1]


def naive_value(name: str, shape: tuple[int, ...], gates: Sequence[float]) -> torch.Tensor:
    """A new parameter's value without a fit, float32: gates constant, sinks 0.

    Args:
        name (`str`): of the value, as in `key_map.NEW_PARAMETERS`.
        shape (`tuple[int, ...]`): of the parameter.
        gates (`Sequence[float]`): opening of the global and of the local gate, between 0 and 1.
    """
    if name in ("gate_global", "gate_local"):
        opening = gates[0] if name == "gate_global" else gates[1]
        return torch.full(shape, math.log(opening / (1 - opening)))
    return torch.zeros(shape)
