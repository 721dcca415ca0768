"""Head dimensions that are no power of two, or wider than one tile; and the precision of products."""

import ast

import pytest
import torch
from kernel_checks import DEVICE, compare, make_states

import import_rules
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
)


pytest.importorskip("triton")

LENGTH = 20


def calls(backend):
    indices = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE).expand(1, 1, LENGTH, 2).contiguous()
    return {
        "full": lambda *states: full_attention_with_oracle(*states, block_size=16, n_selected=1, backend=backend)[:2],
        "block_sparse": lambda *states: block_sparse_attention(
            *states, indices, block_size=16, return_lse=True, backend=backend
        ),
        "window": lambda *states: sliding_window_attention(*states, window=9, return_lse=True, backend=backend),
    }


@pytest.mark.parametrize("dims", [(24, 40), (80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("operation", ["full", "block_sparse", "window"])
def test_outputs_and_gradients_C03_C11(operation, dims):
    states = make_states(LENGTH, heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=torch.float16)
    compare(calls("triton")[operation], calls("reference")[operation], states)


@pytest.mark.parametrize(
    "path", [path for path in import_rules.modeling_files() if path.stem.startswith("triton_")], ids=lambda p: p.stem
)
def test_every_product_names_its_precision_C17(path):
    products = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"
    ]
    assert [node.lineno for node in products if "input_precision" not in {word.arg for word in node.keywords}] == []
