"""How often a kernel is compiled when the length of its calls varies, as it does from one batch to the next."""

import pytest
import torch
from kernel_checks import make_states

from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle, sparse_layer_attention


pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from hysparse_hf.modeling import (  # noqa: E402
    triton_band_backward,
    triton_block_sparse,
    triton_block_sparse_backward,
    triton_full_attention,
    triton_sliding_window,
)


KERNELS = (
    triton_full_attention._full_attention_fwd_kernel,
    triton_block_sparse._block_sparse_fwd_kernel,
    triton_sliding_window._sliding_window_fwd_kernel,
    triton_block_sparse_backward._block_sparse_dq_kernel,
    triton_block_sparse_backward._block_sparse_dkdv_kernel,
    triton_band_backward._band_dq_kernel,
    triton_band_backward._band_dkdv_kernel,
)
LENGTHS = (*range(65, 129, 3), 256, 400, 512, 1000, 1024)


def run(length: int) -> None:
    states = [part.requires_grad_() for part in make_states(length, heads=2, head_dim=64, dtype=torch.bfloat16)]
    output, _, indices = full_attention_with_oracle(*states, block_size=16, n_selected=2, backend="triton")
    layer = sparse_layer_attention(*states, indices, *states, block_size=16, window=32, backend="triton")
    (output + layer).sum().backward()


def test_the_number_of_variants_does_not_follow_the_lengths():
    device = torch.cuda.current_device()
    before = [len(kernel.device_caches[device][0]) for kernel in KERNELS]
    for length in LENGTHS:
        run(length)
    made = [len(kernel.device_caches[device][0]) - old for kernel, old in zip(KERNELS, before, strict=True)]
    # A length divisible by 16 or not, for each argument that holds one.
    assert max(made) <= 4, made
