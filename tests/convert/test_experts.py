"""Mixtures of experts as sources: every family, in both layouts of the experts."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hysparse_hf import HySparseForCausalLM, cli, convert
from hysparse_hf.conversion.faults import dense_difference, module_faults, same_bits, weight_faults
from hysparse_hf.conversion.key_map import KEY_MAPS, OPERATIONS, build_key_map, fused_experts, target_shapes


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Every option of a family: layers without experts, weights that add up to one or not, biases, an odd head.
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-tied": ("Mixtral", {"num_local_experts": 4, "sliding_window": None, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-everything": (
        "Qwen3Moe",
        EXPERTS | {"mlp_only_layers": [3], "attention_bias": True, "head_dim": 18, "tie_word_embeddings": True},
    ),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 56}),
    "qwen2-moe-every-second-layer": (
        "Qwen2Moe",
        EXPERTS | {"shared_expert_intermediate_size": 56, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
}
LAYOUTS = pytest.mark.parametrize("fused", [False, True], ids=["per-expert", "fused"])


@pytest.fixture
def make_experts(make_source):
    """Factory: a source of a family in `FAMILIES`, its experts each by themselves or fused; `(folder, model)`."""

    def make(row, fused=False, **options):
        family, fields = FAMILIES[row]
        source, model = make_source(family, **fields | options)
        if fused:
            state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
            if model.config.tie_word_embeddings:
                del state["lm_head.weight"]
            save_file(state, source / "model.safetensors", metadata={"format": "pt"})
        return source, model

    return make


def keys_of(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@LAYOUTS
@pytest.mark.parametrize("name", FAMILIES)
def test_H07_dense_switch_equals_the_source(make_experts, convert_naive, token_ids, name, fused):
    source, model = make_experts(name, fused)
    out = convert_naive(source)
    scale = model(token_ids).logits.abs().max().item()
    assert scale > 1, "logits too small to compare"
    assert dense_difference(model, out, token_ids) < 1e-5 * scale
    assert module_faults(model, out, token_ids) == {}
    assert weight_faults(source, out) == []


@LAYOUTS
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe-everything"])
def test_H06_every_expert_and_router_is_the_sources_after_loading(make_experts, convert_naive, name, fused):
    source, model = make_experts(name, fused)
    loaded, report = HySparseForCausalLM.from_pretrained(convert_naive(source), output_loading_info=True)
    assert not any(report.values())
    held = loaded.state_dict()
    expected = {key: tensor for key, tensor in model.state_dict().items() if ".mlp." in key}
    assert {key for key in held if ".mlp." in key} == expected.keys()
    assert sum(key.endswith(("gate_up_proj", "down_proj", "mlp.gate.weight")) for key in expected) >= 12
    for key, tensor in expected.items():
        assert same_bits(held[key], tensor), key


@LAYOUTS
def test_H07_experts_stay_in_the_layout_of_the_source(make_experts, convert_naive, fused):
    source, _ = make_experts("mixtral", fused)
    stored = [key for key in keys_of(convert_naive(source)) if ".experts." in key]
    assert len(stored) == (5 * 2 if fused else 5 * 4 * 3)
    assert all(bool(re.search(r"\.experts\.\d+\.", key)) is not fused for key in stored)


@LAYOUTS
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe-everything"])
def test_inverse_returns_the_source_bit_for_bit(make_experts, convert_naive, name, fused):
    source, _ = make_experts(name, fused)
    out = convert_naive(source)
    written, original = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    record = json.loads((out / "provenance.json").read_text())
    assert record["keys"]["mapped"] == len(original)
    assert record["keys"]["dropped"] == {}
    config = HySparseForCausalLM.from_pretrained(out).config
    key_map = build_key_map(
        KEY_MAPS["mixture_of_experts"],
        {key: tuple(tensor.shape) for key, tensor in original.items()},
        target_shapes(config, original),
        tied=config.tie_word_embeddings,
    )
    for entry in key_map.entries:
        assert same_bits(key_map.source_tensor(entry, written[entry.target]), original[entry.source])
    assert OPERATIONS.keys() == {"copy"}


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_the_configuration_is_lost_unseen(make_experts, convert_naive, name):
    source, model = make_experts(name)
    out = convert_naive(source)
    dropped = json.loads((out / "provenance.json").read_text())["dropped_config_fields"]
    named = {"attention_dropout", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    assert dropped.keys() <= named | {"router_jitter_noise"}
    config = HySparseForCausalLM.from_pretrained(out).config
    for field in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"):
        assert getattr(config, field) == getattr(model.config, field)


@LAYOUTS
def test_H05_a_missing_expert_is_named(make_experts, convert_naive, edit, fused):
    source, _ = make_experts("qwen3-moe", fused)
    name = "experts.down_proj" if fused else "experts.2.up_proj.weight"
    edit.tensors(source / "model.safetensors", lambda tensors: tensors.pop(f"model.layers.1.mlp.{name}"))
    with pytest.raises(ValueError, match=re.escape(f"model.layers.1.mlp.{name} (") + ".* is missing in the source"):
        convert_naive(source)


def test_dry_run_names_the_experts(make_experts, tmp_path, capsys):
    source, _ = make_experts("mixtral")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--dry-run"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if "layers.3.block_sparse_moe.experts.1.w3" in line
    )
    assert line.split()[-1] == "model.layers.3.mlp.experts.1.up_proj.weight"


def test_the_fit_is_the_same_in_both_layouts(make_experts, tmp_path, token_ids):
    options = {"calibrate": token_ids, "plan": "regular", "budget": 16, "block_size": 8, "window": 12}
    fits = []
    for fused in (False, True):
        source, _ = make_experts("qwen2-moe", fused, name=f"source-{fused}")
        record = convert(source, tmp_path / f"out-{fused}", **options)
        assert weight_faults(source, tmp_path / f"out-{fused}") == []
        fits.append(record["fit"])
    assert set(fits[0]) == {"1", "2", "3"}
    assert fits[0] == fits[1]


def test_fused_experts_of_separate_ones():
    parts = {
        f"x.experts.{expert}.{part}.weight": torch.full((2, 3), 10.0 * expert + number)
        for expert in range(3)
        for number, part in enumerate(("gate_proj", "up_proj", "down_proj"))
    }
    fused = fused_experts("x.experts.gate_up_proj", 3, parts.__getitem__)
    assert fused[:, :, 0].tolist() == [[0, 0, 1, 1], [10, 10, 11, 11], [20, 20, 21, 21]]
    assert fused_experts("x.experts.down_proj", 3, parts.__getitem__)[:, 0, 0].tolist() == [2, 12, 22]


MLP = "model.layers.2.mlp"


def swap_experts(tensors):
    for part in ("gate_proj", "up_proj", "down_proj"):
        first, second = (f"{MLP}.experts.{expert}.{part}.weight" for expert in (1, 3))
        tensors[first], tensors[second] = tensors[second], tensors[first]


def swap_gate_and_up(tensors):
    first, second = (f"{MLP}.experts.0.{part}.weight" for part in ("gate_proj", "up_proj"))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def swap_fused_experts(tensors):
    for part in ("gate_up_proj", "down_proj"):
        tensors[f"{MLP}.experts.{part}"] = tensors[f"{MLP}.experts.{part}"][[0, 3, 2, 1]]


def swap_fused_gate_and_up(tensors):
    tensors[f"{MLP}.experts.gate_up_proj"][0] = tensors[f"{MLP}.experts.gate_up_proj"][0].roll(40, 0)


def permute_router(tensors):
    tensors[f"{MLP}.gate.weight"] = tensors[f"{MLP}.gate.weight"][[1, 0, 2, 3]]


# Layout, fault, half of the logit difference that it makes (4.9, 4.2, 4.9, 4.2 and 6.3 in this order, against 5e-06 of
# the right conversion), what is said of which tensor, and the modules that differ.
PLANTED = {
    "swapped-experts": (
        False,
        swap_experts,
        2.4,
        {
            f"{MLP}.experts.{expert}.{part}.weight": f"holds the source's {MLP}.experts.{other}.{part}.weight"
            for expert, other in ((1, 3), (3, 1))
            for part in ("gate_proj", "up_proj", "down_proj")
        },
        {f"{MLP}.experts"},
    ),
    "swapped-gate-and-up": (
        False,
        swap_gate_and_up,
        2.1,
        {
            f"{MLP}.experts.0.gate_proj.weight": f"holds the source's {MLP}.experts.0.up_proj.weight",
            f"{MLP}.experts.0.up_proj.weight": f"holds the source's {MLP}.experts.0.gate_proj.weight",
        },
        {f"{MLP}.experts"},
    ),
    "fused-swapped-experts": (
        True,
        swap_fused_experts,
        2.4,
        {
            f"{MLP}.experts.gate_up_proj": "with its experts in the order [0, 3, 2, 1]",
            f"{MLP}.experts.down_proj": "with its experts in the order [0, 3, 2, 1]",
        },
        {f"{MLP}.experts"},
    ),
    "fused-swapped-gate-and-up": (
        True,
        swap_fused_gate_and_up,
        2.1,
        {f"{MLP}.experts.gate_up_proj": "in experts [0], gate and up swapped"},
        {f"{MLP}.experts"},
    ),
    "permuted-router": (False, permute_router, 3.1, {f"{MLP}.gate.weight": "differs from"}, {f"{MLP}.gate"}),
}


@pytest.mark.parametrize(("fused", "plant", "wrong", "tensors", "modules"), PLANTED.values(), ids=PLANTED)
def test_wrong_expert_is_named(make_experts, convert_naive, token_ids, edit, fused, plant, wrong, tensors, modules):
    source, model = make_experts("qwen3-moe", fused)
    out = convert_naive(source)
    edit.tensors(out / "model.safetensors", plant)
    found = dict(line.split(": ", 1) for line in weight_faults(source, out))
    assert found.keys() == tensors.keys()
    assert all(words in found[name] for name, words in tensors.items())
    assert set(module_faults(model, out, token_ids)) == modules
    assert dense_difference(model, out, token_ids) > wrong


def test_dropped_router_is_named(make_experts, convert_naive, edit):
    source, _ = make_experts("mixtral")
    out = convert_naive(source)
    edit.tensors(out / "model.safetensors", lambda tensors: tensors.pop(f"{MLP}.gate.weight"))
    assert weight_faults(source, out) == [f"{MLP}.gate.weight: missing in the converted checkpoint"]


def test_router_that_forgets_to_normalise_is_named(make_experts, convert_naive, token_ids, edit):
    source, model = make_experts("mixtral")
    out = convert_naive(source)
    edit.json(out / "config.json", norm_topk_prob=False)
    assert set(module_faults(model, out, token_ids)) == {f"model.layers.{layer}.mlp.gate" for layer in range(5)}
