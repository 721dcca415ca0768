"""Tests of operations run with uninitialised memory made visible."""

import pytest


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan(nan_filled_empty):
    """Fill what `torch.empty` and its relatives return with NaN, so that an unwritten output shows."""
