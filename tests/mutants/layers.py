"""Faults of what surrounds attention in a layer."""

from .entry import Mutant


LAYERS = "modeling/layers_hysparse.py"
NORM = "modeling/triton_rms_norm.py"
ROTARY = "modeling/triton_rotary.py"
SWIGLU = "modeling/triton_swiglu.py"

MUTANTS = {
    "norm-kernel-rounds-behind-the-weight": Mutant(
        NORM,
        "out = normed.to(states.dtype).to(tl.float32) * ",
        "out = normed * ",
        "tests/ops/test_triton_rms_norm.py::test_values_are_rounded_before_the_weight",
    ),
    "norm-kernel-gradient-without-its-mean": Mutant(
        NORM,
        "factor * (grad - normed * mean)",
        "factor * grad",
        "tests/ops/test_triton_rms_norm.py::test_shapes",
    ),
    "rotary-kernel-gradient-turned-forward": Mutant(
        ROTARY,
        "not ctx.opposite)",
        "ctx.opposite)",
        "tests/ops/test_triton_rotary.py::test_what_is_turned_back_is_what_was",
    ),
    "rotary-kernel-gradient-by-the-other-sines": Mutant(
        ROTARY,
        "_product(second, sin_second)",
        "_product(second, sin_first)",
        "tests/ops/test_triton_rotary.py::test_halves_that_turn_by_different_angles",
    ),
    "swiglu-kernel-slope-of-the-sigmoid-alone": Mutant(
        SWIGLU,
        "grad * up * share * (1 + gate * (1 - share))",
        "grad * up * share",
        "tests/ops/test_triton_swiglu.py::test_shapes",
    ),
    "eager-norm-on-the-kernels": Mutant(
        LAYERS,
        "rms_norm(hidden_states, self.weight, self.eps, backend=backend_of(self.config))",
        "rms_norm(hidden_states, self.weight, self.eps)",
        "tests/models/test_backends.py::test_the_reference_can_be_forced_D07",
    ),
}
