"""The map accounts for every key, and its inverse gives the source back bit for bit."""

import itertools
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from hysparse_hf import HySparseConfig, convert
from hysparse_hf.conversion.faults import checkpoint_map, same_bits
from hysparse_hf.conversion.key_map import DENSE_DECODER, NEW_PARAMETERS, OPERATIONS, build_key_map, target_shapes
from hysparse_hf.conversion.source import FolderSource


CONFIG = {
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "layer_plan": ["full", "sparse"],
}


def shapes_of(**changes):
    """Target shapes, and the source's: the same without the new parameters."""
    targets = target_shapes(HySparseConfig(**(CONFIG | changes)))
    return {key: shape for key, shape in targets.items() if not re.search("gate_(global|local)|sink", key)}, targets


def test_every_target_is_filled_once_or_new():
    sources, targets = shapes_of(attention_bias=True, mlp_bias=True, use_qk_norm=True)
    key_map = build_key_map(DENSE_DECODER, sources, targets)
    filled = [entry.target for entry in key_map.entries]
    assert sorted([*filled, *key_map.new]) == sorted(targets)
    assert set(key_map.new.values()) == set(NEW_PARAMETERS.values())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "model.layers.0.self_attn.o_proj.bias"),
        ({}, "model.layers.1.mlp.down_proj.bias"),
        ({}, "model.layers.1.self_attn.q_norm.weight"),
        ({}, "model.layers.2.input_layernorm.weight"),
        ({}, "model.layers.0.self_attn.unknown.weight"),
        ({}, "score.weight"),
    ],
    ids=lambda value: f"H05-{value}" if isinstance(value, str) else "",
)
def test_source_key_without_a_place_is_named(changes, key):
    sources, targets = shapes_of(**changes)
    with pytest.raises(ValueError, match=re.escape(f"{key} (8) is in the source")):
        build_key_map(DENSE_DECODER, sources | {key: (8,)}, targets)


@pytest.mark.parametrize(
    "key",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.self_attn.o_proj.bias",
    ],
    ids=lambda key: f"H05-{key}",
)
def test_missing_source_key_is_named(key):
    sources, targets = shapes_of(attention_bias=True, use_qk_norm=True)
    sources.pop(key)
    with pytest.raises(ValueError, match=re.escape(key) + r" \([\d, ]+\) is missing in the source"):
        build_key_map(DENSE_DECODER, sources, targets)


def test_wrong_shape_is_named():
    sources, targets = shapes_of()
    sources["model.norm.weight"] = (9,)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(9\), config\.json asks for \(8\)"):
        build_key_map(DENSE_DECODER, sources, targets)


def test_all_faults_are_listed_together():
    sources, targets = shapes_of()
    sources.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"extra\.weight[^\0]*model\.norm\.weight"):
        build_key_map(DENSE_DECODER, sources | {"extra.weight": (1,)}, targets)


def test_two_sources_for_one_target_are_refused():
    sources, targets = shapes_of()
    rule = DENSE_DECODER[0]._replace(source="model.copy.weight")
    with pytest.raises(ValueError, match=r"model\.copy\.weight and model\.embed_tokens\.weight are both"):
        build_key_map((*DENSE_DECODER, rule), sources | {"model.copy.weight": (7, 8)}, targets)


def test_stored_rotary_frequencies_are_dropped_for_a_reason():
    sources, targets = shapes_of()
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    key_map = build_key_map(DENSE_DECODER, sources | {key: (2,)}, targets)
    assert key_map.dropped == {key: "computed from the configuration when built"}


def test_inverse_returns_the_source_bit_for_bit():
    hypothesis = pytest.importorskip("hypothesis")
    strategies = hypothesis.strategies

    @hypothesis.settings(max_examples=25)
    @hypothesis.given(
        layers=strategies.integers(1, 4),
        group=strategies.sampled_from([1, 2, 3]),
        kv_heads=strategies.integers(1, 3),
        head_dim=strategies.sampled_from([2, 6]),
        attention_bias=strategies.booleans(),
        mlp_bias=strategies.booleans(),
        use_qk_norm=strategies.booleans(),
        tied=strategies.booleans(),
        prefix=strategies.sampled_from(["model.", ""]),
        dtype=strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        seed=strategies.integers(0, 99),
    )
    def check(layers, group, kv_heads, head_dim, attention_bias, mlp_bias, use_qk_norm, tied, prefix, dtype, seed):
        shapes, targets = shapes_of(
            num_hidden_layers=layers,
            layer_plan=["full"] + ["sparse"] * (layers - 1),
            num_attention_heads=group * kv_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            attention_bias=attention_bias,
            mlp_bias=mlp_bias,
            use_qk_norm=use_qk_norm,
            tie_word_embeddings=tied,
        )
        generator = torch.Generator().manual_seed(seed)
        source = {}
        for key, shape in shapes.items():
            # Every bit pattern is allowed, NaN included.
            bits = torch.randint(-(2**15), 2**15, (*shape, dtype.itemsize // 2), generator=generator).short()
            source[prefix + key.removeprefix("model.") if key != "lm_head.weight" else key] = bits.view(dtype)[..., 0]
        key_map = build_key_map(
            DENSE_DECODER,
            {key: tuple(tensor.shape) for key, tensor in source.items()},
            targets,
            prefixes=("model.", ""),
            tied=tied,
        )
        written = {e.target: OPERATIONS[e.operation].apply(source[e.source]) for e in key_map.entries}
        assert sorted([*written, *key_map.new]) == sorted(targets)
        for entry in key_map.entries:
            assert same_bits(key_map.source_tensor(entry, written[entry.target]), source[entry.source])

    check()


def test_converted_files_invert_to_the_source_bit_for_bit(make_source, tmp_path):
    """The same through whole conversions: tensors of any bit pattern, written by one process and read back."""
    hypothesis = pytest.importorskip("hypothesis")
    strategies = hypothesis.strategies
    numbers = itertools.count()

    @hypothesis.settings(max_examples=8)
    @hypothesis.given(
        family=strategies.sampled_from(["Llama", "Qwen2", "Qwen3"]),
        layers=strategies.integers(1, 3),
        tied=strategies.booleans(),
        dtype=strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        shard=strategies.sampled_from(["1GB", "60KB"]),
        written=strategies.sampled_from([10**9, 60_000]),
        seed=strategies.integers(0, 99),
    )
    def check(family, layers, tied, dtype, shard, written, seed):
        name = f"source{next(numbers)}"
        options = {"num_hidden_layers": layers, "tie_word_embeddings": tied, "dtype": dtype}
        source, _ = make_source(family, name=name, max_shard_size=shard, **options)
        generator = torch.Generator().manual_seed(seed)
        for file in source.glob("*.safetensors"):
            tensors = {
                key: torch.randint(-(2**15), 2**15, (*tensor.shape, dtype.itemsize // 2), generator=generator)
                .short()
                .view(dtype)[..., 0]
                .contiguous()
                for key, tensor in load_file(file).items()
            }
            save_file(tensors, file, metadata={"format": "pt"})
        convert(source, tmp_path / f"{name}-out", init="naive", window=12, max_shard_bytes=written)
        original, converted = FolderSource(source), FolderSource(tmp_path / f"{name}-out")
        key_map = checkpoint_map(original, HySparseConfig.from_pretrained(converted.path))
        assert not key_map.dropped
        for entry in key_map.entries:
            inverted = key_map.source_tensor(entry, converted.tensor(entry.target))
            assert same_bits(inverted, original.tensor(entry.source)), entry.source

    check()
