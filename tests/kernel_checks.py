"""Compare a Triton operation with the reference, outputs and every gradient; imported as `kernel_checks`.

Without a card the kernels run in triton's interpreter: float32 and float16 only, and few programs.
"""

from collections.abc import Callable

import pytest
import torch

from helpers import assert_within_reference_error
from hysparse_hf.modeling import reference_hysparse, selection_hysparse
from hysparse_hf.modeling.rows_hysparse import Rows


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Rows of every kind, for `batch=2, q_len=40, kv_len=70`.
ROW_KINDS = {
    "last_queries": Rows(),
    "left_padding": Rows.from_padding(torch.tensor([0, 37])),
    "unequal_rows": Rows(query_start=torch.tensor([30, 9])),
    "packed": Rows(first_key=torch.tensor([0, 31, 32, 50]).repeat_interleave(torch.tensor([9, 1, 14, 16]))[None]),
    "padded_unequal_rows": Rows(query_start=torch.tensor([2, 30]), first_key=torch.tensor([[5], [0]])),
}

# These two hold what the others do: queries and first columns of their own for every row, padding, documents.
# Interpreted kernels take so long that the others wait for `-m slow`; a card runs all.
TELLING_ROWS = ("packed", "padded_unequal_rows")
every_row_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if DEVICE == "cuda" or kind in TELLING_ROWS else pytest.mark.slow)
        for kind in ROW_KINDS
    ],
)


def on_device(rows: Rows) -> Rows:
    """The same rows on the device of these tests."""
    return Rows(*(None if part is None else part.to(DEVICE) for part in (rows.query_start, rows.first_key)))


def make_states(
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 1,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    sink: bool = False,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Query, key, value and, if asked for, float32 sinks, on the device of these tests.

    A sink's gradient has one value per head; with fewer than four its largest error, ours or the reference's, is luck.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = [
        (batch, heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, v_head_dim or head_dim),
    ]
    states = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [*states, torch.randn(heads, generator=generator).to(DEVICE)] if sink else states


def evaluate(
    call: Callable[..., tuple[torch.Tensor, ...]], states: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Outputs and lse of `call(*states)`, then the gradient of a random linear function of both in each state.

    The function's weights are rounded to `dtype` (default: that of the states) whatever it is evaluated in.
    """
    dtype = states[0].dtype if dtype is None else dtype
    states = [tensor.detach().requires_grad_() for tensor in states]
    outputs = call(*states)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=generator).to(dtype).to(output) for output in outputs]
    # A row without keys has lse -inf, which no gradient reaches.
    terms = [
        (output.masked_fill(output.isinf(), 0) * weight).sum() for output, weight in zip(outputs, weights, strict=True)
    ]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(sum(terms), states)]


def compare(kernel: Callable, reference: Callable, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hold the kernel's outputs and gradients to the error budget; return them."""
    actual = evaluate(kernel, states)
    low = evaluate(reference, states)
    exact = evaluate(reference, [tensor.double() for tensor in states], states[0].dtype)
    names = ("output", "lse", "grad query", "grad key", "grad value", "grad sink")
    for name, *triple in zip(names, actual, low, exact, strict=False):
        assert_within_reference_error(*triple, name=name)
    return actual


def assert_selection(indices: torch.Tensor, states: list[torch.Tensor], choose: Callable[..., torch.Tensor]) -> None:
    """Every chosen block scores at least as much as every rejected one, within the rounding of the logits.

    `choose(*states)` gives the reference's indices; it is called in float64.
    """
    recorded = []
    original = selection_hysparse.select_blocks

    def record(scores, *others, **more):
        recorded.append(scores)
        return original(scores, *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_hysparse, "select_blocks", record)
        exact = choose(*(tensor.double() for tensor in states))
    scores = torch.cat([part.double() for part in _padded(recorded)], dim=2)
    chosen = selection_hysparse.chosen_blocks(indices, scores.shape[-1])
    expected = selection_hysparse.chosen_blocks(exact, scores.shape[-1])
    assert torch.equal((indices >= 0).sum(-1), (exact >= 0).sum(-1))
    valid = indices.masked_fill(indices < 0, torch.iinfo(torch.int32).max)
    assert torch.equal(valid, valid.sort(-1).values), "ids must ascend, then -1"
    # Forced blocks are chosen whatever they score: only where the two selections differ do the scores decide.
    lost = scores.masked_fill(~(expected & ~chosen), float("-inf")).amax(-1)
    won = scores.masked_fill(~(chosen & ~expected), float("inf")).amin(-1)
    eps = torch.finfo(torch.float32).eps
    assert (lost - won <= 64 * eps * scores.abs().masked_fill(scores.isinf(), 0).amax()).all()


def _padded(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    width = max(part.shape[-1] for part in parts)
    return [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=float("-inf")) for part in parts]
