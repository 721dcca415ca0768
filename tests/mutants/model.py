"""Faults of the first generation's layers, of its training, and of its place on devices."""

from .entry import CACHE, CONFIG, DECODER, MODEL, PROMPT_END, ROWS, Mutant


FORWARD = "tests/models/test_forward.py"
LOGITS = f"{FORWARD}::TestAgainstLoops::test_logits[default]"
TRAINING = "tests/models/test_training.py"
CHECKPOINTING = "tests/models/test_checkpointing.py"
DEVICES = "tests/models/test_devices.py"
ENDING = "tests/models/test_prompt_end.py"
PARALLEL = "tests/models/test_distributed.py::TestTensorParallel::test_equals_one_process"

MUTANTS = {
    "prompt-end-with-a-window-one-token-short": Mutant(
        PROMPT_END,
        "length + config.sliding_window - 1, ring",
        "length + config.sliding_window - 2, ring",
        f"{ENDING}::test_logits_and_cache_are_those_of_the_full_pass[default-1]",
    ),
    "prompt-end-without-the-tokens-kept-for-undoing": Mutant(
        PROMPT_END,
        "cache.layers[index].kept",
        "config.sliding_window",
        f"{ENDING}::test_chunks_turns_and_undone_tokens[plain-growing]",
    ),
    "prompt-end-of-windows-that-record": Mutant(
        PROMPT_END,
        "cache is not None and cache.layers[index].record_past",
        "False",
        f"{ENDING}::TestAllTokensRun::test_where_windows_record_what_may_be_undone",
    ),
    "prompt-end-of-slots-in-place-of-tokens": Mutant(
        ROWS,
        "begin = (counts - count).clamp(min=0)",
        "begin = torch.full_like(counts, skipped)",
        f"{ENDING}::test_padded_rows[default-right-growing]",
    ),
    "prompt-end-of-rows-that-skip-nothing-behind-a-cache": Mutant(
        CACHE,
        "seen = min(self._past(layout),",
        "seen = 0 if skipped else min(self._past(layout),",
        f"{ENDING}::test_rows_of_few_tokens_in_a_later_chunk[default-left-growing]",
    ),
    "prompt-end-that-windows-do-not-count": Mutant(
        CACHE,
        "self._advance(skipped + key_states.shape[2], masked)",
        "self._advance(key_states.shape[2], masked)",
        f"{ENDING}::test_logits_and_cache_are_those_of_the_full_pass[default-1]",
    ),
    "prompt-end-where-documents-are-packed": Mutant(
        PROMPT_END,
        "rows.first_key is not None or ",
        "",
        f"{ENDING}::TestAllTokensRun::test_where_more_is_asked_for_B10[documents]",
    ),
    "B10-outputs-of-the-decoder-alone-without-rows": Mutant(
        MODEL,
        "and 0 < logits_to_keep < q_len and not self.needs_all_rows(asked):",
        "and 0 < logits_to_keep < q_len:",
        f"{ENDING}::TestAllTokensRun::test_where_the_decoder_alone_is_asked_B10[output_selected_indices]",
    ),
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
        'has_own_window = branch == "own" and self.config.share_full_kv',
        "has_own_window = False",
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
        'shared_query = own_query if self.turns_as_full else self._turned(query, rotations["full"], layout)',
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
        "                **dict(zip((f'shared_{part}' for part in 'key value indices layouts'.split()), shared)),\n",
        f"{CHECKPOINTING}::TestCheckpointing::test_tensors_with_gradients_are_positional",
    ),
    "maps-without-gates": Mutant(
        DECODER,
        "weights * gate.mean(-1, keepdim=True)",
        "weights",
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
    "gates-start-anywhere": Mutant(
        MODEL,
        "isinstance(module, (HySparseAttention, HySparseGate))",
        "isinstance(module, HySparseAttention)",
        "tests/models/test_initialisation.py::TestInitialisation::test_building_initialises_gates_and_sinks_to_zero",
    ),
    "gates-for-the-heads-of-all-ranks": Mutant(
        DECODER,
        "unflatten(-1, (-1, width))",
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
        f"{DEVICES}::TestDispatch::test_all_that_a_layer_reads_follows_it_B04_B05",
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
}
