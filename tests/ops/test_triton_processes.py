"""Several processes that compile the kernels at once, into one empty folder."""

import json
import os
import subprocess
import sys

import pytest


pytestmark = pytest.mark.gpu

STEP = """
import json, torch
from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle, sliding_window_attention

generator = torch.Generator().manual_seed(0)
states = [torch.randn(1, 2, 70, 64, generator=generator).cuda().requires_grad_() for _ in range(3)]
output, _, indices = full_attention_with_oracle(*states, block_size=16, n_selected=2, backend="triton")
output = output + sliding_window_attention(*states, window=9, backend="triton")
output.sum().backward()
print(json.dumps([output.sum().item(), indices.sum().item(), *(part.grad.sum().item() for part in states)]))
"""


def test_four_first_calls_at_once_D06(tmp_path):
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "empty")}
    workers = [
        subprocess.Popen([sys.executable, "-c", STEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        for _ in range(4)
    ]
    printed = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, printed[0][1].decode()[-3000:]
    results = [json.loads(output.decode().splitlines()[-1]) for output, _ in printed]
    assert all(result == results[0] for result in results)
    assert any((tmp_path / "empty").iterdir())
