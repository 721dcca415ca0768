"""A whole model on the kernels against the same model on the reference: logits, selections, and every gradient.

A few cases run in Triton's interpreter, which takes seconds for each; all run where there is a card.
"""

import pytest
import torch
from kernel_checks import DEVICE
from models.tiny import draw_ids, padded_mask, spread, tiny_model


pytest.importorskip("triton")

from hysparse_hf.modeling import attention_hysparse  # noqa: E402


# Settings that change which operations a sparse layer runs or what it hands them.
SWITCHES = {
    "default": {},
    "headwise": {"gate_granularity": "headwise"},
    "no_gates": {"gate_granularity": "none"},
    "no_sinks": {"attention_sink": False},
    "no_window": {"window_branch": "none"},
    "shared_window": {"window_branch": "shared_kv"},
    "merged_shared": {"window_branch": "merged_shared"},
    "merged_own": {"window_branch": "merged_own"},
    "own_kv": {"share_full_kv": False},
    "own_oracle": {"share_oracle": False},
    "dense": {"dense": True},
    "window_layers": {"layer_plan": ["window", "full", "sparse"], "window_layer_gate": True},
    "other_donor": {"layer_plan": ["full", "full", "sparse"]},
}
ON_A_CARD = pytest.mark.gpu
TOKENS = draw_ids(1, 50)[0]


def inputs_of(kind: str) -> dict:
    """Rows of three lengths with padding in front, behind or between, or three documents in one row."""
    if kind == "packed":
        positions = torch.cat([torch.arange(length) for length in (13, 19, 18)])[None]
        return {"input_ids": TOKENS[None], "position_ids": positions, "labels": TOKENS[None]}
    if kind == "plain":
        return {"input_ids": TOKENS[None], "labels": TOKENS[None]}
    mask = padded_mask(kind, (50, 27, 5), 53)
    ids = spread((TOKENS, TOKENS[:27], TOKENS[3:8]), mask)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def model_of(**switches):
    """Blocks of 16 are the smallest that the kernels know; one of four is selected."""
    settings = {
        "layer_plan": ["full", "sparse"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "oracle_block_size": 16,
        "oracle_budget": 16,
    }
    return tiny_model(**{**settings, **switches}).to(DEVICE)


def run(model, backend: str, kind: str, monkeypatch):
    """`(logits at tokens, selections, gradients by name)` of one back end, asked for by name: nothing falls back."""
    monkeypatch.setenv("HYSPARSE_BACKEND", backend)
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs_of(kind).items()}
    output = model(**inputs, use_cache=False, output_selected_indices=True)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return output.logits[inputs["labels"] >= 0].detach(), output.selected_indices, gradients


def check_equal(model, kind: str, monkeypatch) -> None:
    logits, selections, gradients = run(model, "triton", kind, monkeypatch)
    expected = run(model, "reference", kind, monkeypatch)
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(selections, expected[1], strict=True))
    for name, gradient in expected[2].items():
        if gradient is None:
            assert gradients[name] is None, name
            continue
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


@pytest.mark.parametrize(
    "kind", ["left", "packed", *(pytest.param(kind, marks=ON_A_CARD) for kind in ("plain", "right", "holes"))]
)
def test_default_model_equals_the_reference(kind, monkeypatch):
    check_equal(model_of(), kind, monkeypatch)


@ON_A_CARD
@pytest.mark.parametrize("switch", [name for name in SWITCHES if name != "default"])
def test_switched_model_equals_the_reference(switch, monkeypatch):
    check_equal(model_of(**SWITCHES[switch]), "left", monkeypatch)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=ON_A_CARD)])
def test_checkpointed_model_equals_the_reference(reentrant, monkeypatch):
    model = model_of().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check_equal(model, "left", monkeypatch)


def test_layouts_are_made_once_for_each_full_layer(monkeypatch):
    kernels = attention_hysparse.OPERATIONS.kernels
    made, counts = kernels["selection_layouts"], []

    def counted(*args, **options):
        counts.append(options["for_backward"])
        return made(*args, **options)

    monkeypatch.setitem(kernels, "selection_layouts", counted)
    monkeypatch.setenv("HYSPARSE_BACKEND", "triton")
    model = model_of(layer_plan=["full", "sparse", "sparse", "full", "sparse"])
    ids = TOKENS[None, :20].to(DEVICE)
    model(ids, use_cache=False)
    assert counts == [True, True]
    with torch.no_grad():
        model(ids, use_cache=False)
    assert counts[2:] == [False, False]
