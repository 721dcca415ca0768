"""Sliding-window attention (reference back end) against loops over single queries in float64."""

import math

import naive
import pytest
import torch
from naive import random_states

from helpers import assert_within_reference_error
from hysparse_hf.modeling import reference_hysparse
from hysparse_hf.modeling.attention_hysparse import merge_branches, sliding_window_attention
from hysparse_hf.modeling.rows_hysparse import Rows


def attend(states, **options):
    return sliding_window_attention(*states, backend="reference", **{"window": 5, "return_lse": True, **options})


def compare(states, *, rows=None, **options):
    """Compare output, lse and map with the loops."""
    options = {"window": 5, **options}
    results = attend(states, rows=rows, return_weights=True, **options)
    expected = naive.sliding_window_attention(*states, rows=rows or naive.NOTHING, **options)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class TestAgainstLoops:
    @pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129])
    @pytest.mark.parametrize("window", [0, 1, 2, 64, 65, 1000])
    def test_lengths_and_windows(self, length, window):
        compare(random_states(length, heads=1), window=window)

    @pytest.mark.parametrize(
        ("q_len", "kv_len"), [(1, 17), (3, 17), (1, 64), (3, 64), (65, 129)], ids=lambda length: str(length)
    )
    @pytest.mark.parametrize("window", [0, 1, 5, 100])
    def test_fewer_queries_than_keys_C21(self, q_len, kv_len, window):
        compare(random_states(q_len, kv_len), window=window)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2), (8, 1)], ids=["1", "3", "3x2", "8"])
    def test_group_sizes(self, heads, kv_heads):
        compare(random_states(21, batch=2, heads=heads, kv_heads=kv_heads))

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 48), (128, 160)])
    def test_head_dims(self, head_dim, v_head_dim):
        compare(random_states(19, head_dim=head_dim, v_head_dim=v_head_dim))

    def test_non_contiguous_states(self):
        states = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in random_states(19, heads=4))
        assert not states[0].is_contiguous()
        compare(states)

    def test_scaling_is_used(self):
        compare(random_states(19), scaling=0.05)


class TestRows:
    @pytest.mark.parametrize("padding", [[0, 1], [3, 5], [4, 8], [0, 20]], ids=str)
    def test_left_padding(self, padding):
        compare(random_states(21, batch=2), rows=Rows.from_padding(torch.tensor(padding)))

    @pytest.mark.parametrize("cuts", [[0, 21], [0, 1, 21], [0, 4, 8, 21], [0, 5, 6, 14, 21]], ids=str)
    def test_packed_documents(self, cuts):
        rows = Rows.from_cu_seqlens(torch.tensor(cuts, dtype=torch.int32), 21)
        compare(random_states(21), rows=rows)

    @pytest.mark.parametrize("starts", [[0, 16], [3, 5], [7, 7]], ids=str)
    def test_query_offset_per_row(self, starts):
        compare(random_states(5, 21, batch=2), rows=Rows(query_start=torch.tensor(starts)))

    @pytest.mark.parametrize("q_len", [9, 70], ids=["one-chunk", "two-chunks"])
    @pytest.mark.parametrize("masks", [1, 4], ids=["all-heads", "per-head"])
    def test_visibility(self, masks, q_len):
        visibility = torch.rand(2, masks, q_len, 75, generator=torch.Generator().manual_seed(1)) > 0.5
        states = random_states(q_len, 75, batch=2, heads=4, kv_heads=2)
        compare(states, rows=Rows(visibility=visibility))


