"""Checkpoints that carry their own code: run without the package and without Triton, saved again, moved."""

import importlib.metadata
import json
import shutil
import sys

import pytest
import torch
import transformers
from fresh_process import run_isolated
from models import tiny
from models.generations import T1, T2
from models.tiny import draw_ids, tiny_model
from packaging.requirements import Requirement
from transformers.dynamic_module_utils import check_imports

import import_rules


IDS = draw_ids(2, 40)
# Each generation's fresh processes run once for all their tests.
both_generations = pytest.mark.parametrize("generation", [T1, T2], scope="module")


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<pad>", "<s>", "one", "two"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>").save_pretrained(folder)


LOAD_USE_AND_SAVE_AGAIN = """
folder, again = argument["folder"], argument["again"]
ids = torch.tensor(argument["ids"])
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(ids, use_cache=False).logits
    states = base(ids, use_cache=False).last_hidden_state
torch.save({"logits": logits, "states": states, "weights": model.state_dict()}, argument["results"])
tokens = model.generate(ids[:1, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
words = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("one two")["input_ids"]
model.save_pretrained(again)
config.save_pretrained(again + "-config-only")
print(json.dumps({
    "tokens": tokens[0].tolist(),
    "words": words,
    "modules": sorted({type(part).__module__.split(".")[0] for part in (config, model, base)}),
    "loaded": sorted({"hysparse_hf", "triton"} & set(sys.modules)),
}))
"""


