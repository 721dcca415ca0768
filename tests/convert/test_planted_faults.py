"""A wrong tensor in a converted checkpoint is caught by name. Each test writes down the right and the wrong number."""

import pytest
import torch

from hysparse_hf import cli, verify
from hysparse_hf.conversion.faults import dense_difference, module_faults, weight_faults


@pytest.fixture
def converted(make_source, convert_naive):
    source, model = make_source(attention_bias=True)
    return source, model, convert_naive(source)


ATTENTION = "model.layers.2.self_attn"


def swap_keys_and_values(tensors):
    for part in ("weight", "bias"):
        key, value = f"{ATTENTION}.k_proj.{part}", f"{ATTENTION}.v_proj.{part}"
        tensors[key], tensors[value] = tensors[value], tensors[key]


def permute_kv_heads(tensors):
    for part in ("weight", "bias"):
        name = f"{ATTENTION}.k_proj.{part}"
        tensors[name] = tensors[name].unflatten(0, (2, 24)).flip(0).flatten(0, 1)


def transpose_output(tensors):
    tensors[f"{ATTENTION}.o_proj.weight"] = tensors[f"{ATTENTION}.o_proj.weight"].T.reshape(64, 96)


def round_once(tensors):
    name = f"{ATTENTION}.q_proj.weight"
    tensors[name] = tensors[name].bfloat16().float()


# Largest logit difference of the right conversion: 3.8e-06, with logits up to 5.7. Of the wrong ones, in this order:
# 6.3, 1.8, 5.8 and 3.3e-03; the second column is half of that.
PLANTED = {
    "swapped-k-and-v": (
        swap_keys_and_values,
        3.0,
        {
            f"{ATTENTION}.k_proj.weight": f"holds the source's {ATTENTION}.v_proj.weight",
            f"{ATTENTION}.k_proj.bias": f"holds the source's {ATTENTION}.v_proj.bias",
            f"{ATTENTION}.v_proj.weight": f"holds the source's {ATTENTION}.k_proj.weight",
            f"{ATTENTION}.v_proj.bias": f"holds the source's {ATTENTION}.k_proj.bias",
        },
        {f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"},
    ),
    "permuted-kv-head": (
        permute_kv_heads,
        0.9,
        {
            f"{ATTENTION}.k_proj.weight": "with its heads in the order [1, 0]",
            f"{ATTENTION}.k_proj.bias": "with its heads in the order [1, 0]",
        },
        {f"{ATTENTION}.k_proj"},
    ),
    "transposed-output": (
        transpose_output,
        2.9,
        {f"{ATTENTION}.o_proj.weight": "differs from the source's"},
        {f"{ATTENTION}.o_proj"},
    ),
    "rounded-once": (
        round_once,
        1.6e-3,
        {f"{ATTENTION}.q_proj.weight": "differs from the source's"},
        {f"{ATTENTION}.q_proj"},
    ),
}


@pytest.mark.parametrize(("plant", "wrong", "tensors", "modules"), PLANTED.values(), ids=PLANTED)
def test_wrong_tensor_is_named(converted, token_ids, edit, plant, wrong, tensors, modules):
    source, model, out = converted
    assert dense_difference(model, out, token_ids) < 1e-5
    edit.tensors(out / "model.safetensors", plant)
    found = weight_faults(source, out)
    assert {line.partition(": ")[0] for line in found} == tensors.keys()
    assert all(tensors[line.partition(": ")[0]] in line for line in found)
    assert set(module_faults(model, out, token_ids)) == modules
    assert dense_difference(model, out, token_ids) > wrong


def test_dropped_tensor_is_named(converted, edit):
    source, _, out = converted
    edit.tensors(out / "model.safetensors", lambda tensors: tensors.pop(f"{ATTENTION}.o_proj.bias"))
    assert weight_faults(source, out) == [f"{ATTENTION}.o_proj.bias: missing in the converted checkpoint"]


def drop_bias(tensors):
    del tensors[f"{ATTENTION}.k_proj.bias"]


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (swap_keys_and_values, f"{ATTENTION}.k_proj.weight: holds the source's {ATTENTION}.v_proj.weight"),
        (permute_kv_heads, f"{ATTENTION}.k_proj.weight: holds the source's {ATTENTION}.k_proj.weight with its heads"),
        (drop_bias, f"{ATTENTION}.k_proj.bias: missing"),
    ],
    ids=["swapped-k-and-v", "permuted-kv-head", "H05-dropped-bias"],
)
def test_command_fails_and_names_the_tensor(converted, edit, capsys, plant, name):
    source, _, out = converted
    edit.tensors(out / "model.safetensors", plant)
    assert cli.main(["verify", str(source), str(out)]) == 1
    assert name in capsys.readouterr().out


def test_wrong_table_is_caught_without_the_table(make_source, convert_naive, token_ids, monkeypatch):
    """A table that swaps k and v agrees with its own inverse; running the source's modules shows it."""
    from hysparse_hf.conversion import key_map

    def swapped(rule):
        swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
        name = next((name for name in swap if name in rule.source), None)
        return rule if name is None else rule._replace(target=rule.source.replace(name, swap[name]))

    rules = tuple(swapped(rule) for rule in key_map.DENSE_DECODER)
    monkeypatch.setitem(key_map.KEY_MAPS, "dense_decoder", rules)
    source, model = make_source()
    out = convert_naive(source)
    assert weight_faults(source, out) == []
    named = {f"model.layers.{layer}.self_attn.{name}" for layer in range(5) for name in ("k_proj", "v_proj")}
    assert set(module_faults(model, out, token_ids)) == named
    report = verify(source, out, text=token_ids, samples=0)
    assert {line.partition(": ")[0] for line in report["faults"]} == named


def test_verification_stops_a_conversion_that_wrote_a_wrong_tensor(make_source, convert_naive, monkeypatch, tmp_path):
    from hysparse_hf.conversion import output

    write = output.CheckpointWriter.write

    def wrong(self, key, tensor):
        write(self, key, -tensor if key == "model.norm.weight" else tensor)

    monkeypatch.setattr(output.CheckpointWriter, "write", wrong)
    source, _ = make_source()
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight: differs"):
        convert_naive(source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_difference_needs_a_float32_source(converted, token_ids):
    _, model, out = converted
    with pytest.raises(ValueError, match="float32 model"):
        dense_difference(model.to(torch.bfloat16), out, token_ids)
