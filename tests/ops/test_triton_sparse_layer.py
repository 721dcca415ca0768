"""A sparse layer's attention as one operation: against the reference, against its parts, and bitwise repeatable."""

import pytest
import torch
from kernel_checks import DEVICE, ROW_KINDS, compare, evaluate, every_row_kind, make_states, on_device

from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    selection_layouts,
    sliding_window_attention,
    sparse_layer_attention,
)
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS, Rows


BACKENDS = ["reference", "triton"]

# Window caches hold fewer columns than the full layer's; documents and offsets count among their own.
WINDOW_ROWS = {
    "last_queries": Rows(),
    "left_padding": Rows(first_key=torch.tensor([[0], [7]])),
    "unequal_rows": Rows(first_key=torch.tensor([[0], [5]])),
    "packed": Rows(first_key=torch.tensor([0, 11, 12, 30]).repeat_interleave(torch.tensor([9, 1, 14, 16]))[None]),
    "padded_unequal_rows": Rows(first_key=torch.tensor([[2], [0]])),
}


def call(backend, indices, rows=PLAIN_ROWS, window_rows=PLAIN_ROWS, *, gates, block_size=16, window=9, **options):
    """The operation as a function of its tensors, all of which get gradients."""

    def attend(query, key, value, window_query, window_key, window_value, sink_global, sink_local, *logits):
        output = sparse_layer_attention(
            query,
            key,
            value,
            indices.to(DEVICE),
            window_query,
            window_key,
            window_value,
            block_size=block_size,
            window=window,
            rows=on_device(rows),
            window_rows=on_device(window_rows),
            sink_global=sink_global,
            sink_local=sink_local,
            backend=backend,
            **dict(zip(("gate_global", "gate_local"), logits, strict=gates)),
            **options,
        )
        return (output,)

    return attend


def make_layer(q_len, kv_len, window_len=None, *, gates="elementwise", dtype=torch.float32, **sizes):
    """States of both branches, both sinks and, unless `gates` is None, both gates' logits."""
    query, key, value, sink_global = make_states(q_len, kv_len, dtype=dtype, sink=True, **sizes)
    near = make_states(q_len, window_len or kv_len, dtype=dtype, sink=True, seed=1, **sizes)
    states = [query, key, value, *near[:3], sink_global, near[3]]
    if gates:
        width = value.shape[3] if gates == "elementwise" else 1
        generator = torch.Generator().manual_seed(2)
        shape = (query.shape[0], q_len, query.shape[1], width)
        # As a projection leaves them: heads behind the length.
        states += [torch.randn(shape, generator=generator).to(DEVICE, dtype).transpose(1, 2) for _ in range(2)]
    return states


def draw(states, n, block_size=16):
    generator = torch.Generator().manual_seed(0)
    blocks = -(-states[1].shape[2] // block_size)
    shape = (states[0].shape[0], states[1].shape[1], states[0].shape[2], n)
    return torch.randint(-1, blocks + 2, shape, generator=generator, dtype=torch.int32)


def check(states, indices, *rows, **options):
    gates = len(states) == 10
    calls = (call(backend, indices, *rows, gates=gates, **options) for backend in ("triton", "reference"))
    return compare(*calls, states)


@pytest.mark.parametrize("gates", ["elementwise", "headwise", None])
def test_outputs_and_all_gradients(gates):
    states = make_layer(40, 70, 50, gates=gates, heads=6, kv_heads=2, head_dim=24, v_head_dim=40)
    check(states, draw(states, 3))


@every_row_kind
def test_rows(kind):
    states = make_layer(40, 70, 50, batch=2)
    check(states, draw(states, 4), ROW_KINDS[kind], WINDOW_ROWS[kind])


def test_float16():
    states = make_layer(20, 60, heads=8, head_dim=80, dtype=torch.float16)
    check(states, draw(states, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_the_gated_sum_of_its_branches(backend):
    states = make_layer(30, 48, 40)
    query, key, value, window_query, window_key, window_value, sink_global, sink_local, *gates = states
    indices = draw(states, 2).to(DEVICE)
    (output,) = call(backend, indices, gates=True)(*states)
    far = block_sparse_attention(query, key, value, indices, block_size=16, sink=sink_global, backend="reference")
    near = sliding_window_attention(
        window_query, window_key, window_value, window=9, sink=sink_local, backend="reference"
    )
    expected = torch.sigmoid(gates[0]) * far + torch.sigmoid(gates[1]) * near
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_layers_share_layouts():
    states = make_layer(40, 40)
    indices = draw(states, 3).to(DEVICE)
    layouts = selection_layouts(*states[:3], indices, block_size=16, backend="triton")
    shared = evaluate(call("triton", indices, gates=True, layouts=layouts), states)
    alone = evaluate(call("triton", indices, gates=True), states)
    assert all(torch.equal(x, y) for x, y in zip(shared, alone, strict=True))


def test_layouts_are_none_where_the_reference_runs():
    states = make_layer(5, 20)
    assert selection_layouts(*states[:3], draw(states, 2).to(DEVICE), block_size=16, backend="reference") is None
    assert selection_layouts(*states[:3], draw(states, 2).to(DEVICE), block_size=24, backend="triton") is None


def test_without_gradients_the_result_is_the_same():
    states = make_layer(20, 40)
    indices = draw(states, 2)
    attend = call("triton", indices, gates=True)
    with torch.no_grad():
        (output,) = attend(*states)
    assert torch.equal(output, evaluate(attend, states)[0])


def test_gates_that_do_not_belong_together_are_refused():
    states = make_layer(5, 20)
    gates = {"gate_global": states[8], "gate_local": states[9][..., :1]}
    options = {"block_size": 16, "window": 4}
    with pytest.raises(ValueError, match="gate_local"):
        sparse_layer_attention(*states[:3], draw(states, 2).to(DEVICE), *states[3:6], **options, **gates)
    with pytest.raises(ValueError, match="window_query"):
        sparse_layer_attention(*states[:3], draw(states, 2).to(DEVICE), states[3][:, :, 1:], *states[4:6], **options)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_graph_is_whole(compiler):
    states = make_layer(20, 40)
    attend = call("triton", draw(states, 2), gates=True)
    compiled = torch.compile(attend, fullgraph=True, backend=compiler)
    for x, y in zip(evaluate(compiled, states), evaluate(attend, states), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_listed_head_dims_on_the_card_C12(dims, dtype):
    states = make_layer(300, 400, 350, heads=6, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    check(states, draw(states, 4, 64), block_size=64, window=128)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("gates", ["elementwise", "headwise"])
def test_listed_groups_on_the_card_C01(group, gates):
    states = make_layer(300, 300, gates=gates, heads=2 * group, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    check(states, draw(states, 4, 64), block_size=64, window=128)


@pytest.mark.gpu
def test_results_repeat_bitwise():
    states = make_layer(700, 700, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    attend = call("triton", draw(states, 8, 64), gates=True, block_size=64, window=128)
    runs = [evaluate(attend, states) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))
