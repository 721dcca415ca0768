"""Full attention and its oracle (reference back end) against loops over single queries in float64."""

import math

import naive
import pytest
import torch
from naive import random_states

from helpers import assert_within_reference_error
from hysparse_hf.modeling import reference_hysparse
from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle
from hysparse_hf.modeling.rows_hysparse import Rows


def attend(states, **options):
    return full_attention_with_oracle(*states, backend="reference", **{"block_size": 4, "n_selected": 2, **options})


def compare(states, *, rows=None, **options):
    """Compare output, lse and indices with the loops; return the indices."""
    options = {"block_size": 4, "n_selected": 2, **options}
    output, lse, indices = full_attention_with_oracle(*states, rows=rows, backend="reference", **options)
    expected = naive.full_attention(*states, rows=rows or naive.NOTHING, **options)
    torch.testing.assert_close(output, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)
    assert indices.dtype == torch.int32
    assert torch.equal(indices, expected[2])
    return indices


class TestAgainstLoops:
    @pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129])
    def test_block_edges(self, length):
        compare(random_states(length), block_size=64, n_selected=1)

    @pytest.mark.parametrize(
        ("q_len", "kv_len"), [(1, 17), (3, 17), (1, 64), (3, 64), (2, 65), (5, 129)], ids=lambda length: str(length)
    )
    def test_fewer_queries_than_keys_C21(self, q_len, kv_len):
        compare(random_states(q_len, kv_len))

    @pytest.mark.parametrize("q_len", [1, 3])
    def test_last_queries_equal_rows_of_the_whole_call_C21(self, q_len):
        query, key, value = random_states(64)
        whole = attend((query, key, value))
        last = attend((query[:, :, -q_len:], key, value))
        for part, full in zip(last, whole, strict=True):
            torch.testing.assert_close(part, full[:, :, -q_len:], rtol=0, atol=1e-12)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2), (8, 1)], ids=["1", "3", "3x2", "8"])
    def test_group_sizes(self, heads, kv_heads):
        compare(random_states(21, batch=2, heads=heads, kv_heads=kv_heads))

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 48), (128, 160), (5, 3)])
    def test_head_dims(self, head_dim, v_head_dim):
        output, *_ = attend(random_states(9, head_dim=head_dim, v_head_dim=v_head_dim))
        assert output.shape[-1] == v_head_dim
        compare(random_states(19, head_dim=head_dim, v_head_dim=v_head_dim))

    def test_scaling_is_used(self):
        compare(random_states(19), scaling=0.05)

    def test_non_contiguous_states(self):
        query, key, value = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in random_states(19))
        assert not query.is_contiguous()
        compare((query, key[..., ::1], value.flip(-1).flip(-1).expand_as(value)))

    @pytest.mark.parametrize("block_reduction", ["max", "sum"])
    @pytest.mark.parametrize("head_reduction", ["max", "mean"])
    @pytest.mark.parametrize("seed", range(3))
    def test_reductions(self, block_reduction, head_reduction, seed):
        states = random_states(33, heads=6, kv_heads=2, seed=seed)
        compare(states, block_reduction=block_reduction, head_reduction=head_reduction)

    @pytest.mark.parametrize(("first", "local"), [(1, 0), (0, 1), (1, 1), (2, 1), (0, 3)])
    def test_forced_blocks(self, first, local):
        compare(random_states(33), n_selected=3, forced_first_blocks=first, forced_local_blocks=local)

    def test_block_size_one(self):
        compare(random_states(17), block_size=1, n_selected=5)

    def test_n_selected_zero_gives_no_indices(self):
        states = random_states(9)
        output, lse, indices = attend(states, n_selected=0)
        assert indices is None
        torch.testing.assert_close(output, naive.full_attention(*states)[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, naive.full_attention(*states)[1], rtol=0, atol=1e-12)

    def test_map_times_values_is_the_output(self):
        states = random_states(19, heads=4, kv_heads=2)
        output, _, _, weights = attend(states, return_weights=True)
        torch.testing.assert_close(weights, naive.full_attention(*states)[3], rtol=0, atol=1e-12)
        value = states[2].repeat_interleave(2, dim=1)
        torch.testing.assert_close(weights @ value, output, rtol=0, atol=1e-12)


class TestRows:
    @pytest.mark.parametrize("padding", [[0, 1], [3, 5], [4, 8], [0, 20]], ids=str)
    def test_left_padding(self, padding):
        compare(random_states(21, batch=2), rows=Rows.from_padding(torch.tensor(padding)))

    def test_padded_row_equals_the_row_alone(self):
        query, key, value = random_states(21)
        padded = [torch.cat([torch.full_like(states[:, :, :5], 7.0), states], dim=2) for states in (query, key, value)]
        alone = attend((query, key, value))
        together = attend(padded, rows=Rows.from_padding(torch.tensor([5])))
        for part, whole in zip(alone, together, strict=True):
            torch.testing.assert_close(part, whole[:, :, 5:], rtol=0, atol=1e-12)

    def test_padding_queries_see_nothing_A17(self):
        output, lse, indices = attend(random_states(9), rows=Rows.from_padding(torch.tensor([4])))
        assert (output[:, :, :4] == 0).all()
        assert (lse[:, :, :4] == -math.inf).all()
        assert (indices[:, :, :4] == -1).all()

    @pytest.mark.parametrize("cuts", [[0, 21], [0, 1, 21], [0, 4, 8, 21], [0, 5, 6, 14, 21]], ids=str)
    def test_packed_documents(self, cuts):
        rows = Rows.from_cu_seqlens(torch.tensor(cuts, dtype=torch.int32), 21)
        query, key, value = random_states(21)
        indices = compare((query, key, value), rows=rows)
        for start, stop in zip(cuts, cuts[1:], strict=False):
            alone = attend([states[:, :, start:stop] for states in (query, key, value)])
            assert torch.equal(indices[:, :, start:stop], alone[2])

    def test_packed_rows_of_a_batch_differ(self):
        position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
        compare(random_states(10, batch=2), block_size=2, rows=Rows.from_position_ids(position_ids))

    @pytest.mark.parametrize("starts", [[0, 16], [3, 5], [7, 7]], ids=str)
    def test_query_offset_per_row(self, starts):
        compare(random_states(5, 21, batch=2), rows=Rows(query_start=torch.tensor(starts)))

    def test_columns_behind_a_short_row_do_not_matter(self):
        query, key, value = random_states(3, 21)
        rows = Rows(query_start=torch.tensor([9]))
        before = attend((query, key, value), rows=rows)
        key[:, :, 12:], value[:, :, 12:] = 1e4, 1e4
        after = attend((query, key, value), rows=rows)
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("masks", [1, 4], ids=["all-heads", "per-head"])
    def test_visibility(self, masks):
        generator = torch.Generator().manual_seed(1)
        visibility = torch.rand(2, masks, 9, 13, generator=generator) > 0.6
        visibility[:, :, 4] = False
        states = random_states(9, 13, batch=2, heads=4, kv_heads=4)
        compare(states, rows=Rows(visibility=visibility))

    def test_visibility_per_head_inside_a_group(self):
        visibility = torch.rand(1, 4, 9, 13, generator=torch.Generator().manual_seed(1)) > 0.4
        visibility[..., 0] = True
        states = random_states(9, 13, heads=4, kv_heads=2)
        output, lse, _ = attend(states, rows=Rows(visibility=visibility), n_selected=0)
        expected = naive.full_attention(*states, rows=Rows(visibility=visibility))
        torch.testing.assert_close(output, expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)


class TestSelection:
    def test_no_block_of_the_future_is_chosen_B14(self):
        *_, indices = attend(random_states(33), n_selected=9)
        own = torch.arange(33) // 4
        assert (indices <= own[:, None]).all()

    @pytest.mark.parametrize("length", range(1, 14))
    def test_budget_beyond_the_blocks_selects_every_visible_one_C04(self, length):
        *_, indices = attend(random_states(length), n_selected=3)
        for query in range(length):
            visible = query // 4 + 1
            expected = list(range(visible))[:3] + [-1] * (3 - visible)
            if visible <= 3:
                assert indices[0, 0, query].tolist() == expected

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("length", [33, 64, 65, 129])
    def test_equal_keys_choose_the_lowest_ids_B14(self, dtype, length):
        # Quarters: their products are equal whatever order a library adds them in.
        states = random_states(length, head_dim=80, heads=3)
        query, key, value = (part.mul(4).round().div(4).to(dtype) for part in states)
        key = key[:, :, :1].expand_as(key).contiguous()
        *_, indices = attend((query, key, value), n_selected=3)
        for position in range(length):
            blocks = min(position // 4 + 1, 3)
            assert indices[0, 0, position].tolist() == [*range(blocks), *[-1] * (3 - blocks)]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("seed", range(4))
    def test_exactly_representable_ties_go_to_the_lower_id(self, dtype, seed):
        # Small integers and a power of two as scaling: equal scores are equal in any order of adding, and many are.
        generator = torch.Generator().manual_seed(seed)
        query = torch.randint(1, 4, (1, 1, 257, 64), generator=generator).to(dtype)
        key = torch.randint(-1, 2, (1, 1, 257, 64), generator=generator).to(dtype)
        scores = query[0, 0].double() @ key[0, 0].double().T
        *_, indices = attend((query, key, key), n_selected=3, scaling=0.125)
        ties_at_the_cut = 0
        for position in range(257):
            columns = scores[position, : position + 1]
            best = [float(part.max()) for part in columns.split(4)]
            ranked = sorted(range(len(best)), key=lambda block: (-best[block], block))  # noqa: B023 - used at once
            ties_at_the_cut += len(ranked) > 3 and best[ranked[2]] == best[ranked[3]]
            assert [block for block in indices[0, 0, position].tolist() if block >= 0] == sorted(ranked[:3])
        assert ties_at_the_cut > 20

    def test_group_maximum_is_over_normalised_scores(self):
        # Head 0 has huge but even logits, so no block holds much of its mass; head 1 puts nearly all on block 2.
        query = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]], dtype=torch.float64)
        key = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
        key[0, 0, :, 0] = torch.tensor([50.0, 50.1, 50, 50, 50, 50, 50, 50])
        key[0, 0, 4, 1] = 6.0
        *_, indices = attend((query, key, key), block_size=2, n_selected=1, scaling=1.0)
        assert indices.flatten().tolist() == [2]
        compare((query, key, key), block_size=2, n_selected=1, scaling=1.0)

    def test_head_mean_and_max_choose_differently(self):
        # Probabilities per block: head 0 (0.6, 0.1, 0.3), head 1 (0.02, 0.9, 0.08); mean 0.31, 0.5, 0.19.
        # Head 0 (0.5, 0.45, 0.05), head 1 (0.0, 0.45, 0.55): max says block 2, mean says block 1.
        probabilities = torch.tensor([[0.5, 0.45, 0.05], [1e-9, 0.45, 0.55]], dtype=torch.float64)
        query = torch.eye(2, dtype=torch.float64)[None, :, None]
        key = probabilities.log().T[None, None]
        chosen = {
            reduction: attend((query, key, key), block_size=1, n_selected=1, scaling=1.0, head_reduction=reduction)[
                2
            ].item()
            for reduction in ("max", "mean")
        }
        assert chosen == {"max": 2, "mean": 1}

    def test_extreme_logits_make_no_false_ties(self):
        # Probabilities of all blocks but the last underflow to zero; their order must survive.
        key = torch.zeros(1, 1, 16, 1)
        key[0, 0, :, 0] = torch.tensor([float(n) for n in (-900, -700, -800, -600)]).repeat_interleave(4)
        key[0, 0, -1] = 1000.0
        *_, indices = attend((torch.ones(1, 1, 1, 1), key, key), n_selected=3, scaling=1.0)
        assert indices.flatten().tolist() == [1, 2, 3]

    @pytest.mark.parametrize("magnitude", [1e4, -1e4], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_large_logits_stay_finite_C25(self, magnitude, dtype):
        query, key, value = (states.to(dtype).requires_grad_() for states in random_states(9))
        output, lse, _ = attend((query, key, value), scaling=magnitude)
        (output.float().sum() + lse.clamp(max=10).sum()).backward()
        for tensor in (output, query.grad, key.grad, value.grad):
            assert tensor.isfinite().all()

    def test_indices_carry_no_gradient(self):
        states = [part.requires_grad_() for part in random_states(9)]
        assert not attend(states)[2].requires_grad

    @pytest.mark.parametrize("forced", ["first", "local"])
    def test_forced_blocks_count_inside_the_budget(self, forced):
        # The tokens of the middle block are far the heaviest, so only forcing can choose another.
        key = torch.zeros(1, 1, 12, 1, dtype=torch.float64)
        key[0, 0, 4:8] = 9.0
        query = torch.ones(1, 1, 12, 1, dtype=torch.float64)
        *_, indices = attend((query, key, key), n_selected=1, **{f"forced_{forced}_blocks": 1})
        assert indices[0, 0, -1].tolist() == [{"first": 0, "local": 2}[forced]]

    def test_forced_local_block_is_the_querys_own_B14(self):
        *_, indices = attend(random_states(33), forced_local_blocks=1)
        own = torch.arange(33) // 4
        assert (indices == own[:, None]).any(-1).all()

    def test_last_block_may_be_short(self):
        key = torch.zeros(1, 1, 9, 1, dtype=torch.float64)
        key[0, 0, 8] = 5.0
        *_, indices = attend((torch.ones(1, 1, 1, 1, dtype=torch.float64), key, key), n_selected=1)
        assert indices.flatten().tolist() == [2]


class TestGradients:
    @pytest.mark.parametrize(
        "rows",
        [
            pytest.param(None, id="plain"),
            pytest.param(Rows.from_padding(torch.tensor([0, 3])), id="padded"),
            pytest.param(Rows(first_key=torch.tensor([[0, 0, 0, 3, 3, 3, 3]])), id="packed"),
        ],
    )
    def test_equal_autograd_of_the_loops(self, rows):
        states = [part.requires_grad_() for part in random_states(7, batch=2, heads=4, kv_heads=2, v_head_dim=5)]
        generator = torch.Generator().manual_seed(3)
        direction = torch.randn(2, 4, 7, 5, generator=generator, dtype=torch.float64)
        output, lse, _ = attend(states, rows=rows)
        expected, expected_lse, *_ = naive.full_attention(*states, rows=rows or naive.NOTHING)
        seen = expected_lse > -math.inf
        grads = torch.autograd.grad((output * direction).sum() + lse[seen].sin().sum(), states)
        wanted = torch.autograd.grad((expected * direction).sum() + expected_lse[seen].sin().sum(), states)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)

    def test_gradcheck(self):
        states = [part.requires_grad_() for part in random_states(3, 5, head_dim=3)]
        assert torch.autograd.gradcheck(lambda *parts: attend(parts)[:2], states)

    def test_rows_without_keys_give_zero_gradients_C06(self):
        states = [part.requires_grad_() for part in random_states(9)]
        output, lse, _ = attend(states, rows=Rows.from_padding(torch.tensor([4])))
        (output.sum() + lse[..., 4:].sum()).backward()
        for part in states:
            assert (part.grad[:, :, :4] == 0).all()
            assert part.grad[:, :, 4:].isfinite().all()


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
    whole = attend(states, rows=rows, return_weights=True)
    monkeypatch.setattr(reference_hysparse, "CHUNK_ELEMENTS", elements)
    chunked = attend(states, rows=rows, return_weights=True)
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [63, 65])
def test_low_precision_is_within_the_error_of_plain_torch(dtype, length):
    low = [part.to(dtype).requires_grad_() for part in random_states(length, heads=3, head_dim=64)]
    plain = [part.detach().clone().requires_grad_() for part in low]
    high = [part.detach().double().requires_grad_() for part in low]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(1, 3, -1, -1)
    results = [attend(low)[:2], naive.plain_attention(*plain, causal), attend(high)[:2]]
    for output, _ in results:
        output.double().sin().sum().backward()
    for name, triple in zip(("output", "lse"), zip(*results, strict=True), strict=True):
        assert_within_reference_error(*triple, name=name)
    for name, *triple in zip("qkv", low, plain, high, strict=True):
        assert_within_reference_error(*(part.grad for part in triple), name=f"d{name}")


