"""The library's own tests of a causal language model, on small models of both generations.

Run by `test_library_suite.py`, which makes the library's tests importable as `tests`.
"""

import sys
import unittest
from pathlib import Path

import torch
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

import hysparse_hf


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import tiny, tiny2  # noqa: E402 - after the path to it


# By these tables the tests know what a class is for.
for model_type, prefix in (("hysparse", "HySparse"), ("hysparse2", "HySparse2")):
    MODEL_MAPPING_NAMES[model_type] = f"{prefix}Model"
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = f"{prefix}ForCausalLM"

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


class Tester:
    """What the library's tests ask: sizes, a configuration and inputs."""

    is_training = True
    batch_size, seq_length = 3, 24

    def __init__(self, make_config):
        self.make_config = make_config
        config = make_config()
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            setattr(self, name, getattr(config, name))

    def get_config(self):
        return self.make_config()

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(2, self.vocab_size, (self.batch_size, self.seq_length))
        return self.make_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Of a model whose class may have experts, these take for granted that it has.
ABOUT_EXPERTS = (
    "test_eager_matches_batched_and_grouped_inference",
    "test_output_router_logits_from_config",
    "test_reverse_loading_mapping",
)


class Suite(ModelTesterMixin):
    """The library's tests; a subclass says of which classes and configuration."""

    all_generative_model_classes = ()
    classes: tuple[type, ...]
    tiny_config: staticmethod
    settings: dict = {}

    def setUp(self):
        if not self.settings and self._testMethodName.startswith(ABOUT_EXPERTS):
            self.skipTest("there are no experts")
        self.all_model_classes = self.classes
        self.model_tester = Tester(lambda: self.tiny_config(initializer_range=0.02, **self.settings))
        self.config_tester = ConfigTester(self, config_class=self.classes[0].config_class, hidden_size=64)

    def test_config(self):
        self.config_tester.run_common_tests()

    @unittest.skip("a layer of each kind needs more layers than two")
    def test_num_layers_is_small(self):
        pass

    @unittest.skip("there is one rotary embedding per kind of layer, or none")
    def test_model_rope_scaling_frequencies(self):
        pass

    @unittest.skip("a gated layer's map is the product of map and gate, which the output does not come from")
    def test_retain_grad_hidden_states_attentions(self):
        pass


class FirstGeneration(Suite, unittest.TestCase):
    classes = (hysparse_hf.HySparseModel, hysparse_hf.HySparseForCausalLM)
    tiny_config = staticmethod(tiny.tiny_config)


class FirstGenerationWithExperts(FirstGeneration):
    settings = EXPERTS


class SecondGeneration(Suite, unittest.TestCase):
    classes = (hysparse_hf.HySparse2Model, hysparse_hf.HySparse2ForCausalLM)
    tiny_config = staticmethod(tiny2.tiny_config)


class SecondGenerationWithExperts(SecondGeneration):
    settings = EXPERTS
