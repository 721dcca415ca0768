"""Attention over selected blocks (reference back end) against loops over single queries in float64."""

import math

import naive
import pytest
import torch
from naive import random_states

from helpers import assert_within_reference_error
from hysparse_hf.modeling import reference_hysparse
from hysparse_hf.modeling.attention_hysparse import block_sparse_attention, full_attention_with_oracle
from hysparse_hf.modeling.rows_hysparse import Rows


def random_indices(states, block_size=4, width=3, seed=0):
    """Ids of blocks, with -1 and repeats in any place, some past the end or in the future."""
    query, key, _ = states
    blocks = math.ceil(key.shape[2] / block_size)
    generator = torch.Generator().manual_seed(seed)
    shape = (query.shape[0], key.shape[1], query.shape[2], width)
    return torch.randint(-1, blocks + 1, shape, generator=generator, dtype=torch.int32)


def attend(states, indices, **options):
    options = {"block_size": 4, "return_lse": True, **options}
    return block_sparse_attention(*states, indices, backend="reference", **options)


def compare(states, indices, *, rows=None, **options):
    """Compare output and lse with the loops."""
    options = {"block_size": 4, **options}
    output, lse, weights = attend(states, indices, rows=rows, return_weights=True, **options)
    expected = naive.block_sparse_attention(*states, indices, rows=rows or naive.NOTHING, **options)
    for one, other in zip((output, lse, weights), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class TestAgainstLoops:
    @pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129])
    def test_block_edges(self, length):
        states = random_states(length)
        compare(states, random_indices(states, block_size=64, width=1), block_size=64)

    @pytest.mark.parametrize(
        ("q_len", "kv_len"), [(1, 17), (3, 17), (1, 64), (3, 64), (5, 129)], ids=lambda length: str(length)
    )
    def test_fewer_queries_than_keys_C21(self, q_len, kv_len):
        states = random_states(q_len, kv_len)
        compare(states, random_indices(states))

    @pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2), (8, 1)], ids=["1", "3", "3x2", "8"])
    def test_group_sizes(self, heads, kv_heads):
        states = random_states(21, batch=2, heads=heads, kv_heads=kv_heads)
        compare(states, random_indices(states))

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 48), (128, 160)])
    def test_head_dims(self, head_dim, v_head_dim):
        states = random_states(19, head_dim=head_dim, v_head_dim=v_head_dim)
        compare(states, random_indices(states))

    @pytest.mark.parametrize("seed", range(4))
    def test_minus_one_and_repeats_anywhere_C08(self, seed):
        states = random_states(23, batch=2, heads=4, kv_heads=2, seed=seed)
        compare(states, random_indices(states, width=6, seed=seed))

    def test_non_contiguous_states_and_indices(self):
        states = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in random_states(19, heads=4))
        indices = random_indices(states, width=6)[..., ::2]
        assert not indices.is_contiguous()
        compare(states, indices)

    def test_scaling_is_used(self):
        states = random_states(19)
        compare(states, random_indices(states), scaling=0.05)

    @pytest.mark.parametrize("window", [0, 1, 3, 100])
    def test_window_in_the_same_softmax(self, window):
        states = random_states(21, heads=4, kv_heads=2)
        compare(states, random_indices(states), window=window, sink=torch.zeros(4, dtype=torch.float64))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_kinds_of_integers(self, dtype):
        states = random_states(19)
        compare(states, random_indices(states).to(dtype))


class TestRows:
    @pytest.mark.parametrize("padding", [[0, 1], [3, 5], [4, 8], [0, 20]], ids=str)
    def test_left_padding_moves_the_blocks(self, padding):
        states = random_states(21, batch=2)
        compare(states, random_indices(states), rows=Rows.from_padding(torch.tensor(padding)))

    @pytest.mark.parametrize("cuts", [[0, 21], [0, 1, 21], [0, 4, 8, 21], [0, 5, 6, 14, 21]], ids=str)
    def test_packed_documents(self, cuts):
        states = random_states(21)
        rows = Rows.from_cu_seqlens(torch.tensor(cuts, dtype=torch.int32), 21)
        compare(states, random_indices(states), rows=rows, window=2)

    @pytest.mark.parametrize("starts", [[0, 16], [3, 5], [7, 7]], ids=str)
    def test_query_offset_per_row(self, starts):
        states = random_states(5, 21, batch=2)
        compare(states, random_indices(states), rows=Rows(query_start=torch.tensor(starts)), window=2)

    @pytest.mark.parametrize("masks", [1, 4], ids=["all-heads", "per-head"])
    def test_visibility(self, masks):
        visibility = torch.rand(2, masks, 9, 13, generator=torch.Generator().manual_seed(1)) > 0.5
        states = random_states(9, 13, batch=2, heads=4, kv_heads=2)
        compare(states, random_indices(states), rows=Rows(visibility=visibility))

    def test_padded_row_equals_the_row_alone(self):
        states = random_states(21)
        indices = random_indices(states)
        padded = [torch.cat([torch.full_like(part[:, :, :5], 7.0), part], dim=2) for part in states]
        longer = torch.cat([torch.zeros_like(indices[:, :, :5]), indices], dim=2)
        alone = attend(states, indices)
        together = attend(padded, longer, rows=Rows.from_padding(torch.tensor([5])))
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one, other[:, :, 5:], rtol=0, atol=1e-12)


