"""Faults of the selection and of the operations."""

from .entry import REFERENCE, ROWS, SELECTION, Mutant


FULL = "tests/ops/test_full_attention.py"
SPARSE = "tests/ops/test_block_sparse.py"
WINDOW = "tests/ops/test_sliding_window.py"
CHOICE = "tests/ops/test_selection.py"
FORWARD = "tests/models/test_forward.py"
LOGITS = f"{FORWARD}::TestAgainstLoops::test_logits[default]"

MUTANTS = {
    "raw-logit-group-maximum": Mutant(
        REFERENCE,
        "scores = scores - lse.detach()",
        "scores = scores - 0 * lse.detach()",
        f"{FULL}::TestSelection::test_group_maximum_is_over_normalised_scores",
    ),
    "exponentiated-scores": Mutant(
        REFERENCE,
        "reduce_heads(scores, head_reduction)",
        "reduce_heads(torch.where(scores > -math.inf, scores.exp(), scores), head_reduction)",
        f"{FULL}::TestSelection::test_extreme_logits_make_no_false_ties",
    ),
    "scaled-before-the-product": Mutant(
        REFERENCE,
        "grouped = query.to(dtype).reshape",
        "grouped = (query.to(dtype) * (scaling / LN2)).reshape",
        f"{FULL}::TestSelection::test_exactly_representable_ties_go_to_the_lower_id",
    ),
    "tie-to-the-higher-id": Mutant(
        SELECTION,
        "torch.sort(scores, dim=-1, descending=True, stable=True).indices",
        "(scores.shape[-1] - 1 - torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True).indices)",
        f"{CHOICE}::TestSelectBlocks::test_ties_go_to_the_lower_id_B14",
    ),
    "forced-blocks-outside-the-budget": Mutant(
        SELECTION,
        ".indices[..., :n_selected]",
        ".indices[..., : n_selected + forced_first_blocks + forced_local_blocks]",
        f"{CHOICE}::TestSelectBlocks::test_forced_blocks_stand_inside_the_budget",
    ),
    "forced-local-without-the-own-block": Mutant(
        SELECTION,
        "(ids > last - forced_local_blocks)",
        "((ids >= last - forced_local_blocks) & (ids < last))",
        f"{CHOICE}::TestSelectBlocks::test_forced_local_blocks_end_with_the_querys_own",
    ),
    "sum-as-max": Mutant(
        SELECTION,
        'torch.amax if reduction == "max" else torch.logsumexp',
        "torch.amax",
        f"{FULL}::TestSectionFiveNumbers::test_one_heavy_token_against_sixteen_light_ones",
    ),
    "mean-of-logarithms": Mutant(
        SELECTION,
        "torch.logsumexp(scores, 2) - math.log(scores.shape[2])",
        "scores.mean(2)",
        f"{CHOICE}::TestReduceHeads::test_mean_is_of_probabilities",
    ),
    "minus-one-as-last-block": Mutant(
        SELECTION,
        "torch.where((indices >= 0) & (indices < num_blocks), indices, num_blocks)",
        "torch.where(indices < num_blocks, indices % num_blocks, num_blocks)",
        f"{CHOICE}::TestIndexRows::test_mask_of_rows_takes_minus_one_anywhere",
    ),
    "sees-the-next-token": Mutant(
        REFERENCE,
        "visible = columns <= rows.owned_columns(start, stop, q_len, kv_len, device)[..., None]",
        "visible = columns <= rows.owned_columns(start, stop, q_len, kv_len, device)[..., None] + 1",
        f"{FULL}::TestAgainstLoops::test_group_sizes",
    ),
    "query-offset-ignored": Mutant(
        ROWS,
        "return self.query_start[:, None] + steps",
        "return (steps + kv_len - q_len)[None].expand(len(self.query_start), -1)",
        f"{FULL}::TestRows::test_query_offset_per_row",
    ),
    "slot-anchored-scores": Mutant(
        REFERENCE,
        "    if first is None:\n        return logits",
        "    if True:\n        return logits",
        f"{FULL}::TestRows::test_left_padding",
    ),
    "slot-anchored-blocks": Mutant(
        REFERENCE,
        "((columns - first[..., None]) // block_size)",
        "((columns - 0 * first[..., None]) // block_size)",
        f"{SPARSE}::TestRows::test_left_padding_moves_the_blocks",
    ),
    "window-plus-one": Mutant(
        REFERENCE,
        "near = torch.arange(lowest, limit, device=query.device) > owned[..., None] - window",
        "near = torch.arange(lowest, limit, device=query.device) > owned[..., None] - window - 1",
        f"{WINDOW}::TestAgainstLoops::test_group_sizes",
    ),
    "window-minus-one": Mutant(
        REFERENCE,
        "near = torch.arange(lowest, limit, device=query.device) > owned[..., None] - window",
        "near = torch.arange(lowest, limit, device=query.device) > owned[..., None] - window + 1",
        f"{WINDOW}::TestMeaning::test_window_counts_the_querys_own_token",
    ),
    "last-piece-of-a-long-list-lost": Mutant(
        "modeling/triton_list_pieces.py",
        "// piece).to(tl.int32) - number\n",
        "// piece).to(tl.int32) - number - 1\n",
        "tests/ops/test_triton_block_sparse.py::test_long_lists_are_summed_in_pieces",
    ),
    "sink-ignored": Mutant(
        REFERENCE,
        "    if sink is not None:\n",
        "    if False:\n",
        f"{SPARSE}::TestSink::test_joins_the_denominator_only",
    ),
    "overlap-removed": Mutant(
        REFERENCE,
        "chosen = chosen_blocks(indices[:, :, start:stop], num_blocks)",
        "chosen = chosen_blocks(indices[:, :, start:stop], num_blocks)\n"
        "        own = rows.owned_columns(start, stop, q_len, kv_len, query.device)[..., None]\n"
        "        visible = visible & ~(torch.arange(limit, device=query.device) > own - 6)[:, None]",
        LOGITS,
    ),
}
