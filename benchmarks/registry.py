"""What is measured and how: shapes, index sets, timing, checks, and the rows of a result file."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel


# Name -> (query heads, KV heads): the paper's 7B shape, MQA-like groups of 8, and the paper's 80B shape.
SHAPES = {"g4": (32, 8), "g8": (32, 4), "g16": (64, 4)}
HEAD_DIM = 128
BLOCK_SIZE = 64
N_SELECTED = 16
WINDOW = 128
# A real model's choice: the length of its text, and what stands for -1 in the file.
RECORDED = Path(__file__).parent / "recorded" / "smollm2-135m-8k.npz"
RECORDED_LENGTH = 8192
NONE = 255
# Sparse layers that share one set of layouts, as in the paper's 7B model.
SHARING_LAYERS = 3
# Gradients are checked against float64 on a text of this length, outputs at the measured length.
CHECK_LENGTH = 2048


@dataclass
class Row:
    """One measured figure beside its baseline, both from one run."""

    op: str
    passed_over: str
    shape: str
    n: int
    ms: float
    baseline: str
    baseline_ms: float | None
    check_passed: bool
    index_set: str | None = None
    extra: dict = field(default_factory=dict)

    def as_json(self) -> dict:
        """The row as the result file holds it."""
        row = asdict(self)
        row["pass"] = row.pop("passed_over")
        row["ratio"] = self.ratio
        extra = row.pop("extra")
        return row | extra

    @property
    def ratio(self) -> float | None:
        return self.ms / self.baseline_ms if self.baseline_ms else None


def median_ms(call: Callable, budget_ms: float = 200) -> float:
    """Median time of a call by device events, after a warm-up; L2 is flushed between calls."""
    return triton.testing.do_bench(call, warmup=budget_ms / 4, rep=budget_ms, return_mode="median")


def backward_ms(call: Callable, states: list[torch.Tensor], grad: torch.Tensor, budget_ms: float = 200) -> float:
    """Median time of the backward pass of `call(*states)` alone."""
    states = [tensor.detach().requires_grad_() for tensor in states]
    output = call(*states)
    return median_ms(lambda: torch.autograd.grad(output, states, grad, retain_graph=True), budget_ms)


def make_states(shape: str, n: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Random normal query, key and value of a shape; the batch is 1."""
    heads, kv_heads = SHAPES[shape]
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(1, size, n, HEAD_DIM, device="cuda", dtype=dtype) for size in sizes]


def dense_attention(backend: SDPBackend, is_causal: bool = True) -> Callable:
    """Dense attention of one library back end."""

    def attend(query, key, value):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    return attend


class Baselines:
    """Library times, each measured once per run and shape."""

    def __init__(self) -> None:
        self.times: dict[tuple, float] = {}

    def once(self, name: str, measure: Callable[[], float]) -> float:
        """What `measure` found the first time."""
        if (name,) not in self.times:
            self.times[name,] = measure()
        return self.times[name,]

    def dense(self, shape: str, n: int, passed_over: str, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> float:
        """Milliseconds of dense causal attention, `"forward"` or `"backward"`."""
        key = (shape, n, passed_over, backend)
        if key not in self.times:
            states = make_states(shape, n)
            attend = dense_attention(backend)
            if passed_over == "forward":
                self.times[key] = median_ms(lambda: attend(*states))
            else:
                self.times[key] = backward_ms(attend, states, torch.randn_like(states[0]))
        return self.times[key]


def recorded_set(kv_heads: int) -> torch.Tensor:
    """What SmolLM2-135M chooses on a text, `(1, kv_heads, RECORDED_LENGTH, N_SELECTED)`; see `record_selection.py`."""
    indices = torch.from_numpy(np.load(RECORDED)["indices"][:kv_heads].astype(np.int32)).cuda()[None]
    return torch.where(indices == NONE, -1, indices)


def index_set(kind: str, kv_heads: int, n: int, n_selected: int = N_SELECTED, block_size: int = BLOCK_SIZE):
    """Indices `(1, kv_heads, n, n_selected)`: every query chooses its own block and others among those it sees.

    `random` draws from all of them, `correlated` from a pool twice as large as the choice (32 blocks of 64) that 64
    neighbouring queries share, `first` in the same way but for the first block, which all choose, as heads of trained
    models do; `recorded` are the first of a real model's.
    """
    if kind == "recorded":
        return recorded_set(kv_heads)[:, :, :n]
    generator = torch.Generator(device="cuda").manual_seed(0)
    blocks = triton.cdiv(n, block_size)
    ids = torch.arange(blocks, device="cuda")
    indices = torch.empty(1, kv_heads, n, n_selected, dtype=torch.int32, device="cuda")
    for start in range(0, n, 4096):
        own = torch.arange(start, min(n, start + 4096), device="cuda") // block_size
        scores = torch.rand(kv_heads, len(own), blocks, device="cuda", generator=generator)
        if kind in ("correlated", "first"):
            pool = torch.rand(kv_heads, len(own) // 64, blocks, device="cuda", generator=generator)
            pool = pool.masked_fill(ids > own[::64, None], -1)
            kept = pool.topk(min(2 * n_selected, blocks), -1).indices
            scores += torch.zeros_like(pool).scatter_(2, kept, 1.0).repeat_interleave(64, 1)
        if kind == "first":
            scores[..., 0] = 3.0
        scores = scores.masked_fill(ids > own[:, None], -1)
        scores.scatter_(2, own[None, :, None].expand(kv_heads, -1, 1), 3.0)
        values, chosen = scores.topk(min(n_selected, blocks), -1)
        chosen = torch.where(values < 0, blocks, chosen).sort(-1).values
        indices[0, :, start : start + len(own)] = torch.where(chosen == blocks, -1, chosen).int()
    return indices


def describe() -> dict:
    """Card, versions, date and command of this run (without the place of the result file)."""
    arguments = sys.argv[1:]
    if "--output" in arguments:
        place = arguments.index("--output")
        del arguments[place : place + 2]
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
    }


def write_rows(output: Path, header: dict, rows: list[Row]) -> None:
    """Write a result file: what `describe` says, and the rows."""
    content = {**header, "rows": [row.as_json() for row in rows]}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n")
