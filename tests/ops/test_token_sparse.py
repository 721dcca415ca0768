"""The token oracle and attention over selected tokens and the window, against loops over single queries in float64."""

import math
import threading
import time

import hypothesis
import naive
import pytest
import torch
from hypothesis import strategies
from naive import random_states

from hysparse_hf.modeling import reference_hysparse
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    full_attention_with_token_oracle,
    token_sparse_attention,
)
from hysparse_hf.modeling.rows_hysparse import Rows
from hysparse_hf.modeling.selection_hysparse import select_tokens


LAYOUTS = [
    pytest.param(None, id="plain"),
    pytest.param(Rows.from_padding(torch.tensor([2, 7])), id="padded"),
    pytest.param(Rows(query_start=torch.tensor([6, 2])), id="offset"),
    pytest.param(Rows(query_columns=torch.tensor([[20, 3, 3, 7, *range(9, 20)]])), id="columns"),
    pytest.param(
        Rows(query_columns=torch.tensor([[*range(3, 18)], [*range(15)]]), first_key=torch.tensor([[2], [0]])),
        id="columns-of-padded-rows",
    ),
    pytest.param(Rows.from_position_ids(torch.tensor([[*range(8), *range(7)], [*range(3), *range(12)]])), id="packed"),
]


def states_for(rows, **options):
    """States of 15 queries, over 21 keys where the rows place the queries."""
    placed = rows is not None and (rows.query_start is not None or rows.query_columns is not None)
    return random_states(15, 21 if placed else 15, batch=2, **options)


def random_tokens(states, width=5, seed=0):
    """Token ids with -1 and repeats in any place, some inside the window, past the end or in the future."""
    query, key, _ = states
    generator = torch.Generator().manual_seed(seed)
    shape = (query.shape[0], key.shape[1], query.shape[2], width)
    return torch.randint(-1, key.shape[2] + 2, shape, generator=generator, dtype=torch.int32)


def choose(states, **options):
    options = {"n_selected": 4, "window": 3, **options}
    return full_attention_with_token_oracle(*states, backend="reference", **options)


def attend(states, indices, **options):
    options = {"window": 3, "return_lse": True, **options}
    return token_sparse_attention(*states, indices, backend="reference", **options)


def assert_close(results, expected):
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class TestOracleAgainstLoops:
    @pytest.mark.parametrize("head_reduction", ["max", "mean"])
    @pytest.mark.parametrize("rows", LAYOUTS)
    def test_rows(self, rows, head_reduction):
        states = states_for(rows, heads=4, kv_heads=2, v_head_dim=5)
        options = {"n_selected": 4, "window": 3, "head_reduction": head_reduction}
        output, lse, indices, weights = choose(states, rows=rows, return_weights=True, **options)
        expected = naive.full_attention_with_token_oracle(*states, rows=rows or naive.NOTHING, **options)
        assert torch.equal(indices, expected[2])
        assert indices.dtype == torch.int32
        assert_close((output, lse, weights), (expected[0], expected[1], expected[3]))

    @pytest.mark.parametrize("window", [0, 1, 2, 5, 100])
    @pytest.mark.parametrize("n_selected", [1, 3, 40])
    def test_window_and_budget(self, window, n_selected):
        states = random_states(19, heads=3)
        indices = choose(states, window=window, n_selected=n_selected)[2]
        expected = naive.full_attention_with_token_oracle(*states, window=window, n_selected=n_selected)[2]
        assert torch.equal(indices, expected)

    def test_a_callers_own_mask(self):
        visibility = torch.rand(2, 1, 9, 13, generator=torch.Generator().manual_seed(1)) > 0.4
        states, rows = random_states(9, 13, batch=2, heads=4, kv_heads=2), Rows(visibility=visibility)
        expected = naive.full_attention_with_token_oracle(*states, rows=rows, n_selected=4, window=3)
        output, lse, indices = choose(states, rows=rows)
        assert torch.equal(indices, expected[2])
        assert_close((output, lse), expected[:2])


