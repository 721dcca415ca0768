"""What a source folder may look like, and what is refused by name before any work."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from hysparse_hf import convert
from hysparse_hf.conversion.faults import weight_faults
from hysparse_hf.conversion.source import open_source


def shards_of(folder):
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def assert_refused(source, tmp_path, error, match):
    with pytest.raises(error, match=match):
        convert(source, tmp_path / "out", init="naive")
    assert [path.name for path in tmp_path.iterdir()] == [source.name], "something was left behind"


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_source_equals_the_single_file(make_source, convert_naive, with_index):
    single, _ = make_source(name="single")
    sharded, _ = make_source(name="sharded", max_shard_size="100KB")
    assert len(shards_of(sharded)) > 3
    if not with_index:
        (sharded / "model.safetensors.index.json").unlink()
    outs = convert_naive(single, "a"), convert_naive(sharded, "b")
    first, second = (load_file(out / "model.safetensors") for out in outs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_H10_missing_shard_is_named(make_source, tmp_path):
    source, _ = make_source(max_shard_size="100KB")
    (source / shards_of(source)[1]).unlink()
    assert_refused(source, tmp_path, ValueError, r"missing: model-00002-of-\d+\.safetensors")


def test_H10_renamed_shard_is_named(make_source, tmp_path):
    source, _ = make_source(max_shard_size="100KB")
    (source / shards_of(source)[1]).rename(source / "model-00099-of-00099.safetensors")
    assert_refused(source, tmp_path, ValueError, r"missing: model-00002.*not in the index: model-00099")


def test_H10_stale_index_beside_a_single_file(make_source, tmp_path):
    source, _ = make_source()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert_refused(source, tmp_path, ValueError, r"model\.safetensors beside model\.safetensors\.index\.json")


def test_H10_index_that_contradicts_its_shards(make_source, tmp_path):
    source, _ = make_source(max_shard_size="100KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shards_of(source)[0]
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    assert_refused(source, tmp_path, ValueError, r"lm_head\.weight is in .*not in the index[^\0]*model\.norm\.weight")


def test_H10_gap_in_the_numbering_without_index(make_source, tmp_path):
    source, _ = make_source(max_shard_size="100KB")
    (source / "model.safetensors.index.json").unlink()
    (source / shards_of(source)[2]).unlink()
    assert_refused(source, tmp_path, ValueError, r"missing numbers: \[3\]")


def test_H10_truncated_shard_is_named(make_source, tmp_path):
    source, _ = make_source(max_shard_size="100KB")
    name = shards_of(source)[1]
    content = (source / name).read_bytes()
    (source / name).write_bytes(content[:-100])
    assert_refused(source, tmp_path, ValueError, rf"{name} must be a complete safetensors file")


def test_same_tensor_in_two_shards_is_named(make_source, tmp_path):
    source, _ = make_source(max_shard_size="100KB")
    (source / "model.safetensors.index.json").unlink()
    first, last = (source / shards_of(source)[i] for i in (0, -1))
    key = next(iter(load_file(first)))
    save_file(load_file(last) | {key: load_file(first)[key]}, last, metadata={"format": "pt"})
    assert_refused(source, tmp_path, ValueError, rf"{key} is in .* and in {last.name}")


def as_pickle(source):
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")


def test_H13_pickle_of_tensors_is_read(make_source, convert_naive):
    source, _ = make_source()
    as_pickle(source)
    out = convert_naive(source)
    assert weight_faults(source, out) == []


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)  # noqa: PTH102 - what an attacker would write


def test_H13_pickle_that_runs_code_is_refused_and_does_not_run(make_source, tmp_path, tmp_path_factory):
    source, _ = make_source()
    as_pickle(source)
    mark = tmp_path_factory.mktemp("mark") / "ran"
    torch.save({"model.norm.weight": Bomb(str(mark))}, source / "pytorch_model.bin")
    assert_refused(source, tmp_path, ValueError, r"pytorch_model\.bin must be a pickle of tensors only")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        pytest.param({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}, "Gemma3", id="gemma3"),
        pytest.param({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence", id="classifier"),
        pytest.param({"architectures": None, "model_type": "mamba"}, "'mamba'", id="by-model-type"),
        pytest.param({"quantization_config": {"quant_method": "gptq"}}, "quantised", id="quantised"),
    ],
)
def test_unsupported_source_is_refused_by_name(make_source, tmp_path, edit, changes, match):
    source, _ = make_source()
    edit.json(source / "config.json", **changes)
    assert_refused(source, tmp_path, NotImplementedError, match)


def test_packed_weights_are_refused_by_name(make_source, tmp_path, edit):
    source, _ = make_source()
    name = "model.layers.1.mlp.up_proj.weight"
    edit.tensors(source / "model.safetensors", lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    assert_refused(source, tmp_path, NotImplementedError, rf"{name} \(torch\.float8")


def test_dtype_of_packed_weights_is_refused_by_name(make_source, tmp_path, edit):
    source, _ = make_source()
    name = "model.layers.1.mlp.up_proj.weight"
    edit.tensors(source / "model.safetensors", lambda t: t.update({name: torch.zeros(80, 8, dtype=torch.uint32)}))
    assert_refused(source, tmp_path, NotImplementedError, rf"{name} must be of a dtype .* got U32")


def test_partial_rotation_is_refused(make_source, tmp_path, edit):
    source, _ = make_source()
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    edit.json(source / "config.json", rope_parameters=rope)
    assert_refused(source, tmp_path, NotImplementedError, "`partial_rotary_factor` is not 1")


def test_folder_without_weights(make_source, tmp_path):
    source, _ = make_source()
    (source / "model.safetensors").unlink()
    assert_refused(source, tmp_path, FileNotFoundError, r"must hold model\.safetensors")


def test_broken_config(make_source, tmp_path):
    source, _ = make_source()
    (source / "config.json").write_text('{"model_type": ')
    assert_refused(source, tmp_path, ValueError, r"config\.json must be valid JSON")


def test_place_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_source(tmp_path / "nowhere")


def test_broken_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"model\.gguf must be a complete GGUF file"):
        open_source(path)


# A process of its own: in one that has run other tests, freed memory comes and goes.
MEASURED = """
    import sys, threading
    import psutil
    from hysparse_hf import convert

    source, target = sys.argv[1:]
    options = {"init": "naive", "plan": [0], "gate_granularity": "headwise"}
    convert(source, target + "/first", **options)  # what is loaded once, loaded before measuring
    process = psutil.Process()
    for dtype in (None, "bfloat16"):
        peak, done = [0], threading.Event()

        def watch():
            while not done.wait(0.002):
                peak[0] = max(peak[0], process.memory_info().rss)

        before = process.memory_info().rss
        watcher = threading.Thread(target=watch)
        watcher.start()
        convert(source, f"{target}/{dtype}", dtype=dtype, **options)
        done.set()
        watcher.join()
        print(peak[0] - before)
