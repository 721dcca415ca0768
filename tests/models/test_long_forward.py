"""A long forward on the reference back end stays within the memory and time that a laptop has."""

import json
import subprocess
import sys

import pytest


pytest.importorskip("psutil")

# SmolLM2-135M's shape with random weights; the peak is sampled, and reset before the forward by measuring above it.
LONG_FORWARD = """
import json, threading, time
import psutil, torch
from hysparse_hf import HySparseConfig, HySparseForCausalLM

torch.manual_seed(0)
config = HySparseConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
)
model = HySparseForCausalLM(config).eval()
ids = torch.randint(config.vocab_size, (1, 8192))
process = psutil.Process()
weights = process.memory_info().rss
peak, running = weights, True

def watch():
    global peak
    while running:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.01)

watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter()
with torch.no_grad():
    output = model(ids, logits_to_keep=1, use_cache=True)
seconds = time.perf_counter() - began
running = False
watcher.join()
finite = bool(output.logits.isfinite().all())
print(json.dumps({"seconds": seconds, "gigabytes": (peak - weights) / 1e9, "finite": finite}))
"""


@pytest.mark.slow
def test_8192_tokens_stay_under_3_gigabytes_and_60_seconds() -> None:
    result = subprocess.run([sys.executable, "-c", LONG_FORWARD], capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout.splitlines()[-1])
    print(measured)
    assert measured["finite"]
    assert measured["gigabytes"] < 3
    assert measured["seconds"] < 60