class TestOracle:
    def test_attention_is_that_of_the_block_oracle(self):
        states = random_states(21, heads=4, kv_heads=2)
        blocks = full_attention_with_oracle(*states, block_size=4, n_selected=2, backend="reference")
        for one, other in zip(choose(states)[:2], blocks[:2], strict=True):
            assert torch.equal(one, other)

    def test_without_a_window_it_is_the_block_oracle_with_blocks_of_one(self):
        states = random_states(21, heads=4, kv_heads=2)
        blocks = full_attention_with_oracle(*states, block_size=1, n_selected=4, backend="reference")[2]
        assert torch.equal(choose(states, window=0)[2], blocks)

    def test_nothing_of_the_window_or_the_future_is_listed(self):
        indices = choose(random_states(33), window=6)[2]
        assert (indices <= (torch.arange(33) - 6)[:, None].clamp(min=-1)).all()
        assert (indices[0, 0, 6:, 0] >= 0).all()

    @pytest.mark.parametrize("length", range(1, 12))
    def test_short_rows_take_all_C04(self, length):
        indices = choose(random_states(length), n_selected=4, window=3)[2]
        for query in range(length):
            before = max(query - 2, 0)
            if before <= 4:
                assert indices[0, 0, query].tolist() == [*range(before), *[-1] * (4 - before)]
            else:
                assert (indices[0, 0, query] >= 0).all()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_equal_keys_choose_the_lowest_ids_B14(self, dtype):
        # Quarters: their products are equal whatever order a library adds them in.
        states = random_states(70, heads=3, head_dim=80)
        query, key, value = (part.mul(4).round().div(4).to(dtype) for part in states)
        key = key[:, :, :1].expand_as(key).contiguous()
        indices = choose((query, key, value), n_selected=5, window=3)[2]
        for position in range(70):
            chosen = min(max(position - 2, 0), 5)
            assert indices[0, 0, position].tolist() == [*range(chosen), *[-1] * (5 - chosen)]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_exactly_representable_ties_go_to_the_lower_id_B14(self, dtype):
        generator = torch.Generator().manual_seed(0)
        query = torch.randint(1, 4, (1, 1, 129, 64), generator=generator).to(dtype)
        key = torch.randint(-1, 2, (1, 1, 129, 64), generator=generator).to(dtype)
        scores = query[0, 0].double() @ key[0, 0].double().T
        indices = choose((query, key, key), n_selected=6, window=4, scaling=0.125)[2]
        ties_at_the_cut = 0
        for position in range(10, 129):
            best = scores[position, : position - 3].tolist()
            ranked = sorted(range(len(best)), key=lambda token: (-best[token], token))  # noqa: B023 - used at once
            ties_at_the_cut += len(ranked) > 6 and best[ranked[5]] == best[ranked[6]]
            assert indices[0, 0, position].tolist() == sorted(ranked[:6])
        assert ties_at_the_cut > 20

    def test_group_maximum_is_over_normalised_scores(self):
        # Head 0 has huge but even logits; head 1 puts nearly all of its mass on token 4.
        query = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]], dtype=torch.float64)
        key = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
        key[0, 0, :, 0] = torch.tensor([50.0, 50.1, 50, 50, 50, 50, 50, 50])
        key[0, 0, 4, 1] = 6.0
        assert choose((query, key, key), n_selected=1, window=1, scaling=1.0)[2].item() == 4

    def test_extreme_logits_make_no_false_ties(self):
        key = torch.tensor([-900.0, -700, -800, -600, 1000]).view(1, 1, -1, 1)
        indices = choose((torch.ones(1, 1, 1, 1), key, key), n_selected=2, window=1, scaling=1.0)[2]
        assert indices.flatten().tolist() == [1, 3]

    def test_a_token_in_the_window_still_counts_in_the_probabilities(self):
        """The denominator is the whole row: with a mean over heads a heavy window lowers a head's other tokens."""
        key = torch.tensor([[1.0, 0.0], [0.0, 0.6], [9.0, 0.0]], dtype=torch.float64)[None, None]
        query = torch.eye(2, dtype=torch.float64)[None, :, None]
        options = {"n_selected": 1, "scaling": 1.0, "head_reduction": "mean"}
        assert choose((query, key, key), window=1, **options)[2].item() == 1
        # Without the heavy token head 0 prefers token 0 by more than head 1 prefers token 1.
        assert choose((query, key[:, :, :2], key[:, :, :2]), window=0, **options)[2].item() == 0

    def test_decode_and_chunks_choose_what_the_whole_chooses(self):
        query, key, value = random_states(24, heads=4, kv_heads=2)
        whole = choose((query, key, value))[2]
        for start, stop in ((0, 10), (10, 11), (11, 17), (17, 24)):
            part = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])
            assert torch.equal(choose(part)[2], whole[:, :, start:stop])

    def test_indices_carry_no_gradient_but_the_attention_does(self):
        states = [part.requires_grad_() for part in random_states(9, heads=4, kv_heads=2)]
        output, lse, indices = choose(states)
        assert not indices.requires_grad
        grads = torch.autograd.grad(output.sin().sum() + lse.sin().sum(), states)
        expected, expected_lse, *_ = naive.full_attention(*states)
        wanted = torch.autograd.grad(expected.sin().sum() + expected_lse.sin().sum(), states)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)

    def test_no_budget_gives_no_indices(self):
        assert choose(random_states(9), n_selected=0)[2] is None


