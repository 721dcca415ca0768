"""One forward pass: against loops written from the specification, its extra outputs, and no host synchronisation."""

import ast

import naive_model
import pytest
import torch
from models.tiny import SWITCHES, assert_same_logits, changed_layer_output, draw_ids, padded_mask, spread, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import import_rules
from hysparse_hf.modeling.compat_transformers import cache_of


ROW = draw_ids(1, 40)


class TestAgainstLoops:
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_logits(self, switches):
        model = tiny_model(torch.float64, **SWITCHES[switches])
        with torch.no_grad():
            expected = naive_model.forward(model, ROW).logits
            assert_same_logits(model(ROW, use_cache=False).logits, expected)

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_selected_indices_and_maps(self, switches):
        model = tiny_model(torch.float64, **SWITCHES[switches])
        with torch.no_grad():
            expected = naive_model.forward(model, ROW)
            output = model(ROW, use_cache=False, output_attentions=True, output_selected_indices=True)
        full = [layer for layer, kind in enumerate(model.config.layer_plan) if kind == "full"]
        assert len(output.selected_indices) == len(full)
        for indices, layer in zip(output.selected_indices, full, strict=True):
            assert indices.dtype == torch.int32
            assert torch.equal(indices, expected.indices[layer])
        assert len(output.attentions) == model.config.num_hidden_layers
        for layer, weights in enumerate(output.attentions):
            torch.testing.assert_close(weights, expected.maps[layer], rtol=0, atol=1e-10)

    def test_without_sinks_and_gates(self):
        model = tiny_model(torch.float64, gate_granularity="none", attention_sink=False)
        assert not any("gate_" in n and "self_attn" in n or "sink_" in n for n, _ in model.named_parameters())
        with torch.no_grad():
            assert_same_logits(model(ROW, use_cache=False).logits, naive_model.forward(model, ROW).logits)


