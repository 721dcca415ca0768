"""Sparse layers, selected blocks and windows at few new tokens, Triton back end: error budgets and who counts."""

import itertools

import pytest
import torch
from kernel_checks import DEVICE, make_states, on_device

from helpers import assert_within_reference_error
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
    sparse_layer_attention,
)
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS, Rows


pytest.importorskip("triton")
# Only files of this folder have "triton" in their name, so the import cannot fail for another reason.
from hysparse_hf.modeling import triton_block_sparse, triton_decode_sparse, triton_sliding_window, triton_sparse_layer


# Rows of every kind for `batch=2, q_len=3`: among 150 columns of the full layer and 40 of the window.
ROW_KINDS = {
    "last_queries": (Rows(), Rows()),
    "left_padding": (Rows.from_padding(torch.tensor([0, 137])), Rows(first_key=torch.tensor([[0], [29]]))),
    "unequal_rows": (Rows(query_start=torch.tensor([147, 9])), Rows(first_key=torch.tensor([[0], [28]]))),
    "one_token_rows": (Rows(query_start=torch.tensor([0, 1])), Rows(query_start=torch.tensor([0, 30]))),
    "packed": (
        Rows(first_key=torch.tensor([[31, 31, 149], [0, 148, 149]])),
        Rows(first_key=torch.tensor([[2, 2, 39], [0, 38, 39]])),
    ),
}

# One program per row, and as many as there are tiles.
divisions = pytest.mark.parametrize("programs", [1, 10**6], ids=["one_program", "many_programs"])