class TestSelectTokens:
    @hypothesis.given(
        scores=strategies.lists(strategies.sampled_from([-math.inf, 0.0, 1.0, 2.0]), min_size=1, max_size=14),
        n_selected=strategies.integers(1, 16),
        window=strategies.integers(0, 5),
        behind=strategies.integers(0, 4),
    )
    @hypothesis.settings(max_examples=200)
    def test_equals_a_sorted_list(self, scores, n_selected, window, behind):
        own = max(len(scores) - 1 - behind, 0)
        rows = torch.tensor(scores, dtype=torch.float64).view(1, 1, 1, -1)
        chosen = select_tokens(rows, torch.tensor([[own]]), n_selected, window).flatten().tolist()
        open_ids = [i for i, score in enumerate(scores) if score > -math.inf and not own - window < i <= own]
        wanted = sorted(sorted(open_ids, key=lambda i: (-scores[i], i))[:n_selected])
        assert chosen == wanted + [-1] * (n_selected - len(wanted))

    def test_signed_zeros_are_equal(self):
        for scores in ([0.0, -0.0, -1.0], [-0.0, 0.0, -1.0]):
            rows = torch.tensor(scores).view(1, 1, 1, -1)
            assert select_tokens(rows, torch.tensor([[3]]), 1, 1).item() == 0


class TestAttentionAgainstLoops:
    @pytest.mark.parametrize("rows", LAYOUTS)
    def test_rows(self, rows):
        states = states_for(rows, heads=4, kv_heads=2, v_head_dim=5)
        indices, sink = random_tokens(states), torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=torch.float64)
        results = attend(states, indices, rows=rows, sink=sink, return_weights=True)
        expected = naive.token_sparse_attention(*states, indices, window=3, rows=rows or naive.NOTHING, sink=sink)
        assert_close(results, expected)

    @pytest.mark.parametrize("window", [0, 1, 2, 3, 20, 100])
    @pytest.mark.parametrize("length", [1, 2, 3, 4, 19])
    def test_windows(self, length, window):
        states = random_states(length, heads=3)
        indices = random_tokens(states)
        expected = naive.token_sparse_attention(*states, indices, window=window)
        assert_close(attend(states, indices, window=window, return_weights=True), expected)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2), (8, 1)], ids=["1", "3", "3x2", "8"])
    @pytest.mark.parametrize(("q_len", "kv_len"), [(1, 17), (3, 17), (21, 21)], ids=str)
    def test_groups_and_offsets_C21(self, heads, kv_heads, q_len, kv_len):
        states = random_states(q_len, kv_len, batch=2, heads=heads, kv_heads=kv_heads)
        indices = random_tokens(states)
        assert_close(attend(states, indices), naive.token_sparse_attention(*states, indices, window=3)[:2])

    def test_non_contiguous_indices(self):
        states = random_states(19)
        indices = random_tokens(states, width=8)[..., ::2]
        assert not indices.is_contiguous()
        assert_close(attend(states, indices), naive.token_sparse_attention(*states, indices, window=3)[:2])

    @pytest.mark.parametrize("rows", LAYOUTS)
    def test_gradients(self, rows):
        states = [part.requires_grad_() for part in states_for(rows, heads=4, kv_heads=2, v_head_dim=5)]
        sink = torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
        indices = random_tokens(states)
        direction = torch.randn(2, 4, 15, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        output, lse = attend(states, indices, rows=rows, sink=sink)
        expected, expected_lse, _ = naive.token_sparse_attention(
            *states, indices, window=3, rows=rows or naive.NOTHING, sink=sink
        )
        seen = expected_lse > -math.inf
        inputs = [*states, sink]
        grads = torch.autograd.grad((output * direction).sum() + lse[seen].sin().sum(), inputs)
        wanted = torch.autograd.grad((expected * direction).sum() + expected_lse[seen].sin().sum(), inputs)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)

    def test_gradcheck(self):
        states = [part.requires_grad_() for part in random_states(3, 7, head_dim=3)]
        sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
        indices = torch.tensor([[0, -1], [1, 0], [6, 1]], dtype=torch.int32)[None, None]
        assert torch.autograd.gradcheck(
            lambda *parts: attend(parts[:3], indices, window=2, sink=parts[3]), (*states, sink)
        )


