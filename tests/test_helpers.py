"""The shared helpers accept what they should and refuse what they should."""

import pytest
import torch

from helpers import assert_within_reference_error


@pytest.fixture
def oracle():
    return torch.linspace(-3, 3, 101, dtype=torch.float64).exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reference_bounds_itself(oracle, dtype):
    assert_within_reference_error(oracle.to(dtype), oracle.to(dtype), oracle)


def test_twice_the_reference_error_passes(oracle):
    assert_within_reference_error((oracle + 0.02).float(), (oracle + 0.01).float(), oracle)


def test_single_outlier_fails_on_max(oracle):
    actual = oracle.float()
    actual[7] += 1e-3
    with pytest.raises(AssertionError, match="max error"):
        assert_within_reference_error(actual, oracle.float(), oracle)


def test_spread_error_fails_on_mean(oracle):
    reference = oracle.float()
    reference[7] += 1e-2
    with pytest.raises(AssertionError, match="mean error"):
        assert_within_reference_error((oracle + 1e-2).float(), reference, oracle)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_value_that_is_not_finite_fails(oracle, value):
    actual = oracle.float()
    actual[0] = value
    with pytest.raises(AssertionError, match="1 of 101 values of the result"):
        assert_within_reference_error(actual, oracle.float(), oracle)


def test_infinity_of_the_oracle_is_required(oracle):
    oracle[3] = float("-inf")
    assert_within_reference_error(oracle.float(), oracle.float(), oracle)
    actual = oracle.float()
    actual[3] = 0.0
    with pytest.raises(AssertionError, match=r"first at \[3\]"):
        assert_within_reference_error(actual, oracle.float(), oracle)


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_other_dtype_or_shape_fails(oracle, change):
    actual = oracle.half() if change == "dtype" else oracle.float()[None]
    with pytest.raises(AssertionError, match=change):
        assert_within_reference_error(actual, oracle.float(), oracle)


class TestNanFilledEmpty:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.empty(3, 4),
            lambda: torch.empty((2, 2), dtype=torch.bfloat16),
            lambda: torch.empty_like(torch.zeros(5)),
            lambda: torch.empty_strided((2, 3), (3, 1)),
            lambda: torch.zeros(2).new_empty(7),
        ],
        ids=["empty", "bfloat16", "like", "strided", "new"],
    )
    @pytest.mark.usefixtures("nan_filled_empty")
    def test_floats_are_nan(self, make):
        assert make().isnan().all()

    @pytest.mark.usefixtures("nan_filled_empty")
    def test_integers_are_the_lowest(self):
        assert (torch.empty(4, dtype=torch.int32) == torch.iinfo(torch.int32).min).all()

    @pytest.mark.usefixtures("nan_filled_empty")
    def test_leaf_keeps_requires_grad(self):
        assert torch.empty(2, requires_grad=True).is_leaf

    def test_is_undone_after_the_test(self):
        assert torch.empty.__module__ != "conftest"
