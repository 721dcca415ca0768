"""Faults planted on purpose, each with the test that must notice it.

`python tests/mutants.py [name ...]` applies each mutant to a scratch copy of the packages, runs its test there and
prints whether it was caught; the exit status is the number of those that were not.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parent.parent

REFERENCE = "modeling/reference_hysparse.py"
SELECTION = "modeling/selection_hysparse.py"
ROWS = "modeling/rows_hysparse.py"
MODEL = "modeling/modeling_hysparse.py"
DECODER = "modeling/decoder_hysparse.py"
CONFIG = "modeling/configuration_hysparse.py"
CACHE = "modeling/cache_layers_hysparse.py"
FIXED_CACHE = "modeling/cache_fixed_hysparse.py"
CACHE_COLUMNS = "modeling/cache_columns_hysparse.py"
INPUTS = "modeling/inputs_hysparse.py"
WHOLE_CACHE = "modeling/cache_hysparse.py"
MODEL2 = "modeling/modeling_hysparse2.py"
DECODER2 = "modeling/decoder_hysparse2.py"

FULL = "tests/ops/test_full_attention.py"
SPARSE = "tests/ops/test_block_sparse.py"
WINDOW = "tests/ops/test_sliding_window.py"
CHOICE = "tests/ops/test_selection.py"
FORWARD = "tests/models/test_forward.py"
ALGEBRA = "tests/models/test_cache_algebra.py::test_operations_in_any_order"
FIXED = "tests/models/test_preallocated_cache.py"
GENERATE = "tests/models/test_generate.py"
CACHE_TESTS = "tests/models/test_cache.py"
LAYOUTS = "tests/models/test_layouts.py"
LOADING = "tests/models/test_loading.py"
TOKENS = "tests/ops/test_token_sparse.py"
FORWARD2 = "tests/models/test_hysparse2_forward.py"
EARLY_EXIT = "tests/models/test_hysparse2_early_exit.py"
LOGITS2 = f"{FORWARD2}::TestAgainstLoops::test_logits_maps_and_indices[default]"
LOGITS = f"{FORWARD}::TestAgainstLoops::test_logits[default]"
TRAINING = "tests/models/test_training.py"
CHECKPOINTING = "tests/models/test_checkpointing.py"
DEVICES = "tests/models/test_devices.py"
PARALLEL = "tests/models/test_distributed.py::TestTensorParallel::test_equals_one_process"


class Mutant(NamedTuple):
    """Replace `old`, which occurs once in `file`, by `new`; `test` must fail."""

    file: str
    old: str
    new: str
    test: str


MUTANTS = {
    # Selection.
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
    # Operations.
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
    # The model.
    "merged-softmax": Mutant(
        DECODER,
        'if branch == "merged_own" and self.config.share_full_kv:',
        'if branch in ("own", "merged_own") and self.config.share_full_kv:',
        LOGITS,
    ),
    "swapped-gates": Mutant(
        DECODER,
        'projection = getattr(self, f"gate_{branch}_proj", None)',
        'branch = {"global": "local", "local": "global"}.get(branch, branch)\n'
        '        projection = getattr(self, f"gate_{branch}_proj", None)',
        LOGITS,
    ),
    "swapped-sinks": Mutant(
        DECODER,
        'sink=self._sink("local")',
        'sink=self._sink("global")',
        LOGITS,
    ),
    "local-branch-from-the-full-layers-kv": Mutant(
        DECODER,
        'if branch == "own" and self.config.share_full_kv:',
        "if False:",
        LOGITS,
    ),
    "stale-indices": Mutant(
        MODEL,
        "shared = tuple(given)",
        "shared = (*given[:2], given[2] if shared[2] is None else shared[2])",
        LOGITS,
    ),
    "keys-and-values-of-the-first-full-layer": Mutant(
        MODEL,
        "shared = tuple(given)",
        "shared = tuple(given) if shared[0] is None else (*shared[:2], given[2])",
        LOGITS,
    ),
    "donor-off-by-one": Mutant(
        MODEL,
        "shared = tuple(given)",
        "shared, late = (tuple(given) if selected is None or shared[0] is None else late), tuple(given)",
        f"{FORWARD}::TestSharing::test_sparse_layer_receives_the_preceding_full_layers_tensors_B12",
    ),
    "donor-plan-off-by-one": Mutant(
        CONFIG,
        'donors.append(full if kind == "sparse" else None)',
        'donors.append(full + 1 if kind == "sparse" else None)',
        "tests/models/test_config.py::TestPlan::test_donor_is_the_preceding_full_layer_B12",
    ),
    "shared-query-turned-by-the-own-setting": Mutant(
        DECODER,
        'shared_query = own_query if self.turns_as_full else layout.compact(rotate(query, rotations["full"]))',
        "shared_query = own_query",
        "tests/models/test_config.py::TestKindsOfRotation::test_logits_equal_the_loops",
    ),
    "rotary-length-of-the-whole-batch": Mutant(
        "modeling/layers_hysparse.py",
        "last = position_ids.amax(-1, keepdim=True)",
        "last = position_ids.amax().view(1, 1)",
        "tests/models/test_config.py::TestDenseEqualsTheLibrary::test_a_row_beside_a_longer_one_gives_what_it_gives_alone",
    ),
    "shared-keys-detached": Mutant(
        DECODER,
        "key if read else None",
        "key.detach() if read else None",
        f"{TRAINING}::TestGradients::test_a_full_layers_projection_learns_from_its_sparse_layers",
    ),
    "shared-tensors-by-keyword": Mutant(
        MODEL,
        "                *shared,\n",
        "                **dict(zip(('shared_key', 'shared_value', 'shared_indices'), shared, strict=True)),\n",
        f"{CHECKPOINTING}::TestCheckpointing::test_tensors_with_gradients_are_positional",
    ),
    "maps-without-gates": Mutant(
        DECODER,
        "            if gate is not None:\n                weights = ",
        "            if False:\n                weights = ",
        f"{FORWARD}::TestAgainstLoops::test_selected_indices_and_maps",
    ),
    "item-count-ignored": Mutant(
        MODEL,
        "vocab_size=self.config.vocab_size, **kwargs)",
        "vocab_size=self.config.vocab_size)",
        f"{TRAINING}::TestLoss::test_is_the_summed_cross_entropy_over_the_item_count_F02",
    ),
    "router-weights-as-they-are": Mutant(
        "modeling/moe_hysparse.py",
        "if self.norm_topk_prob:",
        "if False:",
        "tests/models/test_moe.py::TestMeaning::test_equals_the_loops_in_float64",
    ),
    "shared-expert-without-gate": Mutant(
        "modeling/moe_hysparse.py",
        "torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)",
        "self.shared_expert(tokens)",
        "tests/models/test_moe.py::TestMeaning::test_equals_the_loops_in_float64",
    ),
    "balance-counts-padding": Mutant(
        "modeling/moe_hysparse.py",
        "attention_mask = attention_mask[:, -q_len:]",
        "attention_mask = None",
        "tests/models/test_moe.py::TestModel::test_balance_counts_no_padding",
    ),
    "balance-without-gradient": Mutant(
        "modeling/decoder_hysparse.py",
        "return hidden_states, *given, router_logits",
        "return hidden_states, *given, router_logits if router_logits is None else router_logits.detach()",
        "tests/models/test_moe.py::TestAgainstTheLibrary::test_loss_with_balance_and_its_gradients",
    ),
    "classifier-reads-the-last-slot": Mutant(
        "modeling/inputs_hysparse.py",
        "slots = slots * layout.visible[:, -q_len:]",
        "pass",
        "tests/models/test_classification.py::TestPooling::test_reads_each_rows_last_visible_token",
    ),
    "classifier-loss-not-divided-by-steps": Mutant(
        MODEL,
        "accepts_loss_kwargs = False",
        "accepts_loss_kwargs = True",
        "tests/models/test_classification.py::TestTraining::test_accumulated_steps_equal_one_large_step",
    ),
    "gate-and-up-of-fused-experts-swapped": Mutant(
        "conversion/key_map.py",
        '("gate_proj", "up_proj")',
        '("up_proj", "gate_proj")',
        "tests/convert/test_experts.py::test_the_fit_is_the_same_in_both_layouts",
    ),
    "gates-start-anywhere": Mutant(
        MODEL,
        "isinstance(module, (HySparseAttention, HySparseGate))",
        "isinstance(module, HySparseAttention)",
        "tests/models/test_loading.py::TestInitialisation::test_building_initialises_gates_and_sinks_to_zero",
    ),
    "gates-for-the-heads-of-all-ranks": Mutant(
        DECODER,
        "unflatten(-1, (output.shape[-2], -1))",
        "unflatten(-1, (self.num_heads, -1))",
        PARALLEL,
    ),
    "training-step-makes-a-cache": Mutant(
        MODEL,
        "return False if use_cache is None and labels is not None and self.training else use_cache",
        "return use_cache",
        f"{CHECKPOINTING}::TestCheckpointing::test_wrapped_layers_are_replayed_without_a_cache_F05",
    ),
    "layers-may-be-split": Mutant(
        MODEL,
        '_no_split_modules = ["HySparseDecoderLayer"]',
        "_no_split_modules = []",
        f"{DEVICES}::test_an_automatic_map_never_splits_a_layer_E12",
    ),
    "part-of-the-layout-stays-on-its-device": Mutant(
        ROWS,
        'names = ("positions", "order", "place", ',
        'names = ("positions", "order", ',
        f"{DEVICES}::TestDispatch::test_all_that_a_layer_reads_follows_it_B04",
    ),
    "norm-gradients-of-one-rank": Mutant(
        CONFIG,
        '    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",\n',
        "",
        PARALLEL,
    ),
    "host-read-in-masked-forward": Mutant(
        ROWS,
        "if q_len > 1 else None",
        "if q_len > 1 and bool(visible.any()) else None",
        f"{FORWARD}::TestNoHostSynchronisation::test_masked_forward_and_decode_step_D09",
    ),
    "padding-keeps-its-columns": Mutant(
        ROWS,
        "order = torch.argsort((~new).long(), dim=-1, stable=True) if q_len > 1 else None",
        "order = None",
        f"{FORWARD}::TestExtraOutputs::test_maps_and_indices_of_padded_rows_equal_those_alone",
    ),
    # The cache.
    "stale-rows-after-a-reorder-in-place": Mutant(
        FIXED_CACHE,
        "refill(buffer, change(buffer)) for buffer",
        "(change(buffer), buffer)[1] for buffer",
        f"{FIXED}::test_static_beams_equal_growing_beams",
    ),
    "counts-stay-when-rows-move": Mutant(
        WHOLE_CACHE,
        "self._transform_rest(lambda states: states.index_select(0, beam_idx.to(states.device)))",
        "pass",
        ALGEBRA,
    ),
    "window-of-the-cache-minus-one": Mutant(
        CACHE,
        "seen = min(self._past(layout), self.sliding_window - 1)",
        "seen = min(self._past(layout), self.sliding_window - 2)",
        f"{FIXED}::test_A10_A11_around_the_window",
    ),
    "ring-of-one-column-less": Mutant(
        CACHE,
        "self.kept = sliding_window + slack",
        "self.kept = sliding_window + slack - 1",
        "tests/models/test_cache_bytes.py::test_used_bytes_equal_the_formula[default-38-plain]",
    ),
    "crop-of-the-first-layer-alone": Mutant(
        WHOLE_CACHE,
        "for layer, count in filled:\n            layer.crop(",
        "for layer, count in filled[:1]:\n            layer.crop(",
        f"{CACHE_TESTS}::test_crop_twice_before_the_next_token",
    ),
    "crop-refused-halfway": Mutant(
        WHOLE_CACHE,
        "for layer, count in filled:\n                layer.check_crop(",
        "for layer, count in filled[:1]:\n                layer.check_crop(",
        f"{CACHE_TESTS}::test_crop_past_the_slack_is_an_error_that_loses_nothing",
    ),
    "padding-written-into-the-ring": Mutant(
        CACHE_COLUMNS,
        "source = ring_positions(start + new_counts, size)",
        "source = ring_positions(start + q_len, size)",
        f"{CACHE_TESTS}::test_padding_longer_than_the_ring_leaves_a_short_rows_window",
    ),
    "hidden-token-of-a-step-not-counted": Mutant(
        WHOLE_CACHE,
        "written = layout.past_counts + layout.new_counts.clamp(min=1)",
        "written = layout.past_counts + layout.new_counts",
        f"{CACHE_TESTS}::test_a_hidden_token_of_a_single_step_takes_one_column_of_the_slack",
    ),
    "prompt-attends-to-all-the-room": Mutant(
        FIXED_CACHE,
        "return (key_states, value_states) if start is None else (self.keys, self.values)",
        "return self.keys, self.values",
        f"{FIXED}::test_A10_A11_around_the_window",
    ),
    "A28-fetches-the-following-layer": Mutant(
        WHOLE_CACHE,
        "next((i for i in order if isinstance(self.layers[i], GrowingLayer)), None)",
        "order[0] if isinstance(self.layers[order[0]], GrowingLayer) else None",
        "tests/models/test_offloaded_cache.py::test_each_turn_fetches_the_next_full_layer_and_sends_its_own_away",
    ),
    # The most valuable faults seen elsewhere, by the ids of their tests.
    "A01-shared-tensors-kept-on-the-model": Mutant(
        MODEL,
        "shared = tuple(given)",
        'shared = self.__dict__.setdefault(f"kept {tuple(given[2].shape)}", tuple(given))',
        f"{GENERATE}::test_A01_calls_leave_nothing_on_the_model",
    ),
    "A02-other-keys-than-the-mask-size-announces": Mutant(
        CACHE,
        "return seen + query_length, self.cumulative_length - seen",
        "return self.cumulative_length + query_length, 0",
        f"{CACHE_TESTS}::test_A02_single_tokens_without_a_crop_between_them",
    ),
    "A06-window-layers-not-reordered": Mutant(
        CACHE,
        "self._transform(lambda states: states.index_select(0, beam_idx.to(states.device)))",
        "self._transform(lambda states: states if self.is_sliding else states.index_select(0, beam_idx))",
        "tests/models/test_decoding.py::test_A06_beams_equal_beams_without_a_cache",
    ),
    "A07-several-tokens-start-anew": Mutant(
        INPUTS,
        "layout = cache.layout_without_mask(q_len, device)",
        "layout = layout_of_length(cache.get_seq_length() if q_len == 1 else 0, q_len, device)",
        f"{LAYOUTS}::test_A07_several_new_tokens_on_a_filled_cache",
    ),
    "A17-empty-rows-subtract-infinities": Mutant(
        REFERENCE,
        "logits.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)",
        "logits.detach().amax(-1, keepdim=True)",
        f"{FULL}::TestRows::test_padding_queries_see_nothing_A17",
    ),
    "A25-older-cache-name-ignored": Mutant(
        "modeling/compat_transformers.py",
        'kwargs["cache"] = legacy',
        'kwargs["cache"] = None',
        f"{FORWARD}::TestCacheArgument::test_both_names_are_read_and_extended_A25",
    ),
    "B01-without-a-cache-nothing-new-is-shared": Mutant(
        MODEL,
        "shared = tuple(given)",
        "shared = tuple(given) if cache is not None or shared[0] is None else shared",
        f"{FORWARD}::TestSharing::test_use_cache_changes_nothing_B01",
    ),
    "B02-checkpointing-cuts-the-shared-tensors": Mutant(
        MODEL,
        "shared = tuple(given)",
        "shared = (given[0].detach(), *given[1:]) if checkpointing_is_active(self) else tuple(given)",
        f"{CHECKPOINTING}::TestCheckpointing::test_loss_and_gradients_are_those_without_B02",
    ),
    "B03-sharding-cuts-the-shared-tensors": Mutant(
        MODEL,
        "shared = tuple(given)",
        'shared = (given[0].detach(), *given[1:]) if "FSDP" in type(layer).__name__ else tuple(given)',
        "tests/models/test_distributed.py::test_fully_sharded_gradients_survive_rebuilt_arguments_B03",
    ),
    "B08-every-layer-chooses-for-itself": Mutant(
        DECODER,
        "if not self.config.share_oracle:",
        "if True:",
        f"{FORWARD}::TestSharing::test_what_the_donor_gives_reaches_the_logits_B08",
    ),
    "C04-index-rows-as-short-as-the-context": Mutant(
        SELECTION,
        "return torch.nn.functional.pad(ids, (0, missing), value=-1) if missing > 0 else ids",
        "return ids",
        f"{FULL}::TestSelection::test_budget_beyond_the_blocks_selects_every_visible_one_C04",
    ),
    "D04-triton-imported-without-a-guard": Mutant(
        "modeling/attention_hysparse.py",
        "import torch\n",
        "import torch\nimport triton  # noqa: F401\n",
        f"{LOADING}::TestShippedFiles::test_need_no_package_that_is_absent_D04",
    ),
    "E01-initialised-in-place-after-loading": Mutant(
        MODEL,
        "init.zeros_(parameter)",
        "parameter.zero_()",
        f"{LOADING}::TestInitialisation::test_a_missing_parameter_resets_no_other_of_its_module_E01",
    ),
    "F01-item-count-never-reaches-the-loss": Mutant(
        MODEL,
        "vocab_size=self.config.vocab_size, **kwargs)",
        "vocab_size=self.config.vocab_size)",
        "tests/models/test_trainer.py::TestTrainer::test_accumulation_gives_the_gradients_of_one_batch_F01",
    ),
    "F12-documents-run-together": Mutant(
        ROWS,
        "torch.where(position_ids[:, 1:] <= position_ids[:, :-1], columns[1:], 0)",
        "torch.zeros_like(position_ids[:, 1:])",
        "tests/models/test_packing.py::test_F12_packed_documents_give_logits_and_blocks_of_the_document_alone",
    ),
    "H04-bias-without-a-row-in-the-map": Mutant(
        "conversion/key_map.py",
        '_kept("model.layers.{layer}.self_attn.v_proj.{part}"),',
        '_kept("model.layers.{layer}.self_attn.v_proj.weight"),\n'
        '    Rule("model.layers.{layer}.self_attn.v_proj.bias", None, reason="unknown"),',
        "tests/convert/test_parity.py::test_dense_switch_equals_the_source[H04-qwen2]",
    ),
    # The second generation.
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
        DECODER2, "        if bridged_states is not None:", "        if False:", LOGITS2
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
        MODEL2,
        "part[:, slots.to(part.device)]",
        "part[:, : len(slots)]",
        f"{EARLY_EXIT}::test_logits_and_cache_are_those_of_the_full_pass[source_rope-last]",
    ),
    "early-exit-counts-slots": Mutant(
        ROWS,
        "place = slots[None] if self.place is None else self.place[:, slots]",
        "place = slots[None]",
        f"{EARLY_EXIT}::test_padded_rows",
    ),
    "B10-rows-left-out-although-asked-for": Mutant(
        MODEL2,
        "if has_labels or self.needs_all_rows(kwargs):",
        "if False:",
        f"{EARLY_EXIT}::TestAllRowsRun::test_where_a_row_per_token_is_asked_for_B10",
    ),
    "no-keys-where-no-row-runs": Mutant(
        DECODER2,
        "        if shared[3] is not None:",
        "        if False:",
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


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the file's text with the fault in it.

    Raises:
        ValueError: the text to replace does not occur exactly once, so the mutant must follow the code.
    """
    text = (root / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {text.count(mutant.old)} times {mutant.old!r}; adapt the mutant")
    return text.replace(mutant.old, mutant.new)


class Scratch:
    """A copy of packages and tests in which Python finds `hysparse_hf` before the installed one."""

    def __init__(self, folder: Path):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "hysparse_hf", folder / "hysparse_hf", ignore=ignored)
        for name in ("modeling", "conversion"):
            shutil.copytree(ROOT / name, folder / "hysparse_hf" / name, ignore=ignored)
            (folder / name).symlink_to(folder / "hysparse_hf" / name)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
        shutil.copy(ROOT / "setup.cfg", folder)

    def run(self, *tests: str) -> subprocess.CompletedProcess:
        """Run tests on what the copy holds now."""
        # No bytecode: a file changed twice within one second would be taken for unchanged.
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=600)

    def catches(self, mutant: Mutant) -> bool:
        """Whether the mutant's test fails on it, and not for want of a test or an importable file."""
        path = self.folder / mutant.file
        original = path.read_text()
        path.write_text(mutated(mutant, self.folder))
        try:
            done = self.run(mutant.test)
        finally:
            path.write_text(original)
        return done.returncode == 1 and " failed" in done.stdout and "SyntaxError" not in done.stdout


def main(names: list[str]) -> int:
    """Run the named mutants, or all, and print what became of each."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(Path(folder))
        sound = scratch.run(*sorted({MUTANTS[name].test for name in names or MUTANTS}))
        if sound.returncode:
            print(sound.stdout, "the tests fail without any mutant", sep="\n")
            return len(MUTANTS)
        for name in names or MUTANTS:
            caught = scratch.catches(MUTANTS[name])
            print(f"{'caught' if caught else 'NOT CAUGHT':12}{name:44}{MUTANTS[name].test}", flush=True)
            missed += [] if caught else [name]
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
