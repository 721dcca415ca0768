"""Which layers of a dense model make the self-decoder, which the cross-decoder, and which stay full in each."""

import operator
from collections.abc import Sequence

from hysparse_hf.modeling.configuration_hysparse import regular_layer_plan
from hysparse_hf.modeling.configuration_hysparse2 import default_cross_layer_plan


# The full layers of each half.
Halves = tuple[Sequence[int], Sequence[int]]


def half_plans(plan: str | Halves | None, num_layers: int, sparse_layers_per_full: int) -> dict[str, list[str]]:
    """The plans of both halves, by the names of their fields in `HySparse2Config`.

    By default the self-decoder is the larger half of the layers. With N = `sparse_layers_per_full` every (N+1)-th of
    its layers is full, and its last one, whose input the cross-decoder reads: no other state of the self-decoder is
    as close to what the cross-decoder's layers read in the source. Its other layers keep a window. The
    cross-decoder's layers are a full one and N sparse ones, repeated.

    Args:
        plan (`str` or `Halves`, *optional*): the full layers of both halves, as two lists or as `"0,7/15,19"`, the
            cross-decoder beginning at the first one of the second list; `None` or `"regular"` for the default.
        num_layers (`int`): layers of the source.
        sparse_layers_per_full (`int`): N of the 1:N ratio; only read by the default.
    Raises:
        ValueError: no two lists, an empty one, a layer that the source lacks, lists that are not in order, or a source
            of one layer.
    """
    if num_layers < 2:
        raise ValueError(
            f"the source must have at least 2 layers, one for each half, got {num_layers}; convert it to the first "
            "generation."
        )
    if plan is None or plan == "regular":
        count = num_layers - num_layers // 2
        in_self = [
            "window" if kind == "sparse" else kind for kind in regular_layer_plan(count, sparse_layers_per_full)
        ]
        in_cross = default_cross_layer_plan(num_layers - count, sparse_layers_per_full)
        return {"self_layer_plan": in_self, "cross_layer_plan": in_cross}
    full_self, full_cross = _listed(plan)
    full = [*full_self, *full_cross]
    if not full_self or not full_cross or full != sorted(set(full)) or not 0 <= full[0] <= full[-1] < num_layers:
        raise ValueError(
            f"`plan` must list layers of the source (0 to {num_layers - 1}) in ascending order, at least one full "
            f"layer for each half, got {plan!r}; correct it."
        )
    border = full_cross[0]
    return {
        "self_layer_plan": ["full" if layer in full else "window" for layer in range(border)],
        "cross_layer_plan": ["full" if layer in full else "sparse" for layer in range(border, num_layers)],
    }


def _listed(plan: str | Halves) -> list[list[int]]:
    try:
        halves = [half.split(",") for half in plan.split("/")] if isinstance(plan, str) else plan
        first, second = (
            [int(layer) if isinstance(layer, str) else operator.index(layer) for layer in half] for half in halves
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`plan` must be 'regular' or the full layers of both halves such as 0,7/15,19 (the second half begins at "
            f"its first one), got {plan!r}; correct it."
        ) from error
    return [first, second]
