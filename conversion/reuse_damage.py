"""What it costs to read another layer's choice: the damage of `keep_kv`, for every layer and the full ones before it.

There a sparse layer keeps its keys and values and reads the blocks that the full layer before it chose, so what it
loses depends on both. With d_fl the change of layer l's attention output when it reads what layer f chooses, p the
source's distribution and J_l the derivative of the logits by that output, the KL divergence of small changes is

    damage_fl = E[ d_fl' J_l' F J_l d_fl ] / 2 = E[ (g_l d_fl)^2 ] / 2,    F = diag(p) - p p',    g_l = J_l' F^1/2 z

with z normal. One backward pass of the dense source gives g_l of all layers at once, so a window of text costs a few
forward passes, however many pairs there are. Changes at different positions count as independent.

Plain text hardly needs what lies far back, and misjudges which layers find it. What is measured is therefore pieces of
text that stand twice: the second time the source looks up what it says. At most a quarter of that is read, so that
there is something to choose.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.utils import logging

from hysparse_hf.modeling.attention_hysparse import block_sparse_attention
from hysparse_hf.modeling.configuration_hysparse import HySparseConfig

from .calibration import repeated_pieces
from .layer_stream import LayerStream, ReadTarget, by_token


# The damage is measured on so many pieces of text, each twice this length, or as long as the calibration's windows
# where these are shorter.
REUSE_PIECES, REUSE_LENGTH = 8, 512
# One part in so many of a repeated piece is read, at most.
LARGEST_PART = 4
# Logits held at once, in elements.
CHUNK_ELEMENTS = 16 * 1024 * 1024


@dataclass(frozen=True)
class ReuseDamage:
    """KL to the source `(layers, layers)`, float64: entry f, l of layer l alone when it reads what layer f chooses.

    Entries that were not measured are infinite. `text` says what it was measured on.
    """

    matrix: torch.Tensor
    text: dict[str, int]

    replacement: ClassVar[str] = "reads what the layer of its column chooses"

    def of_plan(self, layer_plan: list[str]) -> float:
        """The estimate for all sparse layers of a plan together: their sum."""
        total, donor = 0.0, 0
        for layer, kind in enumerate(layer_plan):
            if kind == "full":
                donor = layer
            else:
                total += self.matrix[donor, layer].item()
        return total

    def alone(self) -> dict[str, dict[int, float]]:
        """How far before it the full layer stands -> layer -> damage of that layer alone."""
        layers = range(len(self.matrix))
        return {
            f"f = l-{distance}": {layer: self.matrix[layer - distance, layer].item() for layer in layers[distance:]}
            for distance in layers[1:]
            if self.matrix.diagonal(distance).isfinite().all()
        }

    def record(self) -> dict[str, Any]:
        """The text, and layer -> full layer -> damage, rounded for a record."""
        pairs: dict[str, dict[str, float]] = {}
        for donor, layer in self.matrix.isfinite().nonzero().tolist():
            pairs.setdefault(str(layer), {})[str(donor)] = round(self.matrix[donor, layer].item(), 5)
        return {"text": self.text, "kl": {layer: pairs[layer] for layer in sorted(pairs, key=int)}}


class ReusePass:
    """The dense source over some windows, forwards and then backwards, layer by layer.

    Args:
        config (`HySparseConfig`): of the converted model; its plan does not matter.
        read (`ReadTarget`): gives the mapped weights.
        windows (`tuple[torch.Tensor, ...]`): token ids, each `(length,)`.
        longest_run (`int`): how many layers before a layer are tried as its full one.
        pieces (`int`), length (`int`): how many pieces are measured, evenly among those that all windows give, and
            their tokens.
    Raises:
        ValueError: windows so short that a single block leaves nothing out.
    """

    def __init__(
        self,
        config: HySparseConfig,
        read: ReadTarget,
        windows: tuple[torch.Tensor, ...],
        *,
        longest_run: int,
        pieces: int = REUSE_PIECES,
        length: int = REUSE_LENGTH,
    ):
        self.config, self.longest_run = config, longest_run
        self.stream = LayerStream(config, read)
        # Twice a piece is no longer than the longest window, so positions stay within what the source knows. A window
        # shorter than a piece gives none.
        length, block = min(length, max(map(len, windows)) // 2), config.oracle_block_size
        if 2 * length <= block:
            raise ValueError(
                f"calibration windows must be longer than a block (`block_size` {block}) for a measured plan with "
                f"`keep_kv`, got two halves of {length} tokens; give longer text, smaller blocks, or a plan."
            )
        self.budget = min(config.oracle_budget, max(1, 2 * length // LARGEST_PART // block) * block)
        repeated = repeated_pieces(windows, pieces, length)
        self.text = {"pieces": len(repeated), "tokens": length, "repeated": 2, "budget": self.budget}
        # Per layer and piece the hidden states before it, and the blocks that it would choose.
        self.states = [self.stream.embed(repeated)]
        self.choices: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def run(self) -> ReuseDamage:
        """Measure every pair."""
        count = self.config.num_hidden_layers
        progress = logging.tqdm(total=2 * count, desc="measuring reuse", unit="layer")
        with progress:
            for index in range(count):
                self._read_forwards(index)
                progress.update()
            gradients = self._sampled_gradients()
            positions = sum(hidden.shape[1] for hidden in gradients)
            matrix = torch.full((count, count), math.inf, dtype=torch.float64)
            for index in reversed(range(count)):
                for donor, total in self._read_backwards(index, gradients).items():
                    matrix[donor, index] = total / 2 / positions
                progress.update()
        return ReuseDamage(matrix, self.text)

    def _read_forwards(self, index: int) -> None:
        layer, states, choices = self.stream.layer(index), [], []
        for hidden in self.states[index]:
            output, chosen = self.stream.attention_inputs(layer, hidden).with_choice(self.config, self.budget)
            attended = layer.self_attn.o_proj(by_token(output).flatten(1))
            states.append(self.stream.after_attention(layer, hidden, attended))
            choices.append(chosen)
        self.states.append(states)
        self.choices.append(choices)

    def _sampled_gradients(self) -> list[torch.Tensor]:
        """Per piece the derivative by the last hidden states of a random mixture of the logits; ends `states`."""
        norm, head = self.stream.head()
        generator = torch.Generator().manual_seed(0)
        gradients: list[torch.Tensor] = []
        for hidden in self.states.pop():
            parts = []
            for part in norm(hidden).split(max(1, CHUNK_ELEMENTS // len(head)), dim=1):
                shares = (part @ head.T).softmax(-1)
                mixture = shares.sqrt() * torch.randn(shares.shape, generator=generator).to(shares)
                parts.append((mixture - shares * mixture.sum(-1, keepdim=True)) @ head)
            with torch.enable_grad():
                normed = norm(hidden.requires_grad_())
            gradients += torch.autograd.grad(normed, hidden, torch.cat(parts, dim=1))
        return gradients

    def _read_backwards(self, index: int, gradients: list[torch.Tensor]) -> dict[int, float]:
        """Earlier layer -> sum of squares over all positions; takes `gradients` back by one layer; ends `states`."""
        layer, donors = self.stream.layer(index), range(max(0, index - self.longest_run), index)
        totals = dict.fromkeys(donors, 0.0)
        for number, hidden in enumerate(self.states.pop()):
            with torch.enable_grad():
                inputs = self.stream.attention_inputs(layer, hidden.requires_grad_())
                attended = layer.self_attn.o_proj(inputs.dense().flatten(1))
                after = self.stream.after_attention(layer, hidden, attended)
            gradient, gradients[number] = torch.autograd.grad(after, (attended, hidden), gradients[number])
            for donor in donors:
                output: Any = block_sparse_attention(
                    inputs.query,
                    inputs.key,
                    inputs.value,
                    self.choices[donor][number],
                    block_size=self.config.oracle_block_size,
                )
                change = layer.self_attn.o_proj(by_token(output).flatten(1)) - attended
                totals[donor] += (gradient * change).sum(-1).square().sum().item()
        return totals
