"""Saving and loading: initialisation, completeness of the state dict, and checkpoints that carry their own code."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from fresh_process import run_isolated
from models.generations import both_generations
from models.tiny import SWITCHES, draw_ids, tiny_config, tiny_model
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

import import_rules
from hysparse_hf import HySparseConfig, HySparseForCausalLM, HySparseForSequenceClassification, HySparseModel


IDS = draw_ids(2, 40)


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
def generations(tmp_path_factory):
    """A checkpoint, saved again by a process without the package, moved, and once more: what each process saw."""
    root = tmp_path_factory.mktemp("generations")
    model = tiny_model()
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


FIRST_AND_AGAIN = pytest.mark.parametrize("number", [0, 1], ids=["saved", "saved-again-and-moved"])


class TestFreshProcess:
    @FIRST_AND_AGAIN
    def test_neither_package_nor_triton_is_loaded_D03(self, generations, number):
        assert generations["seen"][number]["loaded"] == []
        assert generations["seen"][number]["modules"] == ["transformers_modules"]

    @FIRST_AND_AGAIN
    def test_loading_overwrites_no_stored_value_E01(self, generations, number):
        found, wanted = generations["seen"][number]["weights"], generations["expected"]["weights"]
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []

    @FIRST_AND_AGAIN
    @pytest.mark.parametrize("name", ["logits", "states"])
    def test_results_are_bit_equal_E06_E09(self, generations, number, name):
        assert torch.equal(generations["seen"][number][name], generations["expected"][name])

    @FIRST_AND_AGAIN
    def test_generate_gives_the_same_tokens_E06_E10(self, generations, number):
        assert generations["seen"][number]["tokens"] == generations["tokens"]

    @FIRST_AND_AGAIN
    def test_tokenizer_loads_offline_E10(self, generations, number):
        assert generations["seen"][number]["words"] == [2, 3]

    @FIRST_AND_AGAIN
    def test_saving_again_carries_the_same_files_E09(self, generations, number):
        first = {path.name: path.read_text() for path in (generations["root"] / "kept").glob("*.py")}
        assert generations["files"][number] == first

    @pytest.mark.parametrize("folder", ["kept", "moved-v1.5", "third"])
    def test_auto_map_names_the_files_beside_it_E09(self, generations, folder):
        config = json.loads((generations["root"] / folder / "config.json").read_text())
        assert config["auto_map"] == {
            "AutoConfig": "configuration_hysparse.HySparseConfig",
            "AutoModel": "modeling_hysparse.HySparseModel",
            "AutoModelForCausalLM": "modeling_hysparse.HySparseForCausalLM",
            "AutoModelForSequenceClassification": "modeling_hysparse.HySparseForSequenceClassification",
        }

    def test_a_config_saved_alone_brings_its_file(self, generations):
        assert (generations["root"] / "third-config-only" / "configuration_hysparse.py").exists()


class TestShippedFiles:
    @pytest.fixture
    def shipped(self, tmp_path):
        tiny_model().save_pretrained(tmp_path / "model")
        return sorted((tmp_path / "model").glob("*.py"))

    def test_are_exactly_the_model_code_E06(self, shipped):
        files = [path for path in import_rules.modeling_files() if path.stem != "__init__"]
        wanted = {path.name: path.read_text() for path in files if not path.stem.endswith("hysparse2")}
        assert {path.name: path.read_text() for path in shipped} == wanted

    def test_are_flat_E07(self, shipped):
        siblings = {path.stem for path in shipped}
        for path in shipped:
            assert import_rules.flat_violations(path.read_text(), path.name, siblings) == []

    def test_use_no_removed_cache_members_A24(self, shipped):
        removed = ("key_cache", "value_cache", "seen_tokens", "get_usable_length", "to_legacy_cache")
        assert [(path.name, name) for path in shipped for name in removed if name in path.read_text()] == []

    def test_need_no_package_that_is_absent_D04(self, shipped, tmp_path):
        body = """