class TestSharing:
    @pytest.mark.parametrize("donor", [0, 3])
    @pytest.mark.parametrize("part", ["key", "value", "indices"])
    def test_what_the_donor_gives_reaches_the_logits_B08(self, donor, part):
        model = tiny_model()
        place = {"key": 1, "value": 2, "indices": 3}[part]

        def change(parts):
            parts[place] = parts[place].roll(1, dims=2) if part == "indices" else parts[place] + 0.5

        with torch.no_grad():
            before = model(ROW, use_cache=False).logits
            with changed_layer_output(model, donor, change):
                after = model(ROW, use_cache=False).logits
        assert (before - after).abs().max() > 1e-2

    @pytest.mark.parametrize(("layer", "donor"), [(1, 0), (2, 0), (4, 3), (5, 3)])
    def test_sparse_layer_receives_the_preceding_full_layers_tensors_B12(self, layer, donor):
        model = tiny_model()
        given, received = {}, {}
        model.model.layers[donor].register_forward_hook(lambda module, args, output: given.update(parts=output[1:5]))
        model.model.layers[layer].register_forward_pre_hook(lambda module, args: received.update(parts=args[1:]))
        model(ROW, use_cache=False)
        assert len(received["parts"]) == 4
        assert all(one is other for one, other in zip(given["parts"], received["parts"], strict=True))

    def test_blocks_are_the_best_by_the_layers_own_map_B09(self):
        model = tiny_model(torch.float64)
        row = draw_ids(1, 96)
        with torch.no_grad():
            output = model(row, use_cache=False, output_attentions=True, output_selected_indices=True)
        for layer, indices in zip((0, 3), output.selected_indices, strict=True):
            scores = output.attentions[layer].unflatten(-1, (-1, 4)).amax(-1).unflatten(1, (2, 2)).amax(2)
            for query in range(96):
                best = scores[0, :, query, : query // 4 + 1].topk(min(2, query // 4 + 1)).indices.sort().values
                chosen = indices[0, :, query]
                assert chosen[:, : best.shape[1]].tolist() == best.tolist()
                assert (chosen[:, best.shape[1] :] == -1).all()

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_use_cache_changes_nothing_B01(self, switches):
        model = tiny_model(**SWITCHES[switches])
        with torch.no_grad():
            outputs = [model(ROW, labels=ROW, use_cache=use_cache) for use_cache in (True, False)]
        assert cache_of(outputs[0]) is not None
        assert cache_of(outputs[1]) is None
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(outputs[0].loss, outputs[1].loss, rtol=0, atol=1e-6)


class TestExtraOutputs:
    def test_hidden_states_have_the_librarys_form(self):
        model = tiny_model()
        output = model.model(ROW, use_cache=False, output_hidden_states=True)
        assert len(output.hidden_states) == model.config.num_hidden_layers + 1
        assert {tuple(states.shape) for states in output.hidden_states} == {(1, 40, 64)}
        assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ROW))
        assert torch.equal(output.hidden_states[-1], output.last_hidden_state)

    def test_hidden_states_are_what_each_layer_receives(self):
        model = tiny_model()
        received = []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda module, args: received.append(args[0]))
        output = model(ROW, use_cache=False, output_hidden_states=True)
        assert all(torch.equal(one, other) for one, other in zip(output.hidden_states, received, strict=False))

    def test_nothing_extra_unless_asked_for(self):
        output = tiny_model()(ROW, use_cache=False)
        assert (output.hidden_states, output.attentions, output.selected_indices) == (None, None, None)

    @pytest.mark.parametrize("branch", ["shared_kv", "none"])
    def test_map_times_values_is_the_layers_output_without_gates(self, branch):
        # With these branches a sparse layer reads one set of values, so that one product gives its output.
        model = tiny_model(torch.float64, gate_granularity="none", window_branch=branch)
        values, outputs = {}, {}

        def record(layer, module, args, output):
            if module.kind == "full":
                values[layer] = output[3]

        for number, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_hook(lambda *call, number=number: record(number, *call))
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda module, args, number=number: outputs.update({number: args[0]})
            )
        with torch.no_grad():
            maps = model(ROW, use_cache=False, output_attentions=True).attentions
        for number, donor in enumerate([0, 0, 0, 3, 3, 3]):
            product = maps[number] @ values[donor].repeat_interleave(2, dim=1)
            torch.testing.assert_close(product.transpose(1, 2).flatten(2), outputs[number], rtol=0, atol=1e-10)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_maps_do_not_change_the_logits(self, implementation):
        model = tiny_model()
        model.set_attn_implementation(implementation)
        plain = model(ROW, use_cache=False).logits
        assert_same_logits(model(ROW, use_cache=False, output_attentions=True).logits, plain)

    @pytest.mark.parametrize("kind", ["left", "right", "holes"])
    def test_maps_and_indices_of_padded_rows_equal_those_alone(self, kind):
        model = tiny_model(torch.float64)
        mask = padded_mask(kind, [23, 40], 40)
        rows = [draw_ids(1, length, seed=length)[0] for length in (23, 40)]
        asked = {"use_cache": False, "output_attentions": True, "output_selected_indices": True}
        with torch.no_grad():
            padded = model(spread(rows, mask), attention_mask=mask, **asked)
            alone = model(rows[0][None], **asked)
        slots = mask[0].bool()
        for together, single in zip(padded.attentions, alone.attentions, strict=True):
            torch.testing.assert_close(together[0][:, slots][..., slots], single[0], rtol=0, atol=1e-10)
            assert (together[0][..., ~slots] == 0).all()
        for together, single in zip(padded.selected_indices, alone.selected_indices, strict=True):
            assert torch.equal(together[0][:, slots], single[0])
            assert (together[0][:, ~slots] == -1).all()

    def test_decode_steps_report_the_rows_of_the_whole(self):
        model = tiny_model(torch.float64)
        asked = {"output_attentions": True, "output_selected_indices": True}
        with torch.no_grad():
            whole = model(ROW, use_cache=False, **asked)
            cache = cache_of(model(ROW[:, :37], use_cache=True))
            steps = model(ROW[:, 37:], cache=cache, **asked)
        for step, full in zip(steps.attentions, whole.attentions, strict=True):
            torch.testing.assert_close(step, full[:, :, 37:], rtol=0, atol=1e-10)
        for step, full in zip(steps.selected_indices, whole.selected_indices, strict=True):
            assert torch.equal(step, full[:, :, 37:])

    @pytest.mark.parametrize(
        "kept",
        [0, 1, 7, torch.tensor([0, 5, 39]), torch.tensor([-1])],
        ids=["all", "last", "last-7", "positions", "negative-position"],
    )
    def test_logits_to_keep(self, kept):
        model = tiny_model()
        whole = model(ROW, use_cache=False).logits
        logits = model(ROW, use_cache=False, logits_to_keep=kept).logits
        expected = whole[:, kept] if isinstance(kept, torch.Tensor) else whole[:, -kept:]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    def test_tuple_output(self):
        model = tiny_model()
        logits = model(ROW, use_cache=False, return_dict=False)[0]
        assert torch.equal(logits, model(ROW, use_cache=False).logits)


class TestCacheArgument:
    @pytest.mark.parametrize("name", ["cache", "past_key_values"])
    def test_both_names_are_read_and_extended_A25(self, name):
        model = tiny_model()
        with torch.no_grad():
            whole = model(ROW, use_cache=False).logits
            cache = cache_of(model(ROW[:, :30], use_cache=True))
            for part in (model, model.model):
                given = cache.fork()
                output = part(ROW[:, 30:], **{name: given})
                assert cache_of(output) is given
                assert given.get_seq_length() == 40
            logits = model(ROW[:, 30:], **{name: cache}).logits
        assert_same_logits(logits, whole[:, 30:])

    def test_the_position_of_the_argument_is_kept_A25(self):
        model = tiny_model()
        with torch.no_grad():
            whole = model(ROW, use_cache=False).logits
            cache = cache_of(model(ROW[:, :30], use_cache=True))
            assert_same_logits(model(ROW[:, 30:], None, None, cache).logits, whole[:, 30:])

    def test_both_names_at_once_are_refused(self):
        model = tiny_model()
        cache = cache_of(model(ROW, use_cache=True))
        with pytest.raises(ValueError, match="two names of one argument"):
            model(ROW, cache=cache, past_key_values=cache)