class TestMeaning:
    def test_section_5_the_union_holds_a_mass_of_0_77(self):
        weights = torch.tensor([0.04, 0.06, 0.30, 0.05, 0.08, 0.12, 0.20, 0.15], dtype=torch.float64)
        key = weights.log().view(1, 1, -1, 1)
        value = torch.eye(8, dtype=torch.float64)[None, None]
        query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        indices = choose((query, key, value), n_selected=2, window=2, scaling=1.0)[2]
        assert indices.flatten().tolist() == [2, 5]
        output, lse = attend((query, key, value), indices, window=2, scaling=1.0)
        assert lse.exp().item() == pytest.approx(0.77)
        wanted = torch.tensor([0, 0, 0.30, 0, 0, 0.12, 0.20, 0.15], dtype=torch.float64) / 0.77
        torch.testing.assert_close(output.flatten(), wanted)

    def test_a_window_across_a_selected_block_counts_twice_in_generation_1_and_once_in_generation_2(self):
        """Eight equal tokens, block 3 selected, window 3: tokens 6 and 7 stand in both."""
        query, key = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 8, 1, dtype=torch.float64)
        value = torch.eye(8, dtype=torch.float64)[None, None]
        block = torch.full((1, 1, 1, 1), 3, dtype=torch.int32)
        branches = {"block_size": 2, "backend": "reference"}
        branch = block_sparse_attention(query, key, value, block, **branches).flatten()
        assert branch.tolist() == [0] * 6 + [0.5] * 2
        local = naive.sliding_window_attention(query, key, value, window=3)[0].flatten()
        torch.testing.assert_close((branch + local)[5:], torch.tensor([2, 5, 5], dtype=torch.float64) / 6)
        tokens = torch.tensor([6, 7], dtype=torch.int32).view(1, 1, 1, 2)
        once = attend((query, key, value), tokens, window=3, return_lse=False).flatten()
        torch.testing.assert_close(once[5:], torch.ones(3, dtype=torch.float64) / 3)
        assert once[:5].tolist() == [0] * 5

    @pytest.mark.parametrize("listed", [[2, 9], [2, 2, 9], [-1, 9, 2], [9, -1, 2, 2], [2, 9, 11, 10]], ids=str)
    def test_repeats_and_minus_one_and_the_window_itself_change_nothing_C08(self, listed):
        states = random_states(1, 12)
        expected = attend(states, torch.tensor([2, 9], dtype=torch.int32).view(1, 1, 1, -1))
        results = attend(states, torch.tensor(listed, dtype=torch.int32).view(1, 1, 1, -1))
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other)

    def test_nothing_listed_is_the_window_alone(self):
        states = random_states(15, heads=4, kv_heads=2)
        nothing = torch.full((1, 2, 15, 3), -1, dtype=torch.int32)
        assert_close(attend(states, nothing), naive.sliding_window_attention(*states, window=3)[:2])

    def test_neither_window_nor_tokens_gives_zero_C06(self):
        states = [part.requires_grad_() for part in random_states(5)]
        indices = torch.full((1, 1, 5, 2), -1, dtype=torch.int32)
        output, lse = attend(states, indices, window=0, sink=torch.tensor([-3.0, 40.0]))
        assert (output == 0).all()
        assert (lse == -math.inf).all()
        output.sum().backward()
        assert all((part.grad == 0).all() for part in states)

    @pytest.mark.parametrize("length", range(1, 12))
    def test_equals_dense_while_window_and_budget_cover_everything_C04(self, length):
        states = random_states(length, heads=4, kv_heads=2)
        *dense, indices = choose(states, n_selected=4, window=3)
        sparse = attend(states, indices, window=3)
        for one, other in zip(sparse, dense, strict=True):
            torch.testing.assert_close(one[:, :, :7], other[:, :, :7], rtol=0, atol=1e-12)
        if length > 7:
            assert (sparse[0] - dense[0])[:, :, 7:].abs().max() > 1e-3

    def test_queries_at_given_columns_are_rows_of_the_whole(self):
        query, key, value = random_states(15, heads=4, kv_heads=2)
        *dense, indices = choose((query, key, value))
        whole = attend((query, key, value), indices)
        kept = torch.tensor([14, 2, 2, 9])
        part, rows = (query[:, :, kept], key, value), Rows(query_columns=kept[None])
        *dense_part, chosen = choose(part, rows=rows)
        assert torch.equal(chosen, indices[:, :, kept])
        results = [*dense_part, *attend(part, chosen, rows=rows)]
        assert_close(results, [part[:, :, kept] for part in (*dense, *whole)])


