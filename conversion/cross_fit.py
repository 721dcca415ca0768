"""Initial values of one layer of the second generation's cross-decoder.

A **full layer** makes keys and values of a state H of the self-decoder, where it made them of its own input X in the
source. The weights that it has there do not fit H. Ridge regressions do better,

    W_K' = argmin  sum over t of |W_K X_t - W_K' H_t|^2  +  ridge |W_K'|^2,       and alike for the values,

before rotation and norm, which stay the layer's own. (A rotation leaves the size of an error as it is.) The values
also have to do for the sparse layers that read them: `ValueMoments` finds the ones from which those of all layers of
the group can be told best. The output projection then reads them as its own, and is regressed once more on what the
heads give, drawn towards what it was, where there is text enough.

A **sparse layer** has nothing but its full layer's keys and values. In this order:

1. queries that find with those keys what its own find with its own (`query_fit`); where queries are normalised
   behind their projection, they stay the source's;
2. the sink, which takes a tenth of the mass at the median position (`sinks`);
3. the output projection reads the values as its own: per KV head the best linear map of the full layer's values to
   its own is folded into it. It is doubled, so that a gate of one half passes the branch as it is;
4. gates, first constant, then reading the layer's input (`gates`);
5. the output projection once more.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hysparse_hf.modeling.attention_hysparse import full_attention_with_token_oracle, token_sparse_attention
from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.configuration_hysparse2 import HySparse2Config
from hysparse_hf.modeling.decoder_hysparse import HySparseAttention, HySparseDecoderLayer
from hysparse_hf.modeling.layers_hysparse import rotate

from .fit import HEADROOM, Evidence, Given, SparseValues, fit_gated, fitted_tensor
from .layer_stream import AttentionInputs, LayerStream, by_token
from .output_refit import ridge_towards
from .query_fit import fit_queries
from .sinks import sink_for_share


# Penalties, in units of the mean squared input. Output projections are held harder than in the first generation: on
# other text 0.1 left a relative error of .651, .731 and .718 in layers 16, 22 and 25 of SmolLM2-135M-Instruct, 0.03
# left .656, .740 and .725, and 0.3 the same as 0.1.
BRIDGE_RIDGE, VALUE_RIDGE, OUTPUT_RIDGE = 0.003, 0.01, 0.1


@dataclass(frozen=True)
class CrossValues:
    """Values of a layer of the cross-decoder.

    Args:
        projections (`dict`): name inside the attention, such as `k_proj.weight` -> tensor.
        branch (`SparseValues`, *optional*): of a sparse layer.
    """

    projections: dict[str, torch.Tensor] = field(default_factory=dict)
    branch: SparseValues | None = None


@dataclass(frozen=True)
class CrossFit:
    """What a layer starts with, the figures that a record says of it, and what sparse layers read of it.

    Args:
        values (`CrossValues`): of the layer.
        figures (`dict`): errors, relative to what they are errors of.
        given (`list[Given]`): per window what a full layer gives to sparse ones: key, value, token indices.
    """

    values: CrossValues
    figures: dict[str, float]
    given: list[Given] = field(default_factory=list)


def cross_tensor(name: str, values: SparseValues | CrossValues, config: HySparseConfig) -> torch.Tensor | None:
    """As `fitted_tensor`, of either half."""
    if isinstance(values, SparseValues):
        return fitted_tensor(name, values, config)
    found = values.projections.get(name.removeprefix("self_attn."))
    return fitted_tensor(name, values.branch, config) if found is None and values.branch else found


class CrossFitter:
    """Fits layers of the cross-decoder, each on the teacher's inputs.

    Args:
        config (`HySparse2Config`): of the converted model.
        stream (`LayerStream`): gives rotations.
        refit (`bool`): whether there is text enough for output projections.
    """

    def __init__(self, config: HySparse2Config, stream: LayerStream, *, refit: bool):
        self.config, self.stream, self.refit = config, stream, refit

    def fit_full(
        self,
        layer: HySparseDecoderLayer,
        inputs: Sequence[AttentionInputs],
        offered: Sequence[torch.Tensor],
        values: torch.Tensor,
    ) -> CrossFit:
        """Fit a full layer.

        Args:
            layer (`HySparseDecoderLayer`): with the source's weights; it is left as it is.
            inputs (`AttentionInputs`): of its attention in the source, per window.
            offered (`torch.Tensor`): per window what the layer of the self-decoder reads, `(1, length, hidden)`.
            values (`torch.Tensor`): the projection of values, as from `ValueMoments`.
        """
        attention = copy.deepcopy(layer.self_attn)
        own, read = (torch.cat([states[0] for states in part]) for part in ([part.states for part in inputs], offered))
        figures = {}
        for name, projection in (("key", attention.k_proj), ("value", attention.v_proj)):
            target = own @ projection.weight.T
            figures[f"{name}_copied"] = _relative_error(read @ projection.weight.T, target)
            if name == "key":
                fitted = ridge_towards(read, target, torch.zeros_like(projection.weight), BRIDGE_RIDGE)
            else:
                fitted = values
            figures[f"{name}_fitted"] = _relative_error(read @ fitted.T, target)
            projection.load_state_dict({"weight": fitted}, strict=False)
        projections = {"k_proj.weight": attention.k_proj.weight, "v_proj.weight": attention.v_proj.weight}
        given, heads = [], []
        for part, states in zip(inputs, offered, strict=True):
            key, value = self._keys_and_values(attention, states)
            output, _, indices = full_attention_with_token_oracle(
                part.query,
                key,
                value,
                n_selected=self.config.oracle_budget,
                window=self.config.sliding_window,
                head_reduction=self.config.oracle_head_reduction,
            )
            assert output is not None
            assert indices is not None
            heads.append(by_token(output).flatten(1))
            given.append((key, value, indices))
        joined = torch.cat(heads)
        target = torch.cat([part.dense().flatten(1) for part in inputs]) @ attention.o_proj.weight.T
        weight, figures["value_error"] = self._aligned(attention, inputs, given)
        figures["error_bridged"] = _relative_error(joined @ weight.T, target)
        if self.refit:
            weight = ridge_towards(joined, target, weight, OUTPUT_RIDGE)
            figures["error_refit"] = _relative_error(joined @ weight.T, target)
        projections["o_proj.weight"] = weight
        return CrossFit(CrossValues(projections), _rounded(figures), given)

    def fit_sparse(
        self, layer: HySparseDecoderLayer, inputs: Sequence[AttentionInputs], given: Sequence[Given]
    ) -> CrossFit:
        """Fit a sparse layer; arguments as in `fit_full`, and per window what its full layer gives."""
        attention, figures = copy.deepcopy(layer.self_attn), {}
        projections: dict[str, torch.Tensor] = {}
        if not self.config.use_qk_norm:
            projections, figures["logits_error"] = self._fit_queries(attention, inputs, given)
        weight, figures["value_error"] = self._aligned(attention, inputs, given)
        parts = [self._evidence(attention, *pair) for pair in zip(inputs, given, strict=True)]
        evidence, gated = Evidence.join(parts), self.config.gate_granularity != "none"
        sinks = sink_for_share(evidence.lse[:, 0].T)[None]
        values = SparseValues(sinks, HEADROOM * weight if gated else weight, names=("global",))
        figures["error_read"] = SparseValues(sinks, weight).error(evidence)
        if gated:
            values = fit_gated(evidence, values, figures)
        if self.refit:
            values = replace(
                values, weight=ridge_towards(values.gated(evidence), evidence.target, values.weight, OUTPUT_RIDGE)
            )
            figures["error_refit"] = values.error(evidence)
        return CrossFit(CrossValues(projections, values), _rounded(figures))

    def _keys_and_values(
        self, attention: HySparseAttention, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, `(1, kv_heads, length, head_dim)` each, of the states that a layer reads."""
        key, value = (
            projection(states).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.k_proj, attention.v_proj)
        )
        key = attention.k_norm(key) if self.config.use_qk_norm else key
        return rotate(key.transpose(1, 2), self.stream.rotation(states)), value.transpose(1, 2)

    def _fit_queries(
        self, attention: HySparseAttention, inputs: Sequence[AttentionInputs], given: Sequence[Given]
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Fit and replace the projection of queries; a bias is the weight of a column of ones."""
        projection = attention.q_proj
        states = [part.states[0] for part in inputs]
        if projection.bias is not None:
            states = [nn.functional.pad(part, (0, 1), value=1.0) for part in states]
        rotations, keys = [self.stream.rotation(part.states) for part in inputs], [key for key, _, _ in given]
        fitted, error = fit_queries(states, inputs, keys, rotations, attention.scaling)
        parts = {"weight": fitted}
        if projection.bias is not None:
            parts = {"weight": fitted[:, :-1].contiguous(), "bias": fitted[:, -1].contiguous()}
        projection.load_state_dict(parts)
        return {f"q_proj.{name}": tensor for name, tensor in parts.items()}, error

    def _evidence(self, attention: HySparseAttention, inputs: AttentionInputs, given: Given) -> Evidence:
        query = inputs.query
        if not self.config.use_qk_norm:
            query = attention.q_proj(inputs.states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            query = rotate(query, self.stream.rotation(inputs.states))
        output, lse = token_sparse_attention(query, *given, window=self.config.sliding_window, return_lse=True)
        target = inputs.dense().flatten(1) @ attention.o_proj.weight.T
        return Evidence(inputs.states[0], by_token(output)[:, None], lse[0].T[:, None], target)

    def _aligned(
        self, attention: HySparseAttention, inputs: Sequence[AttentionInputs], given: Sequence[Given]
    ) -> tuple[torch.Tensor, float]:
        """The output projection behind the best maps of the given values to the layer's own, and the maps' error."""
        own, read = (
            torch.cat([by_token(value) for value in values])
            for values in ([part.value for part in inputs], [value for _, value, _ in given])
        )
        zeros = own.new_zeros(own.shape[-1], own.shape[-1])
        maps = [ridge_towards(read[:, i], own[:, i], zeros, VALUE_RIDGE) for i in range(own.shape[1])]
        found = torch.stack([read[:, i] @ each.T for i, each in enumerate(maps)], dim=1)
        per_head = torch.stack(maps).repeat_interleave(attention.num_key_value_groups, dim=0)
        weight = attention.o_proj.weight.unflatten(1, (-1, own.shape[-1]))
        return torch.einsum("ohd,hde->ohe", weight, per_head).flatten(1), _relative_error(found, own)


class ValueMoments:
    """What the values of a group of layers have in common with the states H that they are to be made of.

    Args:
        read (`torch.Tensor`): H per window, `(1, length, n)`.
    """

    def __init__(self, read: Sequence[torch.Tensor]):
        self.states = torch.cat([part[0] for part in read])
        # Per layer H'v `(n, kv_heads, head_dim)`, float64, over the root mean square of v per KV head.
        self.products: list[torch.Tensor] = []

    def add(self, inputs: Sequence[AttentionInputs], bias: torch.Tensor | None) -> None:
        """Add a layer, from what its attention gets in the source and the bias of its values."""
        values = torch.cat([by_token(part.value) for part in inputs])
        values = values if bias is None else values - bias.view(values.shape[1:])
        product = (self.states.T @ values.flatten(1)).double().unflatten(1, values.shape[1:])
        self.products.append(product / values.square().mean((0, 2)).sqrt()[:, None])

    def joint_values(self) -> torch.Tensor:
        """The projection of values `(kv_heads * head_dim, n)` that serves all layers best.

        Per KV head, a regression of reduced rank: of what H tells of the values of all layers, each divided by its
        size, the `head_dim` directions that tell most.
        """
        gram = (self.states.T @ self.states).double()
        ridged = gram + BRIDGE_RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
        factor = torch.linalg.cholesky(ridged)
        heads, dim = self.products[0].shape[1:]
        rows = []
        for head in range(heads):
            fitted = torch.cholesky_solve(torch.cat([product[:, head] for product in self.products], dim=1), factor)
            directions = torch.linalg.eigh(fitted.T @ gram @ fitted)[1][:, -dim:]
            rows.append((fitted @ directions).T)
        return torch.cat(rows).to(self.states.dtype)


def _relative_error(found: torch.Tensor, target: torch.Tensor) -> float:
    return ((found - target).norm() / target.norm()).item()


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(figure, 4) for name, figure in figures.items()}
