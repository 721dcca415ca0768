"""One forward pass of the second generation: against loops written from the specification; who reads whose keys."""

import naive_model2
import pytest
import torch
from models.test_forward import HostReads
from models.test_sharing import layers_that_read
from models.tiny import assert_same_logits, changed_layer_output, draw_ids, padded_mask
from models.tiny2 import BASELINES, SWITCHES, over_models, tiny_model

from hysparse_hf.modeling.compat_transformers import cache_of


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

    @pytest.mark.parametrize("selection", ["token", "block"])
    def test_own_keys_of_selection_and_window_count_once(self, selection):
        branch = {"recent_window": "branch", "window_branch": "merged_own", "share_full_kv": False}
        model = tiny_model(torch.float64, selection=selection, oracle_budget=8, **branch)
        with torch.no_grad():
            assert_same_logits(model(ROW, use_cache=False).logits, naive_model2.forward(model, ROW).logits)

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


class TestSharing:
    @pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
    @pytest.mark.parametrize(
        ("switch", "readers"),
        [
            ("default", [[0], [1], [2], [3, 4, 5], [], []]),
            ("two_bridges", [[0], [1], [2], [3, 4], [], [5, 6], []]),
            # The output of layer 2 is what layer 3 projects.
            ("yoco", [[0], [1], [2, 3, 4, 5], [3, 4, 5], [], []]),
        ],
    )
    def test_weights_reach_the_layers_of_their_group_alone_B12(self, switch, readers, projection):
        model = tiny_model(**SWITCHES.get(switch, {"baseline": switch}))
        read = [
            layers_that_read(model, ROW, getattr(layer.self_attn, projection).weight)
            if hasattr(layer.self_attn, projection)
            else []
            for layer in model.model.layers
        ]
        assert read == readers

    @pytest.mark.parametrize(
        ("switch", "source", "readers"),
        [
            pytest.param("default", 1, [3], id="default"),
            pytest.param("residual", 1, [3], id="residual"),
            pytest.param("self_output", "self_output", [3], id="self-output"),
            pytest.param("own_kv", 1, [3, 4, 5], id="own-kv"),
            pytest.param("two_bridges", 2, [3], id="first-of-two"),
            pytest.param("two_bridges", 0, [5], id="second-of-two"),
        ],
    )
    def test_states_of_the_self_decoder_reach_the_layers_of_the_map_B12(self, switch, source, readers):
        """The very tensors: the source's normed input, its input, or the normed output of the half."""
        model = tiny_model(**SWITCHES[switch])
        normed, inputs, received = {}, {}, {}
        for number, layer in enumerate(model.model.layers):
            layer.input_layernorm.register_forward_hook(lambda _, args, out, n=number: normed.update({n: out}))
            layer.register_forward_pre_hook(lambda _, args, n=number: inputs.update({n: args[0]}))
            layer.register_forward_pre_hook(lambda _, args, n=number: received.update({n: args[5]}))
        if source == "self_output":
            model.model.bridge_norm.register_forward_hook(lambda _, args, out: normed.update({source: out}))
        model(ROW, use_cache=False)
        offered = inputs if switch in ("residual", "own_kv") else normed
        assert [number for number, states in received.items() if states is offered[source]] == readers

    def test_sparse_layers_receive_the_preceding_full_layers_tensors_B08(self):
        model = tiny_model(**SWITCHES["two_bridges"])
        given, received = {}, {}
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda _, args, output, n=number: given.update({n: output[1:5]}))
            layer.register_forward_pre_hook(lambda _, args, n=number: received.update({n: args[1:5]}))
        output = model(ROW, output_selected_indices=True)
        for number, donor in enumerate(model.config.donor_plan):
            if donor is not None:
                assert all(one is other for one, other in zip(received[number], given[donor], strict=True))
        assert torch.equal(given[3][2], output.selected_indices[2])
        assert torch.equal(given[5][2], output.selected_indices[3])

    def test_other_indices_give_other_logits_B08(self):
        model = tiny_model()
        with torch.no_grad():
            before = model(ROW).logits
            with changed_layer_output(model, 3, lambda parts: parts.__setitem__(3, parts[3].roll(1, dims=2))):
                after = model(ROW).logits
        assert (before - after).abs().max() > 1e-2

    def test_a_budget_that_covers_everything_is_reading_everything_B08(self):
        settings = {"oracle_budget": 40, "attention_sink": False}
        selecting, reading = (tiny_model(torch.float64, selection=name, **settings) for name in ("token", "all"))
        with torch.no_grad():
            assert_same_logits(selecting(ROW).logits, reading(ROW).logits)

    def test_tokens_are_the_best_outside_the_window_by_the_layers_own_map_B09(self):
        model = tiny_model(torch.float64)
        row = draw_ids(1, 96)
        with torch.no_grad():
            output = model(row, use_cache=False, output_attentions=True, output_selected_indices=True)
        weights = output.attentions[3].unflatten(1, (2, 2)).amax(2)[0]
        for query in range(96):
            open_tokens = max(query - 5, 0)
            best = weights[:, query, :open_tokens].topk(min(5, open_tokens)).indices.sort().values
            chosen = output.selected_indices[1][0, :, query]
            assert chosen[:, : best.shape[1]].tolist() == best.tolist()
            assert (chosen[:, best.shape[1] :] == -1).all()

    def test_no_bridge_is_keys_of_the_layers_own_input(self):
        """The control experiment differs from the complete model by the source of these keys alone."""
        bridged, plain = tiny_model(torch.float64), tiny_model(torch.float64, bridge=False)
        plain.load_state_dict(bridged.state_dict())
        own = {}
        for number, layer in enumerate(plain.model.layers):
            layer.input_layernorm.register_forward_hook(lambda _, args, out, n=number: own.update({n: out}))
        with torch.no_grad():
            expected = plain(ROW, use_cache=False).logits
            assert (bridged(ROW, use_cache=False).logits - expected).abs().max() > 1e-2
            bridged.model.layers[3].register_forward_pre_hook(lambda _, args: (*args[:-1], own[3]))
            assert_same_logits(bridged(ROW, use_cache=False).logits, expected)


