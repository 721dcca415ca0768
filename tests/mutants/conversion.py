"""Faults of the conversion."""

from .entry import Mutant


FIT = "tests/convert/test_hysparse2_fit.py"
VERIFY = "tests/convert/test_hysparse2_verify.py"
PLAN = "tests/convert/test_hysparse2_plan.py"

MUTANTS = {
    "gate-and-up-of-fused-experts-swapped": Mutant(
        "conversion/key_map.py",
        '("gate_proj", "up_proj")',
        '("up_proj", "gate_proj")',
        "tests/convert/test_experts.py::test_the_fit_is_the_same_in_both_layouts",
    ),
    "bridged-keys-fitted-to-what-they-are-made-of": Mutant(
        "conversion/cross_fit.py",
        "            target = own @ projection.weight.T\n",
        "            target = read @ projection.weight.T\n",
        f"{FIT}::test_bridged_keys_are_a_ridge_regression_on_what_the_last_self_layer_reads",
    ),
    "joint-values-that-tell-least": Mutant(
        "conversion/cross_fit.py",
        "[1][:, -dim:]",
        "[1][:, :dim]",
        f"{FIT}::test_joint_values_tell_most_of_all_layers_values",
    ),
    "bridged-values-of-the-full-layer-alone": Mutant(
        "conversion/bridge_fit.py",
        "self.offered[source], self.values[index])",
        "self.offered[source])",
        f"{FIT}::test_bridged_values_are_joint_ones_of_the_layers_that_read_them",
    ),
    "queries-turned-the-wrong-way-in-the-fit": Mutant(
        "conversion/query_fit.py",
        "(cos, -sin)",
        "(cos, sin)",
        f"{FIT}::test_queries_solve_the_weighted_least_squares",
    ),
    "queries-free-where-the-source-does-not-attend": Mutant(
        "conversion/query_fit.py",
        "(attention + visible / visible.sum(1, keepdim=True)) / 2",
        "attention",
        f"{FIT}::test_queries_solve_the_weighted_least_squares",
    ),
    "rung-of-shared-keys-has-the-bridge": Mutant(
        "conversion/ladder.py",
        'Rung(3, "keys and values of the full layer", {"bridge": False}, fitted="self")',
        'Rung(3, "keys and values of the full layer", {}, fitted="self")',
        f"{VERIFY}::test_rungs_are_what_they_say",
    ),
    "bridge-map-not-compared-with-provenance": Mutant(
        "conversion/bridge_faults.py",
        "if not is_normed or found.get(layer) != source",
        "if not is_normed",
        f"{VERIFY}::test_bridge_from_the_wrong_layer_is_named",
    ),
    "bridged-states-not-compared": Mutant(
        "conversion/bridge_faults.py",
        "if not torch.equal(given[name], given[other])",
        "if given[name].shape != given[other].shape",
        f"{VERIFY}::test_code_that_bridges_from_the_wrong_layer_is_caught_without_the_table",
    ),
    "early-exit-that-computes-more-rows-passes": Mutant(
        "conversion/early_exit.py",
        'self.processed["cross"] != self.rows',
        "False",
        f"{VERIFY}::test_early_exit_that_computes_more_rows_is_a_fault",
    ),
    "damage-fitted-on-what-it-is-measured-on": Mutant(
        "conversion/damage.py",
        "self.fitted_on = len(windows)",
        "self.fitted_on = len(windows) + len(repeated)",
        "tests/convert/test_damage.py::test_windows_are_fitted_on_plain_text_alone",
    ),
    "measured-plan-of-the-self-decoder-backwards": Mutant(
        "conversion/halves_damage.py",
        "longest_run)[::-1]",
        "longest_run)",
        f"{PLAN}::test_measured_plan_is_the_cheapest_one",
    ),
}
