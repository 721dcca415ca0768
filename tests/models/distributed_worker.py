"""One of two processes that train together over gloo: `distributed_worker.py RANK FOLDER` runs every check.

The processes meet through a file in `FOLDER` and leave what they saw there as `rank0.json` and `rank1.json`; the tests
in `test_distributed.py` read them. Starting processes costs more than all the checks, so one pair runs them all.
"""

import functools
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import tiny, tiny2  # noqa: E402 - after the path to them
from models.tiny import draw_ids  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402


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
    """All of a tensor, of which each rank has a part; by hand where the part is one of each of several, packed."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    (placement,) = tensor.placements
    packed = getattr(placement, "split_factor", 1)
    if packed == 1:
        return tensor.full_tensor()
    part = tensor.to_local().contiguous()
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part)
    pieces = zip(*(each.chunk(packed, placement.dim) for each in parts), strict=True)
    return torch.cat([piece for of_ranks in pieces for piece in of_ranks], placement.dim)


def compared(model, expected):
    """Parameters of `model` without a gradient, and the largest distance from the gradients of `expected`."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    distances = {
        name: (whole(found[name]) - parameter.grad).abs().max().item()
        for name, parameter in expected.named_parameters()
        if found[name] is not None
    }
    return {"missing": [name for name in found if found[name] is None], "worst": max(distances.values())}


def trained_alone(generation):
    """A model after one backward pass in this process alone over all the rows."""
    model = generation.tiny_model(torch.float64).train()
    model(IDS, labels=IDS).loss.backward()
    return model


def saved(generation, name, **switches):
    """A model and the folder it was saved in, once for both ranks."""
    model = generation.tiny_model(torch.float64, **switches)
    folder = FOLDER / f"{model.config.model_type}-{name}"
    if RANK == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model, folder


def data_parallel(generation, checkpointing):
    model = generation.tiny_model(torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    # Named, because its hooks work only as long as it lives.
    parallel = DistributedDataParallel(model)
    parallel(OWN, labels=OWN).loss.backward()
    return compared(model, trained_alone(generation))


def fully_sharded(generation, reentrant):
    model = generation.tiny_model(torch.float64).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(OWN, labels=OWN).loss.backward()
    return compared(model, trained_alone(generation))


def sharded_by_the_library(generation):
    expected, folder = saved(generation, "sharded")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(fsdp_size=2)
    )
    model(OWN, labels=OWN).loss.backward()
    expected(IDS, labels=IDS).loss.backward()
    return compared(model, expected)


def sharded_in_mixed_precision(generation):
    """The library's policy casts parameters and inputs to bfloat16: what a bfloat16 model computes."""
    _, folder = saved(generation, "mixed", initializer_range=0.05)
    settings = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=settings).train()
    output = model(OWN, labels=OWN, use_cache=False)
    output.loss.backward()
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return {
        "equal": torch.equal(output.logits, low(OWN, use_cache=False).logits),
        "dtypes": sorted({str(parameter.grad.dtype) for parameter in model.parameters()}),
    }


def saved_again(model, expected, folder):
    """Whether what both ranks save together holds the tensors of `expected`, or why PyTorch cannot save it."""
    try:
        model.save_pretrained(folder)
    except ValueError as error:
        return str(error)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    return all(torch.equal(again[key], value) for key, value in expected.state_dict().items())


def tensor_parallel(generation, name, **switches):
    expected, folder = saved(generation, name, vocab_size=62, **switches)
    # The library's fused experts have no float64.
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    expected.set_experts_implementation("eager")
    settings = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=settings, **options)
    with torch.no_grad():
        parallel, alone = (m(IDS, output_selected_indices=True) for m in (model, expected))
        last = [m(IDS, logits_to_keep=1).logits for m in (model, expected)]
    per_rank = [indices.chunk(2, dim=1)[RANK] for indices in alone.selected_indices]
    tokens = [m.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, expected)]
    model(IDS, labels=IDS).loss.backward()
    expected(IDS, labels=IDS).loss.backward()
    return {
        **compared(model, expected),
        "logits": max((one - other).abs().max().item() for one, other in (last, (parallel.logits, alone.logits))),
        "own_groups": all(map(torch.equal, parallel.selected_indices, per_rank)),
        "tokens": torch.equal(*tokens),
        "saved": saved_again(model, expected, folder / "again"),
        "whole": [key for key, parameter in model.named_parameters() if not hasattr(parameter, "full_tensor")],
    }


def one_kv_head_on_two_ranks(generation):
    _, folder = saved(generation, "one-kv-head", num_key_value_heads=1)
    try:
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


# Of both generations.
CHECKS = {
    "ddp": functools.partial(data_parallel, checkpointing=False),
    "ddp-checkpointing": functools.partial(data_parallel, checkpointing=True),
    "fsdp2": functools.partial(fully_sharded, reentrant=None),
    "fsdp2-reentrant": functools.partial(fully_sharded, reentrant=True),
    "fsdp2-not-reentrant": functools.partial(fully_sharded, reentrant=False),
    "fsdp2-library": sharded_by_the_library,
    "fsdp2-mixed-precision": sharded_in_mixed_precision,
    "tp-one-kv-head": one_kv_head_on_two_ranks,
}
WIDE = {"v_head_dim": 40, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}
TENSOR_PARALLEL = {
    (tiny, "wide_values"): WIDE,
    (tiny, "window_layers"): tiny.SWITCHES["window_layers"],
    (tiny, "headwise_full_gate"): tiny.SWITCHES["headwise_full_gate"],
    (tiny, "experts"): EXPERTS,
    (tiny2, "wide_values"): WIDE,
    (tiny2, "two_bridges"): tiny2.SWITCHES["two_bridges"],
    (tiny2, "own_kv"): tiny2.SWITCHES["own_kv"],
    (tiny2, "experts"): EXPERTS,
}


def checks():
    """What to run for each generation, by its name."""
    for generation, label in ((tiny, "T1"), (tiny2, "T2")):
        for name, check in CHECKS.items():
            yield f"{label}-{name}", functools.partial(check, generation)
        for (of, name), switches in TENSOR_PARALLEL.items():
            if of is generation:
                yield f"{label}-tp-{name}", functools.partial(tensor_parallel, generation, name, **switches)


def main():
    torch.set_num_threads(1)
    # The library asks the launcher's variables for its place.
    os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2")
    meeting = f"file://{FOLDER / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
    results = {}
    for name, check in checks():
        try:
            results[name] = check()
        except Exception:
            results[name] = {"failure": traceback.format_exc()}
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
