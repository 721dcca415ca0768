"""Tests whose body is the same for both generations; imported as `models.generations`.

Such a test has an argument `generation`: the module `models.tiny` (T1) or `models.tiny2` (T2), with `tiny_model`,
`tiny_config` and `MODELS`. By that argument tests/test_known_faults.py knows what a row is tested on.
"""

from collections.abc import Iterable

import pytest
from models import tiny, tiny2


T1, T2 = pytest.param(tiny, id="T1"), pytest.param(tiny2, id="T2")
# Of the second generation one of each way in which the cross-decoder gets its keys.
WAYS = ("default", "source_rope", "own_kv", "branch", "yoco_baseline")
# Its settings that run by default where each of them is a case of its own.
FAST = ("default", "two_bridges")
# Of the first generation one of each way in which layers cache and read.
KINDS = ("default", "no_window", "own_kv", "window_layers", "merged_own")
both_generations = pytest.mark.parametrize("generation", [T1, T2])


def case(generation, *values, marks=()):
    """Values of one test, `generation` first, under an id that names them."""
    label = "T1" if generation is tiny else "T2"
    return pytest.param(generation, *values, id="-".join([label, *map(str, values)]), marks=marks)


def over_settings(
    first: Iterable[str] = tiny.MODELS,
    second: Iterable[str] = tiny2.MODELS,
    fast: Iterable[str] = FAST,
    first_fast: Iterable[str] = tiny.MODELS,
):
    """Parametrise a test by `generation` and `switch`, a key of `generation.MODELS`.

    Args:
        first, second: settings of T1 and of T2.
        fast, first_fast: those of T2 and of T1 that run by default; the others run only with the slow tests.
    """
    settings = [case(tiny, name, marks=() if name in first_fast else pytest.mark.slow) for name in first]
    settings += [case(tiny2, name, marks=() if name in fast else pytest.mark.slow) for name in second]
    return pytest.mark.parametrize(("generation", "switch"), settings)
