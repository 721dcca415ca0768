"""Choosing blocks from stored scores, exact: many blocks, many chosen, ties, and queries that see few."""

import pytest
import torch
from kernel_checks import DEVICE


pytest.importorskip("triton")
# Only files of this folder have "triton" in their name, so the import cannot fail for another reason.
from hysparse_hf.modeling.triton_block_topk import block_topk


GROUP = 3


def chosen_by_sorting(scores: torch.Tensor, seen: torch.Tensor, n_selected: int) -> torch.Tensor:
    """Ids of the highest of `scores` `(rows, queries, blocks)`, of which each query sees the first `seen`."""
    blocks = scores.shape[-1]
    visible = torch.arange(blocks, device=scores.device) < seen[:, None]
    order = scores.masked_fill(~visible, -float("inf")).argsort(dim=-1, descending=True, stable=True)
    order = torch.nn.functional.pad(order[..., :n_selected], (0, max(0, n_selected - blocks)), value=blocks)
    places = torch.arange(n_selected, device=scores.device)
    ids = torch.where(places < seen[:, None], order, blocks).sort(-1).values
    return torch.where(ids == blocks, -1, ids).int()


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    ("blocks", "n_selected"),
    [(1, 1), (3, 5), (31, 7), (32, 32), (33, 16), (64, 1), (100, 64), (257, 40), (1030, 16), (2050, 100)],
)
def test_equals_sorting(blocks, n_selected, ties):
    """Blocks of 16 keys; the last of 11 queries sees all of them."""
    q_len, rows = 11, 2
    generator = torch.Generator().manual_seed(blocks)
    scores = torch.randn(rows, blocks, GROUP, q_len, generator=generator)
    lse = torch.zeros(1, rows * GROUP, q_len)
    if ties:
        # A few values, both zeros among them.
        scores = (2 * scores).round() / 4
        scores[:, ::3] *= -1
    else:
        lse = torch.randn(lse.shape, generator=generator)
    indices = torch.full((1, rows, q_len, n_selected), -7, dtype=torch.int32, device=DEVICE)
    gap = max(0, 16 * blocks - q_len)
    block_topk(
        scores.to(DEVICE),
        lse.to(DEVICE),
        indices,
        None,
        None,
        gap=gap,
        steps=(0, q_len),
        block_size=16,
        head_reduction="max",
        forced=(0, 0),
    )
    highest = (scores - lse.view(rows, 1, GROUP, q_len)).amax(2).transpose(1, 2)
    seen = ((torch.arange(q_len) + gap) // 16 + 1).clamp(max=blocks)
    assert torch.equal(indices[0].cpu(), chosen_by_sorting(highest, seen, n_selected))
