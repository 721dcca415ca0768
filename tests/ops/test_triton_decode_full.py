"""Full attention of few new tokens, Triton back end: error budgets, and the blocks that prefill would choose."""

import pytest
import torch
from kernel_checks import DEVICE, assert_selection, make_states, on_device

from helpers import assert_within_reference_error
from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS, Rows


pytest.importorskip("triton")
# Only files of this folder have "triton" in their name, so the import cannot fail for another reason.
from hysparse_hf.modeling import triton_decode_full, triton_full_attention


# Rows of every kind, for `batch=2, q_len=3, kv_len=150`.
ROW_KINDS = {
    "last_queries": Rows(),
    "left_padding": Rows.from_padding(torch.tensor([0, 137])),
    "unequal_rows": Rows(query_start=torch.tensor([147, 9])),
    "one_token_rows": Rows(query_start=torch.tensor([0, 1])),
    "packed": Rows(first_key=torch.tensor([[31, 31, 149], [0, 148, 149]])),
    "padded_unequal_rows": Rows(query_start=torch.tensor([92, 140]), first_key=torch.tensor([[5], [0]])),
}


def call(backend, states, rows=PLAIN_ROWS, **options):
    options = {"block_size": 16, "n_selected": 2, "rows": on_device(rows), **options}
    with torch.no_grad():
        return full_attention_with_oracle(*states, backend=backend, **options)


def check(states, rows=PLAIN_ROWS, **options):
    """Error budgets of output and lse, and the selection by the float64 scores; return the results."""
    actual = call("triton", states, rows, **options)
    low = call("reference", states, rows, **options)
    exact = call("reference", [tensor.double() for tensor in states], rows, **options)
    for name, *triple in zip(("output", "lse"), actual, low, exact, strict=False):
        assert_within_reference_error(*triple, name=name)
    if actual[2] is not None:
        assert_selection(actual[2], states, lambda *exact: call("reference", exact, rows, **options)[2])
    return actual


@pytest.fixture
def decode_calls(monkeypatch):
    """Shapes of the queries that reached the decode kernels."""
    seen = []
    decode = triton_full_attention.decode_full_attention

    def record(query, *others, **options):
        seen.append(tuple(query.shape))
        return decode(query, *others, **options)

    monkeypatch.setattr(triton_full_attention, "decode_full_attention", record)
    return seen


@pytest.mark.parametrize("kv_len", [2, 15, 16, 17, 33, 65, 129, 257])
def test_lengths_around_a_block_C04(kv_len):
    check(make_states(1, kv_len))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_C21(kind):
    check(make_states(3, 150, batch=2), ROW_KINDS[kind])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (16, 1), (64, 1)], ids=["1", "3", "16", "64"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_group_sizes_C01(heads, kv_heads, q_len):
    check(make_states(q_len, 60, heads=heads, kv_heads=kv_heads))


def test_more_rows_than_one_tile_holds():
    check(make_states(9, 60, heads=8))


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("block_reduction", ["max", "sum"])
@pytest.mark.parametrize("head_reduction", ["max", "mean"])
def test_reductions_and_block_sizes(block_reduction, head_reduction, block_size):
    options = {"block_reduction": block_reduction, "head_reduction": head_reduction, "block_size": block_size}
    check(make_states(2, 300, heads=3, head_dim=24, v_head_dim=40), **options)


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
def test_head_dims_C03_C11(dims):
    check(make_states(2, 70, heads=4, head_dim=dims[0], v_head_dim=dims[1]))


@pytest.mark.parametrize(("first", "local"), [(1, 0), (0, 1), (2, 1)])
def test_forced_blocks(first, local):
    check(make_states(3, 90), n_selected=3, forced_first_blocks=first, forced_local_blocks=local)


@pytest.mark.parametrize("n_selected", [0, 1, 7, 20])
def test_numbers_of_blocks_C04(n_selected):
    indices = check(make_states(2, 90), n_selected=n_selected)[2]
    assert indices is None if not n_selected else indices.shape[-1] == n_selected


def test_float16():
    check(make_states(3, 130, dtype=torch.float16, head_dim=80))


def test_equal_scores_choose_the_lower_ids():
    """Keys that are multiples of one unit vector give exactly representable scores, many of them equal."""
    query = torch.zeros(1, 2, 1, 16, device=DEVICE)
    query[..., 0] = 1
    key = torch.zeros(1, 1, 96, 16, device=DEVICE)
    key[0, 0, :, 0] = torch.tensor([1.0, 2, 2, 1, 2, 2], device=DEVICE).repeat_interleave(16)
    for n_selected, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [0, 1, 2, 4, 5])):
        indices = call("triton", [query, key, key], n_selected=n_selected, scaling=1.0)[2]
        assert indices.flatten().tolist() == expected


def test_group_maximum_is_over_normalised_scores():
    """Head 0 has the larger logits and an even spread, head 1 one clear winner: the raw maximum would choose else."""
    query = torch.zeros(1, 2, 1, 16, device=DEVICE)
    query[0, 0, 0, 0] = query[0, 1, 0, 1] = 1
    key = torch.zeros(1, 1, 64, 16, device=DEVICE)
    key[..., 0] = 20
    key[0, 0, :16, 0] = 20.5
    key[0, 0, 40, 1] = 8
    assert call("triton", [query, key, key], n_selected=1, scaling=1.0)[2].flatten().tolist() == [2]


