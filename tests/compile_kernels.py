"""Compile every Triton operation of one shape for an NVIDIA card of compute capability 9.0, on a machine without one.

`python tests/compile_kernels.py '{"heads": 6, ...}'` prints one JSON object per kernel: its name, its shared memory in
bytes, and whether it holds the card's matrix instructions. A process of its own is needed: triton reads its switches
when kernels are defined. Launches only compile, so results are whatever the memory held.
"""

import json
import os
import sys


os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hysparse_hf.modeling import triton_common, triton_list_pieces
from hysparse_hf.modeling.attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    sliding_window_attention,
    sparse_layer_attention,
)
from hysparse_hf.modeling.layers_hysparse import rms_norm, rotate, swiglu


class NoCard:
    """What triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(kernel: JITFunction, grid: tuple):
    """In place of `kernel[grid]`: report what the launch would compile."""

    def launch(*arguments, **options):
        compiled = kernel.run(*arguments, grid=(1, 1, 1), warmup=True, **options)
        matrix = "wgmma" in compiled.asm["ptx"]
        print(json.dumps({"name": kernel.__name__, "shared": compiled.metadata.shared, "wgmma": matrix}))

    return launch


def main(
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
    q_len: int = 40,
    n_selected: int = 4,
    window: int = 128,
) -> None:
    """Run every operation forward and backward on states of one shape."""
    triton.runtime.driver.set_active(NoCard())
    JITFunction.__getitem__ = compile_only
    triton_common.is_interpreted = lambda: True
    torch.use_deterministic_algorithms(True, warn_only=True)

    def states(count: int, dim: int) -> torch.Tensor:
        return torch.zeros(1, count, q_len, dim, dtype=getattr(torch, dtype), requires_grad=True)

    query, key, value = states(heads, head_dim), states(kv_heads, head_dim), states(kv_heads, v_head_dim)
    gates = {"gate_global": states(heads, v_head_dim), "gate_local": states(heads, v_head_dim)}
    sink = torch.zeros(heads, requires_grad=True)
    indices = torch.zeros(1, kv_heads, q_len, n_selected, dtype=torch.int32)
    options = {"block_size": block_size, "backend": "triton"}

    def every_operation(query, indices, gates) -> list[torch.Tensor]:
        return [
            full_attention_with_oracle(query, key, value, n_selected=n_selected, **options)[0],
            full_attention_with_oracle(query, key, value, n_selected=0, **options)[0],
            sliding_window_attention(query, key, value, window=window, sink=sink, backend="triton"),
            block_sparse_attention(query, key, value, indices, sink=sink, **options),
            sparse_layer_attention(
                query,
                key,
                value,
                indices,
                query,
                key,
                value,
                window=window,
                sink_global=sink,
                sink_local=sink,
                **gates,
                **options,
            ),
        ]

    rotation = [states(1, head_dim)[0].detach() for _ in range(2)]
    weight = torch.zeros(head_dim, requires_grad=True)
    layer = rms_norm(query, weight, 1e-6, backend="triton")
    layer = rotate(swiglu(layer, layer, backend="triton"), rotation, backend="triton")
    # The second time the lists of so few queries have pieces too.
    for piece_rows in (triton_list_pieces.PIECE_ROWS, 1):
        triton_list_pieces.PIECE_ROWS = piece_rows
        outputs = [*every_operation(query, indices, gates), layer]
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs], retain_graph=True)
    with torch.no_grad():
        headwise = {name: gate[..., :1] for name, gate in gates.items()}
        for logits in (gates, headwise, {}):
            every_operation(query, indices, logits)
        for few in (1, 16):
            last_gates = {name: gate[:, :, :few] for name, gate in gates.items()}
            every_operation(query[:, :, :few], indices[:, :, :few], last_gates)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
