"""The kernels of every listed shape compile for the card without one, and fit into its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parent.parent / "compile_kernels.py"

# What one program may use on compute capability 9.0.
MOST_SHARED = 227 * 1024

KERNELS = {
    "_full_attention_fwd_kernel",
    "_block_topk_kernel",
    "_sliding_window_fwd_kernel",
    "_tile_union_kernel",
    "_block_sparse_fwd_kernel",
    "_row_terms_kernel",
    "_band_dq_kernel",
    "_band_dkdv_kernel",
    "_choice_blocks_kernel",
    "_block_sparse_dq_kernel",
    "_block_sparse_dkdv_kernel",
    "_add_pieces_kernel",
    "_gates_bwd_kernel",
    "_decode_full_kernel",
    "_decode_full_finish_kernel",
    "_decode_sparse_kernel",
}
# Of the operations around attention, which have no matrix products.
KERNELS_AROUND = {
    "_rms_norm_fwd_kernel",
    "_rms_norm_bwd_kernel",
    "_rotary_kernel",
    "_swiglu_fwd_kernel",
    "_swiglu_bwd_kernel",
}


def compile_all(**shape):
    """Names and sizes of all kernels that the operations launch for a shape."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(shape)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(dtype="bfloat16", heads=8, kv_heads=2, dims=(128, 128), block_size=64):
    found = compile_all(
        dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=dims[0], v_head_dim=dims[1], block_size=block_size
    )
    assert {kernel["name"] for kernel in found} == KERNELS | KERNELS_AROUND
    assert [kernel for kernel in found if kernel["shared"] > MOST_SHARED] == []
    return found


def test_products_run_on_the_matrix_units():
    found = check()
    many_rows = {name for name in KERNELS if "fwd" in name or "dq" in name or "dkdv" in name}
    # Sixteen queries fill a tile of the decode kernel; one does not, and its group goes to the older units.
    assert {kernel["name"] for kernel in found if kernel["wgmma"]} == many_rows | {"_decode_full_kernel"}


@pytest.mark.parametrize("q_len", [1, 40])
def test_numbers_that_are_one(q_len):
    """Triton makes a constant of such a number, on which kernels must not call what only tensors have."""
    ones = {"heads": 1, "kv_heads": 1, "n_selected": 1, "window": 1}
    found = compile_all(dtype="float32", head_dim=16, v_head_dim=16, block_size=16, q_len=q_len, **ones)
    kinds = ("fwd", "dq") if q_len == 1 else ("fwd", "dq", "decode")
    assert {kernel["name"] for kernel in found} >= {name for name in KERNELS if any(kind in name for kind in kinds)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_listed_head_dims_C12(dims, dtype):
    check(dtype, dims=dims)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16, 64])
def test_listed_groups_C01(group):
    check(heads=2 * group)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size):
    check(block_size=block_size)
