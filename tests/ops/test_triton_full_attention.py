"""Full attention and its oracle, Triton back end: error budgets, and selections compared by meaning."""

import pytest
import torch
from kernel_checks import (
    DEVICE,
    ROW_KINDS,
    assert_selection,
    compare,
    evaluate,
    every_row_kind,
    make_states,
    on_device,
)

from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle
from hysparse_hf.modeling.rows_hysparse import PLAIN_ROWS, Rows


pytest.importorskip("triton")
# Only files of this folder have "triton" in their name, so the import cannot fail for another reason.
from hysparse_hf.modeling import triton_full_attention


def full(*states, rows, **options):
    """The operation with this file's usual options."""
    return full_attention_with_oracle(*states, rows=on_device(rows), **{"block_size": 16, "n_selected": 2, **options})


def call(backend, rows=PLAIN_ROWS, kept=None, **options):
    """The operation as a function of its states; the indices go into `kept`."""

    def attend(query, key, value):
        output, lse, indices = full(query, key, value, backend=backend, rows=rows, **options)
        if kept is not None:
            kept.append(indices)
        return output, lse

    return attend


def check(states, rows=PLAIN_ROWS, **options):
    """Error budgets of outputs and gradients, and the selection by the float64 scores; return the indices."""
    kept = []
    compare(call("triton", rows, kept, **options), call("reference", rows, **options), states)
    (indices,) = kept
    if options.get("n_selected", 2):
        assert_selection(indices, states, lambda *exact: full(*exact, backend="reference", rows=rows, **options)[2])
    return indices


@pytest.mark.parametrize("length", [1, 15, 17, 129])
def test_lengths_around_a_block(length):
    check(make_states(length))


@every_row_kind
def test_rows(kind):
    check(make_states(40, 70, batch=2), ROW_KINDS[kind])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (64, 1)], ids=["1", "3", "8", "64"])
def test_group_sizes_C01(heads, kv_heads):
    check(make_states(9, 40, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("block_reduction", ["max", "sum"])
def test_reductions_and_block_sizes(block_reduction, block_size):
    # Tiles of float32 hold 32 keys, so a block of 128 is put together from parts.
    options = {"block_reduction": block_reduction, "block_size": block_size, "head_reduction": "mean"}
    check(make_states(10, 280, heads=3, head_dim=24, v_head_dim=40), **options)


@pytest.mark.parametrize(("first", "local"), [(1, 0), (0, 1), (2, 1)])
def test_forced_blocks(first, local):
    check(make_states(60), n_selected=3, forced_first_blocks=first, forced_local_blocks=local)


@pytest.mark.parametrize("n_selected", [0, 1, 7, 20])
def test_numbers_of_blocks_C04(n_selected):
    indices = check(make_states(5, 90), n_selected=n_selected)
    assert indices is None if not n_selected else indices.shape[-1] == n_selected


def test_float16():
    check(make_states(20, 60, dtype=torch.float16, head_dim=80))


def test_equal_scores_choose_the_lower_ids():
    """Keys that are multiples of one unit vector give exactly representable scores, many of them equal."""
    query = torch.zeros(1, 2, 6, 16, device=DEVICE)
    query[..., 0] = 1
    key = torch.zeros(1, 1, 96, 16, device=DEVICE)
    key[0, 0, :, 0] = torch.tensor([1.0, 2, 2, 1, 2, 2], device=DEVICE).repeat_interleave(16)
    value = torch.ones_like(key)
    for n_selected, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [0, 1, 2, 4, 5])):
        kept = []
        call("triton", kept=kept, n_selected=n_selected, scaling=1.0)(query, key, value)
        assert kept[0][0, 0].tolist() == [expected] * 6


def test_group_maximum_is_over_normalised_scores():
    """Head 0 has the larger logits and an even spread, head 1 one clear winner: the raw maximum would choose else."""
    query = torch.zeros(1, 2, 1, 16, device=DEVICE)
    query[0, 0, 0, 0] = query[0, 1, 0, 1] = 1
    key = torch.zeros(1, 1, 64, 16, device=DEVICE)
    key[..., 0] = 20
    key[0, 0, :16, 0] = 20.5
    key[0, 0, 40, 1] = 8
    kept = []
    call("triton", kept=kept, n_selected=1, scaling=1.0)(query, key, key)
    assert kept[0].flatten().tolist() == [2]


def test_scratch_bound_changes_nothing(monkeypatch):
    states = make_states(70, batch=2, heads=6, kv_heads=2)
    rows = Rows.from_cu_seqlens(torch.tensor([0, 20, 21, 70]), 70)
    whole, parts = [], []
    before = call("triton", rows, whole)(*states)
    monkeypatch.setattr(triton_full_attention, "SCRATCH_BYTES", 1)
    after = call("triton", rows, parts)(*states)
    for x, y in zip([*before, *whole], [*after, *parts], strict=True):
        assert torch.equal(x, y)


def test_what_lies_past_a_short_row_does_not_leak():
    rows = ROW_KINDS["unequal_rows"]
    query, key, value = make_states(40, 70, batch=2)
    before = evaluate(call("triton", rows), [query, key, value])
    key[1, :, 49:] = value[1, :, 49:] = float("nan")
    after = evaluate(call("triton", rows), [query, key, value])
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_packed_documents_of_many_lengths():
    """The backward pass leaves out the queries behind a document; its last one stands alone in a tile of queries."""
    rows = Rows.from_cu_seqlens(torch.tensor([0, 33, 65, 130, 190]), 190)
    check(make_states(190, heads=2), rows)


def test_gradient_of_the_output_alone():
    query, key, value = (states.requires_grad_() for states in make_states(20))
    kernel = torch.autograd.grad(call("triton")(query, key, value)[0].sum(), (query, key, value))
    reference = torch.autograd.grad(call("reference")(query, key, value)[0].sum(), (query, key, value))
    torch.testing.assert_close(kernel, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_listed_head_dims_on_the_card_C12_C17(dims, dtype):
    states = make_states(300, 400, heads=6, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    check(states, block_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
def test_listed_groups_on_the_card_C01(group):
    states = make_states(700, heads=2 * group, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    check(states, block_size=64, n_selected=4)


@pytest.mark.gpu
def test_library_and_own_gradient_agree():
    states = make_states(900, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)

    def output_only(backend):
        return lambda *tensors: call(backend, block_size=64)(*tensors)[:1]

    compare(output_only("triton"), output_only("reference"), states)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first = compare(output_only("triton"), output_only("reference"), states)
        second = evaluate(output_only("triton"), states)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.gpu
def test_memory_at_128k_stays_under_the_bound():
    states = make_states(8, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    query, key, value = (tensor[:, :, :1].repeat(1, 1, 131072, 1) for tensor in states)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = full_attention_with_oracle(query, key, value, block_size=64, n_selected=16, backend="triton")
    held = sum(tensor.numel() * tensor.element_size() for tensor in results)
    assert torch.cuda.max_memory_allocated() - before - held < 1.5e9
