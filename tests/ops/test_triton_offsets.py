"""Offsets past 2^31 in the states that a call is given, packed documents included."""

import mmap

import pytest
import torch
from kernel_checks import DEVICE, evaluate, make_states

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
)
from hysparse_hf.modeling.rows_hysparse import Rows


pytest.importorskip("triton")

LENGTH, DIM = 20, 16
# From one token to the next, in elements: the last token begins past 2^31.
STRIDE = 2**27
# Two documents, of 13 and 7 tokens.
PACKED = Rows.from_cu_seqlens(torch.tensor([0, 13, LENGTH], dtype=torch.int32, device=DEVICE), LENGTH)


@pytest.fixture(scope="module")
def far_apart():
    """Function that lays a tensor `(1, 1, LENGTH, DIM)` out with `STRIDE`; only its own pages become memory."""
    elements = (LENGTH - 1) * STRIDE + DIM
    if DEVICE == "cuda":
        storage = torch.zeros(elements, dtype=torch.float16, device=DEVICE)
    else:
        storage = torch.frombuffer(mmap.mmap(-1, 2 * elements), dtype=torch.float16)

    def lay_out(states):
        far = storage.as_strided(states.shape, (elements, elements, STRIDE, 1))
        far.copy_(states)
        return far

    return lay_out


def calls():
    indices = torch.tensor([0, -1], dtype=torch.int32, device=DEVICE).expand(1, 1, LENGTH, 2).contiguous()
    options = {"rows": PACKED, "backend": "triton"}
    return {
        "full": lambda *states: full_attention_with_oracle(*states, block_size=16, n_selected=1, **options)[:2],
        "block_sparse": lambda *states: block_sparse_attention(
            *states, indices, block_size=16, return_lse=True, **options
        ),
        "window": lambda *states: sliding_window_attention(*states, window=5, return_lse=True, **options),
    }


@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("operation", ["full", "block_sparse", "window"])
def test_packed_states_with_a_long_stride_C14_C15(far_apart, operation, place):
    call = calls()[operation]
    states = make_states(LENGTH, heads=1, head_dim=DIM, dtype=torch.float16)
    expected = evaluate(call, states)
    states[place] = far_apart(states[place])
    assert (LENGTH - 1) * states[place].stride(2) > 2**31
    for one, other in zip(evaluate(call, states), expected, strict=True):
        assert torch.equal(one, other)