class TestImplementations:
    @pytest.mark.parametrize("switch", ["default", "block", "branch", "own_kv"])
    def test_eager_and_default_agree(self, switch):
        model = tiny_model(**SWITCHES[switch])
        ids = draw_ids(2, 40)
        with torch.no_grad():
            default = model(ids).logits
            model.set_attn_implementation("eager")
            assert_same_logits(model(ids).logits, default)

    @pytest.mark.slow
    @pytest.mark.parametrize("kept", [0, 1, torch.tensor([3, 20])], ids=str)
    def test_compiles_into_one_graph_D09(self, kept):
        model = tiny_model()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            logits = compiled(ROW, use_cache=False, logits_to_keep=kept).logits
            assert_same_logits(logits, model(ROW, use_cache=False, logits_to_keep=kept).logits)

    @over_models(SWITCHES)
    def test_nothing_waits_for_the_device_D09(self, switch):
        model = tiny_model(**SWITCHES[switch])
        mask = padded_mask("holes", [23, 40], 40)
        longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        ids = draw_ids(2, 41)
        with torch.no_grad(), HostReads() as reads:
            for kept in (0, 1, torch.tensor([3, 20])):
                model(ROW, use_cache=False, logits_to_keep=kept)
                cache = cache_of(model(ids[:, :40], attention_mask=mask, use_cache=True, logits_to_keep=kept))
                model(ids[:, 40:], attention_mask=longer, cache=cache, logits_to_keep=1)
        assert reads.seen == []

    def test_tuple_output(self):
        model = tiny_model()
        assert torch.equal(model(ROW, return_dict=False, logits_to_keep=2)[0], model(ROW, logits_to_keep=2).logits)
