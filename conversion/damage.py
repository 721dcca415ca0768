"""What it costs to make a layer sparse: each layer alone gives way to its window with a fitted sink.

One streaming pass carries the teacher's hidden states and, beside them, one copy per layer tried so far, which differs
from the teacher's by that layer's replacement. At the end stand the logits. With p the teacher's distribution and d_i
the change of the logits that replacing layer i makes, the KL divergence of small changes is a quadratic form, so

    damage_ij = E[ cov_p(d_i, d_j) ] / 2

says for every set of layers what replacing them together costs: the sum of the matrix over the set. The diagonal is
scaled to the true KL of each layer alone. Errors that point the same way add up to more than their sum, others cancel.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import logging

from hysparse_hf.modeling.attention_hysparse import sliding_window_attention
from hysparse_hf.modeling.configuration_hysparse import HySparseConfig

from .layer_stream import AttentionInputs, LayerStream, ReadTarget, by_token
from .sinks import HeadSums, fit_local_sink


# Changes of logits held at once, in elements.
CHUNK_ELEMENTS = 32 * 1024 * 1024


@dataclass(frozen=True)
class Damage:
    """KL to the teacher `(layers, layers)`, float64: the diagonal of each layer alone, the rest of pairs."""

    matrix: torch.Tensor

    def of(self, layers: list[int]) -> float:
        """The estimate for replacing several layers together."""
        return self.matrix[layers][:, layers].sum().item()

    def record(self) -> dict[str, float]:
        """Layer -> damage alone, rounded for a record."""
        return {str(layer): round(kl, 5) for layer, kl in enumerate(self.matrix.diagonal().tolist())}


class DamagePass:
    """The dense teacher over all windows, once as it is and once per layer with that layer replaced.

    Args:
        config (`HySparseConfig`): of the converted model; its plan does not matter.
        read (`ReadTarget`): gives the mapped weights.
        windows (`tuple[torch.Tensor, ...]`): token ids, each `(length,)`, longer than the sliding window.
    """

    def __init__(self, config: HySparseConfig, read: ReadTarget, windows: tuple[torch.Tensor, ...]):
        self.config = config
        self.stream = LayerStream(config, read)
        # Per window `[teacher, layer 1 replaced, layer 2 replaced, ...]`; layer 0 always stays full.
        self.states = [[hidden] for hidden in self.stream.embed(windows)]

    @torch.no_grad()
    def run(self) -> Damage:
        """Measure every layer."""
        layers = self.config.num_hidden_layers
        for index in logging.tqdm(range(layers), desc="measuring layers", unit="layer"):
            layer = self.stream.layer(index)
            inputs = [self.stream.attention_inputs(layer, states[0]) for states in self.states]
            replaced = [] if index == 0 else self._replaced(layer, inputs)
            for number, states in enumerate(self.states):
                before = states[0]
                for copy, hidden in enumerate(states):
                    found = self.stream.attention_inputs(layer, hidden) if copy else inputs[number]
                    attended = layer.self_attn.o_proj(found.dense().flatten(1))
                    states[copy] = self.stream.after_attention(layer, hidden, attended)
                if replaced:
                    states.append(self.stream.after_attention(layer, before, replaced[number]))
        return Damage(nn.functional.pad(self._matrix(), (1, 0, 1, 0)))

    def _replaced(self, layer: nn.Module, inputs: list[AttentionInputs]) -> list[torch.Tensor]:
        """Per window what the layer's attention gives when it is a window with a fitted sink."""
        window = self.config.sliding_window
        local = [
            sliding_window_attention(part.query, part.key, part.value, window=window, return_lse=True)
            for part in inputs
        ]
        sums = [
            HeadSums.of(part.dense(), by_token(output), lse[0], skip=window)
            for part, (output, lse) in zip(inputs, local, strict=True)
        ]
        sink = fit_local_sink(HeadSums.join(sums))[0]
        return [
            layer.self_attn.o_proj((by_token(output) * torch.sigmoid(lse[0].T - sink)[..., None]).flatten(1))
            for output, lse in local
        ]

    def _matrix(self) -> torch.Tensor:
        norm, head = self.stream.head()
        tried = len(self.states[0]) - 1
        pairs = torch.zeros(tried, tried, dtype=torch.float64, device=self.stream.device)
        alone = torch.zeros(tried, dtype=torch.float64, device=self.stream.device)
        chunk = max(1, CHUNK_ELEMENTS // ((tried + 1) * len(head)))
        positions = 0
        for states in self.states:
            for part in norm(torch.cat(states)).split(chunk, dim=1):
                logits = (part @ head.T).log_softmax(-1)
                teacher, changes = logits[0], logits[1:] - logits[0]
                shares = teacher.exp()
                alone -= (shares * changes).sum((1, 2)).double()
                changes -= (shares * changes).sum(-1, keepdim=True)
                changes = (changes * shares.sqrt()).flatten(1)
                pairs += (changes @ changes.T).double()
                positions += part.shape[1]
        pairs, alone = (pairs / 2 / positions).cpu(), (alone / positions).cpu().clamp(min=0)
        scale = (alone / pairs.diagonal().clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
        return pairs * scale * scale[:, None]
