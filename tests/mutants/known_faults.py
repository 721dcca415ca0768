"""Faults of the bold rows of docs/known_faults.md, by their ids; row B10 is among those of the second generation."""

from .entry import CACHE, DECODER, INPUTS, MODEL, REFERENCE, ROWS, SELECTION, Mutant


FULL = "tests/ops/test_full_attention.py"
FORWARD = "tests/models/test_forward.py"
GENERATE = "tests/models/test_generate_calls.py"
CACHE_TESTS = "tests/models/test_cache.py"
LAYOUTS = "tests/models/test_layouts.py"
REMOTE = "tests/models/test_remote_code.py"
CHECKPOINTING = "tests/models/test_checkpointing.py"

MUTANTS = {
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
        f"{REMOTE}::TestShippedFiles::test_need_no_package_that_is_absent_D04",
    ),
    "E01-initialised-in-place-after-loading": Mutant(
        MODEL,
        "init.zeros_(parameter)",
        "parameter.zero_()",
        "tests/models/test_initialisation.py::TestInitialisation::test_a_missing_parameter_resets_no_other_of_its_module_E01",
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
}
