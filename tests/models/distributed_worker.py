"""One of two processes that train together over gloo: `distributed_worker.py RANK FOLDER` runs every check.

The processes meet through a file in `FOLDER` and leave what they saw there as `rank0.json` and `rank1.json`; the tests
in `test_distributed.py` read them. Starting processes costs more than all the checks, so one pair runs them all.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.tiny import SWITCHES, draw_ids, tiny_model  # noqa: E402 - after the path to it
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from hysparse_hf import HySparseForCausalLM  # noqa: E402


RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
IDS = draw_ids(2, 36)
OWN = IDS[RANK : RANK + 1]
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "mlp_only_layers": [1],
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compared(model, expected):
    """Parameters of `model` without a gradient, and the largest distance from the gradients of `expected`."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    distances = {
        name: (whole(found[name]) - parameter.grad).abs().max().item()
        for name, parameter in expected.named_parameters()
        if found[name] is not None
    }
    return {"missing": [name for name in found if found[name] is None], "worst": max(distances.values())}


def trained_alone(ids=IDS, **switches):
    """A model after one backward pass in this process alone over all the rows."""
    model = tiny_model(torch.float64, **switches).train()
    model(ids, labels=ids).loss.backward()
    return model


def saved(name, **switches):
    """A model and the folder it was saved in, once for both ranks."""
    model = tiny_model(torch.float64, **switches)
    if RANK == 0:
        model.save_pretrained(FOLDER / name)
    dist.barrier()
    return model, FOLDER / name


def data_parallel(checkpointing):
    model = tiny_model(torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    # Named, because its hooks work only as long as it lives.
    parallel = DistributedDataParallel(model)
    parallel(OWN, labels=OWN).loss.backward()
    return compared(model, trained_alone())


def fully_sharded(reentrant):
    model = tiny_model(torch.float64).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(OWN, labels=OWN).loss.backward()
    return compared(model, trained_alone())


def sharded_by_the_library():
    expected, folder = saved("sharded")
    model = HySparseForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(fsdp_size=2)
    )
    model(OWN, labels=OWN).loss.backward()
    expected(IDS, labels=IDS).loss.backward()
    return compared(model, expected)


def sharded_in_mixed_precision():
    """The library's policy casts parameters and inputs to bfloat16: what a bfloat16 model computes."""
    _, folder = saved("mixed", initializer_range=0.05)
    settings = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=True)
    model = HySparseForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=settings).train()
    output = model(OWN, labels=OWN, use_cache=False)
    output.loss.backward()
    low = HySparseForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return {
        "equal": torch.equal(output.logits, low(OWN, use_cache=False).logits),
        "dtypes": sorted({str(parameter.grad.dtype) for parameter in model.parameters()}),
    }


def tensor_parallel(name, **switches):
    expected, folder = saved(name, vocab_size=62, **switches)
    # The library's fused experts have no float64.
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    expected.set_experts_implementation("eager")
    settings = DistributedConfig(tp_size=2, tp_plan="auto")
    model = HySparseForCausalLM.from_pretrained(folder, distributed_config=settings, **options)
    with torch.no_grad():
        parallel = model(IDS, output_selected_indices=True)
        alone = expected(IDS, output_selected_indices=True)
    per_rank = [indices.chunk(2, dim=1)[RANK] for indices in alone.selected_indices]
    tokens = [m.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (model, expected)]
    model(IDS, labels=IDS).loss.backward()
    expected(IDS, labels=IDS).loss.backward()
    model.save_pretrained(FOLDER / f"{name}-again")
    dist.barrier()
    again = HySparseForCausalLM.from_pretrained(FOLDER / f"{name}-again", dtype=torch.float64).state_dict()
    return {
        **compared(model, expected),
        "logits": (parallel.logits - alone.logits).abs().max().item(),
        "own_groups": all(map(torch.equal, parallel.selected_indices, per_rank)),
        "tokens": torch.equal(*tokens),
        "saved": all(torch.equal(again[key], value) for key, value in expected.state_dict().items()),
        "whole": [key for key, parameter in model.named_parameters() if not hasattr(parameter, "full_tensor")],
    }


def one_kv_head_on_two_ranks():
    _, folder = saved("one-kv-head", num_key_value_heads=1)
    try:
        HySparseForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


CHECKS = {
    "ddp": lambda: data_parallel(checkpointing=False),
    "ddp-checkpointing": lambda: data_parallel(checkpointing=True),
    "fsdp2": lambda: fully_sharded(reentrant=None),
    "fsdp2-reentrant": lambda: fully_sharded(reentrant=True),
    "fsdp2-not-reentrant": lambda: fully_sharded(reentrant=False),
    "fsdp2-library": sharded_by_the_library,
    "fsdp2-mixed-precision": sharded_in_mixed_precision,
    "tp-wide_values": lambda: tensor_parallel("wide_values", tie_word_embeddings=True, **SWITCHES["wide_values"]),
    "tp-window_layers": lambda: tensor_parallel("window_layers", **SWITCHES["window_layers"]),
    "tp-headwise_full_gate": lambda: tensor_parallel("headwise_full_gate", **SWITCHES["headwise_full_gate"]),
    "tp-experts": lambda: tensor_parallel("experts", **EXPERTS),
    "tp-one-kv-head": one_kv_head_on_two_ranks,
}


def main():
    torch.set_num_threads(1)
    # The library asks the launcher's variables for its place.
    os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2")
    meeting = f"file://{FOLDER / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
    results = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check()
        except Exception:
            results[name] = {"failure": traceback.format_exc()}
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
