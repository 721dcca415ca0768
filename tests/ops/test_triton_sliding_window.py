"""Sliding window, Triton back end: outputs and gradients by error budget against the reference in float64."""

import pytest
import torch
from kernel_checks import DEVICE, ROW_KINDS, compare, evaluate, every_row_kind, make_states, on_device

from hysparse_hf.modeling.attention_hysparse import sliding_window_attention
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS


pytest.importorskip("triton")


def call(backend, window, rows=PLAIN_ROWS):
    def attend(query, key, value, sink=None):
        options = {"window": window, "rows": on_device(rows), "return_lse": True}
        return sliding_window_attention(query, key, value, sink=sink, backend=backend, **options)

    return attend


def check(states, window, rows=PLAIN_ROWS):
    return compare(call("triton", window, rows), call("reference", window, rows), states)


@pytest.mark.parametrize("length", [1, 63, 65, 129])
def test_lengths_around_a_tile(length):
    check(make_states(length, sink=True), window=64)


@pytest.mark.parametrize("window", [0, 1, 33, 1000])
def test_windows(window):
    output, *_ = check(make_states(40, sink=True), window)
    assert window or not output.any()


@pytest.mark.parametrize("sink", [False, True], ids=["no_sink", "sink"])
@every_row_kind
def test_rows(kind, sink):
    check(make_states(40, 70, batch=2, sink=sink), 20, ROW_KINDS[kind])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (64, 1)], ids=["1", "3", "8", "64"])
def test_group_sizes_C01(heads, kv_heads):
    check(make_states(9, 20, heads=heads, kv_heads=kv_heads, sink=True), 7)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(24, 40), (80, 80)])
def test_head_dims_C03(head_dim, v_head_dim):
    check(make_states(30, head_dim=head_dim, v_head_dim=v_head_dim, sink=True), 20)


def test_float16():
    check(make_states(40, 70, dtype=torch.float16, sink=True), 20)


def test_strided_states():
    query, key, value = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in make_states(30, heads=4))
    check([query, key, value], 20)
    # A last dimension that is not dense, and an address that is no multiple of 16 bytes.
    loose = [torch.stack([states, states], -1)[..., 0] for states in (query, key, value)]
    shifted = [torch.cat([states[..., :1], states], -1)[..., 1:] for states in (query, key, value)]
    for tensors in (loose, shifted):
        torch.testing.assert_close(call("triton", 20)(*tensors), call("triton", 20)(query, key, value), rtol=0, atol=0)


def test_what_lies_past_a_short_row_does_not_leak():
    rows = ROW_KINDS["unequal_rows"]
    query, key, value = make_states(40, 70, batch=2)
    before = evaluate(call("triton", 20, rows), [query, key, value])
    key[1, :, 49:] = value[1, :, 49:] = float("nan")
    after = evaluate(call("triton", 20, rows), [query, key, value])
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_listed_head_dims_on_the_card_C12_C17(dims, dtype):
    states = make_states(300, 400, heads=6, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, sink=True)
    check(states, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
def test_listed_groups_on_the_card_C01(group):
    check(make_states(300, heads=2 * group, kv_heads=2, head_dim=128, dtype=torch.bfloat16, sink=True), 128)


@pytest.mark.gpu
def test_offsets_beyond_int32_C14():
    length, stride = 2100, 2**20
    storage = torch.zeros(length * stride, dtype=torch.bfloat16, device=DEVICE)
    far = storage.as_strided((1, 1, length, 64), (length * stride, length * stride, stride, 1))
    near = make_states(length, heads=1, head_dim=64, dtype=torch.bfloat16)
    far.copy_(near[1])
    for place in range(3):
        states = [far if i == place else near[1] for i in range(3)]
        torch.testing.assert_close(call("triton", 99)(*states), call("triton", 99)(*[near[1]] * 3), rtol=0, atol=0)
