"""Faults of the cache."""

from .entry import CACHE, CACHE_COLUMNS, FIXED_CACHE, WHOLE_CACHE, Mutant


ALGEBRA = "tests/models/test_cache_algebra.py::test_operations_in_any_order"
FIXED = "tests/models/test_preallocated_cache.py"
CACHE_TESTS = "tests/models/test_cache.py"

MUTANTS = {
    "stale-rows-after-a-reorder-in-place": Mutant(
        FIXED_CACHE,
        "refill(buffer, change(buffer)) for buffer",
        "(change(buffer), buffer)[1] for buffer",
        "tests/models/test_static_generation.py::test_static_beams_equal_growing_beams",
    ),
    "counts-stay-when-rows-move": Mutant(
        WHOLE_CACHE,
        "self._transform_rest(lambda states: states.index_select(0, beam_idx.to(states.device)))",
        "pass",
        ALGEBRA,
    ),
    "window-of-the-cache-minus-one": Mutant(
        CACHE,
        "min(self._past(layout), self.sliding_window - 1)",
        "min(self._past(layout), self.sliding_window - 2)",
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
        "modeling/cache_offload_hysparse.py",
        "next((i for i in order if isinstance(self.layers[i], GrowingLayer)), None)",
        "order[0] if isinstance(self.layers[order[0]], GrowingLayer) else None",
        "tests/models/test_offloaded_cache.py::test_each_turn_fetches_the_next_full_layer_and_sends_its_own_away",
    ),
}