class TestMeaning:
    def test_repeats_count_once_C08(self):
        states = random_states(1, 12)
        once = attend(states, torch.tensor([0, 2]).view(1, 1, 1, -1))
        twice = attend(states, torch.tensor([0, 0, 2]).view(1, 1, 1, -1))
        for one, other in zip(once, twice, strict=True):
            assert torch.equal(one, other)

    def test_the_last_block_is_causal_inside(self):
        query, key, value = random_states(6)
        indices = torch.ones(1, 1, 6, 1, dtype=torch.int32)
        before = attend((query, key, value), indices)[0]
        value = value.clone()
        value[:, :, 5] = 100.0
        after = attend((query, key, value), indices)[0]
        assert torch.equal(before[:, :, :5], after[:, :, :5])
        assert not torch.equal(before[:, :, 5], after[:, :, 5])

    @pytest.mark.parametrize("length", range(1, 14))
    def test_equals_dense_while_the_budget_covers_everything_C04(self, length):
        states = random_states(length, heads=4, kv_heads=2)
        *dense, indices = full_attention_with_oracle(*states, block_size=4, n_selected=3, backend="reference")
        sparse = attend(states, indices)
        covered = min(length, 12)
        for one, other in zip(sparse, dense, strict=True):
            torch.testing.assert_close(one[:, :, :covered], other[:, :, :covered], rtol=0, atol=1e-12)
        if length > 12:
            assert (sparse[0] - dense[0])[:, :, 12:].abs().max() > 1e-3

    @pytest.mark.parametrize("length", [11, 12, 13])
    def test_decode_across_the_dense_to_sparse_threshold_equals_prefill_C23(self, length):
        query, key, value = random_states(length, heads=4, kv_heads=2)
        *_, indices = full_attention_with_oracle(query, key, value, block_size=4, n_selected=3, backend="reference")
        whole = attend((query, key, value), indices)[0]
        for position in range(length):
            seen = (query[:, :, position : position + 1], key[:, :, : position + 1], value[:, :, : position + 1])
            *_, own = full_attention_with_oracle(*seen, block_size=4, n_selected=3, backend="reference")
            assert torch.equal(own, indices[:, :, position : position + 1])
            step = attend(seen, own)[0]
            torch.testing.assert_close(step[:, :, 0], whole[:, :, position], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("width", [0, 2])
    def test_nothing_selected_gives_zero_C06(self, width):
        states = random_states(5)
        output, lse = attend(states, torch.full((1, 1, 5, width), -1, dtype=torch.int32))
        assert (output == 0).all()
        assert (lse == -math.inf).all()

    def test_nothing_selected_with_a_sink_gives_zero_C06(self):
        states = random_states(5)
        indices = torch.full((1, 1, 5, 2), -1, dtype=torch.int32)
        output, lse = attend(states, indices, sink=torch.tensor([-3.0, 40.0]))
        assert (output == 0).all()
        assert (lse == -math.inf).all()

    def test_section_5_two_blocks_hold_a_mass_of_0_70(self):
        weights = torch.tensor([0.04, 0.06, 0.30, 0.05, 0.08, 0.12, 0.20, 0.15], dtype=torch.float64)
        key = weights.log().view(1, 1, -1, 1)
        value = torch.eye(8, dtype=torch.float64)[None, None]
        query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        indices = torch.tensor([1, 3], dtype=torch.int32).view(1, 1, 1, -1)
        output, lse = attend((query, key, value), indices, block_size=2, scaling=1.0)
        assert lse.exp().item() == pytest.approx(0.70)
        wanted = torch.tensor([0, 0, 0.30, 0.05, 0, 0, 0.20, 0.15], dtype=torch.float64) / 0.70
        torch.testing.assert_close(output.flatten(), wanted)


class TestSink:
    @pytest.mark.parametrize("values", [[0.0, 0.0], [-2.0, 3.0], [-1e4, 1e4], [30.0, -30.0]], ids=str)
    def test_joins_the_denominator_only(self, values):
        states = random_states(13)
        compare(states, random_indices(states), sink=torch.tensor(values, dtype=torch.float64))

    def test_lse_excludes_the_sink(self):
        states = random_states(13)
        indices = random_indices(states)
        without = attend(states, indices)[1]
        with_sink = attend(states, indices, sink=torch.full((2,), 5.0, dtype=torch.float64))[1]
        assert torch.equal(without, with_sink)

    @pytest.mark.parametrize(("value", "share"), [(-1e4, 1.0), (1e4, 0.0)], ids=["tiny", "huge"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_extremes_saturate_without_nan_C25(self, value, share, dtype):
        states = [part.to(dtype).requires_grad_() for part in random_states(9)]
        sink = torch.full((2,), value, requires_grad=True)
        indices = torch.zeros(1, 1, 9, 1, dtype=torch.int32)
        output, _ = attend(states, indices, sink=sink)
        unsunk, _ = attend(states, indices)
        torch.testing.assert_close(output, unsunk * share)
        output.float().sum().backward()
        for part in (*states, sink):
            assert part.grad.isfinite().all()


class TestGradients:
    @pytest.mark.parametrize("window", [0, 2])
    @pytest.mark.parametrize(
        "rows",
        [
            pytest.param(None, id="plain"),
            pytest.param(Rows.from_padding(torch.tensor([0, 3])), id="padded"),
            pytest.param(Rows(first_key=torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]])), id="packed"),
        ],
    )
    def test_equal_autograd_of_the_loops(self, rows, window):
        states = [part.requires_grad_() for part in random_states(9, batch=2, heads=4, kv_heads=2, v_head_dim=5)]
        generator = torch.Generator().manual_seed(3)
        sink = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
        direction = torch.randn(2, 4, 9, 5, generator=generator, dtype=torch.float64)
        indices = random_indices(states, block_size=2)
        options = {"block_size": 2, "window": window, "sink": sink}
        output, lse = attend(states, indices, rows=rows, **options)
        expected, expected_lse, _ = naive.block_sparse_attention(
            *states, indices, rows=rows or naive.NOTHING, **options
        )
        seen = expected_lse > -math.inf
        inputs = [*states, sink]
        grads = torch.autograd.grad((output * direction).sum() + lse[seen].sin().sum(), inputs)
        wanted = torch.autograd.grad((expected * direction).sum() + expected_lse[seen].sin().sum(), inputs)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)

    def test_gradcheck(self):
        states = [part.requires_grad_() for part in random_states(3, 5, head_dim=3)]
        sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
        indices = torch.tensor([[0, -1], [1, 0], [1, 1]], dtype=torch.int32)[None, None]
        assert torch.autograd.gradcheck(
            lambda *parts: attend(parts[:3], indices, block_size=2, sink=parts[3]), (*states, sink)
        )

    def test_empty_row_has_no_gradient_and_leaves_others_alone_C06(self):
        states = [part.requires_grad_() for part in random_states(5)]
        indices = torch.zeros(1, 1, 5, 1, dtype=torch.int32)
        others = attend(states, indices)[0][:, :, [0, 1, 3, 4]].sin().sum()
        wanted = torch.autograd.grad(others, states)
        indices[:, :, 2] = -1
        grads = torch.autograd.grad(attend(states, indices)[0].sin().sum(), states)
        assert (grads[0][:, :, 2] == 0).all()
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=0, atol=1e-12)

    def test_many_queries_on_one_block_C07(self):
        states = [part.float().requires_grad_() for part in random_states(65, heads=8, kv_heads=2, head_dim=16)]
        high = [part.detach().double().requires_grad_() for part in states]
        own = (torch.arange(65, dtype=torch.int32) // 4).view(1, 1, -1, 1).expand(1, 2, -1, 1)
        indices = torch.cat([torch.zeros_like(own), own], dim=-1)
        attend(states, indices)[0].sin().sum().backward()
        naive.block_sparse_attention(*high, indices, block_size=4)[0].sin().sum().backward()
        for part, want in zip(states, high, strict=True):
            error = (part.grad.double() - want.grad).abs().max() / want.grad.abs().max()
            assert error < 1e-5


@pytest.mark.parametrize("elements", [1, 50, 300], ids=str)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(None, id="plain"),
        pytest.param(Rows.from_padding(torch.tensor([2, 7])), id="padded"),
        pytest.param(Rows(query_start=torch.tensor([6, 2])), id="offset"),
        pytest.param(
            Rows.from_position_ids(torch.tensor([[*range(8), *range(7)], [*range(3), *range(12)]])), id="packed"
        ),
    ],
)
def test_chunking_changes_nothing(monkeypatch, elements, rows):
    states = random_states(15, 21 if rows is not None and rows.query_start is not None else 15, batch=2)
    indices = random_indices(states)
    sink = torch.tensor([0.5, -0.5], dtype=torch.float64)
    whole = attend(states, indices, rows=rows, sink=sink, window=2, return_weights=True)
    monkeypatch.setattr(reference_hysparse, "CHUNK_ELEMENTS", elements)
    chunked = attend(states, indices, rows=rows, sink=sink, window=2, return_weights=True)
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [63, 65])
def test_low_precision_is_within_the_error_of_plain_torch(dtype, length):
    low = [part.to(dtype).requires_grad_() for part in random_states(length, heads=3, head_dim=64)]
    plain = [part.detach().clone().requires_grad_() for part in low]
    high = [part.detach().double().requires_grad_() for part in low]
    sinks = [torch.tensor([0.5, -1.0, 3.0], dtype=part.dtype).requires_grad_() for part in (low[0], low[0], high[0])]
    indices = random_indices(low, block_size=16, width=2).clamp(min=0)
    mask = naive.block_sparse_attention(*(part.detach() for part in high), indices, block_size=16)[2] > 0
    results = [
        attend(low, indices, block_size=16, sink=sinks[0]),
        naive.plain_attention(*plain, mask, sink=sinks[1]),
        attend(high, indices, block_size=16, sink=sinks[2]),
    ]
    for output, _ in results:
        output.double().sin().sum().backward()
    for name, triple in zip(("output", "lse"), zip(*results, strict=True), strict=True):
        assert_within_reference_error(*triple, name=name)
    parts = [[*states, sink] for states, sink in zip((low, plain, high), sinks, strict=True)]
    for name, *triple in zip(("query", "key", "value", "sink"), *parts, strict=True):
        assert_within_reference_error(*(part.grad for part in triple), name=f"gradient of {name}")


