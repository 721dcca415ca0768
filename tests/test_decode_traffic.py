"""Bytes and pages that a decoding step reads, counted by the benchmark from selections."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hysparse_hf import HySparseConfig


FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "decode_traffic.py"
SPEC = importlib.util.spec_from_file_location("decode_traffic", FILE)
decode_traffic = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(decode_traffic)


def row(*ids):
    return torch.tensor(ids, dtype=torch.int32).view(1, 1, 1, -1)


@pytest.mark.parametrize(
    ("ids", "length", "expected"),
    [
        ((0, 1), 1000, (128, 8)),
        ((0, 0, -1, 1), 1000, (128, 8)),
        ((-1, -1), 1000, (0, 0)),
        ((2,), 129, (1, 1)),
        ((2,), 144, (16, 1)),
        ((0, 2), 145, (81, 6)),
        ((0, 9), 145, (64, 4)),
    ],
)
def test_blocks_count_once_and_up_to_the_new_token(ids, length, expected):
    assert decode_traffic.tokens_and_pages(row(*ids), 64, torch.tensor([length])) == expected


def test_layers_of_each_kind_are_summed():
    config = HySparseConfig(
        num_hidden_layers=4,
        layer_plan=["full", "sparse", "sparse", "full"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=20,
    )
    first = torch.cat([row(0, 1).expand(1, 2, 1, 2), row(0, -1).expand(1, 2, 1, 2)])
    traffic = decode_traffic.traffic_of_step(config, [100, 10], [first, first])
    per_token = 16 * 2
    assert traffic["full"] == {"bytes": 2 * 2 * 110 * per_token, "pages": 2 * 2 * (7 + 1)}
    assert traffic["sparse"] == {"bytes": 2 * 2 * (100 + 10) * per_token, "pages": 2 * 2 * (4 + 3 + 1)}
    # Columns 80 to 99 lie on pages 5 and 6.
    assert traffic["window"] == {"bytes": 2 * 2 * (20 + 10) * per_token, "pages": 2 * 2 * (2 + 1)}
