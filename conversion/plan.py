"""Which layers stay full: the regular rule of the paper, or an explicit list."""

import operator
from collections.abc import Sequence

from hysparse_hf.modeling.configuration_hysparse import regular_layer_plan


def parse_ratio(ratio: str) -> int:
    """Sparse layers per full layer of a ratio such as `"1:3"`.

    Raises:
        ValueError: anything but `1:N` with N at least 0.
    """
    full, _, sparse = str(ratio).partition(":")
    if full.strip() != "1" or not sparse.strip().isdecimal():
        raise ValueError(
            f"`ratio` must read 1:N (one full layer, then N sparse ones), got {ratio!r}; use for example '1:3'."
        )
    return int(sparse)


def layer_plan(plan: str | Sequence[int] | None, num_layers: int, sparse_layers_per_full: int) -> list[str]:
    """The kind of every layer, `"full"` or `"sparse"`.

    Args:
        plan (`str` or `Sequence[int]`, *optional*): the full layers, as integers or as `"0,3,8"`; `None` or
            `"regular"` for the regular plan.
        num_layers (`int`): layers of the source.
        sparse_layers_per_full (`int`): N of the 1:N ratio; only read by the regular plan.
    Raises:
        ValueError: no list of layers, a layer that the source lacks, a layer listed twice, or layer 0 missing.
    """
    if plan is None or plan == "regular":
        return regular_layer_plan(num_layers, sparse_layers_per_full)
    full = _listed(plan)
    outside = sorted({layer for layer in full if not 0 <= layer < num_layers})
    if outside:
        raise ValueError(
            f"`plan` must list layers of the source (0 to {num_layers - 1}), got {outside}; leave them out."
        )
    repeated = sorted({layer for layer in full if full.count(layer) > 1})
    if repeated:
        raise ValueError(f"`plan` must list each full layer once, got {repeated} again; remove the repetition.")
    if 0 not in full:
        raise ValueError(
            f"`plan` must include layer 0, got {sorted(full)}; a sparse layer reads the full layer before it, so "
            "the first layer is always full."
        )
    return ["full" if layer in full else "sparse" for layer in range(num_layers)]


def _listed(plan: str | Sequence[int]) -> list[int]:
    parts = plan.split(",") if isinstance(plan, str) else plan
    try:
        return [int(part) if isinstance(part, str) else operator.index(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`plan` must be 'regular' or a list of full layers such as 0,3,8, got {plan!r}; correct it."
        ) from error