class TestContradictions:
    """Inputs that cannot be what was meant are refused before a wrong result is computed."""

    @pytest.mark.parametrize("shape", [(1, 40), (3, 40), (2, 39), (40,), (2, 40, 40), (3, 1, 40, 40)], ids=str)
    def test_mask_of_another_shape(self, shape):
        with pytest.raises(ValueError, match=r"`attention_mask` must be \(2, 40\)"):
            tiny_model()(draw_ids(2, 40), attention_mask=torch.ones(shape), use_cache=False)

    @pytest.mark.parametrize("mask", [[[1] * 40], {"full_attention": torch.ones(1, 1, 40, 40)}], ids=["list", "dict"])
    def test_mask_that_is_no_tensor(self, mask):
        with pytest.raises(TypeError, match="`attention_mask` must be a tensor"):
            tiny_model()(ROW, attention_mask=mask)

    def test_one_4d_mask_serves_all_rows(self):
        model, ids = tiny_model(), draw_ids(2, 40)
        mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
        assert_same_logits(model(ids, attention_mask=mask, use_cache=False).logits, model(ids, use_cache=False).logits)

    def test_mask_and_document_borders(self):
        with pytest.raises(ValueError, match="both say where rows begin"):
            tiny_model()(ROW, attention_mask=torch.ones_like(ROW), cu_seq_lens_q=torch.tensor([0, 20, 40]))

    @pytest.mark.parametrize("given", [{}, {"input_ids": ROW, "inputs_embeds": torch.zeros(1, 40, 64)}], ids=len)
    def test_ids_and_embeddings(self, given):
        with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
            tiny_model()(**given)


class HostReads(TorchDispatchMode):
    """Records the operations that make the host wait for a device."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and len(args) > 1 else None
        masks = indices if isinstance(indices, list | tuple) else []
        by_mask = any(getattr(mask, "dtype", None) == torch.bool for mask in masks)
        if name in self.WAITING or by_mask:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


class TestNoHostSynchronisation:
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_forward_without_positions_D09(self, switches):
        model = tiny_model(**SWITCHES[switches])
        with torch.no_grad(), HostReads() as reads:
            model(ROW, use_cache=False)
            model(ROW, use_cache=True)
        assert reads.seen == []

    @pytest.mark.parametrize("kind", ["left", "holes"])
    def test_masked_forward_and_decode_step_D09(self, kind):
        model = tiny_model()
        mask = padded_mask(kind, [23, 40], 40)
        longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        ids = draw_ids(2, 41)
        with torch.no_grad(), HostReads() as reads:
            cache = cache_of(model(ids[:, :40], attention_mask=mask, use_cache=True))
            model(ids[:, 40:], attention_mask=longer, cache=cache)
        assert reads.seen == []

    def test_decode_step_with_positions_as_generate_passes_them_D09(self):
        model = tiny_model()
        with torch.no_grad(), HostReads() as reads:
            cache = cache_of(model(ROW[:, :39], use_cache=True))
            model(ROW[:, 39:], cache=cache, position_ids=torch.tensor([[39]]))
        assert reads.seen == []

    def test_training_step_D09(self):
        model = tiny_model().train()
        with HostReads() as reads:
            model(ROW, labels=ROW, use_cache=False).loss.backward()
        assert reads.seen == []

    def test_a_synchronisation_would_be_seen(self):
        with HostReads() as reads:
            bool(torch.ones(1).any())
            torch.ones(3)[torch.tensor([True, False, True])]
        assert len(reads.seen) >= 2

    @pytest.mark.parametrize("path", import_rules.modeling_files(), ids=lambda path: path.stem)
    def test_source_reads_no_tensor_on_the_host_D09(self, path):
        calls = [
            f"{path.name}:{node.lineno}: .{node.func.attr}()"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("item", "tolist", "numpy")
        ]
        assert calls == []


class TestCompile:
    @pytest.mark.parametrize(
        "ropes",
        [
            pytest.param(None, marks=pytest.mark.slow, id="one-rope"),
            pytest.param({"full": {"rope_theta": 1e4}, "sparse": {"rope_theta": 500.0}}, id="per-kind"),
        ],
    )
    def test_forward_is_one_graph_D09(self, ropes):
        model = tiny_model(layer_plan=["full", "sparse", "full"], rope_parameters=ropes)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        try:
            with torch.no_grad():
                logits = compiled(ROW, use_cache=False).logits
                assert_same_logits(logits, model(ROW, use_cache=False).logits)
        finally:
            torch._dynamo.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_every_switch_and_mask_is_one_graph_D09(self, switches):
        model = tiny_model(**SWITCHES[switches])
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        mask = padded_mask("left", [23, 40], 40)
        ids = draw_ids(2, 40)
        try:
            with torch.no_grad():
                for options in ({}, {"attention_mask": mask}):
                    logits = compiled(ids, use_cache=False, **options).logits
                    assert_same_logits(logits, model(ids, use_cache=False, **options).logits)
        finally:
            torch._dynamo.reset()
