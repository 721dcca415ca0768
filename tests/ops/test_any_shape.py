"""Reference operations against loops over single queries, on drawn shapes and rows."""

import hypothesis
import naive
import torch
from hypothesis import strategies

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
)
from hysparse_hf.modeling.rows_hysparse import Rows


@strategies.composite
def calls(draw):
    """States, rows and options of one call; small, so that every border is near."""
    batch, kv_heads, group = (
        draw(strategies.integers(1, 2)),
        draw(strategies.integers(1, 2)),
        draw(strategies.integers(1, 3)),
    )
    q_len = draw(strategies.integers(1, 9))
    kv_len = q_len + draw(strategies.integers(0, 9))
    kind = draw(strategies.sampled_from(["plain", "padded", "offset", "packed"]))
    integers = [draw(strategies.integers(0, kv_len - 1)) for _ in range(batch)]
    rows = None
    if kind == "padded":
        rows = Rows.from_padding(torch.tensor(integers))
    elif kind == "offset":
        rows = Rows(query_start=torch.tensor(integers).clamp(max=kv_len - q_len))
    elif kind == "packed":
        # A document never begins behind the query it belongs to.
        own = torch.arange(kv_len - q_len, kv_len)
        starts = torch.tensor(sorted(draw(strategies.sets(strategies.integers(0, kv_len - 1), min_size=1))))
        first = torch.stack([torch.where(starts <= column, starts, 0).max() for column in own])
        rows = Rows(first_key=first[None])
    options = {
        "block_size": draw(strategies.integers(1, 5)),
        "n_selected": draw(strategies.integers(1, 4)),
        "block_reduction": draw(strategies.sampled_from(["max", "sum"])),
        "head_reduction": draw(strategies.sampled_from(["max", "mean"])),
    }
    states = naive.random_states(
        q_len,
        kv_len,
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(strategies.integers(1, 5)),
        v_head_dim=draw(strategies.integers(1, 5)),
        seed=draw(strategies.integers(0, 9)),
    )
    sink = torch.linspace(-1, 1, kv_heads * group, dtype=torch.float64)
    return states, rows, options, sink, draw(strategies.integers(0, 12))


def assert_close(results, expected):
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@hypothesis.given(calls())
@hypothesis.settings(max_examples=60)
def test_full_then_block_sparse_attention(call):
    states, rows, options, sink, window = call
    output, lse, indices = full_attention_with_oracle(*states, rows=rows, backend="reference", **options)
    expected = naive.full_attention(*states, rows=rows or naive.NOTHING, **options)
    assert_close((output, lse), expected[:2])
    assert torch.equal(indices, expected[2])
    options = {"block_size": options["block_size"], "window": window, "sink": sink}
    results = block_sparse_attention(
        *states, indices, rows=rows, return_lse=True, return_weights=True, backend="reference", **options
    )
    assert_close(results, naive.block_sparse_attention(*states, indices, rows=rows or naive.NOTHING, **options))


@hypothesis.given(calls())
@hypothesis.settings(max_examples=60)
def test_sliding_window_attention(call):
    states, rows, _, sink, window = call
    results = sliding_window_attention(
        *states, rows=rows, window=window, sink=sink, return_lse=True, return_weights=True, backend="reference"
    )
    expected = naive.sliding_window_attention(*states, rows=rows or naive.NOTHING, window=window, sink=sink)
    assert_close(results, expected)
