"""Which back end a model's layers run on, and that a kernel that fails costs speed alone."""

import logging

import pytest
import torch
from kernel_checks import DEVICE
from models.tiny import assert_same_logits, draw_ids, tiny_model

from hysparse_hf.modeling import attention_hysparse, dispatch_hysparse


pytest.importorskip("triton")

from hysparse_hf.modeling import (  # noqa: E402
    triton_block_sparse,
    triton_full_attention,
    triton_rms_norm,
    triton_rotary,
    triton_selection_layouts,
    triton_sliding_window,
    triton_swiglu,
)


# Per operation a kernel of its forward pass, and its module.
KERNELS = {
    "full_attention_with_oracle": (triton_full_attention, "_full_attention_fwd_kernel"),
    "sparse_layer_attention": (triton_block_sparse, "_block_sparse_fwd_kernel"),
    "block_sparse_attention": (triton_block_sparse, "_block_sparse_fwd_kernel"),
    "sliding_window_attention": (triton_sliding_window, "_sliding_window_fwd_kernel"),
    "rms_norm": (triton_rms_norm, "_rms_norm_fwd_kernel"),
    "rotate": (triton_rotary, "_rotary_kernel"),
    "swiglu": (triton_swiglu, "_swiglu_fwd_kernel"),
}
# Operations that only some configurations run.
SWITCHES = dict.fromkeys(("block_sparse_attention", "sliding_window_attention"), {"window_branch": "merged_own"})
ROW = draw_ids(1, 20).to(DEVICE)


class FailingKernel:
    """Stands for a compiled kernel whose launch raises."""

    def __init__(self, error: Exception):
        self.error = error
        self.launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        raise self.error


@pytest.fixture
def model(monkeypatch, request):
    """A model whose layers take the kernels, as they do on a card: blocks of 16 are the smallest that these know."""
    monkeypatch.delenv("HYSPARSE_BACKEND", raising=False)
    monkeypatch.setattr(dispatch_hysparse, "_FAILED", set())
    monkeypatch.setattr(
        dispatch_hysparse,
        "_on_device",
        lambda requested, device: "triton" if requested == "auto" else requested,
    )
    switches = SWITCHES.get(request.param, {}) if hasattr(request, "param") else {}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model(layer_plan=["full", "sparse"], oracle_block_size=16, oracle_budget=32, **heads, **switches)
    return model.requires_grad_(False).to(DEVICE)


def reference_logits(model):
    model.set_attn_implementation("eager")
    logits = model(ROW).logits
    model.set_attn_implementation("sdpa")
    return logits


@pytest.mark.parametrize(("operation", "model"), [(name, name) for name in KERNELS], indirect=["model"])
def test_a_kernel_that_fails_gives_way_to_the_reference_with_one_warning_D07(model, operation, monkeypatch, caplog):
    kernel = FailingKernel(RuntimeError("PassManager::run failed"))
    monkeypatch.setattr(*KERNELS[operation], kernel)
    with caplog.at_level(logging.WARNING, logger=dispatch_hysparse.__name__):
        for _ in range(2):
            assert_same_logits(model(ROW).logits, reference_logits(model))
    assert kernel.launches == 1
    assert len(caplog.records) == 1
    assert f"`{operation}`" in caplog.text
    assert "PassManager::run failed" in caplog.text


def test_layouts_that_fail_are_left_to_each_layer_D07(model, monkeypatch, caplog):
    kernel = FailingKernel(RuntimeError("PassManager::run failed"))
    monkeypatch.setattr(triton_selection_layouts, "_tile_union_kernel", kernel)
    states = [torch.zeros(1, 1, 40, 16, device=DEVICE)] * 3
    indices = torch.zeros(1, 1, 40, 1, dtype=torch.int32, device=DEVICE)
    with caplog.at_level(logging.WARNING, logger=dispatch_hysparse.__name__):
        for _ in range(2):
            assert attention_hysparse.selection_layouts(*states, indices, block_size=16) is None
    assert (kernel.launches, len(caplog.records)) == (1, 1)
    with pytest.raises(RuntimeError, match="PassManager"):
        attention_hysparse.selection_layouts(*states, indices, block_size=16, backend="triton")


def test_a_kernel_asked_for_by_name_fails_aloud_D07(model, monkeypatch):
    states = [torch.zeros(1, 1, 3, 16, device=DEVICE)] * 3
    monkeypatch.setattr(*KERNELS["sliding_window_attention"], FailingKernel(RuntimeError("PassManager::run failed")))
    with pytest.raises(RuntimeError, match="PassManager"):
        attention_hysparse.sliding_window_attention(*states, window=2, backend="triton")


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "made_up"])
def test_attention_implementations_of_others_are_refused(implementation):
    with pytest.raises(ValueError, match="support"):
        tiny_model().set_attn_implementation(implementation)


def test_running_out_of_memory_is_no_reason_for_the_reference_D07(model, monkeypatch):
    monkeypatch.setattr(
        *KERNELS["sparse_layer_attention"], FailingKernel(torch.OutOfMemoryError("CUDA out of memory"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        model(ROW)


@pytest.mark.parametrize("switch", ["environment", "config"])
def test_the_reference_can_be_forced_D07(model, switch, monkeypatch):
    expected = reference_logits(model)
    kernels = [FailingKernel(AssertionError("a kernel was launched")) for _ in KERNELS]
    for place, kernel in zip(KERNELS.values(), kernels, strict=True):
        monkeypatch.setattr(*place, kernel)
    if switch == "environment":
        monkeypatch.setenv("HYSPARSE_BACKEND", "reference")
    else:
        model.set_attn_implementation("eager")
    assert_same_logits(model(ROW).logits, expected)
    assert [kernel.launches for kernel in kernels] == [0] * len(KERNELS)