from transformers.dynamic_module_utils import check_imports
for path in argument["files"]:
    check_imports(path)
try:
    import triton
except ImportError:
    print(json.dumps(len(argument["files"])))
"""
        assert run_isolated(body, tmp_path, files=[str(path) for path in shipped]) == len(shipped)


class TestWithoutTriton:
    def test_the_package_loads_and_generates_D03(self, tmp_path):
        model = tiny_model()
        model.save_pretrained(tmp_path / "model")
        body = """
import hysparse_hf
model = AutoModelForCausalLM.from_pretrained(argument["folder"], trust_remote_code=True).eval()
tokens = model.generate(torch.tensor(argument["ids"]), max_new_tokens=5, do_sample=False, pad_token_id=0)
print(json.dumps([type(model).__module__.split(".")[0], tokens.tolist(), "triton" in sys.modules]))
"""
        found = run_isolated(
            body, tmp_path / "modules", blocked=["triton"], folder=str(tmp_path / "model"), ids=IDS[:, :9].tolist()
        )
        tokens = model.generate(IDS[:, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert found == ["hysparse_hf", tokens.tolist(), False]

    def test_the_kernels_asked_for_by_name_say_what_to_install_D03(self, tmp_path):
        body = """
from hysparse_hf.modeling.attention_hysparse import sliding_window_attention
states = [torch.zeros(1, 1, 3, 16)] * 3
sliding_window_attention(*states, window=2)
try:
    sliding_window_attention(*states, window=2, backend="triton")
except ImportError as error:
    print(json.dumps(str(error)))