"""


# Of about 200 MB; an expert of the second is 2 MB.
LARGE = {
    "dense": ("Llama", {"intermediate_size": 2048}),
    "experts": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 320}),
}


@pytest.mark.parametrize(
    ("family", "widths"),
    [pytest.param(*row, id=name, marks=[pytest.mark.slow] * (name != "dense")) for name, row in LARGE.items()],
)
def test_H09_peak_memory_stays_below_two_shards(make_source, tmp_path, family, widths):
    """Eight shards of about 20 MB. Reading mapped files counts: resident memory is what is measured."""
    pytest.importorskip("psutil")
    source, _ = make_source(
        family,
        **widths,
        hidden_size=512,
        num_hidden_layers=9,
        num_attention_heads=8,
        head_dim=64,
        vocab_size=2000,
        max_shard_size="20MB",
    )
    largest = max((source / name).stat().st_size for name in shards_of(source))
    assert len(shards_of(source)) >= 8
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    growth = [int(word) for word in done.stdout.split()]
    assert len(growth) == 2
    assert max(growth) <= 2 * largest, f"grew by {growth} bytes (kept, cast) over shards of at most {largest} bytes"


def test_pickle_from_before_the_zip_format_is_read(make_source, convert_naive):
    source, _ = make_source()
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert weight_faults(source, convert_naive(source)) == []


def test_single_file_with_an_index_of_its_own_is_read(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    index = dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert weight_faults(source, convert_naive(source)) == []
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index | {"x": "model.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"x is in model\.safetensors\.index\.json for model\.safetensors"):
        open_source(source)
