"""Helpers that several tests share; imported as `helpers`."""

import torch


def assert_within_reference_error(
    actual: torch.Tensor, reference_low: torch.Tensor, oracle64: torch.Tensor, name: str = "result"
) -> None:
    """Bound an implementation's error by that of plain torch in the same dtype.

    With `err(x)` the distance of x from the oracle, the rule is `err(actual) <= 2 * err(reference_low) + eps(dtype) *
    max|oracle|`, for the largest and for the mean distance, with every value finite. Where the oracle is infinite, as
    the log-sum-exp of an empty row is, `actual` must hold the same infinity.

    In float32 on a card the factors are 3 and 2: its exponential errs by two units in the last place, and few rows of
    few keys do not even that out. On an H200 (2026-12-01) six of 1,119 tests broke the rule otherwise, by 2 to 41 %.

    Args:
        actual (`torch.Tensor`): what is tested, on any device.
        reference_low (`torch.Tensor`): the reference function on the same inputs in the same dtype as `actual`.
        oracle64 (`torch.Tensor`): the reference function on those inputs promoted to float64.
        name (`str`): what is compared, for the message.
    Raises:
        AssertionError: the rule is broken; the message gives both errors and the bound.
    """
    assert oracle64.dtype == torch.float64, f"{name}: the oracle must be float64, got {oracle64.dtype}"
    assert actual.dtype == reference_low.dtype, f"{name}: dtype {actual.dtype}, reference has {reference_low.dtype}"
    assert actual.shape == reference_low.shape == oracle64.shape, (
        f"{name}: shape {tuple(actual.shape)}, reference {tuple(reference_low.shape)}, oracle {tuple(oracle64.shape)}"
    )
    if oracle64.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    times, units = (3, 2) if actual.is_cuda and actual.dtype == torch.float32 else (2, 1)
    actual, reference, oracle = (tensor.detach().cpu().double() for tensor in (actual, reference_low, oracle64))
    assert not oracle.isnan().any(), f"{name}: the oracle holds NaN"
    infinite = oracle.isinf()
    for label, tensor in (("result", actual), ("reference", reference)):
        wrong = torch.where(infinite, tensor != oracle, ~tensor.isfinite())
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values of the {label} are not finite, or finite where the "
            f"oracle is infinite; first at {wrong.nonzero()[0].tolist()}"
        )
    finite = ~infinite
    if not finite.any():
        return
    slack = units * eps * oracle[finite].abs().max().item()
    distance = (actual - oracle)[finite].abs()
    allowed = (reference - oracle)[finite].abs()
    for label, error, reference_error in (
        ("max", distance.max().item(), allowed.max().item()),
        ("mean", distance.mean().item(), allowed.mean().item()),
    ):
        bound = times * reference_error + slack
        assert error <= bound, (
            f"{name}: {label} error {error:.3e} exceeds {bound:.3e} = {times} * {reference_error:.3e} (reference) + "
            f"{slack:.3e} ({units} * eps * max|oracle|)"
        )
