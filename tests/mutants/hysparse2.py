"""Faults of the second generation."""

from .entry import DECODER2, MODEL, MODEL2, PROMPT_END, REFERENCE, ROWS, SELECTION, WHOLE_CACHE, Mutant


TOKENS = "tests/ops/test_token_sparse.py"
FORWARD2 = "tests/models/test_hysparse2_forward.py"
EARLY_EXIT = "tests/models/test_hysparse2_early_exit.py"
LOGITS2 = f"{FORWARD2}::TestAgainstLoops::test_logits_maps_and_indices[default]"

MUTANTS = {
    "token-window-plus-one": Mutant(
        SELECTION,
        "(ids > own - window) & (ids <= own)",
        "(ids > own - window - 1) & (ids <= own)",
        f"{TOKENS}::TestOracle::test_short_rows_take_all_C04",
    ),
    "token-window-minus-one": Mutant(
        SELECTION,
        "(ids > own - window) & (ids <= own)",
        "(ids > own - window + 1) & (ids <= own)",
        f"{TOKENS}::TestOracle::test_nothing_of_the_window_or_the_future_is_listed",
    ),
    "token-ties-to-the-higher-id": Mutant(
        SELECTION,
        "at_cut.cumsum(-1) <= width",
        "at_cut.flip(-1).cumsum(-1).flip(-1) <= width",
        f"{TOKENS}::TestOracle::test_equal_keys_choose_the_lowest_ids_B14",
    ),
    "overlap-counted-twice": Mutant(
        REFERENCE,
        "    return block_sparse_attention(",
        "    there = {'scaling': scaling, 'rows': rows}\n"
        "    parts = (\n"
        "        block_sparse_attention(query, key, value, indices, block_size=1, **there),\n"
        "        sliding_window_attention(query, key, value, window=window, **there),\n"
        "    )\n"
        "    lse = torch.logaddexp(parts[0][1], parts[1][1])\n"
        "    return sum(part[0] * torch.exp(part[1] - lse)[..., None] for part in parts), lse, None\n"
        "    return block_sparse_attention(",
        f"{TOKENS}::TestMeaning::"
        "test_a_window_across_a_selected_block_counts_twice_in_generation_1_and_once_in_generation_2",
    ),
    "window-as-a-second-branch": Mutant(DECODER2, 'return "merged_shared" if', 'return "shared_kv" if', LOGITS2),
    "oracle-lists-the-forced-window": Mutant(DECODER2, "window=self.forced_window", "window=0", LOGITS2),
    "cross-layers-project-their-own-input": Mutant(
        DECODER2,
        "own_states = None\n        if bridged_states is not None:",
        "own_states = None\n        if False:",
        LOGITS2,
    ),
    "bridge-from-the-layers-output": Mutant(
        MODEL2, "bridge[index] = residual if normed is None else normed", "bridge[index] = hidden_states", LOGITS2
    ),
    "bridge-from-the-wrong-layer": Mutant(
        MODEL2,
        "bridge.get(plan[index])",
        "None if plan[index] is None else next(reversed(bridge.values()))",
        f"{FORWARD2}::TestSharing::test_states_of_the_self_decoder_reach_the_layers_of_the_map_B12",
    ),
    "bridge-cut-off-from-gradients": Mutant(
        MODEL2,
        "bridge[index] = residual if normed is None else normed",
        "bridge[index] = (residual if normed is None else normed).detach()",
        "tests/models/test_hysparse2_training.py::TestGradients::test_the_bridge_trains_the_self_decoder",
    ),
    "self-output-without-its-norm": Mutant(
        MODEL2,
        "self.bridge_norm(hidden_states)",
        "hidden_states",
        f"{FORWARD2}::TestAgainstLoops::test_logits_maps_and_indices[self_output]",
    ),
    "early-exit-runs-every-row": Mutant(
        MODEL2,
        "if leaves_early:\n",
        "if False:\n",
        f"{EARLY_EXIT}::test_logits_and_cache_are_those_of_the_full_pass[default-last]",
    ),
    "early-exit-runs-a-row-too-few": Mutant(
        MODEL2,
        "slots = torch.arange(q_len - logits_to_keep, q_len, device=device)",
        "slots = torch.arange(q_len - logits_to_keep + (logits_to_keep > 1), q_len, device=device)",
        f"{EARLY_EXIT}::test_logits_and_cache_are_those_of_the_full_pass[default-last-7]",
    ),
    "early-exit-turns-rows-by-their-number": Mutant(
        PROMPT_END,
        "lambda part: tokens_at(part, slots)",
        "lambda part: part[:, : slots.shape[1]]",
        f"{EARLY_EXIT}::test_logits_and_cache_are_those_of_the_full_pass[source_rope-last]",
    ),
    "early-exit-counts-slots": Mutant(
        ROWS,
        "place = slots[None] if self.place is None else self.place[:, slots]",
        "place = slots[None]",
        f"{EARLY_EXIT}::test_padded_rows",
    ),
    "B10-rows-left-out-although-asked-for": Mutant(
        MODEL,
        "if not (has_labels or keeps_all or self.needs_all_rows(kwargs)):",
        "if True:",
        f"{EARLY_EXIT}::TestAllRowsRun::test_where_a_row_per_token_is_asked_for_B10",
    ),
    "no-keys-where-no-row-runs": Mutant(
        DECODER2,
        "*_, bridged_states = shared\n        if bridged_states is not None:",
        "*_, bridged_states = shared\n        if False:",
        "tests/models/test_hysparse2_cache.py::TestLazyBridge::test_eager_projects_at_once",
    ),
    "pending-states-survive-a-crop": Mutant(
        WHOLE_CACHE,
        "self.pending = without_last(self.pending, -tokens_to_remove)",
        "pass",
        "tests/models/test_hysparse2_cache.py::TestOperations::test_crop",
    ),
    "pending-states-not-reordered": Mutant(
        WHOLE_CACHE,
        "self.pending = [states.changed(change) for states in self.pending]",
        "pass",
        "tests/models/test_hysparse2_cache.py::TestOperations::test_reorder",
    ),
}
