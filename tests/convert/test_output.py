"""The target folder appears complete or not at all, and holds all that a loader needs."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh_process import run_isolated
from safetensors import safe_open
from safetensors.torch import load_file

import import_rules
from hysparse_hf import HySparseForCausalLM, cli, convert
from hysparse_hf.conversion.output import CheckpointWriter, appearing_folder


def snapshot(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_H12_filled_target_is_refused(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="new or empty folder"):
        convert_naive(source)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_target_that_is_a_file_is_refused(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="new or empty folder"):
        convert_naive(source)


def test_empty_target_is_filled(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    (tmp_path / "out").mkdir()
    assert (convert_naive(source) / "config.json").exists()


def test_empty_working_folder_is_filled(make_source, tmp_path, monkeypatch):
    source, _ = make_source()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    convert(source, ".", init="naive", window=12)
    assert (tmp_path / "out" / "config.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_target_of_a_link_is_filled(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert_naive(source, "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()


def test_mount_point_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(ValueError, match="mount point"):
        convert(tmp_path / "source", tmp_path)


# Where the process is killed: a function, and how many of its calls still return.
KILLED_IN = {
    "first-tensor": ("hysparse_hf.conversion.output.CheckpointWriter.write", 0),
    "tenth-tensor": ("hysparse_hf.conversion.output.CheckpointWriter.write", 10),
    "config": ("hysparse_hf.modeling.configuration_hysparse.HySparseConfig.save_pretrained", 0),
    "code": ("shutil.copyfile", 3),
    "verification": ("hysparse_hf.conversion.job.compare_tensors", 0),
    "provenance": ("hysparse_hf.conversion.job.Job.provenance", 0),
    "rename": ("os.replace", 0),
}

KILLER = """
    import os, pkgutil, signal, sys
    from hysparse_hf import convert

    def dying(function, left):
        def call(*args, **kwargs):
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **kwargs)
        return call

    for argument in sys.argv[3:]:
        name, path, left = argument.split("=")
        child = os.fork()
        if not child:
            owner, _, attribute = path.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            setattr(owner, attribute, dying(getattr(owner, attribute), int(left)))
            convert(sys.argv[1], os.path.join(sys.argv[2], name), init="naive")
            os._exit(0)
        # Flushed, or the next child inherits it and may print it again.
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_H12_killed_conversion_leaves_no_target_and_can_be_repeated(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    outs = tmp_path / "outs"
    outs.mkdir()
    points = [f"{name}={path}={left}" for name, (path, left) in KILLED_IN.items()]
    command = [sys.executable, "-c", textwrap.dedent(KILLER), str(source), str(outs), *points]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [word for name in KILLED_IN for word in (name, str(-signal.SIGKILL))]
    # Each left its unfinished folder, under a hidden name.
    left = sorted(path.name for path in outs.iterdir())
    assert [name.partition(".partial-")[0] for name in left] == sorted(f".{name}" for name in KILLED_IN)
    first, again = convert_naive(source, "clean"), convert_naive(source, "outs/rename")
    assert snapshot(first) == snapshot(again)
    # The same target removes what it left; others' are not its business.
    kept = [name for name in left if not name.startswith(".rename.")]
    assert sorted(path.name for path in outs.iterdir()) == sorted([*kept, "rename"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs file locks")
def test_H12_folders_of_running_processes_and_of_others_are_left_alone(tmp_path, caplog):
    others = [
        tmp_path / name for name in (".out.partial-mine", ".out.partial-0123abcd.txt", ".output.partial-0123abcd")
    ]
    for folder in others:
        folder.mkdir()
    abandoned = tmp_path / ".out.partial-0123abcd"
    abandoned.mkdir()
    (abandoned / "model.safetensors").write_text("half")
    with appearing_folder(tmp_path / "out") as running:
        assert not abandoned.exists()
        assert "0123abcd was left behind by a process that was killed" in caplog.text
        (running / "config.json").write_text("{}")
        with appearing_folder(tmp_path / "out") as second:
            assert running.exists(), "its process still writes into it"
            second.rmdir()
            second.mkdir()
    assert all(folder.exists() for folder in others)
    assert (tmp_path / "out" / "config.json").exists()


def test_H12_file_system_without_locks_keeps_what_may_be_in_use(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def fail(*_):
        raise OSError(errno.EBADF, "locks are not supported here")

    monkeypatch.setattr(fcntl, "flock", fail)
    unknown = tmp_path / ".out.partial-0123abcd"
    unknown.mkdir()
    with appearing_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
    assert unknown.exists()
    assert (tmp_path / "out" / "config.json").exists()


def test_H12_folder_that_loses_its_place_to_a_cleaner_is_made_again(tmp_path, monkeypatch):
    """Another process may take a new folder for an abandoned one before it is locked."""
    fcntl = pytest.importorskip("fcntl")
    lock, taken = fcntl.flock, []

    def slow(descriptor, operation):
        if not taken:
            taken.append(next(tmp_path.glob(".out.partial-*")))
            taken[0].rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with appearing_folder(tmp_path / "out") as folder:
        assert folder != taken[0]
        assert folder.exists()


def test_error_on_the_way_leaves_nothing(make_source, convert_naive, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("hysparse_hf.conversion.job.compare_tensors", fail)
    source, _ = make_source()
    with pytest.raises(OSError, match="disk full"):
        convert_naive(source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_dry_run_prints_the_map_and_writes_nothing(make_source, tmp_path, capsys):
    source, _ = make_source(tie_word_embeddings=True)
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--dry-run", "--plan", "0,2"]) == 0
    printed = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert "97x64" in printed
    assert "new: sink_local" in printed
    assert "full [0, 2]" in printed
    with safe_open(source / "model.safetensors", "pt") as file:
        keys = list(file.keys())
    assert all(key in printed for key in keys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "1,2"], "must include layer 0"),
        (["--plan", "0,9"], "layers of the source (0 to 4), got [9]"),
        (["--plan", "0,3,3"], "each full layer once"),
        (["--plan", "best"], "'regular' or a list"),
        (["--max-sparse-run", "0"], "at least 1"),
        (["--max-sparse-run", "1"], "at least 2 for 2 full layers of 5"),
        (["--gate-granularity", "none", "--init", "naive"], "needs `init='fitted'`"),
        (["--ratio", "3"], "must read 1:N"),
        (["--budget", "1000"], "use 960 or 1024"),
        (["--window", "0"], "at least 1"),
        (["--gates", "0", "1"], "between 0 and 1"),
        (["--calibrate", "nowhere.txt"], "nowhere.txt"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_wrong_option_is_explained_before_any_work(make_source, tmp_path, capsys, arguments, words):
    source, _ = make_source()
    assert cli.main(["convert", str(source), str(tmp_path / "out"), *arguments]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_shards_of_the_output_load(make_source, convert_naive, token_ids):
    source, _ = make_source()
    single = convert_naive(source, "single")
    sharded = convert_naive(source, "sharded", max_shard_bytes=100_000)
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 110_000 for file in files)
    first, second = (HySparseForCausalLM.from_pretrained(out)(token_ids).logits for out in (single, sharded))
    assert torch.equal(first, second)


def test_writer_makes_files_that_safetensors_reads(tmp_path):
    tensors = {
        "half": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "wide": torch.randn(2, 5, dtype=torch.float64),
        "view": torch.randn(4, 3).T,
        "empty": torch.zeros(0, 4),
    }
    planned = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    with CheckpointWriter(tmp_path, planned) as writer:
        for key in reversed(tensors):
            writer.write(key, tensors[key])
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) and read[key].dtype == tensors[key].dtype for key in tensors)


def test_writer_notices_a_tensor_that_was_never_written(tmp_path):
    with (
        pytest.raises(AssertionError, match="never written"),
        CheckpointWriter(tmp_path, {"a": ((2,), torch.float32)}),
    ):
        pass


def test_provenance_says_where_it_comes_from_and_names_no_place(make_source, convert_naive, tmp_path):
    source, _ = make_source()
    out = convert_naive(source, plan="0,3", dtype="bfloat16")
    text = (out / "provenance.json").read_text()
    record = json.loads(text)
    assert str(tmp_path) not in text
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert record["source"]["name"] == "source"
    for name, entry in record["source"]["files"].items():
        assert entry["sha256"] == hashlib.sha256((source / name).read_bytes()).hexdigest()
    assert record["plan"] == ["full", "sparse", "sparse", "full", "sparse"]
    assert record["options"]["dtype"] == "bfloat16"
    assert (
        record["verification"]["tensors_equal"] == record["keys"]["mapped"] == record["verification"]["tensors_cast"]
    )
    assert not any(record["verification"]["loading_report"].values())


def test_download_cache_gives_repository_and_revision(make_source, tmp_path):
    source, _ = make_source(name="models--org--tiny/snapshots/abc123")
    record = convert(source, tmp_path / "out", init="naive", dry_run=True)
    assert record["source"]["name"] == "org/tiny@abc123"


def test_companions_are_copied(make_source, convert_naive):
    source, _ = make_source()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "LICENSE").write_text("words")
    (source / "secret.txt").write_text("not a companion")
    generation = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(generation | {"cache_implementation": "static"}))
    out = convert_naive(source)
    for name in ("chat_template.jinja", "tokenizer_config.json", "LICENSE"):
        assert (out / name).read_text() == (source / name).read_text()
    assert not (out / "secret.txt").exists()
    assert "cache_implementation" not in json.loads((out / "generation_config.json").read_text())


USE_AND_SAVE_AGAIN = """
folder, again = argument["folder"], argument["again"]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.arange(3, 43)[None]
torch.save(model(ids).logits, argument["logits"])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(again)
tokenizer.save_pretrained(again)
load = AutoModelForCausalLM.from_pretrained
print(json.dumps({
    "model_type": AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type,
    "base": type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__,
    "new_tokens": model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape[1] - 40,
    "words": tokenizer.decode(tokenizer("some words").input_ids),
    "dtypes": [str(load(folder, trust_remote_code=True, dtype=dtype).dtype) for dtype in ("auto", "float16")],
}))
"""


def test_E06_E09_E10_E16_loads_and_saves_again_without_the_package_triton_and_network(
    make_source, convert_naive, letters, tmp_path
):
    """The converted checkpoint, and what the fresh process saved, read elsewhere after the first is gone."""
    source, _ = make_source(tie_word_embeddings=True, dtype=torch.bfloat16)
    letters.save_pretrained(source)
    out = convert_naive(source, "with.dot-hyphen and space")
    here = HySparseForCausalLM.from_pretrained(out)(torch.arange(3, 43)[None]).logits
    for number in range(2):
        logits, again = tmp_path / f"logits{number}.pt", tmp_path / f"saved-again.{number}"
        places = {"folder": str(out), "logits": str(logits), "again": str(again)}
        assert run_isolated(USE_AND_SAVE_AGAIN, tmp_path / f"modules{number}", **places) == {
            "model_type": "hysparse",
            "base": "HySparseModel",
            "new_tokens": 3,
            "words": "some words",
            "dtypes": ["torch.bfloat16", "torch.float16"],
        }
        assert torch.equal(torch.load(logits), here)
        out.rename(tmp_path / f"gone{number}")
        out = tmp_path / "elsewhere" / f"v1.{number} moved"
        out.parent.mkdir(exist_ok=True)
        again.rename(out)


def test_E07_code_is_the_models_own_and_flat(make_source, convert_naive):
    source, _ = make_source()
    files = {path.name: path.read_text() for path in convert_naive(source).glob("*.py")}
    assert {"configuration_hysparse.py", "modeling_hysparse.py"} <= files.keys()
    originals = {path.name: path.read_text() for path in import_rules.modeling_files()}
    siblings = {name.removesuffix(".py") for name in files}
    for name, text in files.items():
        assert text == originals[name]
        assert import_rules.flat_violations(text, name, siblings) == []


def test_place_where_nothing_can_be_made_is_refused_before_any_work(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="`out` must lie where folders can be made, got .*: Not a directory"):
        convert(tmp_path / "source", tmp_path / "notes.txt" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_slower_of_two_conversions_to_one_place_is_told(tmp_path):
    def fill(name, meanwhile=lambda: None):
        with appearing_folder(tmp_path / "out") as folder:
            (folder / "config.json").write_text(name)
            meanwhile()

    with pytest.raises(ValueError, match="`out` must stay a new or empty folder until the end"):
        fill("slower", meanwhile=lambda: fill("faster"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "faster"


def test_value_without_a_place_in_the_asked_dtype_is_refused_by_name(make_source, convert_naive, edit, tmp_path):
    source, _ = make_source()
    name = "model.layers.2.mlp.up_proj.weight"
    edit.tensors(source / "model.safetensors", lambda tensors: tensors[name].view(-1)[0].fill_(1e5))
    with pytest.raises(ValueError, match=rf"{name} must fit the `dtype` of the output, torch.float16, .* 1e\+05"):
        convert_naive(source, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert convert_naive(source, dtype="bfloat16").exists()


def test_options_of_other_libraries_are_recorded_as_plain_ones(make_source, tmp_path):
    source, _ = make_source()
    numbers = {"gates": tuple(np.array([0.25, 0.75], dtype=np.float32)), "budget": np.int64(16), "block_size": 8}
    for name, plan in (("array", np.array([0, 3])), ("range", range(0, 4, 3))):
        record = convert(source, tmp_path / name, plan=plan, init="naive", window=12, **numbers)
        assert json.loads((tmp_path / name / "provenance.json").read_text()) == record
        assert record["options"]["plan"] == [0, 3]
        assert (record["options"]["gates"], record["options"]["budget"]) == ([0.25, 0.75], 16)
