"""How far one model's predictions are from another's on text: KL divergence, perplexity, and the same next token.

Only last hidden states are kept of a model, so the second one can be loaded after the first is gone; logits exist for
a few positions at a time. `attention_errors` looks inside: how far each layer's attention is from the dense one's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import logging

from .texts import Text


# Logits held at once, in elements.
CHUNK_ELEMENTS = 16 * 1024 * 1024


@dataclass(frozen=True)
class Predictions:
    """A model's head, and its last hidden states `(length, hidden)` on each window of each text."""

    head: nn.Linear
    states: tuple[tuple[torch.Tensor, ...], ...]


@dataclass
class Figures:
    """Sums over positions that have a next token; `largest_difference` and `largest` are of logits."""

    tokens: int = 0
    divergence: float = 0.0
    loss_first: float = 0.0
    loss_second: float = 0.0
    same: int = 0
    largest_difference: float = 0.0
    largest: float = 0.0

    def add(self, other: "Figures") -> None:
        """Join another set of positions."""
        for field in fields(self):
            pair = getattr(self, field.name), getattr(other, field.name)
            # A NaN must stay: `max` may drop it, a sum does not.
            is_largest = field.name.startswith("largest") and not any(map(math.isnan, pair))
            setattr(self, field.name, max(pair) if is_largest else sum(pair))

    def record(self) -> dict[str, float]:
        """`kl` of the second model from the first, `perplexity` of both, share of equal top tokens, `tokens`."""
        return {
            # Rounding may leave a sum of nothing below 0. In this order, for a NaN to stay.
            "kl": max(self.divergence, 0.0) / self.tokens,
            "first_perplexity": _exp(self.loss_first / self.tokens),
            "perplexity": _exp(self.loss_second / self.tokens),
            "same_token": self.same / self.tokens,
            "tokens": self.tokens,
        }


def _exp(value: float) -> float:
    """`math.exp`, and infinity for what is larger than any float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def on_device(model: Any) -> Any:
    """A model where the measuring is done: on the GPU if there is one."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def predict(model: PreTrainedModel, texts: Sequence[Text], description: str) -> Predictions:
    """Run a model over texts.

    Raises:
        NotImplementedError: the model does something to its logits after the head.
    """
    head: Any = model.get_output_embeddings()
    short = texts[0].windows[0][None, :4].to(model.device)
    # What is not finite shows in the figures; here only the head is in question.
    logits, expected = head(_last_states(model, short)), model(input_ids=short, use_cache=False).logits
    logits, expected = (part.float().nan_to_num(0.0, 0.0, 0.0) for part in (logits, expected))
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()):
        raise NotImplementedError(
            f"the logits must be those of the head, and {type(model).__name__} changes them afterwards; compare "
            "models of the families that can be converted."
        )
    progress = logging.tqdm(total=sum(len(text.windows) for text in texts), desc=description, unit="window")
    states = []
    with progress:
        for text in texts:
            kept = []
            for window in text.windows:
                kept.append(_last_states(model, window[None].to(model.device))[0])
                progress.update()
            states.append(tuple(kept))
    return Predictions(head, tuple(states))


def _last_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


@torch.no_grad()
def compare_predictions(first: Predictions, second: Predictions, texts: Sequence[Text]) -> list[Figures]:
    """Figures of the second model beside the first, one per text."""
    figures = []
    for text, *states in zip(texts, first.states, second.states, strict=True):
        total = Figures()
        for window, one, other in zip(text.windows, *states, strict=True):
            for part in _window_figures(first.head, second.head, window, one, other):
                total.add(part)
        figures.append(total)
    return figures


def total_of(figures: Sequence[Figures]) -> Figures:
    """The figures of several texts together."""
    total = Figures()
    for part in figures:
        total.add(part)
    return total


def record_of(figures: Sequence[Figures], texts: Sequence[Text]) -> dict[str, Any]:
    """The record of all texts together, and in `texts` of each."""
    parts = [{"name": text.name, **part.record()} for text, part in zip(texts, figures, strict=True)]
    return {**total_of(figures).record(), "texts": parts}


def _window_figures(
    first_head: nn.Linear, second_head: nn.Linear, window: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> Iterator[Figures]:
    positions = max(1, CHUNK_ELEMENTS // first_head.weight.shape[0])
    for start in range(0, len(window) - 1, positions):
        stop = min(start + positions, len(window) - 1)
        logits = [head(states[start:stop]).float() for head, states in ((first_head, first), (second_head, second))]
        one, other = (F.log_softmax(part, dim=-1) for part in logits)
        following = window[start + 1 : stop + 1].to(one.device)
        yield Figures(
            tokens=stop - start,
            divergence=F.kl_div(other, one, log_target=True, reduction="sum").item(),
            loss_first=F.nll_loss(one, following, reduction="sum").item(),
            loss_second=F.nll_loss(other, following, reduction="sum").item(),
            same=int((one.argmax(-1) == other.argmax(-1)).sum()),
            largest_difference=(logits[0] - logits[1]).abs().max().item(),
            largest=logits[0].abs().max().item(),
        )


@dataclass(frozen=True)
class AttentionStates:
    """What goes into each layer's attention and comes out, `(1, length, hidden)` each, by layer."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@torch.no_grad()
def record_attention(model: PreTrainedModel, window: torch.Tensor) -> AttentionStates:
    """Run a HySparse model over one window and keep its attentions' inputs and outputs."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple, output: tuple) -> None:
        inputs.append(args[0])
        outputs.append(output[0])

    with _hooked(model, lambda attention, index: [attention.register_forward_hook(keep)]):
        _last_states(model, window[None].to(model.device))
    return AttentionStates(tuple(inputs), tuple(outputs))


@torch.no_grad()
def attention_errors(model: PreTrainedModel, window: torch.Tensor, dense: AttentionStates) -> list[float]:
    """Error of each layer's attention alone, where every layer is given what the dense model gives it.

    Args:
        model (`HySparseForCausalLM`): the sparse model.
        window (`torch.Tensor`): the token ids `(length,)` that `dense` was recorded on.
        dense (`AttentionStates`): of the dense model.
    Returns:
        `list[float]`: per layer `|y - y_dense| / |y_dense|`.
    """
    errors: list[float] = []

    def hooks_of(attention: nn.Module, index: int) -> list[RemovableHandle]:
        def give(module: nn.Module, args: tuple) -> tuple:
            return dense.inputs[index], *args[1:]

        def measure(module: nn.Module, args: tuple, output: tuple) -> None:
            expected = dense.outputs[index]
            errors.append(((output[0] - expected).norm() / expected.norm()).item())

        return [attention.register_forward_pre_hook(give), attention.register_forward_hook(measure)]

    with _hooked(model, hooks_of):
        _last_states(model, window[None].to(model.device))
    return errors


@contextmanager
def _hooked(model: Any, hooks_of: Callable[[nn.Module, int], list[RemovableHandle]]) -> Iterator[None]:
    """Hooks on every layer's attention, by layer index, for the time of the context."""
    handles = [handle for index, layer in enumerate(model.model.layers) for handle in hooks_of(layer.self_attn, index)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