@pytest.mark.parametrize("head_reduction", ["max", "mean"])
def test_selection_is_that_of_prefill_row_by_row(head_reduction):
    query, key, value = make_states(60, heads=2)
    options = {"n_selected": 2, "head_reduction": head_reduction}
    whole = call("triton", [query, key, value], **options)[2]
    for start, q_len in ((31, 1), (46, 3), (48, 12)):
        stop = start + q_len
        few = [query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]]
        assert torch.equal(call("triton", few, **options)[2], whole[:, :, start:stop])
        # A pre-allocated cache hands all its columns.
        rows = Rows(query_start=torch.tensor([start]))
        assert torch.equal(call("triton", [few[0], key, value], rows, **options)[2], whole[:, :, start:stop])


def test_number_of_parts_changes_rounding_alone(monkeypatch):
    states = make_states(2, 140, batch=2)
    many = check(states)
    monkeypatch.setattr(triton_decode_full, "_PROGRAMS", 1)
    one = check(states)
    assert torch.equal(many[2], one[2])


def test_what_lies_past_a_short_row_does_not_leak():
    rows = ROW_KINDS["unequal_rows"]
    query, key, value = make_states(3, 150, batch=2)
    before = call("triton", [query, key, value], rows)
    key[1, :, 12:] = value[1, :, 12:] = float("nan")
    after = call("triton", [query, key, value], rows)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y)


def test_columns_before_a_document_do_not_leak():
    rows = ROW_KINDS["left_padding"]
    query, key, value = make_states(3, 150, batch=2)
    before = call("triton", [query, key, value], rows)
    key[1, :, :137] = value[1, :, :137] = float("nan")
    after = call("triton", [query, key, value], rows)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y)


def test_views_of_a_cache_give_what_copies_give():
    query, key, value = make_states(2, 96, batch=2, heads=4, kv_heads=2)
    projected = query.transpose(1, 2).contiguous().transpose(1, 2)
    expected = call("triton", [tensor.contiguous() for tensor in (query, key[:, :, :70], value[:, :, :70])])
    actual = call("triton", [projected, key[:, :, :70], value[:, :, :70]])
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def test_who_takes_which_call(decode_calls):
    states = make_states(17, 40)
    few = [states[0][:, :, :16], *states[1:]]
    call("triton", states)
    call("triton", [few[0], *(tensor[:, :, :16] for tensor in few[1:])])
    assert decode_calls == []
    call("triton", few)
    assert decode_calls == [(1, 4, 16, 16)]
    few[1].requires_grad_()
    output = full_attention_with_oracle(*few, block_size=16, n_selected=2, backend="triton")[0]
    output.sum().backward()
    assert len(decode_calls) == 1


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_graph_is_whole_D09(compiler):
    states = make_states(1, 60)
    start = torch.tensor([40], device=DEVICE)

    def step(query, key, value, start):
        with torch.no_grad():
            rows = Rows(query_start=start)
            return full_attention_with_oracle(
                query, key, value, block_size=16, n_selected=2, rows=rows, backend="triton"
            )

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for x, y in zip(compiled(*states, start), step(*states, start), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_listed_head_dims_on_the_card_C12_C17(dims, dtype):
    states = make_states(3, 3000, heads=6, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    check(states, block_size=64, n_selected=8)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("q_len", [1, 16])
def test_listed_groups_on_the_card_C01(group, q_len):
    states = make_states(q_len, 5000, heads=2 * group, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    check(states, block_size=64, n_selected=8)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("block_reduction", ["max", "sum"])
def test_block_sizes_on_the_card(block_size, block_reduction):
    states = make_states(2, 3000, batch=2, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    rows = Rows(query_start=torch.tensor([2998, 1000]), first_key=torch.tensor([[7], [0]]))
    check(states, rows, block_size=block_size, n_selected=8, block_reduction=block_reduction)


@pytest.mark.gpu
def test_results_repeat_bitwise():
    states = make_states(1, 20000, batch=2, heads=32, kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    runs = [call("triton", states, block_size=64, n_selected=16) for _ in range(4)]
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


@pytest.mark.gpu
def test_a_captured_step_follows_the_length_on_the_device():
    query, key, value = make_states(1, 4096, batch=2, heads=16, kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    rows = Rows(query_start=torch.tensor([1000, 3000], device=DEVICE))

    def step():
        return call("triton", [query, key, value], rows, block_size=64, n_selected=8)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for starts in ([5, 4095], [1001, 64], [1002, 2000]):
        rows.query_start.copy_(torch.tensor(starts))
        graph.replay()
        for x, y in zip(captured, step(), strict=True):
            assert x is None or torch.equal(x, y)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_C14():
    """Rows of a cache whose last columns lie more than 2**31 elements behind its first ones."""
    length = 2**31 // (8 * 128) + 5000
    key = torch.zeros(1, 8, length, 128, device=DEVICE, dtype=torch.bfloat16)
    states = make_states(1, 4000, heads=8, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    key[:, :, -4000:] = states[1]
    rows = Rows(first_key=torch.tensor([[length - 4000]]))
    actual = call("triton", [states[0], key, key], rows, block_size=64, n_selected=8)
    expected = call("triton", [states[0], states[1], states[1]], block_size=64, n_selected=8)
    assert torch.equal(actual[2], expected[2])
    torch.testing.assert_close(actual[0], expected[0], rtol=0.02, atol=0.02)
