"""Early exit put to the test: the same predictions, with a part of the rows at a time through the cross-decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from hysparse_hf.modeling.cache_hysparse import HySparseCache
from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT

from .quality import Predictions, compare_predictions, total_of
from .texts import Text


# Each position's logits are asked for in one of so many passes.
PARTS = 4
# Most that leaving early may change: KL in nats per token. A row whose last chosen and first rejected token score
# alike may choose the other one when fewer rows are computed together; nothing else may differ.
EXIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class EarlyExit:
    """Predictions of passes that leave early, beside those of whole ones.

    Args:
        predictions (`Predictions`): of the passes that leave early.
        kl (`float`): of these from the whole passes, nats per token.
        largest_difference, largest_logit (`float`): of the logits.
        processed (`dict`): tokens that went through each half; whole passes send every token through both.
        rows (`int`): positions whose logits were asked for; the cross-decoder has to process these and no others.
    """

    predictions: Predictions
    kl: float
    largest_difference: float
    largest_logit: float
    processed: dict[str, int]
    rows: int

    def record(self) -> dict[str, Any]:
        """For a report."""
        difference = {"largest": self.largest_difference, "largest_logit": self.largest_logit}
        return {"kl": self.kl, "difference": difference, "processed_tokens": self.processed, "rows": self.rows}

    def faults(self) -> list[str]:
        """What is wrong with it, one line each; none for a right model."""
        wrong = [
            (
                self.processed["cross"] != self.rows,
                f"the cross-decoder processed {self.processed['cross']} tokens for the logits of {self.rows}",
            ),
            (not self.kl <= EXIT_TOLERANCE, f"predictions differ from those of whole passes by a KL of {self.kl:.2g}"),
        ]
        return [f"early exit: {words}" for is_wrong, words in wrong if is_wrong]


@torch.no_grad()
def leave_early(model: Any, texts: Sequence[Text], whole: Predictions, description: str) -> EarlyExit:
    """Run a model of the second generation over texts, a part of the rows at a time.

    Args:
        model (`HySparse2ForCausalLM`): in evaluation mode.
        texts (`Sequence[Text]`): as for `predict`.
        whole (`Predictions`): of the same model on the same texts, all rows at once.
        description (`str`): of the progress bar.
    """
    processed, rows = {"self": 0, "cross": 0}, 0
    states: list[tuple[torch.Tensor, ...]] = []
    progress = logging.tqdm(total=PARTS * sum(len(text.windows) for text in texts), desc=description, unit="pass")
    with progress:
        for text in texts:
            kept: list[torch.Tensor] = []
            for window in text.windows:
                found = torch.empty_like(whole.states[len(states)][len(kept)])
                for part in range(min(PARTS, len(window))):
                    places = torch.arange(part, len(window), PARTS)
                    cache = HySparseCache(model.config, count_tokens=True)
                    options = {CACHE_ARGUMENT: cache, "logits_to_keep": places.to(model.device)}
                    output = model.model(input_ids=window[None].to(model.device), use_cache=True, **options)
                    found[places.to(found.device)] = output.last_hidden_state[0]
                    processed = {half: count + cache.processed_tokens[half] for half, count in processed.items()}
                    rows += len(places)
                    progress.update()
                kept.append(found)
            states.append(tuple(kept))
    predictions = Predictions(whole.head, tuple(states))
    total = total_of(compare_predictions(whole, predictions, texts))
    return EarlyExit(predictions, total.record()["kl"], total.largest_difference, total.largest, processed, rows)
