"""Training of the second generation: gradients through bridge and shared keys, checkpointing, autocast, losses."""

import naive_model
import naive_model2
import pytest
import torch
from models.tiny import draw_ids
from models.tiny2 import BASELINES, MODELS, over_models, tiny_model


ROW = draw_ids(1, 30)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def labelled():
    """Ids and labels, some of them ignored."""
    ids = draw_ids(2, 30)
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


class TestGradients:
    @over_models(("default", "two_bridges", "own_kv", "residual", "branch_merged_own", "block"))
    def test_equal_those_of_the_loops(self, switch):
        model = tiny_model(torch.float64, **MODELS[switch])
        naive_model.cross_entropy_sum(naive_model2.forward(model, ROW).logits, ROW).backward()
        expected = gradients(model)
        model.zero_grad()
        naive_model.cross_entropy_sum(model(ROW, use_cache=False).logits, ROW).backward()
        for name, grad in gradients(model).items():
            scale = expected[name].abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(
                grad, expected[name], rtol=0, atol=1e-9 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )

    def test_the_bridge_trains_the_self_decoder(self):
        """Cut at the bridge, the self layer's input norm learns something else."""
        model = tiny_model(torch.float64)
        weight = model.model.layers[1].input_layernorm.weight
        whole = torch.autograd.grad(model(ROW, labels=ROW).loss, weight)[0]
        model.model.layers[3].register_forward_pre_hook(lambda module, args: (*args[:-1], args[-1].detach()))
        cut = torch.autograd.grad(model(ROW, labels=ROW).loss, weight)[0]
        assert (whole - cut).norm() > 1e-2 * whole.norm()


class TestCheckpointing:
    def test_tensors_with_gradients_are_positional_B02(self):
        model = tiny_model().train()
        seen = []

        def record(module, args, kwargs):
            seen.append(args)
            tensors = [part for value in kwargs.values() if isinstance(value, dict) for part in value.values()]
            tensors += list(kwargs.values())
            assert not any(isinstance(part, torch.Tensor) and part.requires_grad for part in tensors)

        for layer in model.model.layers:
            layer.register_forward_pre_hook(record, with_kwargs=True)
        model(ROW, labels=ROW)
        assert [part is not None and part.requires_grad for part in seen[3]] == [
            True,
            False,
            False,
            False,
            False,
            True,
        ]
        assert [part is not None and part.requires_grad for part in seen[4]] == [True, True, True, False, False, False]


class TestLoss:
    @pytest.mark.parametrize("items", [17, torch.tensor(17)], ids=["int", "tensor"])
    def test_is_the_summed_cross_entropy_over_the_item_count_F02(self, items):
        model = tiny_model(torch.float64)
        ids, labels = labelled()
        output = model(ids, labels=labels, num_items_in_batch=items)
        expected = naive_model.cross_entropy_sum(output.logits, labels) / 17
        torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("baseline", [None, *BASELINES])
    def test_falls_when_trained(self, baseline):
        model = tiny_model(initializer_range=0.05, baseline=baseline).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(8):
            loss = model(ROW, labels=ROW).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("switch", ["default", "wide_values", "branch_merged_own"])
def test_bfloat16_autocast_trains_with_float32_parameters_C18(switch):
    model = tiny_model(initializer_range=0.05, **MODELS[switch]).train()
    ids, labels = labelled()
    plain = model(ids, labels=labels).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=0.02, atol=0.02)
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32, name
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_low_precision_model_trains(dtype):
    model = tiny_model(dtype, initializer_range=0.05).train()
    model(ROW, labels=ROW).loss.backward()
    for name, grad in gradients(model).items():
        assert grad.isfinite().all(), name
