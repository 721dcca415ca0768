"""Which back end a call reaches: named ones never fall back, `auto` may, and compiled graphs stay whole."""

import logging

import pytest
import torch
from kernel_checks import DEVICE, evaluate, make_states
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hysparse_hf.modeling import dispatch_hysparse
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    resolve_backend,
    sliding_window_attention,
    sparse_layer_attention,
)
from hysparse_hf.modeling.layers_hysparse import rms_norm, rotate, swiglu
from hysparse_hf.modeling.rows_hysparse import Rows


pytest.importorskip("triton")


def test_auto_means_triton_on_cuda_alone(monkeypatch):
    monkeypatch.delenv("HYSPARSE_BACKEND", raising=False)
    assert resolve_backend("auto", torch.device("cpu")) == "reference"
    assert resolve_backend("auto", torch.device("cuda")) == "triton"
    monkeypatch.setenv("HYSPARSE_BACKEND", "reference")
    assert resolve_backend("auto", torch.device("cuda")) == "reference"


def test_without_triton_auto_is_the_reference_and_the_name_is_an_error(monkeypatch):
    monkeypatch.delenv("HYSPARSE_BACKEND", raising=False)
    monkeypatch.setattr(dispatch_hysparse, "missing_triton", lambda: ImportError("pip install triton"))
    assert resolve_backend("auto", torch.device("cuda")) == "reference"
    with pytest.raises(ImportError, match="pip install"):
        sliding_window_attention(*make_states(3), window=2, backend="triton")


def test_named_back_end_refuses_what_it_cannot_do():
    states = make_states(4)
    visible = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE)
    with pytest.raises(NotImplementedError, match="visibility"):
        sliding_window_attention(*states, window=2, rows=Rows(visibility=visible), backend="triton")
    with pytest.raises(NotImplementedError, match="return_weights"):
        sliding_window_attention(*states, window=2, return_weights=True, backend="triton")
    with pytest.raises(NotImplementedError, match="float64"):
        sliding_window_attention(*(tensor.double() for tensor in states), window=2, backend="triton")


def test_more_keys_than_the_kernels_number_are_refused_by_name():
    query, key, value = make_states(17)
    key, value = (states[:, :, :1].expand(-1, -1, 2**26 + 1, -1) for states in (key, value))
    indices = torch.zeros(1, 1, 17, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"up to 2\*\*26 keys, got 67108865"):
        block_sparse_attention(query, key, value, indices, block_size=16, backend="triton")


def test_branches_of_two_dtypes_are_refused_by_name():
    states, window = make_states(4), make_states(4, dtype=torch.float16)
    indices = torch.zeros(1, 1, 4, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="both branches in one dtype"):
        sparse_layer_attention(*states, indices, *window, block_size=16, window=2, backend="triton")


def test_auto_goes_to_the_reference_and_says_so_once(monkeypatch, caplog):
    monkeypatch.delenv("HYSPARSE_BACKEND", raising=False)
    monkeypatch.setattr(dispatch_hysparse, "_on_device", lambda requested, device: "triton")
    dispatch_hysparse._log_once.cache_clear()
    states = [tensor.double() for tensor in make_states(4)]
    with caplog.at_level(logging.INFO, logger=dispatch_hysparse.__name__):
        for _ in range(2):
            output = sliding_window_attention(*states, window=2)
    assert output.dtype == torch.float64
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "float64" in caplog.text


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("operation", ["full", "sparse", "merged", "window"])
def test_compiled_graph_is_whole_and_differentiable(operation, compiler):
    states = make_states(20, heads=4)
    indices = torch.zeros(1, 1, 20, 1, dtype=torch.int32, device=DEVICE)

    def call(query, key, value):
        if operation == "full":
            return full_attention_with_oracle(query, key, value, block_size=16, n_selected=1, backend="triton")[:1]
        if operation in ("sparse", "merged"):
            options = {"block_size": 16, "window": 5 if operation == "merged" else 0, "backend": "triton"}
            return (block_sparse_attention(query, key, value, indices, **options),)
        return (sliding_window_attention(query, key, value, window=5, backend="triton"),)

    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    for x, y in zip(evaluate(compiled, states), evaluate(call, states), strict=True):
        # A compiler may round the merging of two branches otherwise; the kernels it cannot touch.
        torch.testing.assert_close(x, y, **({} if operation == "merged" else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_graph_of_what_surrounds_attention_is_whole(compiler):
    states, weight = make_states(9)[0], torch.linspace(0, 1, 16, device=DEVICE)
    rotation = tuple(torch.linspace(start, 1, 9 * 16, device=DEVICE).view(1, 9, 16) for start in (-1, 0))

    def call(states, weight):
        normed = rms_norm(states, weight, 1e-6, backend="triton")
        return (swiglu(rotate(normed, rotation, backend="triton"), states, backend="triton"),)

    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    for x, y in zip(*(evaluate(each, [states, weight]) for each in (compiled, call)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_other_than_the_current_one_D01():
    states = make_states(70, heads=4, head_dim=64, dtype=torch.bfloat16)

    def call(query, key, value):
        output, _, indices = full_attention_with_oracle(query, key, value, block_size=16, n_selected=2)
        sparse = block_sparse_attention(query, key, value, indices, block_size=16)
        return output, sparse, sliding_window_attention(query, key, value, window=9)

    here = evaluate(call, states)
    with torch.cuda.device(0):
        there = evaluate(call, [tensor.to("cuda:1") for tensor in states])
    for x, y in zip(here, there, strict=True):
        torch.testing.assert_close(x, y.to(x.device), rtol=0, atol=0)


def _decode_window(query):
    key, value = (torch.ones(1, 1, 40, 16, device=DEVICE).cumsum(2) for _ in range(2))
    return sliding_window_attention(query, key, value, window=20, backend="triton")


def _decode_full(query):
    key, value = (torch.ones(1, 1, 40, 16, device=DEVICE).cumsum(2) for _ in range(2))
    return full_attention_with_oracle(query, key, value, block_size=16, n_selected=1, backend="triton")[0]


def _norm(states):
    return rms_norm(states, torch.ones(16, device=DEVICE), 1e-6, backend="triton")


@pytest.mark.parametrize(
    ("call", "operation"), [(_decode_window, "decode_sparse"), (_decode_full, "decode_full"), (_norm, "rms_norm")]
)
@torch.no_grad()
def test_a_tracer_sees_the_operation(call, operation):
    """Launched as it is, a kernel leaves nothing in a recorded graph, which then returns what memory held."""
    states = torch.randn(1, 2, 1, 16, device=DEVICE)
    graph = make_fx(call)(states)
    assert any(operation in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(2 * states), call(2 * states), rtol=0, atol=0)


@torch.no_grad()
def test_fake_tensors_meet_no_kernel():
    query = torch.randn(1, 2, 1, 16, device=DEVICE)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = _decode_window(query)
        assert output.fake_mode is mode
        assert output.shape == (1, 2, 1, 16)
