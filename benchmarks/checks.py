"""Whether an operation is right in this run: the error budgets of the tests, at the shapes that are measured."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers import assert_within_reference_error
from hysparse_hf.modeling.rows_hysparse import Rows


def outputs_are_right(kernel: Callable, reference: Callable, states: list[torch.Tensor], indices=None) -> bool:
    """Compare some runs of neighbouring queries of a long call with the reference on these queries alone."""
    query, key, value = states
    n = query.shape[2]
    result = kernel(*states)
    for start in sorted({0, n // 3, n - 16}):
        part = slice(start, start + 16)
        rows = Rows(query_start=torch.tensor([start], device=query.device))
        limit = start + 16
        few = [query[:, :, part], key[:, :, :limit], value[:, :, :limit]]
        more = () if indices is None else (indices[:, :, part],)
        low = reference(*few, *more, rows=rows)
        exact = reference(*(tensor.double() for tensor in few), *more, rows=rows)
        if not is_within(result[:, :, part], low, exact):
            return False
    return True


def gradients_are_right(kernel: Callable, reference: Callable, states: list[torch.Tensor], indices=None) -> bool:
    """Compare all gradients of a call with those of the reference."""
    more = () if indices is None else (indices,)
    grad = torch.randn_like(kernel(*states, *more))

    def gradients(call, dtype):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in states]
        return torch.autograd.grad(call(*inputs, *more), inputs, grad.to(dtype))

    dtype = states[0].dtype
    triples = zip(
        gradients(kernel, dtype), gradients(reference, dtype), gradients(reference, torch.float64), strict=True
    )
    return all(is_within(*triple) for triple in triples)


def is_within(actual: torch.Tensor, low: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result keeps the tests' error budget; says why not."""
    try:
        assert_within_reference_error(actual, low, exact)
    except AssertionError as failure:
        print(f"check failed: {failure}", flush=True)
        return False
    return True
