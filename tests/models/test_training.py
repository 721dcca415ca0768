"""Training: losses, gradients through shared keys and values, autocast, compiled steps."""

import naive_model
import pytest
import torch
from models.generations import both_generations
from models.tiny import SWITCHES, draw_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hysparse_hf.modeling import decoder_hysparse


ROW = draw_ids(1, 36)


def labelled(batch=2, length=36):
    """Ids and labels, some of them ignored."""
    ids = draw_ids(batch, length)
    labels = ids.clone()
    labels[0, :7] = -100
    labels[-1, -5:] = -100
    return ids, labels


class DtypesSeen(TorchDispatchMode):
    """Collects the dtypes of all tensors that operations inside the context read or return."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self.dtypes.add(value.dtype)
        return result


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class TestLoss:
    @pytest.mark.parametrize("kind", ["none", "int", "tensor"])
    def test_is_the_summed_cross_entropy_over_the_item_count_F02(self, kind):
        model = tiny_model(torch.float64)
        ids, labels = labelled()
        items = int((labels[:, 1:] != -100).sum()) if kind == "none" else 17
        given = {"none": {}, "int": {"num_items_in_batch": 17}, "tensor": {"num_items_in_batch": torch.tensor(17)}}
        output = model(ids, labels=labels, use_cache=False, **given[kind])
        expected = naive_model.cross_entropy_sum(output.logits, labels) / items
        torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=1e-6)

    def test_shifted_labels_may_be_given(self):
        model = tiny_model()
        ids, labels = labelled()
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        one = model(ids, labels=labels, use_cache=False).loss
        other = model(ids, labels=labels, shift_labels=shifted, use_cache=False).loss
        torch.testing.assert_close(one, other)

    def test_padding_does_not_enter_the_loss(self):
        model = tiny_model()
        ids, labels = labelled(1)
        alone = model(ids, labels=labels, use_cache=False).loss
        padded = torch.nn.functional.pad(ids, (0, 9))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 9))
        wide = torch.nn.functional.pad(labels, (0, 9), value=-100)
        together = model(padded, attention_mask=mask, labels=wide, use_cache=False).loss
        torch.testing.assert_close(alone, together)

    def test_all_labels_ignored_change_nothing(self):
        model = tiny_model().train()
        ids, _ = labelled()
        loss = model(ids, labels=torch.full_like(ids, -100)).loss
        loss.backward()
        assert loss.isnan()
        assert not any(grad.any() for grad in gradients(model).values())

    def test_all_labels_ignored_in_one_of_several_batches_add_nothing_F01(self):
        model = tiny_model().train()
        ids, _ = labelled()
        loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(40)).loss
        loss.backward()
        assert loss == 0
        assert not any(grad.any() for grad in gradients(model).values())


class TestGradients:
    @pytest.mark.parametrize(
        "switches",
        ["default", "headwise_full_gate", "window_layers", "wide_values", "merged_own", "own_oracle", "shared_window"],
    )
    def test_equal_those_of_the_loops(self, switches):
        model = tiny_model(torch.float64, **SWITCHES[switches])
        labels = ROW
        naive_model.cross_entropy_sum(naive_model.forward(model, ROW).logits, labels).backward()
        expected = gradients(model)
        model.zero_grad()
        logits = model(ROW, use_cache=False).logits
        naive_model.cross_entropy_sum(logits, labels).backward()
        for name, grad in gradients(model).items():
            scale = expected[name].abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(
                grad, expected[name], rtol=0, atol=1e-9 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )

    @pytest.mark.parametrize("name", ["k_proj", "v_proj"])
    def test_a_full_layers_projection_learns_from_its_sparse_layers(self, name):
        # The same loss with the shared tensors cut off gives another gradient.
        model = tiny_model(torch.float64, layer_plan=["full", "sparse"])
        weight = getattr(model.model.layers[0].self_attn, name).weight
        whole = torch.autograd.grad(model(ROW, labels=ROW, use_cache=False).loss, weight)[0]
        model.model.layers[1].register_forward_pre_hook(
            lambda module, args: (args[0], *(part.detach() for part in args[1:4]))
        )
        cut = torch.autograd.grad(model(ROW, labels=ROW, use_cache=False).loss, weight)[0]
        assert (whole - cut).norm() > 1e-2 * whole.norm()


class TestAutocast:
    @pytest.mark.parametrize("switches", ["default", "wide_values", "merged_own"])
    def test_bfloat16_trains_with_float32_parameters_C18(self, switches):
        model = tiny_model(initializer_range=0.05, **SWITCHES[switches]).train()
        ids, labels = labelled()
        plain = model(ids, labels=labels, use_cache=False).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=0.02, atol=0.02)
        for name, grad in gradients(model).items():
            assert grad.dtype == torch.float32, name
            assert grad.isfinite().all(), name

    def test_float16_with_a_scaler_C18(self):
        # Every block is selected, so that rounding cannot change the selection.
        model = tiny_model(initializer_range=0.05, oracle_budget=36).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        ids, labels = labelled()

        def step():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(ids, labels=labels).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.item()

        model(ids, labels=labels).loss.backward()
        plain = gradients(model)
        model.zero_grad()
        losses = [step()]
        for name, grad in gradients(model).items():
            assert grad.dtype == torch.float32, name
            assert (grad - plain[name]).norm() <= 16 * torch.finfo(torch.float16).eps * plain[name].norm(), name
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(step())
        assert losses == sorted(losses, reverse=True)
        assert scaler.get_scale() == 2.0**16

    def test_float16_that_overflows_is_a_skipped_step_C18(self):
        model = tiny_model(initializer_range=0.05).train()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(ROW, labels=ROW).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**39
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("still_on", [False, True], ids=["backward-outside", "backward-inside"])
    @both_generations
    def test_backward_under_bfloat16_meets_no_float16_C19(self, generation, device, still_on):
        model = generation.tiny_model(initializer_range=0.05).train().to(device)
        ids = ROW.to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        with DtypesSeen() as seen, torch.autocast(device, dtype=torch.bfloat16, enabled=still_on):
            loss.backward()
        assert {torch.bfloat16, torch.float32} <= seen.dtypes
        assert torch.float16 not in seen.dtypes

    @both_generations
    def test_generate_runs_C18(self, generation):
        model = generation.tiny_model()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens = model.generate(ROW[:, :9], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert tokens.shape == (1, 13)

    @pytest.mark.parametrize("switches", ["default", "wide_values", "merged_own", "window_layers"])
    def test_operations_receive_one_dtype_C18(self, switches, monkeypatch):
        """Kernels take no mixture: rotation and norm, which are float32 under autocast, must not make one."""
        seen = set()
        for name in ("full_attention_with_oracle", "block_sparse_attention", "sliding_window_attention"):
            operation = getattr(decoder_hysparse, name)

            def recorded(query, key, value, *others, operation=operation, **options):
                seen.add((query.dtype, key.dtype, value.dtype))
                return operation(query, key, value, *others, **options)

            monkeypatch.setattr(decoder_hysparse, name, recorded)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tiny_model(**SWITCHES[switches])(ROW)
        assert seen == {(torch.bfloat16,) * 3}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_low_precision_model_trains(self, dtype):
        model = tiny_model(dtype, initializer_range=0.05).train()
        model(*[ROW], labels=ROW, use_cache=False).loss.backward()
        for name, grad in gradients(model).items():
            assert grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("value", "open_gate"), [(1e4, True), (-1e4, False)], ids=["open", "shut"])
@both_generations
def test_gates_saturate_without_nan_C25(generation, dtype, value, open_gate):
    model = generation.tiny_model(dtype, initializer_range=0.05).train()
    attention = model.model.layers[-1].self_attn
    gates = [module for name, module in attention.named_children() if name.startswith("gate_")]
    assert gates
    with torch.no_grad():
        for gate in gates:
            gate.bias.fill_(value)
    inputs = []
    attention.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(ROW, labels=ROW, use_cache=False).loss.backward()
    assert bool((inputs[0] != 0).any()) is open_gate
    for name, grad in gradients(model).items():
        assert grad.isfinite().all(), name


class TestCompiled:
    """A whole training step is one graph; with `aot_eager` the backward pass is traced too."""

    @pytest.fixture(autouse=True)
    def _fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def assert_equal_steps(self, model, autocast=False, **options):
        steps = []
        for callable_ in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = callable_(ROW, labels=ROW, **options).loss
            loss.backward()
            steps.append((loss, gradients(model)))
            model.zero_grad()
        torch.testing.assert_close(steps[1][0], steps[0][0])
        for name, grad in steps[1][1].items():
            torch.testing.assert_close(grad, steps[0][1][name], msg=lambda m, n=name: f"{n}: {m}")

    def test_step_with_padding_is_one_graph_D09(self):
        model = tiny_model(layer_plan=["full", "sparse"]).train()
        mask = torch.ones_like(ROW).index_fill(1, torch.arange(4), 0)
        self.assert_equal_steps(model, attention_mask=mask, num_items_in_batch=torch.tensor(17))

    def test_packed_step_with_checkpointing_and_autocast_is_one_graph_D09(self):
        model = tiny_model(layer_plan=["full", "sparse"], initializer_range=0.05).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.assert_equal_steps(model, autocast=True, position_ids=torch.arange(36)[None] % 22)