@pytest.mark.parametrize("length", [65, 129])
def test_float32_is_within_1e_5_of_float64(length):
    low = [part.float().requires_grad_() for part in random_states(length, heads=3, head_dim=64)]
    high = [part.detach().double().requires_grad_() for part in low]
    results = [attend(states)[:2] for states in (low, high)]
    for output, _ in results:
        output.sin().sum().backward()
    grads = [[part.grad for part in states] for states in (low, high)]
    for one, other in zip([*results[0], *grads[0]], [*results[1], *grads[1]], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


class TestSectionFiveNumbers:
    """Eight tokens, one query, weights as in the specification; block size 2."""

    weights = torch.tensor([0.04, 0.06, 0.30, 0.05, 0.08, 0.12, 0.20, 0.15], dtype=torch.float64)

    def choose(self, weights=None, **options):
        weights = self.weights if weights is None else weights
        query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        key = weights.log().view(1, 1, -1, 1)
        *_, indices, maps = attend((query, key, key), scaling=1.0, return_weights=True, **options)
        return [block for block in indices.flatten().tolist() if block >= 0], maps.flatten()

    def test_maximum_takes_blocks_1_and_3(self):
        chosen, maps = self.choose(block_size=2, n_selected=2)
        torch.testing.assert_close(maps, self.weights)
        assert chosen == [1, 3]
        assert maps[[2, 3, 6, 7]].sum().item() == pytest.approx(0.70)

    def test_sum_ties_to_block_1(self):
        # (0.10, 0.35, 0.20, 0.35) in exact arithmetic; the logarithms that give these are rounded, so build the tie
        # from equal weights within the two blocks.
        weights = torch.tensor([0.04, 0.06, 0.15, 0.20, 0.08, 0.12, 0.15, 0.20], dtype=torch.float64)
        chosen, _ = self.choose(weights, block_size=2, n_selected=1, block_reduction="sum")
        assert chosen == [1]

    @pytest.mark.parametrize(("reduction", "block"), [("max", 0), ("sum", 1)])
    def test_one_heavy_token_against_sixteen_light_ones(self, reduction, block):
        weights = torch.full((128,), 1e-9, dtype=torch.float64)
        weights[3] = 0.04
        weights[70:86] = 0.01
        chosen, _ = self.choose(weights, block_size=64, n_selected=1, block_reduction=reduction)
        assert chosen == [block]


class TestArgumentErrors:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            pytest.param({"block_size": 0}, "`block_size` must be at least 1, got 0", id="block-size"),
            pytest.param({"n_selected": -1}, "`n_selected` must be at least 0, got -1", id="n-selected"),
            pytest.param({"forced_first_blocks": -1}, "`forced_first_blocks` must be at least 0", id="forced-first"),
            pytest.param({"forced_local_blocks": -1}, "`forced_local_blocks` must be at least 0", id="forced-local"),
            pytest.param({"forced_first_blocks": 2}, r"at most `n_selected` \(1\), got 2 \+ 0", id="forced-beyond"),
            pytest.param({"block_reduction": "mean"}, "`block_reduction` must be one of", id="block-reduction"),
            pytest.param({"head_reduction": "sum"}, "`head_reduction` must be one of", id="head-reduction"),
            pytest.param(
                {"rows": Rows(query_start=torch.zeros(2, dtype=torch.long))}, "`rows.query_start`", id="query-start"
            ),
            pytest.param(
                {"rows": Rows(first_key=torch.zeros(1, 4, dtype=torch.long))}, "`rows.first_key`", id="first-key"
            ),
            pytest.param(
                {"rows": Rows(visibility=torch.ones(1, 1, 5, 4, dtype=torch.bool))}, "visibility", id="visibility"
            ),
            pytest.param({"backend": "cuda"}, "`backend` must be one of", id="backend"),
        ],
    )
    def test_value(self, change, words):
        with pytest.raises(ValueError, match=words):
            full_attention_with_oracle(*random_states(5), **{"block_size": 4, "n_selected": 1, **change})

    @pytest.mark.parametrize(
        ("shapes", "words"),
        [
            pytest.param([(1, 2, 5), (1, 1, 5, 8), (1, 1, 5, 8)], "`query` must be a floating point", id="rank"),
            pytest.param([(1, 2, 5, 8), (1, 1, 5, 4), (1, 1, 5, 8)], "in head_dim", id="head-dim"),
            pytest.param([(1, 2, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)], "in batch", id="batch"),
            pytest.param([(1, 2, 5, 8), (1, 1, 6, 8), (1, 1, 5, 8)], "heads and length", id="lengths"),
            pytest.param([(1, 3, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)], "must be a multiple of `key` heads", id="groups"),
            pytest.param([(1, 2, 5, 8), (1, 1, 4, 8), (1, 1, 4, 8)], "must hold at least the queries", id="short"),
            pytest.param([(1, 2, 0, 8), (1, 1, 5, 8), (1, 1, 5, 8)], "must hold at least one token", id="no-query"),
        ],
    )
    def test_shape(self, shapes, words):
        with pytest.raises(ValueError, match=words):
            attend([torch.zeros(shape) for shape in shapes])

    def test_integer_states(self):
        with pytest.raises(ValueError, match="floating point"):
            attend([part.long() for part in random_states(5)])

    def test_environment_names_an_unknown_back_end(self, monkeypatch):
        monkeypatch.setenv("HYSPARSE_BACKEND", "fast")
        with pytest.raises(ValueError, match="HYSPARSE_BACKEND must be one of"):
            full_attention_with_oracle(*random_states(5), block_size=4, n_selected=1)