@pytest.mark.parametrize("length", [65, 129])
def test_float32_is_within_1e_5_of_float64(length):
    low = [part.float().requires_grad_() for part in random_states(length, heads=3, head_dim=64)]
    high = [part.detach().double().requires_grad_() for part in low]
    indices = random_indices(low)
    results = [attend(states, indices) for states in (low, high)]
    for output, _ in results:
        output.sin().sum().backward()
    grads = [[part.grad for part in states] for states in (low, high)]
    for one, other in zip([*results[0], *grads[0]], [*results[1], *grads[1]], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


class TestArgumentErrors:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            pytest.param({"block_size": 0}, "`block_size` must be at least 1, got 0", id="block-size"),
            pytest.param({"window": -1}, "`window` must be at least 0, got -1", id="window"),
            pytest.param({"sink": torch.zeros(3)}, r"`sink` must have shape \(heads,\) = \(2,\)", id="sink"),
            pytest.param({"backend": "cuda"}, "`backend` must be one of", id="backend"),
        ],
    )
    def test_value(self, change, words):
        states = random_states(5)
        with pytest.raises(ValueError, match=words):
            block_sparse_attention(*states, random_indices(states), **{"block_size": 4, **change})

    @pytest.mark.parametrize(
        "shape", [(1, 2, 5, 3), (2, 1, 5, 3), (1, 1, 4, 3), (1, 1, 5)], ids=["heads", "batch", "queries", "rank"]
    )
    def test_shape_of_indices(self, shape):
        with pytest.raises(ValueError, match="`indices` must be integers"):
            attend(random_states(5), torch.zeros(shape, dtype=torch.int32))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
    def test_kind_of_indices(self, dtype):
        with pytest.raises(ValueError, match="`indices` must be integers"):
            attend(random_states(5), torch.zeros(1, 1, 5, 3, dtype=dtype))
