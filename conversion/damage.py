"""What it costs to make a layer sparse: each layer alone gives way to the window that it can be fitted to.

One streaming pass carries the teacher's hidden states and, beside them, one copy per layer tried so far, which differs
from the teacher's by that layer's replacement. At the end stand the logits. With p the teacher's distribution and d_i
the change of the logits that replacing layer i makes, the KL divergence of small changes is a quadratic form, so

    damage_ij = E[ cov_p(d_i, d_j) ] / 2

says for every set of layers what replacing them together costs: the sum of the matrix over the set. The diagonal is
scaled to the true KL of each layer alone. Errors that point the same way add up to more than their sum, others cancel.

Half of what is measured are pieces of other text that stand twice: plain text hardly tells which layers find what lies
far back. Windows are fitted on plain text alone.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.utils import logging

from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.decoder_hysparse import HySparseDecoderLayer

from .calibration import repeated_pieces
from .fit import Evidence, evidence_of, fit_layer
from .layer_stream import AttentionInputs, LayerStream, ReadTarget
from .sinks import HeadSums


# The damage is measured on so many tokens, in beginnings of windows and repeated pieces, both of this length, and
# there at one position in four.
DAMAGE_TOKENS, DAMAGE_LENGTH, DAMAGE_STRIDE = 4096, 1024, 4
# Changes of logits held at once, in elements.
CHUNK_ELEMENTS = 32 * 1024 * 1024


@dataclass(frozen=True)
class Damage:
    """KL to the teacher `(layers, layers)`, float64: the diagonal of each layer alone, the rest of pairs.

    `text` says on how many windows and repeated pieces, and of how many tokens at most; `kind` what plans call a layer
    that is replaced.
    """

    matrix: torch.Tensor
    text: dict[str, int]
    kind: str = "sparse"

    replacement: ClassVar[str] = "becomes a fitted window"

    def of(self, layers: list[int]) -> float:
        """The estimate for replacing several layers together."""
        return self.matrix[layers][:, layers].sum().item()

    def of_plan(self, layer_plan: list[str]) -> float:
        """The estimate for all layers of a plan together that are replaced."""
        return self.of([layer for layer, kind in enumerate(layer_plan) if kind == self.kind])

    def alone(self) -> Any:
        """Damage of each layer alone."""
        return self.matrix.diagonal().tolist()

    def record(self) -> dict[str, Any]:
        """The text, and layer -> damage alone, rounded for a record."""
        alone = {str(layer): round(kl, 5) for layer, kl in enumerate(self.matrix.diagonal().tolist())}
        return {"text": self.text, "kl": alone}


class DamagePass:
    """The dense teacher over all windows, and over beginnings of some once per layer with that layer replaced.

    Args:
        config (`HySparseConfig`): of the converted model; its plan does not matter.
        read (`ReadTarget`): gives the mapped weights.
        windows (`tuple[torch.Tensor, ...]`): token ids, each `(length,)`, longer than the sliding window.
        refit (`bool`): whether there is text enough to fit output projections.
        tokens (`int`), length (`int`): on how many tokens the damage is measured, and how many together.
        stride (`int`): logits are compared at one position in so many.
    """

    def __init__(
        self,
        config: HySparseConfig,
        read: ReadTarget,
        windows: tuple[torch.Tensor, ...],
        *,
        refit: bool,
        tokens: int = DAMAGE_TOKENS,
        length: int = DAMAGE_LENGTH,
        stride: int = DAMAGE_STRIDE,
    ):
        self.config, self.refit, self.stride = config, refit, stride
        self.stream = LayerStream(config, read)
        # Shorter windows are measured whole.
        self.length = min(length, max(map(len, windows)))
        # A piece that stands twice within the sliding window would tell nothing.
        repeats = self.length // 2 > config.sliding_window
        count = min(len(windows), math.ceil(tokens / self.length / (2 if repeats else 1)))
        # Evenly among the windows, which stand file by file.
        measured = [len(windows) * i // count for i in range(count)]
        repeated = self._repeated(windows, measured) if repeats else ()
        self.text = {"plain": count, "repeated": len(repeated), "tokens": self.length}
        self.fitted_on = len(windows)
        self.teacher = self.stream.embed((*windows, *repeated))
        # Per measured text the hidden states of its beginning with layer 1, 2, ... replaced; layer 0 stays full.
        measured += range(len(windows), len(windows) + len(repeated))
        self.changed: dict[int, list[torch.Tensor]] = {number: [] for number in measured}

    def _repeated(self, windows: tuple[torch.Tensor, ...], measured: list[int]) -> tuple[torch.Tensor, ...]:
        """As many repeated pieces as plain windows are measured, of what is not measured plain where there is such."""
        half = self.length // 2
        others = [ids for number, ids in enumerate(windows) if number not in measured]
        rest = others or [ids[self.length :] for ids in windows]
        return repeated_pieces(rest, len(measured), half) or repeated_pieces(windows, len(measured), half)

    @torch.no_grad()
    def run(self) -> Damage:
        """Measure every layer."""
        for index in logging.tqdm(range(self.config.num_hidden_layers), desc="measuring layers", unit="layer"):
            layer = self.stream.layer(index)
            inputs = [self.stream.attention_inputs(layer, hidden) for hidden in self.teacher]
            replacements = self.replacements(index, layer, inputs)
            for number, changed in self.changed.items():
                for copy, hidden in enumerate(changed):
                    found = self.stream.attention_inputs(layer, hidden)
                    changed[copy] = self._advance(layer, hidden, found.dense().flatten(1))
                beginning = self.teacher[number][:, : self.length]
                for replaced in replacements:
                    attended = replaced[number][: self.length]
                    changed.append(self.stream.after_attention(layer, beginning, attended))
            for number, part in enumerate(inputs):
                self.teacher[number] = self._advance(layer, self.teacher[number], part.dense().flatten(1))
        return self.damage_of(self._matrix())

    def replacements(
        self, index: int, layer: HySparseDecoderLayer, inputs: list[AttentionInputs]
    ) -> list[list[torch.Tensor]]:
        """What is tried in a layer's place: each per window what its attention then gives, `(length, hidden)`."""
        return [] if index == 0 else [self.as_window(layer.self_attn.o_proj, inputs)]

    def damage_of(self, matrix: torch.Tensor) -> Damage:
        """The result, from the damage of all replacements and of pairs of them."""
        return Damage(nn.functional.pad(matrix, (1, 0, 1, 0)), self.text)

    def _advance(self, layer: HySparseDecoderLayer, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return self.stream.after_attention(layer, hidden, layer.self_attn.o_proj(heads))

    def as_window(self, project: nn.Linear, inputs: list[AttentionInputs]) -> list[torch.Tensor]:
        """Per window what the layer's attention gives as a fitted window, `(length, hidden)`."""
        parts, sums = zip(*(evidence_of(part, project.weight, self.config) for part in inputs), strict=True)
        evidence, weight = Evidence.join(parts[: self.fitted_on]), project.weight
        known = HeadSums.join(sums[: self.fitted_on])
        values = fit_layer(evidence, known, weight, gated=True, refit=self.refit).values
        bias = 0.0 if project.bias is None else project.bias
        return [values.gated(part) @ values.weight.T + bias for part in parts]

    def _matrix(self) -> torch.Tensor:
        norm, head = self.stream.head()
        tried = len(next(iter(self.changed.values())))
        pairs = torch.zeros(tried, tried, dtype=torch.float64, device=self.stream.device)
        alone = torch.zeros(tried, dtype=torch.float64, device=self.stream.device)
        chunk = max(1, CHUNK_ELEMENTS // ((tried + 1) * len(head)))
        positions = 0
        for number, changed in self.changed.items():
            states = torch.cat([self.teacher[number][:, : self.length], *changed])[:, :: self.stride]
            for part in norm(states).split(chunk, dim=1):
                logits = (part @ head.T).log_softmax(-1)
                expected, changes = logits[0], logits[1:] - logits[0]
                shares = expected.exp()
                alone -= (shares * changes).sum((1, 2)).double()
                changes -= (shares * changes).sum(-1, keepdim=True)
                changes = (changes * shares.sqrt()).flatten(1)
                pairs += (changes @ changes.T).double()
                positions += part.shape[1]
        pairs, alone = (pairs / 2 / positions).cpu(), (alone / positions).cpu().clamp(min=0)
        scale = (alone / pairs.diagonal().clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
        return pairs * scale * scale[:, None]
