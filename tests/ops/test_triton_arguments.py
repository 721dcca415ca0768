"""Arguments that mean the same whatever their place in memory, their width, or how little they hold."""

import pytest
import torch
from kernel_checks import DEVICE, make_states

from hysparse_hf.modeling import dispatch_hysparse
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    selection_layouts,
    sliding_window_attention,
    sparse_layer_attention,
)
from hysparse_hf.modeling.rows_hysparse import Rows


BLOCK = 16
both_back_ends = pytest.mark.parametrize("backend", ["reference", "triton"])
# One new token goes to the kernels of decoding, more than sixteen to those of prefill.
both_lengths = pytest.mark.parametrize("q_len", [1, 24])


def operations(states, indices, backend, sink=None, rows=None):
    """Outputs of every operation of attention."""
    options = {"rows": rows, "backend": backend}
    return [
        full_attention_with_oracle(*states, block_size=BLOCK, n_selected=2, **options)[0],
        block_sparse_attention(*states, indices, block_size=BLOCK, sink=sink, **options),
        sliding_window_attention(*states, window=9, sink=sink, **options),
        sparse_layer_attention(
            *states,
            indices,
            *states,
            block_size=BLOCK,
            window=9,
            sink_global=sink,
            sink_local=sink,
            window_rows=rows,
            **options,
        ),
    ]


def draw(q_len, batch=2):
    states = make_states(q_len, 48, heads=4, kv_heads=1, batch=batch)[:3]
    indices = torch.randint(0, 3, (batch, 1, q_len, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return states, indices.to(DEVICE)


def assert_all_equal(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


@both_lengths
@both_back_ends
def test_a_start_that_rows_share_in_memory(backend, q_len):
    states, indices = draw(q_len)
    starts = torch.tensor([7 if q_len == 1 else 5], device=DEVICE)
    expected = operations(states, indices, backend, rows=Rows(query_start=starts.repeat(2)))
    assert_all_equal(operations(states, indices, backend, rows=Rows(query_start=starts.expand(2))), expected)


@both_lengths
@both_back_ends
def test_a_sink_that_is_part_of_something_larger(backend, q_len):
    states, indices = draw(q_len)
    column = torch.linspace(-1, 2, 12, device=DEVICE).view(4, 3)[:, 1]
    assert_all_equal(
        operations(states, indices, backend, sink=column), operations(states, indices, backend, sink=column.clone())
    )


def test_the_gradient_of_such_a_sink():
    states, indices = draw(24)
    gradients = []
    for backend in ("reference", "triton"):
        table = torch.linspace(-1, 2, 12, device=DEVICE).view(4, 3).requires_grad_()
        block_sparse_attention(*states, indices, block_size=BLOCK, sink=table[:, 1], backend=backend).sum().backward()
        gradients.append(table.grad)
    torch.testing.assert_close(*gradients)


@both_lengths
def test_keys_that_begin_between_two_words(q_len):
    states, indices = draw(q_len)
    shifted = [torch.nn.functional.pad(part.flatten(), (1, 0))[1:].view(part.shape) for part in states]
    assert all(part.is_contiguous() and part.data_ptr() % 16 for part in shifted)
    assert_all_equal(operations(shifted, indices, "triton"), operations(states, indices, "triton"))


@both_lengths
@both_back_ends
def test_ids_past_every_block_choose_nothing(backend, q_len):
    states, indices = draw(q_len)
    far = indices.long() + 2**32
    expected = operations(states, torch.full_like(indices, -1), backend)
    assert_all_equal(operations(states, far, backend), expected)


@both_back_ends
def test_a_merged_window_wider_than_any_text(backend):
    states, indices = draw(24)
    results = [
        block_sparse_attention(*states, indices, block_size=BLOCK, window=window, backend=backend)
        for window in (48, 2**32)
    ]
    assert torch.equal(*results)


@both_lengths
@both_back_ends
def test_a_sink_of_nothing_where_no_key_is_seen(backend, q_len):
    states, indices = draw(q_len)
    sink = torch.full((4,), -torch.inf, device=DEVICE)
    output = block_sparse_attention(
        *states, torch.full_like(indices, -1), block_size=BLOCK, sink=sink, backend=backend
    )
    assert torch.equal(output, torch.zeros_like(output))


@both_lengths
@both_back_ends
def test_a_batch_of_nothing(backend, q_len):
    states, indices = draw(q_len)
    for output in operations([part[:0] for part in states], indices[:0], backend):
        assert output.shape == (0, 4, q_len, 16)


def test_layouts_of_other_queries_are_refused():
    states, indices = draw(40)
    layouts = selection_layouts(*states, indices, block_size=BLOCK, backend="triton")
    fewer = [part[:, :, -20:] for part in states]
    with pytest.raises(ValueError, match="`layouts` must be made by `selection_layouts` for these `indices`"):
        block_sparse_attention(
            fewer[0], *states[1:], indices[:, :, -20:], block_size=BLOCK, layouts=layouts, backend="triton"
        )


def test_a_call_that_is_wrong_itself_leaves_the_kernel_in_place(monkeypatch):
    monkeypatch.setattr(dispatch_hysparse, "_FAILED", set())
    monkeypatch.setattr(
        dispatch_hysparse, "_on_device", lambda requested, device: "triton" if requested == "auto" else requested
    )
    states, indices = draw(24)
    with pytest.raises(TypeError):
        block_sparse_attention(*states, indices, block_size=BLOCK, scaling="half")
    assert not dispatch_hysparse._FAILED


def test_what_has_no_heads_or_no_width_is_refused():
    query, key, value = draw(24)[0]
    for states in ((query, key[:, :0], value[:, :0]), (query[..., :0], key[..., :0], value)):
        with pytest.raises(ValueError, match="must have heads, and heads a width"):
            sliding_window_attention(*states, window=9)


def test_a_sink_on_another_device_is_refused():
    states, _ = draw(24)
    with pytest.raises(ValueError, match=r"`sink` must have shape \(heads,\) = \(4,\) on"):
        sliding_window_attention(*states, window=9, sink=torch.zeros(4, device="meta"))
