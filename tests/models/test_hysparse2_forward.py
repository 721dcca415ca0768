"""One forward pass of the second generation: against loops written from the specification; who reads whose keys."""

import naive_model2
import pytest
import torch
from models.tiny import assert_same_logits, draw_ids
from models.tiny2 import BASELINES, SWITCHES, tiny_model


ROW = draw_ids(1, 40)


class TestAgainstLoops:
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_logits_maps_and_indices(self, switches):
        model = tiny_model(torch.float64, **SWITCHES[switches])
        with torch.no_grad():
            expected = naive_model2.forward(model, ROW)
            assert_same_logits(model(ROW, use_cache=False).logits, expected.logits)
            output = model(ROW, use_cache=False, output_attentions=True, output_selected_indices=True)
        assert_same_logits(output.logits, expected.logits)
        for weights, layer in zip(output.attentions, range(model.config.num_hidden_layers), strict=True):
            torch.testing.assert_close(weights, expected.maps[layer], rtol=0, atol=1e-10)
        full = [layer for layer, kind in enumerate(model.config.layer_plan) if kind == "full"]
        for indices, layer in zip(output.selected_indices, full, strict=True):
            assert torch.equal(indices, expected.indices[layer])

    @pytest.mark.parametrize("baseline", BASELINES)
    def test_baselines(self, baseline):
        model = tiny_model(torch.float64, baseline=baseline)
        with torch.no_grad():
            assert_same_logits(model(ROW, use_cache=False).logits, naive_model2.forward(model, ROW).logits)

    @pytest.mark.parametrize("selection", ["token", "block", "all"])
    def test_without_sinks_and_gates(self, selection):
        model = tiny_model(
            torch.float64, gate_granularity="none", attention_sink=False, selection=selection, oracle_budget=8
        )
        assert not any("self_attn.gate_" in n or "sink_" in n for n, _ in model.named_parameters())
        with torch.no_grad():
            assert_same_logits(model(ROW, use_cache=False).logits, naive_model2.forward(model, ROW).logits)

    def test_all_with_a_sink(self):
        model = tiny_model(torch.float64, selection="all")
        with torch.no_grad():
            assert_same_logits(model(ROW, use_cache=False).logits, naive_model2.forward(model, ROW).logits)