class TestMeaning:
    def test_window_one_is_the_own_value(self):
        states = random_states(9)
        output, _ = attend(states, window=1)
        torch.testing.assert_close(output, states[2].expand_as(output), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("q_len", [1, 2, 65])
    def test_window_zero_gives_zero(self, q_len):
        output, lse = attend(random_states(q_len, 70), window=0)
        assert (output == 0).all()
        assert (lse == -math.inf).all()

    def test_window_counts_the_querys_own_token(self):
        query, key, value = random_states(1, 12)
        changed = []
        for column in range(12):
            other = value.clone()
            other[:, :, column] += 1.0
            difference = attend((query, key, other), window=5)[0] - attend((query, key, value), window=5)[0]
            changed.append(bool(difference.abs().max() > 0))
        assert changed == [False] * 7 + [True] * 5

    def test_section_5_window_of_two_keeps_tokens_6_and_7(self):
        weights = torch.tensor([0.04, 0.06, 0.30, 0.05, 0.08, 0.12, 0.20, 0.15], dtype=torch.float64)
        states = (
            torch.ones(1, 1, 1, 1, dtype=torch.float64),
            weights.log().view(1, 1, -1, 1),
            torch.eye(8, dtype=torch.float64)[None, None],
        )
        output, lse = attend(states, window=2, scaling=1.0)
        assert lse.exp().item() == pytest.approx(0.35)
        wanted = torch.tensor([0, 0, 0, 0, 0, 0, 0.20, 0.15], dtype=torch.float64) / 0.35
        torch.testing.assert_close(output.flatten(), wanted)


class TestSink:
    @pytest.mark.parametrize("values", [[0.0, 0.0], [-2.0, 3.0], [-1e4, 1e4], [30.0, -30.0]], ids=str)
    def test_joins_the_denominator_only(self, values):
        compare(random_states(13), sink=torch.tensor(values, dtype=torch.float64))

    @pytest.mark.parametrize(("value", "share"), [(-1e4, 1.0), (1e4, 0.0)], ids=["tiny", "huge"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_extremes_saturate_without_nan_C25(self, value, share, dtype):
        states = [part.to(dtype).requires_grad_() for part in random_states(9)]
        sink = torch.full((2,), value, requires_grad=True)
        output, _ = attend(states, sink=sink)
        unsunk, _ = attend(states)
        torch.testing.assert_close(output, unsunk * share)
        output.float().sum().backward()
        for part in (*states, sink):
            assert part.grad.isfinite().all()


class TestGradients:
    @pytest.mark.parametrize(
        "rows",
        [
            pytest.param(None, id="plain"),
            pytest.param(Rows.from_padding(torch.tensor([0, 3])), id="padded"),
            pytest.param(Rows(first_key=torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]])), id="packed"),
        ],
    )
    @pytest.mark.parametrize("window", [1, 3, 20])
    def test_equal_autograd_of_the_loops(self, rows, window):
        states = [part.requires_grad_() for part in random_states(9, batch=2, heads=4, kv_heads=2, v_head_dim=5)]
        generator = torch.Generator().manual_seed(3)
        sink = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
        direction = torch.randn(2, 4, 9, 5, generator=generator, dtype=torch.float64)
        output, lse = attend(states, rows=rows, window=window, sink=sink)
        expected, expected_lse, _ = naive.sliding_window_attention(
            *states, rows=rows or naive.NOTHING, window=window, sink=sink
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
        assert torch.autograd.gradcheck(lambda *parts: attend(parts[:3], window=2, sink=parts[3]), (*states, sink))

    def test_window_zero_has_zero_gradients_C06(self):
        states = [part.requires_grad_() for part in random_states(5)]
        attend(states, window=0, sink=torch.zeros(2, dtype=torch.float64))[0].sum().backward()
        for part in states:
            assert (part.grad == 0).all()


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
    sink = torch.tensor([0.5, -0.5], dtype=torch.float64)
    whole = attend(states, rows=rows, sink=sink, return_weights=True)
    monkeypatch.setattr(reference_hysparse, "CHUNK_ELEMENTS", elements)
    chunked = attend(states, rows=rows, sink=sink, return_weights=True)
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [63, 65])
def test_low_precision_is_within_the_error_of_plain_torch(dtype, length):
    low = [part.to(dtype).requires_grad_() for part in random_states(length, heads=3, head_dim=64)]
    plain = [part.detach().clone().requires_grad_() for part in low]
    high = [part.detach().double().requires_grad_() for part in low]
    sinks = [torch.tensor([0.5, -1.0, 3.0], dtype=part.dtype).requires_grad_() for part in (low[0], low[0], high[0])]
    band = torch.ones(length, length, dtype=torch.bool).tril().triu(-20).expand(1, 3, -1, -1)
    results = [
        attend(low, window=21, sink=sinks[0]),
        naive.plain_attention(*plain, band, sink=sinks[1]),
        attend(high, window=21, sink=sinks[2]),
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
    results = [attend(states, window=21) for states in (low, high)]
    for output, _ in results:
        output.sin().sum().backward()
    grads = [[part.grad for part in states] for states in (low, high)]
    for one, other in zip([*results[0], *grads[0]], [*results[1], *grads[1]], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


class TestMergedBranches:
    """Two softmaxes over disjoint sets, made one."""

    def parts(self, split, sink=None):
        query, key, value = random_states(1, 12, seed=4)
        sides = [naive.attend(query[0, 0, 0], key[0, 0], value[0, 0], columns, 1.0) for columns in split]
        outputs = tuple(side[0].view(1, 1, 1, -1) for side in sides)
        lses = tuple(side[1].view(1, 1, 1) for side in sides)
        everything = [column for side in split for column in side]
        expected = naive.attend(query[0, 0, 0], key[0, 0], value[0, 0], everything, 1.0, sink)
        return outputs, lses, expected

    @pytest.mark.parametrize("sink", [None, 0.0, -50.0, 50.0], ids=str)
    @pytest.mark.parametrize(
        "split",
        [
            pytest.param(([0, 3], [7, 8, 9]), id="both"),
            pytest.param(([], [1, 2]), id="first-empty"),
            pytest.param(([1, 2], []), id="second-empty"),
            pytest.param(([], []), id="both-empty"),
        ],
    )
    def test_equals_one_softmax(self, split, sink):
        sink = None if sink is None else torch.tensor(sink, dtype=torch.float64)
        outputs, lses, expected = self.parts(split, sink)
        output, shares = merge_branches(outputs, lses, None if sink is None else sink[None])
        torch.testing.assert_close(output.flatten(), expected[0], rtol=0, atol=1e-12)
        assert shares.isfinite().all()

    def test_gradients_with_an_empty_branch_are_finite_C06(self):
        outputs = tuple(torch.randn(1, 1, 1, 3).requires_grad_() for _ in range(2))
        lses = (torch.full((1, 1, 1), -math.inf), torch.zeros(1, 1, 1, requires_grad=True))
        sink = torch.zeros(1, requires_grad=True)
        merge_branches(outputs, lses, sink)[0].sum().backward()
        for part in (*outputs, lses[1], sink):
            assert part.grad.isfinite().all()


class TestArgumentErrors:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            pytest.param({"window": -1}, "`window` must be at least 0, got -1", id="window"),
            pytest.param({"sink": torch.zeros(3)}, r"`sink` must have shape \(heads,\) = \(2,\)", id="sink"),
            pytest.param({"sink": torch.zeros(1, 2)}, r"got \(1, 2\)", id="sink-rank"),
            pytest.param({"backend": "cuda"}, "`backend` must be one of", id="backend"),
        ],
    )
    def test_value(self, change, words):
        with pytest.raises(ValueError, match=words):
            sliding_window_attention(*random_states(5), **{"window": 4, **change})
