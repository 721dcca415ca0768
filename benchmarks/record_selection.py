"""Record which blocks a real model chooses on a real text, for `run.py` to measure the kernels on.

python benchmarks/record_selection.py CHECKPOINT TEXT... --output benchmarks/recorded/NAME.npz

CHECKPOINT is a dense model's folder. It is converted with its own attention throughout, so that its full layers choose
as the trained model attends. Of all full layers and KV heads, `KV_HEADS` are kept, evenly spread over the depth.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from registry import BLOCK_SIZE, N_SELECTED, NONE, RECORDED_LENGTH
from transformers import AutoModelForCausalLM, AutoTokenizer

import hysparse_hf
from hysparse_hf import HySparseForCausalLM


KV_HEADS = 8


def record(checkpoint: Path, text: str, length: int) -> np.ndarray:
    """Chosen blocks, uint8 `(KV_HEADS, length, N_SELECTED)`."""
    ids = AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt").input_ids[:, :length]
    if ids.shape[1] < length:
        raise SystemExit(f"the text must hold {length} tokens, it has {ids.shape[1]}; give more files.")
    layers = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).config.num_hidden_layers
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "mapped"
        hysparse_hf.convert(checkpoint, out, plan=list(range(layers)), init="naive", budget=BLOCK_SIZE * N_SELECTED)
        model = HySparseForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        selected = model(ids, use_cache=False, logits_to_keep=1, output_selected_indices=True).selected_indices
    heads = torch.cat(selected, dim=1)[0]
    kept = torch.linspace(0, len(heads) - 1, KV_HEADS).round().long()
    return torch.where(heads[kept] < 0, NONE, heads[kept]).to(torch.uint8).numpy()


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--length", type=int, default=RECORDED_LENGTH)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    text = "\n\n".join(path.read_text() for path in arguments.texts)
    indices = record(arguments.checkpoint, text, arguments.length)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.output, indices=indices)
    print(f"{arguments.output}: {indices.shape}, {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
