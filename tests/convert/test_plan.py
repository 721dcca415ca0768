"""Which layers stay full."""

import pytest

from hysparse_hf.conversion.plan import layer_plan, parse_ratio


def full_layers(plan):
    return [index for index, kind in enumerate(plan) if kind == "full"]


@pytest.mark.parametrize(
    ("layers", "ratio", "expected"),
    [(36, "1:3", [0, 4, 8, 12, 16, 20, 24, 28, 32, 35]), (49, "1:11", [0, 12, 24, 36, 48]), (3, "1:0", [0, 1, 2])],
)
@pytest.mark.parametrize("plan", [None, "regular"])
def test_regular_plan_follows_the_ratio(layers, ratio, expected, plan):
    assert full_layers(layer_plan(plan, layers, parse_ratio(ratio))) == expected


@pytest.mark.parametrize("plan", ["0,3,8", "0, 3, 8", [0, 3, 8], (8, 0, 3)])
def test_explicit_plan(plan):
    assert full_layers(layer_plan(plan, 10, 3)) == [0, 3, 8]


@pytest.mark.parametrize("plan", ["", "0,x", [0, None], "0,,3", [0, 2.5]])
def test_what_is_no_list_is_refused(plan):
    with pytest.raises(ValueError, match="'regular' or a list of full layers"):
        layer_plan(plan, 10, 3)


@pytest.mark.parametrize("ratio", ["3", "2:3", "1:", "1:-1", "1:x", ""])
def test_what_is_no_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="must read 1:N"):
        parse_ratio(ratio)