"""
        message = run_isolated(body, tmp_path, blocked=["triton"])
        assert message.startswith("The Triton kernels need triton 3.6 or newer (`pip install")

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
    names = ["v1.5.2", "two-part-name", "a name with spaces", "3starts.with-digit", "model"]
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


class TestInstalledPackage:
    @pytest.fixture
    def folder(self, tmp_path):
        tiny_model().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    @pytest.mark.parametrize("trust", [True, False], ids=["trusting", "not-trusting"])
    def test_wins_over_the_code_in_the_folder(self, folder, trust):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        base = transformers.AutoModel.from_pretrained(folder, trust_remote_code=trust)
        assert (type(config), type(model), type(base)) == (HySparseConfig, HySparseForCausalLM, HySparseModel)

    def test_registering_twice_loads_the_same_class(self, folder):
        from hysparse_hf import register

        register()
        register()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is HySparseForCausalLM

    def test_saving_drops_references_to_another_repository_E09(self, folder, tmp_path):
        model = HySparseForCausalLM.from_pretrained(folder)
        prefixed = {name: f"org/repo--{target}" for name, target in model.config.auto_map.items()}
        model.config.auto_map = {**prefixed, "AutoModelForTokenClassification": "other.Thing"}
        model.save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]
        assert [target for target in written.values() if "--" in target] == []
        assert written["AutoModelForTokenClassification"] == "other.Thing"


class TestInitialisation:
    @pytest.fixture
    def partial(self, tmp_path):
        """Save a model with only its embeddings in the file, so that loading must initialise the rest."""

        def save(**switches):
            tiny_model(**switches).save_pretrained(tmp_path / "partial")
            tensors = load_file(tmp_path / "partial" / "model.safetensors")
            kept = {name: tensor for name, tensor in tensors.items() if "embed_tokens" in name}
            save_file(kept, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
            return tmp_path / "partial"

        return save

    @pytest.mark.parametrize("switches", ["default", "window_layers", "headwise_full_gate", "wide_values"])
    def test_every_parameter_missing_in_a_file_is_initialised(self, partial, nan_filled_empty, switches):
        model = HySparseForCausalLM.from_pretrained(partial(**SWITCHES[switches]))
        for name, parameter in model.named_parameters():
            if "self_attn.gate_" in name or "sink_" in name or name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif "norm" in name:
                assert (parameter == 1).all(), name
            elif "embed_tokens" not in name:
                assert 0.2 < parameter.std() < 0.4, name
                assert abs(parameter.mean()) < 0.05, name

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 500.0},
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.1] * 12,
                "long_factor": [3.3] * 12,
                "original_max_position_embeddings": 64,
            },
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_every_buffer_loaded_equals_the_built_one(self, tmp_path, nan_filled_empty, rope):
        switches = {"rope_parameters": {"full": rope, "sparse": {"rope_theta": 77.0}}}
        model = tiny_model(**switches)
        model.save_pretrained(tmp_path)
        loaded = HySparseForCausalLM.from_pretrained(tmp_path)
        built, found = dict(model.named_buffers()), dict(loaded.named_buffers())
        assert built.keys() == found.keys()
        assert built
        for name, buffer in built.items():
            assert torch.equal(found[name], buffer), name
        assert torch.equal(loaded(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)

    @pytest.mark.parametrize(
        ("switches", "count"),
        [
            pytest.param({}, 4 * 2 * 3, id="default"),
            pytest.param({"attention_sink": False}, 4 * 2 * 2, id="no-sinks"),
            pytest.param({"full_layer_gate": True}, 4 * 2 * 3 + 2 * 2, id="full-layer-gate"),
        ],
    )
    def test_building_initialises_gates_and_sinks_to_zero(self, nan_filled_empty, switches, count):
        model = HySparseForCausalLM(tiny_config(**switches))
        named = {n: p for n, p in model.named_parameters() if "self_attn.gate_" in n or "sink_" in n}
        assert len(named) == count
        assert [name for name, parameter in named.items() if (parameter != 0).any()] == []

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_loading_overwrites_no_stored_value_E01(self, tmp_path, switches):
        model = HySparseForCausalLM(tiny_config(**SWITCHES[switches]))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(0.5).view(-1)[0] = number
        model.save_pretrained(tmp_path)
        for loaded in (
            HySparseForCausalLM.from_pretrained(tmp_path),
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True),
        ):
            found = loaded.state_dict()
            assert found.keys() == model.state_dict().keys()
            for name, tensor in model.state_dict().items():
                assert torch.equal(found[name], tensor), name

    @pytest.mark.parametrize("missing", ["self_attn.sink_local", "self_attn.gate_local_proj.bias"])
    def test_a_missing_parameter_resets_no_other_of_its_module_E01(self, tmp_path, missing):
        model = tiny_model()
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(missing)}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found = HySparseForCausalLM.from_pretrained(tmp_path).state_dict()
        kept = {name for name, tensor in model.state_dict().items() if torch.equal(found[name], tensor)}
        assert found.keys() - kept == {name for name in found if name.endswith(missing)}
        assert all((found[name] == 0).all() for name in found.keys() - kept)


# Per switch setting, parts of parameter names that the specification leaves without a gradient.
WITHOUT_GRADIENT = {"dense": ("gate_", "sink_")}


class TestStateDict:
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_loads_completely_B07(self, tmp_path, switches):
        tiny_model(**SWITCHES[switches]).save_pretrained(tmp_path)
        _, info = HySparseForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert {name: list(info[f"{name}_keys"]) for name in ("missing", "unexpected", "mismatched")} == {
            "missing": [],
            "unexpected": [],
            "mismatched": [],
        }

    @pytest.mark.parametrize("switches", SWITCHES)
    def test_every_parameter_gets_a_gradient_B07(self, switches):
        model = tiny_model(**SWITCHES[switches]).train()
        model(IDS, labels=IDS).loss.backward()
        unused = {
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is None or not (parameter.grad != 0).any()
        }
        allowed = WITHOUT_GRADIENT.get(switches, ())
        assert {name for name in unused if not any(f"self_attn.{part}" in name for part in allowed)} == set()

    @pytest.mark.parametrize("switches", ["no_window", "shared_window", "merged_shared"])
    def test_layers_that_only_read_have_no_keys_and_values_B07(self, switches):
        names = tiny_model(**SWITCHES[switches]).state_dict()
        own = {int(name.split(".")[2]) for name in names if ".k_proj" in name or ".v_proj" in name}
        assert own == {0, 3}

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @both_generations
    def test_no_undeclared_storage_is_shared_F11(self, generation, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        places: dict[int, list[str]] = {}
        for name, tensor in model.state_dict().items():
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        shared = [sorted(names) for names in places.values() if len(names) > 1]
        assert shared == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @both_generations
    def test_tied_and_untied_heads_survive_E04(self, generation, tmp_path, tied):
        model = generation.tiny_model(tie_word_embeddings=tied)
        model.save_pretrained(tmp_path)
        assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        same = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert same is tied
        assert torch.equal(loaded(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


EVERY_CLASS = pytest.mark.parametrize(
    ("auto", "model_class"),
    [
        pytest.param(transformers.AutoModel, HySparseModel, id="base"),
        pytest.param(transformers.AutoModelForCausalLM, HySparseForCausalLM, id="causal"),
        pytest.param(
            transformers.AutoModelForSequenceClassification, HySparseForSequenceClassification, id="classification"
        ),
    ],
)


class TestClasses:
    def test_head_checkpoint_loads_as_base_model_E05(self, tmp_path):
        model = tiny_model()
        model.save_pretrained(tmp_path)
        base, info = HySparseModel.from_pretrained(tmp_path, output_loading_info=True)
        assert list(info["missing_keys"]) == []
        states = model.model(IDS, use_cache=False).last_hidden_state
        assert torch.equal(base(IDS, use_cache=False).last_hidden_state, states)

    def test_base_checkpoint_loads_under_a_head_E05(self, tmp_path):
        model = tiny_model(tie_word_embeddings=True)
        model.model.save_pretrained(tmp_path)
        loaded = HySparseForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)

    @EVERY_CLASS
    def test_every_class_runs_post_init_E05(self, auto, model_class):
        assert isinstance(model_class(tiny_config()).all_tied_weights_keys, dict)

    @EVERY_CLASS
    def test_every_auto_class_loads_its_own_E05(self, auto, model_class, tmp_path):
        model_class(tiny_config()).save_pretrained(tmp_path)
        model, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is model_class
        assert {kind: list(info[f"{kind}_keys"]) for kind in ("missing", "unexpected")} == {
            "missing": [],
            "unexpected": [],
        }

    def test_generate_is_mixed_in_behind_the_model_E11(self):
        order = [parent.__name__ for parent in HySparseForCausalLM.__mro__]
        assert order.index("PreTrainedModel") < order.index("GenerationMixin")
        assert hasattr(HySparseForCausalLM, "generate")

    @EVERY_CLASS
    @pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
    def test_no_split_names_a_class_that_exists_F08(self, auto, model_class, experts):
        config = tiny_config(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=24)
        names = {type(module).__name__ for module in model_class(config).modules()}
        assert set(model_class._no_split_modules) <= names


@both_generations
class TestDtype:
    @pytest.fixture
    def folder(self, generation, tmp_path):
        generation.tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
        return Path(tmp_path)

    @pytest.mark.parametrize(
        ("given", "dtype"),
        [
            pytest.param({}, torch.bfloat16, id="default"),
            pytest.param({"dtype": "auto"}, torch.bfloat16, id="auto"),
            pytest.param({"torch_dtype": "auto"}, torch.bfloat16, id="older-spelling-auto"),
            pytest.param({"dtype": torch.float16}, torch.float16, id="float16"),
            pytest.param({"torch_dtype": torch.float16}, torch.float16, id="older-spelling-float16"),
            pytest.param({"dtype": torch.float32}, torch.float32, id="float32"),
        ],
    )
    def test_parameters_have_the_one_asked_for_E16(self, generation, folder, given, dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.config.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_rotary_frequencies_stay_float32_E16(self, generation, folder, dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        buffers = dict(model.named_buffers())
        assert buffers
        assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}
        for name, buffer in generation.tiny_model().named_buffers():
            assert torch.equal(buffers[name], buffer)