def make_layer(q_len, kv_len, window_len=40, *, gates="elementwise", sinks=True, dtype=torch.float32, **sizes):
    """States of both branches, and the options of gates and sinks."""
    states = make_states(q_len, kv_len, dtype=dtype, **sizes)
    near = make_states(q_len, window_len, dtype=dtype, seed=1, **sizes)
    generator = torch.Generator().manual_seed(2)
    options = {}
    if gates:
        shape = (*states[0].shape[:1], q_len, states[0].shape[1], states[2].shape[3] if gates == "elementwise" else 1)
        for name in ("gate_global", "gate_local"):
            options[name] = torch.randn(shape, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    if sinks:
        for name in ("sink_global", "sink_local"):
            options[name] = torch.randn(states[0].shape[1], generator=generator).to(DEVICE)
    return states, near, options


def draw(states, n, block_size=16):
    """Ids of all kinds: repeated, -1 anywhere, past the query's own block, and much too large."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-states[1].shape[2] // block_size)
    shape = (states[0].shape[0], states[1].shape[1], states[0].shape[2], n)
    indices = torch.randint(-1, blocks + 2, shape, generator=generator, dtype=torch.int32)
    indices[..., -1] = 2**31 - 1
    return indices.to(DEVICE)


def call(backend, states, near, indices, options, rows=PLAIN_ROWS, window_rows=PLAIN_ROWS, **more):
    more = {"block_size": 16, "window": 9, **more}
    with torch.no_grad():
        return sparse_layer_attention(
            *states,
            indices,
            *near,
            rows=on_device(rows),
            window_rows=on_device(window_rows),
            backend=backend,
            **options,
            **more,
        )


def check(layer, indices, *rows, **more):
    """Hold the output to the error budget; return it."""
    states, near, options = layer

    def exactly(tensors):
        return [tensor.double() for tensor in tensors]

    actual = call("triton", *layer[:2], indices, options, *rows, **more)
    low = call("reference", *layer[:2], indices, options, *rows, **more)
    exact_options = {name: tensor.double() for name, tensor in options.items()}
    exact = call("reference", exactly(states), exactly(near), indices, exact_options, *rows, **more)
    assert_within_reference_error(actual, low, exact)
    return actual


@pytest.fixture
def decode_calls(monkeypatch):
    """Which operations reached the decode kernel."""
    seen = []

    def record(module, name):
        decode = getattr(module, name)

        def recording(*states, **options):
            seen.append(name)
            return decode(*states, **options)

        monkeypatch.setattr(module, name, recording)

    record(triton_sparse_layer, "decode_sparse_layer")
    record(triton_block_sparse, "decode_blocks")
    record(triton_sliding_window, "decode_window")
    return seen


@divisions
@pytest.mark.parametrize("gates", ["elementwise", "headwise", None])
def test_gates_and_sinks(gates, programs, monkeypatch):
    monkeypatch.setattr(triton_decode_sparse, "_PROGRAMS", programs)
    layer = make_layer(2, 150, gates=gates, sinks=gates is not None, heads=6, kv_heads=2, head_dim=24, v_head_dim=40)
    check(layer, draw(layer[0], 9))


@divisions
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_C21(kind, programs, monkeypatch):
    monkeypatch.setattr(triton_decode_sparse, "_PROGRAMS", programs)
    layer = make_layer(3, 150, batch=2)
    check(layer, draw(layer[0], 9), *ROW_KINDS[kind])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (16, 1), (64, 1)], ids=["1", "16", "64"])
def test_group_sizes_C01(heads, kv_heads):
    layer = make_layer(1, 100, heads=heads, kv_heads=kv_heads)
    check(layer, draw(layer[0], 9))


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
def test_head_dims_C03_C11(dims):
    layer = make_layer(2, 70, heads=4, head_dim=dims[0], v_head_dim=dims[1])
    check(layer, draw(layer[0], 5))


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size):
    layer = make_layer(2, 300)
    check(layer, draw(layer[0], 4, block_size), block_size=block_size)


def test_float16():
    layer = make_layer(3, 130, heads=8, head_dim=80, dtype=torch.float16)
    check(layer, draw(layer[0], 7))


@divisions
@pytest.mark.parametrize("window", [0, 1, 40, 1000])
def test_windows(window, programs, monkeypatch):
    monkeypatch.setattr(triton_decode_sparse, "_PROGRAMS", programs)
    layer = make_layer(1, 200, 150)
    check(layer, draw(layer[0], 3), window=window)


@pytest.mark.parametrize("rows", [1, 3, 32, 100, 176, 263, 264, 265, 1000])
def test_programs_hold_all_columns_and_fit_the_card(rows):
    for window, columns, tile in itertools.product((0, 1, 128, 5000), (0, 16, 1024, 200704), (16, 64)):
        near, far, share = triton_decode_sparse._division(rows, window, columns, tile)
        if (near, far) == (0, 1):
            assert share >= max(window, columns)
            continue
        assert near * share >= window
        assert far * share >= columns
        assert share % tile == 0
        assert (near + far) * rows <= triton_decode_sparse._PROGRAMS
        assert max(near, far) <= triton_decode_sparse._MOST_PARTS


@pytest.mark.parametrize("n", [0, 1, 40])
def test_numbers_of_choices_C04(n):
    layer = make_layer(1, 90)
    indices = torch.arange(n, dtype=torch.int32, device=DEVICE).expand(1, 1, 1, n)
    check(layer, indices)


@pytest.mark.parametrize("kv_len", [47, 48, 49])
def test_where_blocks_begin_to_be_left_out_C23(kv_len):
    """As long as the budget holds every block, the selection of a full layer gives dense attention."""
    states = make_states(1, kv_len)
    with torch.no_grad():
        dense, _, indices = full_attention_with_oracle(*states, block_size=16, n_selected=3, backend="triton")
        sparse = block_sparse_attention(*states, indices, block_size=16, backend="triton")
    assert int((indices >= 0).sum()) == 3
    assert torch.allclose(sparse, dense, rtol=0, atol=1e-6) == (kv_len <= 48)


def test_gates_saturate_C25():
    states, near, options = make_layer(1, 60)
    indices = draw(states, 3)
    shut, wide = (torch.full_like(options["gate_global"], logit) for logit in (-1e4, 1e4))
    output = call("triton", states, near, indices, {**options, "gate_global": shut, "gate_local": shut})
    assert torch.equal(output, torch.zeros_like(output))
    ungated = {name: tensor for name, tensor in options.items() if name.startswith("sink")}
    output = call("triton", states, near, indices, {**options, "gate_global": wide, "gate_local": wide})
    torch.testing.assert_close(output, call("triton", states, near, indices, ungated), rtol=0, atol=1e-6)


def test_a_row_that_chose_nothing_is_its_window_alone_C06():
    states, near, options = make_layer(1, 90, gates=None)
    nothing = torch.full((1, 1, 1, 4), -1, dtype=torch.int32, device=DEVICE)
    output = call("triton", states, near, nothing, options)
    alone = call("triton", states, near, nothing[..., :0], options)
    assert torch.equal(output, alone)
    assert bool(output.isfinite().all())


def test_repeated_ids_count_once_C08():
    states, near, options = make_layer(1, 150)
    few = torch.tensor([0, 2, 3, 7], dtype=torch.int32, device=DEVICE)
    many = torch.tensor([2, 0, 2, -1, 7, 3, 0, 2, 3, -1, 7, 2], dtype=torch.int32, device=DEVICE)
    expected = call("triton", states, near, few.expand(1, 1, 1, -1), options)
    actual = call("triton", states, near, many.expand(1, 1, 1, -1), options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@divisions
def test_what_nobody_sees_does_not_leak(programs, monkeypatch):
    monkeypatch.setattr(triton_decode_sparse, "_PROGRAMS", programs)
    (query, key, value), near, options = make_layer(3, 150, batch=2)
    indices = draw([query, key], 9)
    rows = ROW_KINDS["unequal_rows"]
    before = call("triton", [query, key, value], near, indices, options, *rows)
    key[1, :, 12:] = value[1, :, 12:] = float("nan")
    near[1][1, :, :28] = near[2][1, :, :28] = float("nan")
    assert torch.equal(call("triton", [query, key, value], near, indices, options, *rows), before)


@divisions
def test_one_branch_alone_with_its_lse(programs, monkeypatch):
    monkeypatch.setattr(triton_decode_sparse, "_PROGRAMS", programs)
    states, _, options = make_layer(2, 150, heads=6, kv_heads=2)
    indices = draw(states, 9)
    operations = {
        "blocks": lambda sink, *tensors, **more: block_sparse_attention(
            *tensors, indices, block_size=16, sink=sink, return_lse=True, **more
        ),
        "window": lambda sink, *tensors, **more: sliding_window_attention(
            *tensors, window=140, sink=sink, return_lse=True, **more
        ),
    }
    for operation in operations.values():
        for sink in (None, options["sink_local"]):
            with torch.no_grad():
                actual = operation(sink, *states, backend="triton")
                low = operation(sink, *states, backend="reference")
                sink = None if sink is None else sink.double()
                exact = operation(sink, *(tensor.double() for tensor in states), backend="reference")
            for name, *triple in zip(("output", "lse"), actual, low, exact, strict=True):
                assert_within_reference_error(*triple, name=name)


def test_views_of_a_cache_give_what_copies_give():
    states, near, options = make_layer(2, 100, batch=2, heads=4, kv_heads=2)
    indices = draw(states, 5)
    projected = states[0].transpose(1, 2).contiguous().transpose(1, 2)
    history = [tensor[:, :, :70] for tensor in states[1:]]
    views = call("triton", [projected, *history], near, indices[..., ::2], options)
    copies = [tensor.contiguous() for tensor in (states[0], *history)]
    assert torch.equal(call("triton", copies, near, indices[..., ::2].contiguous(), options), views)


def test_who_takes_which_call(decode_calls):
    states, near, options = make_layer(17, 40)
    indices = draw(states, 2)
    call("triton", states, near, indices, options)
    assert decode_calls == []
    states, near, options = make_layer(2, 40)
    indices = draw(states, 2)
    call("triton", states, near, indices, options)
    with torch.no_grad():
        block_sparse_attention(*states, indices, block_size=16, backend="triton")
        sliding_window_attention(*states, window=4, backend="triton")
    assert decode_calls == ["decode_sparse_layer", "decode_blocks", "decode_window"]
    options["gate_local"].requires_grad_()
    output = sparse_layer_attention(*states, indices, *near, block_size=16, window=4, backend="triton", **options)
    output.sum().backward()
    assert len(decode_calls) == 3


def test_block_sizes_that_no_kernel_takes_are_refused_by_name():
    states, near, options = make_layer(1, 40)
    with pytest.raises(NotImplementedError, match="`block_size` that is a power of two from 16 to 1024, got 24"):
        call("triton", states, near, draw(states, 2), options, block_size=24)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_graph_is_whole_D09(compiler):
    states, near, options = make_layer(1, 60)
    indices = draw(states, 3)

    def step(*tensors):
        return call("triton", tensors[:3], tensors[3:], indices, options)

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    assert torch.equal(compiled(*states, *near), step(*states, *near))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("batch", [1, 300])
def test_listed_head_dims_on_the_card_C12_C17(dims, dtype, batch):
    layer = make_layer(
        2, 900, 160, batch=batch, heads=6, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype
    )
    check(layer, draw(layer[0], 8, 64), block_size=64, window=128)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("q_len", [1, 16])
def test_listed_groups_on_the_card_C01(group, q_len):
    layer = make_layer(q_len, 3000, 160, heads=2 * group, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    check(layer, draw(layer[0], 16, 64), block_size=64, window=128)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 40])
def test_results_repeat_bitwise(batch):
    states, near, options = make_layer(
        1, 5000, 128, batch=batch, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    indices = draw(states, 16, 64)
    runs = [call("triton", states, near, indices, options, block_size=64, window=128) for _ in range(50)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.gpu
def test_a_captured_step_follows_the_length_on_the_device():
    states, near, options = make_layer(1, 4096, 128, batch=2, heads=16, kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    rows = Rows(query_start=torch.tensor([1000, 3000], device=DEVICE))
    window_rows = Rows(first_key=torch.tensor([[0], [0]], device=DEVICE))
    indices = draw(states, 16, 64)

    def step():
        return call("triton", states, near, indices, options, rows, window_rows, block_size=64, window=128)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for starts, firsts in (([5, 4095], [122, 0]), ([1001, 64], [0, 63]), ([1002, 2000], [0, 0])):
        rows.query_start.copy_(torch.tensor(starts))
        window_rows.first_key.copy_(torch.tensor(firsts)[:, None])
        graph.replay()
        assert torch.equal(captured, step())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_other_than_the_current_one_D01():
    states, near, options = make_layer(1, 500, 128, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    there = [[tensor.to("cuda:1") for tensor in part] for part in (states, near)]
    with torch.no_grad(), torch.cuda.device(0):
        full = [
            full_attention_with_oracle(*part, block_size=16, n_selected=4, backend="triton")
            for part in (states, there[0])
        ]
        for x, y in zip(*full, strict=True):
            assert torch.equal(x, y.to(x.device))
        elsewhere = {name: tensor.to("cuda:1") for name, tensor in options.items()}
        settings = {"block_size": 16, "window": 64, "backend": "triton"}
        here = sparse_layer_attention(*states, full[0][2], *near, **settings, **options)
        away = sparse_layer_attention(*there[0], full[1][2], *there[1], **settings, **elsewhere)
    assert torch.equal(here, away.to(here.device))
