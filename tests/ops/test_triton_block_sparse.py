"""Block-sparse attention, Triton back end: error budgets, empty and repeated selections, layouts, repeatability."""

import pytest
import torch
from kernel_checks import DEVICE, ROW_KINDS, compare, evaluate, every_row_kind, make_states, on_device

from hysparse_hf.modeling.attention_hysparse import block_sparse_attention
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS


pytest.importorskip("triton")
from hysparse_hf.modeling import triton_block_sparse, triton_block_sparse_backward, triton_list_pieces


def call(backend, indices, rows=PLAIN_ROWS, block_size=16, window=0):
    def attend(query, key, value, sink=None):
        options = {"block_size": block_size, "rows": on_device(rows), "return_lse": True, "backend": backend}
        options["window"] = window
        return block_sparse_attention(query, key, value, indices.to(DEVICE), sink=sink, **options)

    return attend


def check(states, indices, *rows, **options):
    return compare(*(call(backend, indices, *rows, **options) for backend in ("triton", "reference")), states)


def draw(states, n, block_size=16, seed=0):
    """Any ids: -1 anywhere, repeats, blocks that do not exist or are not visible."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-states[1].shape[2] // block_size)
    shape = (states[0].shape[0], states[1].shape[1], states[0].shape[2], n)
    return torch.randint(-1, blocks + 2, shape, generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("length", [1, 15, 17, 47, 49])
def test_lengths_around_a_block_C10(length):
    states = make_states(length, sink=True)
    check(states, draw(states, 3))


@every_row_kind
def test_rows(kind):
    states = make_states(40, 70, batch=2, sink=kind != "packed")
    check(states, draw(states, 3), ROW_KINDS[kind])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (64, 1)], ids=["1", "3", "8", "64"])
def test_group_sizes_C01(heads, kv_heads):
    states = make_states(9, 40, heads=heads, kv_heads=kv_heads, sink=True)
    check(states, draw(states, 2))


@pytest.mark.parametrize("block_size", [32, 128])
def test_block_sizes(block_size):
    states = make_states(20, 280, head_dim=24, v_head_dim=40)
    check(states, draw(states, 2, block_size), block_size=block_size)


def test_float16():
    states = make_states(20, 60, heads=8, dtype=torch.float16, head_dim=80, sink=True)
    check(states, draw(states, 2))


@pytest.mark.parametrize("n", [0, 1, 5])
def test_row_without_blocks_gives_zero_C06(n):
    states = make_states(20, sink=True)
    indices = draw(states, n)
    indices[:, :, 7] = -1
    output, lse, grad_query, *_ = check(states, indices)
    assert not output[:, :, 7].any()
    assert lse[:, :, 7].isneginf().all()
    assert not grad_query[:, :, 7].any()


def test_all_queries_choose_one_block_C07():
    states = make_states(70)
    check(states, torch.zeros(1, 1, 70, 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("kind", "block_size", "piece_rows"),
    [("last_queries", 64, 2), ("packed", 16, 10), ("padded_unequal_rows", 16, 20)],
)
def test_long_lists_are_summed_in_pieces(kind, block_size, piece_rows, monkeypatch):
    """The first block is in every selection, as trained models choose; other lists are short, and some are empty."""
    monkeypatch.setattr(triton_list_pieces, "PIECE_ROWS", piece_rows)
    states = make_states(40, 70, batch=2, heads=4, kv_heads=2)
    indices = draw(states, 3, block_size)
    indices[..., 0] = 0
    run = call("triton", indices, ROW_KINDS[kind], block_size)
    made = []

    def note(*arguments):
        made.append(triton_list_pieces.cut_lists(*arguments))
        return made[-1]

    monkeypatch.setattr(triton_block_sparse_backward, "cut_lists", note)
    compare(run, call("reference", indices, ROW_KINDS[kind], block_size), states)
    assert {pieces.length for pieces in made} == {piece_rows // 2}
    assert all(pieces.cuts > 2 for pieces in made)


@pytest.mark.parametrize("block_size", [16, 64, 1024])
@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize("length", [64, 8192, 131072, 2**20])
def test_sums_of_pieces_take_a_bounded_memory(length, group, block_size):
    choices = torch.empty(8 * length * 16, dtype=torch.int32, device="meta")
    offsets = torch.empty(8 * -(-length // block_size) + 1, dtype=torch.int64, device="meta")
    layouts = triton_block_sparse.SelectionLayouts(*[None] * 3, choices, choices[:0], offsets)
    pieces = triton_list_pieces.cut_lists(layouts, length, group, block_size, 256)
    assert pieces.length * group >= triton_list_pieces.PIECE_ROWS
    assert (pieces.cuts == 0) == (length <= 2 * pieces.length)
    if pieces.cuts:
        assert pieces.sums.nbytes <= 2**27
        assert pieces.lists.shape == (pieces.cuts,)


def test_repeated_ids_count_once_C08():
    states = make_states(48, sink=True)
    once = torch.tensor([0, 2, -1, -1], dtype=torch.int32).expand(1, 1, 48, 4)
    repeated = torch.tensor([2, 0, 2, 0], dtype=torch.int32).expand(1, 1, 48, 4)
    for x, y in zip(evaluate(call("triton", once), states), evaluate(call("triton", repeated), states), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_what_lies_past_a_short_row_does_not_leak():
    rows = ROW_KINDS["unequal_rows"]
    states = make_states(40, 70, batch=2)
    indices = draw(states, 3)
    # The last query of the short row reads the block that holds its own column and the rest.
    indices[1, :, 39, 0] = 3
    before = evaluate(call("triton", indices, rows), states)
    states[1][1, :, 49:] = states[2][1, :, 49:] = float("nan")
    after = evaluate(call("triton", indices, rows), states)
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_layers_share_layouts_and_sum_their_gradients():
    """Two layers of one group: shared keys and values, one set of layouts, the same gradients as without sharing."""
    query, key, value = make_states(40)
    indices = draw((query, key), 3).to(DEVICE)
    options = {"block_size": 16, "rows": PLAIN_ROWS}
    layouts = triton_block_sparse.selection_layouts(query, key, value, indices, for_backward=True, **options)

    def two_layers(shared):
        def attend(query, key, value):
            more = {"scaling": 0.25, "layouts": shared, **options}
            first, *_ = triton_block_sparse.block_sparse_attention(query, key, value, indices, **more)
            second, *_ = triton_block_sparse.block_sparse_attention(query * 2, key, value, indices, **more)
            return first, second

        return attend

    shared, alone = (evaluate(two_layers(given), [query, key, value]) for given in (layouts, None))
    for x, y in zip(shared, alone, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_layouts_say_what_the_indices_say():
    query, key, value = make_states(40, 64, heads=4)
    indices = draw((query, key), 3).to(DEVICE)
    layouts = triton_block_sparse.selection_layouts(
        query, key, value, indices, block_size=16, rows=PLAIN_ROWS, for_backward=True
    )
    tile_q = layouts.starts.shape[2] // 3
    chosen = [{b for b in row if 0 <= b <= (24 + i) // 16} for i, row in enumerate(indices[0, 0].tolist())]
    for tile in range(layouts.starts.shape[1]):
        whole, total = layouts.counts[0, tile].tolist()
        starts, masks = (part[0, tile, :total].tolist() for part in layouts[:2])
        listed = dict(zip(starts, masks, strict=True))
        queries = range(tile * tile_q, min(40, (tile + 1) * tile_q))
        assert listed == {
            16 * b: sum(1 << (i - queries[0]) for i in queries if b in chosen[i])
            for b in set().union(*(chosen[i] for i in queries))
        }
        assert list(listed) == sorted(listed)
        assert whole == sum(start + 15 <= 24 + queries[0] for start in listed)
    for block in range(4):
        begin, end = layouts.offsets[block : block + 2].tolist()
        assert layouts.queries[begin:end].tolist() == [i for i in range(40) if block in chosen[i]]


@every_row_kind
def test_merged_window_counts_no_key_twice(kind):
    """Experiment 10: chosen blocks and the last tokens in one softmax, where both hold some of the keys."""
    states = make_states(40, 70, batch=2, sink=kind != "packed")
    check(states, draw(states, 3), ROW_KINDS[kind], window=20)


def test_odd_blocks_are_refused_by_name():
    states = make_states(20)
    with pytest.raises(NotImplementedError, match="block_size"):
        block_sparse_attention(*states, draw(states, 2).to(DEVICE), block_size=24, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_listed_head_dims_on_the_card_C12_C17(dims, dtype):
    states = make_states(300, 400, heads=6, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, sink=True)
    check(states, draw(states, 4, 64), block_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 128], ids=["no_window", "window"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_on_the_card(block_size, window):
    # A merged window's branches are rounded before they meet: in bfloat16 the gradient of a sink that both share was
    # off by 1.8e-2 where twice the reference's error is 1.0e-2 (benchmarks/NOTES.md), so only float32 tests that one.
    states = make_states(700, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, sink=not window)
    check(states, draw(states, 4, block_size), block_size=block_size, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
def test_listed_groups_on_the_card_C01(group):
    states = make_states(700, heads=2 * group, kv_heads=2, head_dim=128, dtype=torch.bfloat16, sink=True)
    check(states, draw(states, 4, 64), block_size=64)


@pytest.mark.gpu
@every_row_kind
def test_results_repeat_bitwise(kind):
    states = make_states(40, 70, batch=2, heads=8, head_dim=128, dtype=torch.bfloat16, sink=True)
    indices = draw(states, 4)
    runs = [evaluate(call("triton", indices, ROW_KINDS[kind]), states) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))