@pytest.mark.parametrize("elements", [1, 50, 300], ids=str)
@pytest.mark.parametrize("rows", LAYOUTS)
def test_chunking_changes_nothing(monkeypatch, elements, rows):
    states = states_for(rows)
    whole = choose(states, rows=rows)
    wide = attend(states, whole[2], rows=rows, return_weights=True)
    monkeypatch.setattr(reference_hysparse, "CHUNK_ELEMENTS", elements)
    chunked = choose(states, rows=rows)
    assert torch.equal(chunked[2], whole[2])
    assert_close(chunked[:2], whole[:2])
    assert_close(attend(states, whole[2], rows=rows, return_weights=True), wide)


@pytest.mark.parametrize("length", [65, 129])
def test_float32_is_within_1e_5_of_float64(length):
    low = [part.float().requires_grad_() for part in random_states(length, heads=3, head_dim=64)]
    high = [part.detach().double().requires_grad_() for part in low]
    indices = choose(high, n_selected=16, window=8)[2]
    results = [attend(states, indices, window=8) for states in (low, high)]
    for output, _ in results:
        output.sin().sum().backward()
    grads = [[part.grad for part in states] for states in (low, high)]
    for one, other in zip([*results[0], *grads[0]], [*results[1], *grads[1]], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


class PeakMemory(threading.Thread):
    """Largest resident size of this process above what it was, sampled every few milliseconds."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.before, self.peak, self.done = process, process.memory_info().rss, 0, False

    def run(self):
        while not self.done:
            self.peak = max(self.peak, self.process.memory_info().rss - self.before)
            time.sleep(0.005)


@pytest.mark.slow
def test_8192_tokens_stay_far_below_the_square_of_the_length():
    """Nine heads on three, as in SmolLM2-135M: one matrix of scores would be 2.4 GB, the budget of indices is 0.1."""
    psutil = pytest.importorskip("psutil")
    states = [part.float() for part in random_states(8192, heads=9, kv_heads=3, head_dim=64)]
    memory = PeakMemory(psutil.Process())
    memory.start()
    with torch.no_grad():
        *_, indices = choose(states, n_selected=1024, window=128)
        attend(states, indices, window=128)
    memory.done = True
    memory.join()
    print(f"peak {memory.peak / 1e9:.2f} GB")
    assert (indices >= 0).sum(-1)[..., 2000:].eq(1024).all()
    assert memory.peak < 1e9


class TestArgumentErrors:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            pytest.param({"window": -1}, "`window` must be at least 0, got -1", id="window"),
            pytest.param({"n_selected": -1}, "`n_selected` must be at least 0, got -1", id="n-selected"),
            pytest.param({"head_reduction": "sum"}, "`head_reduction` must be one of", id="head-reduction"),
            pytest.param(
                {"rows": Rows(query_columns=torch.zeros(1, 4, dtype=torch.long))}, "rows.query_columns", id="columns"
            ),
        ],
    )
    def test_oracle(self, change, words):
        with pytest.raises(ValueError, match=words):
            full_attention_with_token_oracle(*random_states(5), **{"n_selected": 1, "window": 1, **change})

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            pytest.param({"window": -1}, "`window` must be at least 0, got -1", id="window"),
            pytest.param({"sink": torch.zeros(3)}, r"`sink` must have shape \(heads,\) = \(2,\)", id="sink"),
            pytest.param({"indices": torch.zeros(1, 1, 4, 3, dtype=torch.int32)}, "`indices` must be", id="indices"),
            pytest.param({"indices": torch.zeros(1, 1, 5, 3)}, "`indices` must be integers", id="kind"),
        ],
    )
    def test_attention(self, change, words):
        states = random_states(5)
        arguments = {"indices": random_tokens(states), "window": 1, **change}
        with pytest.raises(ValueError, match=words):
            token_sparse_attention(*states, **arguments)

    @pytest.mark.parametrize("operation", ["oracle", "attention"])
    def test_a_back_end_without_a_kernel_is_refused_by_name(self, operation):
        pytest.importorskip("triton")
        states = [part.float() for part in random_states(5)]
        calls = {
            "oracle": lambda: full_attention_with_token_oracle(*states, n_selected=1, window=1, backend="triton"),
            "attention": lambda: token_sparse_attention(*states, random_tokens(states), window=1, backend="triton"),
        }
        with pytest.raises(NotImplementedError, match="has no Triton kernel"):
            calls[operation]()
