"""From scores to indices: reductions, ranking, forced blocks, and the one form of an index row."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies

from hysparse_hf.modeling.selection_hysparse import (
    chosen_blocks,
    pack_ids,
    reduce_blocks,
    reduce_heads,
    select_blocks,
)


INF = math.inf


def select(scores, last, n_selected, **forced):
    """Choose for one query of one KV head; scores as a list."""
    rows = torch.tensor(scores, dtype=torch.float64).view(1, 1, 1, -1)
    return select_blocks(rows, torch.tensor([[last]]), n_selected, **forced).flatten().tolist()


class TestReduceBlocks:
    def test_max_keeps_the_largest_logit(self):
        logits = torch.tensor([1.0, 4.0, -2.0, 3.0])
        assert reduce_blocks(logits, 2, "max").tolist() == [4.0, 3.0]

    def test_sum_keeps_the_log_of_the_summed_exponentials(self):
        logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
        torch.testing.assert_close(
            reduce_blocks(logits, 2, "sum").exp(), torch.tensor([0.3, 0.7], dtype=torch.float64)
        )

    @pytest.mark.parametrize("reduction", ["max", "sum"])
    @pytest.mark.parametrize("keys", [1, 3, 4, 5, 9])
    def test_last_block_may_be_short(self, keys, reduction):
        logits = torch.arange(keys, dtype=torch.float64)
        blocks = reduce_blocks(logits, 4, reduction)
        wanted = [float(part.max() if reduction == "max" else torch.logsumexp(part, 0)) for part in logits.split(4)]
        assert blocks.tolist() == pytest.approx(wanted)

    @pytest.mark.parametrize("reduction", ["max", "sum"])
    def test_hidden_keys_add_nothing(self, reduction):
        logits = torch.tensor([-INF, 2.0, -INF, -INF])
        assert reduce_blocks(logits, 2, reduction).tolist() == pytest.approx([2.0, -INF])

    def test_sum_of_far_apart_logits_does_not_overflow(self):
        assert reduce_blocks(torch.tensor([1e4, -1e4]), 2, "sum").tolist() == [1e4]


class TestReduceHeads:
    scores = torch.tensor([[0.5, 0.4], [0.1, 0.4], [0.1, 0.4]], dtype=torch.float64).log()[None, None]

    def test_max(self):
        assert reduce_heads(self.scores, "max").exp().flatten().tolist() == pytest.approx([0.5, 0.4])

    def test_mean_is_of_probabilities(self):
        assert reduce_heads(self.scores, "mean").exp().flatten().tolist() == pytest.approx([0.7 / 3, 0.4])

    @pytest.mark.parametrize("reduction", ["max", "mean"])
    def test_one_head_is_itself(self, reduction):
        one = self.scores[:, :, :1]
        torch.testing.assert_close(reduce_heads(one, reduction), one[:, :, 0])

    @pytest.mark.parametrize("reduction", ["max", "mean"])
    def test_a_block_hidden_from_all_heads_stays_hidden(self, reduction):
        assert reduce_heads(torch.full((1, 1, 3, 2), -INF), reduction).tolist() == [[[-INF, -INF]]]

    def test_mean_of_tiny_probabilities_does_not_underflow(self):
        scores = torch.tensor([[-5000.0, -4000.0], [-5000.0, -4001.0]])[None, None]
        first, second = reduce_heads(scores, "mean").flatten().tolist()
        assert -INF < first < second


class TestSelectBlocks:
    def test_highest_scores_in_ascending_order_of_id(self):
        assert select([0.1, 0.9, 0.5, 0.7], 3, 3) == [1, 2, 3]

    @pytest.mark.parametrize(
        ("scores", "n_selected", "chosen"),
        [
            pytest.param([1.0] * 7, 3, [0, 1, 2], id="all-equal"),
            pytest.param([2.0, 1.0, 1.0, 1.0], 2, [0, 1], id="at-the-cut"),
            pytest.param([1.0, 1.0, 1.0, 2.0], 2, [0, 3], id="behind-a-higher"),
            pytest.param([0.0, -0.0], 1, [0], id="signed-zero"),
            pytest.param([-0.0, 0.0], 1, [0], id="signed-zero-swapped"),
        ],
    )
    def test_ties_go_to_the_lower_id_B14(self, scores, n_selected, chosen):
        assert select(scores, len(scores) - 1, n_selected) == chosen

    def test_ties_in_a_long_row_go_to_the_lower_id_B14(self):
        assert select([1.0] * 2000, 1999, 16) == list(range(16))

    @pytest.mark.parametrize("visible", range(4))
    def test_fewer_visible_blocks_than_asked_for_C04(self, visible):
        chosen = select([0.5] * visible + [-INF] * (3 - visible), visible - 1, 3)
        assert chosen == [*range(visible), *[-1] * (3 - visible)]

    def test_width_is_kept_beyond_the_blocks_C04(self):
        assert select([0.1, 0.2], 1, 5) == [0, 1, -1, -1, -1]

    @pytest.mark.parametrize(
        ("first", "local", "chosen"),
        [
            pytest.param(1, 0, [0, 2], id="first"),
            pytest.param(0, 1, [2, 4], id="local"),
            pytest.param(0, 2, [3, 4], id="two-local"),
            pytest.param(1, 1, [0, 4], id="both"),
            pytest.param(2, 0, [0, 1], id="two-first"),
        ],
    )
    def test_forced_blocks_stand_inside_the_budget(self, first, local, chosen):
        scores = [0.1, 0.2, 0.9, 0.3, 0.05]
        assert select(scores, 4, 2, forced_first_blocks=first, forced_local_blocks=local) == chosen

    def test_forced_local_blocks_end_with_the_querys_own(self):
        assert select([0.9, 0.1, 0.1, -INF], 2, 1, forced_local_blocks=1) == [2]

    def test_a_forced_block_that_is_both_counts_once(self):
        assert select([0.9, 0.1, -INF], 0, 2, forced_first_blocks=1, forced_local_blocks=1) == [0, 1]

    def test_a_hidden_block_is_not_forced(self):
        assert select([-INF, 0.5, 0.6], 2, 2, forced_first_blocks=1) == [1, 2]

    @hypothesis.given(
        scores=strategies.lists(strategies.sampled_from([-INF, 0.0, 1.0, 2.0]), min_size=1, max_size=12),
        n_selected=strategies.integers(1, 6),
        first=strategies.integers(0, 2),
        local=strategies.integers(0, 2),
    )
    @hypothesis.settings(max_examples=150)
    def test_equals_a_sorted_list(self, scores, n_selected, first, local):
        hypothesis.assume(first + local <= n_selected)
        last = len(scores) - 1
        visible = [block for block, score in enumerate(scores) if score > -INF]
        forced = {block for block in visible if block < first or block > last - local}
        ranked = sorted(visible, key=lambda block: (block not in forced, -scores[block], block))
        wanted = sorted(ranked[:n_selected])
        chosen = select(scores, last, n_selected, forced_first_blocks=first, forced_local_blocks=local)
        assert chosen == wanted + [-1] * (n_selected - len(wanted))


class TestIndexRows:
    def test_packed_rows_are_int32_ascending_then_minus_one(self):
        packed = pack_ids(torch.tensor([[5, 2, 9]]), torch.tensor([[True, False, True]]), 4)
        assert packed.dtype == torch.int32
        assert packed.tolist() == [[5, 9, -1, -1]]

    def test_mask_of_rows_takes_minus_one_anywhere(self):
        indices = torch.tensor([-1, 2, -1, 0], dtype=torch.int32).view(1, 1, 1, -1)
        assert chosen_blocks(indices, 4).flatten().tolist() == [True, False, True, False]

    def test_mask_of_rows_takes_repeats_C08(self):
        indices = torch.tensor([0, 0, 2], dtype=torch.int32).view(1, 1, 1, -1)
        assert chosen_blocks(indices, 3).flatten().tolist() == [True, False, True]

    def test_ids_past_the_end_choose_nothing(self):
        indices = torch.tensor([1, 7, 2**31 - 1], dtype=torch.int32).view(1, 1, 1, -1)
        assert chosen_blocks(indices, 3).flatten().tolist() == [False, True, False]

    def test_no_columns_choose_nothing_C06(self):
        assert not chosen_blocks(torch.zeros(1, 1, 2, 0, dtype=torch.int32), 3).any()
