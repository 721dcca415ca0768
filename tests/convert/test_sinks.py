"""The closed-form sinks: what they recover and what they leave out."""

import pytest
import torch

from hysparse_hf.conversion.sinks import (
    GRID_ABOVE,
    GRID_BELOW,
    GRID_POINTS,
    HeadSums,
    fit_local_sink,
    sink_for_share,
)


@pytest.mark.parametrize("planted", [-3.0, 0.0, 4.5])
def test_planted_sink_is_recovered(planted):
    """Dense outputs made from a window with a known sink give that sink back, to half a grid step."""
    generator = torch.Generator().manual_seed(0)
    local = torch.randn(400, 3, 8, generator=generator)
    lse = 2 + torch.randn(3, 400, generator=generator)
    dense = torch.sigmoid(lse - planted).T[..., None] * local
    sink, share, without, with_sink = fit_local_sink(HeadSums.of(dense, local, lse, skip=16))
    step = (GRID_ABOVE - GRID_BELOW) / (GRID_POINTS - 1)
    assert (sink - planted).abs().max() <= step / 2 + 1e-5
    assert with_sink < 0.1 * without
    assert share == pytest.approx(torch.sigmoid(lse[..., 16:] - planted).mean().item(), abs=0.03)


def test_window_that_is_right_already_gets_a_sink_without_weight():
    local, lse = torch.randn(300, 2, 8), torch.randn(2, 300)
    sink, share, without, _ = fit_local_sink(HeadSums.of(local, local, lse, skip=0))
    assert without == 0
    assert share > 0.99
    assert torch.allclose(sink, lse.median(dim=1).values + GRID_BELOW)


def test_positions_inside_the_first_window_do_not_count():
    local, lse = torch.randn(300, 2, 8), torch.randn(2, 300)
    dense = 0.5 * local
    spoiled = dense.clone()
    spoiled[:50] = 1e3
    expected, got = (fit_local_sink(HeadSums.of(y, local, lse, skip=50))[0] for y in (dense, spoiled))
    assert torch.equal(expected, got)


def test_global_sink_takes_its_share_at_the_median():
    lse = torch.randn(3, 101) + 5
    sink = sink_for_share(lse, 0.1)
    assert torch.allclose(torch.sigmoid(sink - lse.median(dim=1).values), torch.full((3,), 0.1))