@pytest.fixture(scope="module")
def moved(generation, tmp_path_factory):
    """A checkpoint, saved again by a process without the package, moved, and once more: what each process saw."""
    root = tmp_path_factory.mktemp("checkpoints")
    model = generation.tiny_model()
    model.save_pretrained(root / "first")
    save_tokenizer(root / "first")
    with torch.no_grad():
        expected = {
            "logits": model(IDS, use_cache=False).logits,
            "states": model.model(IDS, use_cache=False).last_hidden_state,
            "weights": model.state_dict(),
        }
    tokens = model.generate(IDS[:1, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()
    seen, files = [], []
    for number, (folder, again) in enumerate([("first", "second one"), ("moved-v1.5", "third")]):
        results = root / f"results{number}.pt"
        report = run_isolated(
            LOAD_USE_AND_SAVE_AGAIN,
            root / f"modules{number}",
            folder=str(root / folder),
            again=str(root / again),
            ids=IDS.tolist(),
            results=str(results),
        )
        seen.append({**report, **torch.load(results)})
        files.append({path.name: path.read_text() for path in (root / again).glob("*.py")})
        if folder == "first":
            # Elsewhere, with the origin gone, so that nothing can point back at it.
            save_tokenizer(root / again)
            (root / again).rename(root / "moved-v1.5")
            shutil.move(root / "first", root / "kept")
    return {"expected": expected, "tokens": tokens, "seen": seen, "files": files, "root": root}


AUTO_MAPS = {
    "hysparse": {
        "AutoConfig": "configuration_hysparse.HySparseConfig",
        "AutoModel": "modeling_hysparse.HySparseModel",
        "AutoModelForCausalLM": "modeling_hysparse.HySparseForCausalLM",
        "AutoModelForSequenceClassification": "modeling_hysparse.HySparseForSequenceClassification",
    },
    "hysparse2": {
        "AutoConfig": "configuration_hysparse2.HySparse2Config",
        "AutoModel": "modeling_hysparse2.HySparse2Model",
        "AutoModelForCausalLM": "modeling_hysparse2.HySparse2ForCausalLM",
    },
}
FIRST_AND_AGAIN = pytest.mark.parametrize("number", [0, 1], ids=["saved", "saved-again-and-moved"])


@both_generations
class TestFreshProcess:
    @FIRST_AND_AGAIN
    def test_neither_package_nor_triton_is_loaded_D03(self, generation, moved, number):
        assert moved["seen"][number]["loaded"] == []
        assert moved["seen"][number]["modules"] == ["transformers_modules"]

    @FIRST_AND_AGAIN
    def test_loading_overwrites_no_stored_value_E01(self, generation, moved, number):
        found, wanted = moved["seen"][number]["weights"], moved["expected"]["weights"]
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []

    @FIRST_AND_AGAIN
    @pytest.mark.parametrize("name", ["logits", "states"])
    def test_results_are_bit_equal_E06_E09(self, generation, moved, number, name):
        assert torch.equal(moved["seen"][number][name], moved["expected"][name])

    @FIRST_AND_AGAIN
    def test_generate_gives_the_same_tokens_E06_E10(self, generation, moved, number):
        assert moved["seen"][number]["tokens"] == moved["tokens"]

    @FIRST_AND_AGAIN
    def test_tokenizer_loads_offline_E10(self, generation, moved, number):
        assert moved["seen"][number]["words"] == [2, 3]

    @FIRST_AND_AGAIN
    def test_saving_again_carries_the_same_files_E09(self, generation, moved, number):
        first = {path.name: path.read_text() for path in (moved["root"] / "kept").glob("*.py")}
        assert moved["files"][number] == first

    @pytest.mark.parametrize("folder", ["kept", "moved-v1.5", "third"])
    def test_auto_map_names_the_files_beside_it_E09(self, generation, moved, folder):
        config = json.loads((moved["root"] / folder / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAPS[config["model_type"]]

    def test_a_config_saved_alone_brings_its_file(self, generation, moved):
        name = "configuration_hysparse.py" if generation is tiny else "configuration_hysparse2.py"
        assert (moved["root"] / "third-config-only" / name).exists()


@both_generations
class TestShippedFiles:
    @pytest.fixture
    def shipped(self, generation, tmp_path):
        generation.tiny_model().save_pretrained(tmp_path / "model")
        return sorted((tmp_path / "model").glob("*.py"))

    def test_are_exactly_the_model_code_E06(self, generation, shipped):
        files = [path for path in import_rules.modeling_files() if path.stem != "__init__"]
        if generation is tiny:
            files = [path for path in files if not path.stem.endswith("hysparse2")]
        wanted = {path.name: path.read_text() for path in files}
        assert {path.name: path.read_text() for path in shipped} == wanted

    def test_are_flat_E07(self, generation, shipped):
        siblings = {path.stem for path in shipped}
        for path in shipped:
            assert import_rules.flat_violations(path.read_text(), path.name, siblings) == []

    def test_use_no_removed_cache_members_A24(self, generation, shipped):
        removed = ("key_cache", "value_cache", "seen_tokens", "get_usable_length", "to_legacy_cache")
        assert [(path.name, name) for path in shipped for name in removed if name in path.read_text()] == []

    def test_need_no_package_that_is_absent_D04(self, generation, shipped, monkeypatch, tmp_path):
        """The library looks for every import outside `try` before it runs a file."""
        for name in ("hysparse_hf", "triton"):
            monkeypatch.setitem(sys.modules, name, None)
        for path in shipped:
            check_imports(path)
        (tmp_path / "careless.py").write_text("import triton\n")
        with pytest.raises(ImportError, match="triton"):
            check_imports(tmp_path / "careless.py")


@pytest.fixture(scope="module")
def without_triton(tmp_path_factory):
    """What a process that cannot import Triton made of the package, and the tokens that were to come."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model()
    model.save_pretrained(folder)
    body = """
import hysparse_hf
from hysparse_hf.modeling.attention_hysparse import sliding_window_attention
model = AutoModelForCausalLM.from_pretrained(argument["folder"], trust_remote_code=True).eval()
tokens = model.generate(torch.tensor(argument["ids"]), max_new_tokens=5, do_sample=False, pad_token_id=0)
states = [torch.zeros(1, 1, 3, 16)] * 3
sliding_window_attention(*states, window=2)
try:
    sliding_window_attention(*states, window=2, backend="triton")
except ImportError as error:
    message = str(error)
print(json.dumps({
    "found": [type(model).__module__.split(".")[0], tokens.tolist(), "triton" in sys.modules], "error": message
}))
"""
    arguments = {"folder": str(folder), "ids": IDS[:, :9].tolist()}
    tokens = model.generate(IDS[:, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
    return {**run_isolated(body, folder / "modules", blocked=["triton"], **arguments), "tokens": tokens.tolist()}


class TestWithoutTriton:
    def test_the_package_loads_and_generates_D03(self, without_triton):
        assert without_triton["found"] == ["hysparse_hf", without_triton["tokens"], False]

    def test_the_kernels_asked_for_by_name_say_what_to_install_D03(self, without_triton):
        assert without_triton["error"].startswith("The Triton kernels need triton 3.6 or newer (`pip install")

    def test_the_metadata_asks_for_it_on_linux_alone_with_a_lowest_version_D03_D07(self):
        wanted = [Requirement(line) for line in importlib.metadata.requires("hysparse_hf")]
        (triton,) = [requirement for requirement in wanted if requirement.name == "triton"]
        assert [triton.marker.evaluate({"sys_platform": name}) for name in ("linux", "darwin", "win32")] == [
            True,
            False,
            False,
        ]
        assert [part.operator for part in triton.specifier] == [">="]


def test_folder_names_that_are_no_identifiers(tmp_path):
    names = ["v1.5.2", "a name with spaces", "3starts.with-digit"]
    tiny_model().save_pretrained(tmp_path / "origin")
    for name in names:
        shutil.copytree(tmp_path / "origin", tmp_path / name)
    body = """
ids = torch.tensor(argument["ids"])
load = AutoModelForCausalLM.from_pretrained
models = [load(folder, trust_remote_code=True).eval() for folder in argument["folders"]]
with torch.no_grad():
    logits = [model(ids, use_cache=False).logits for model in models]
print(json.dumps([torch.equal(one, logits[0]) for one in logits]))
"""
    folders = [str(tmp_path / name) for name in names]
    assert run_isolated(body, tmp_path / "modules", folders=folders, ids=IDS.tolist()) == [True] * len(names)


@both_generations
def test_remote_code_under_another_transformers_names_the_range_E14(generation, tmp_path):
    versions = ["4.57.6", "5.16.1", "6.0.0"]
    generation.tiny_config().save_pretrained(tmp_path / "model")
    body = """
messages = []
for version in argument["versions"]:
    sys.modules["transformers"].__version__ = version
    try:
        AutoConfig.from_pretrained(argument["folder"], trust_remote_code=True)
        messages.append("no error")
    except ImportError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""
    messages = run_isolated(body, tmp_path / "modules", folder=str(tmp_path / "model"), versions=versions)
    for version, message in zip(versions, messages, strict=True):
        assert f"needs transformers>=5.17,<6, got {version}" in message
        assert "pip install" in message
