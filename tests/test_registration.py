"""Registration with the Auto classes, and what happens outside the supported range of transformers."""

import configparser
import dataclasses
import os
import runpy
import subprocess
import sys

import pytest
import transformers
from transformers import modeling_outputs

import import_rules
from hysparse_hf import registration


def _run(code, **environ):
    """Run code in a fresh process and return it completed."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environ}, timeout=120
    )


class TestRange:
    @pytest.mark.parametrize("version", ["4.57.6", "5.16.1", "5.16.0.dev0", "6.0.0", "6.0.0.dev0", "6.1.0rc1"])
    def test_release_outside_is_refused_by_name_E14(self, monkeypatch, version):
        # The library may put a new module object in place of the first while its parts load; ours looks up the last.
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(ImportError, match=r"needs transformers>=5\.17,<6, got ") as caught:
            registration.register()
        assert version in str(caught.value)
        assert "pip install" in str(caught.value)

    @pytest.mark.parametrize("version", ["5.17.0", "5.17.0.dev0", "5.24.0", "5.99.1", "5.25.0.dev0"])
    def test_release_inside_is_accepted(self, monkeypatch, version):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        registration.check_transformers_version()

    def test_import_fails_before_anything_else_is_imported_E14(self, tmp_path):
        # A package with a version and nothing else: any other import from it would be an opaque ImportError.
        (tmp_path / "transformers.py").write_text('__version__ = "4.57.6"\n')
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = _run("import hysparse_hf", PYTHONPATH=path)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: hysparse_hf needs transformers>=5.17,<6, got 4.57.6")

    def test_outputs_without_a_known_cache_field_are_refused_E14(self, monkeypatch):
        @dataclasses.dataclass
        class Renamed:
            logits: object = None

        monkeypatch.setattr(modeling_outputs, "CausalLMOutputWithPast", Renamed)
        path = import_rules.ROOT / "modeling" / "compat_transformers.py"
        with pytest.raises(ImportError, match="none of the cache fields .* pip install"):
            runpy.run_path(str(path))

    def test_range_is_the_one_of_the_metadata(self):
        parser = configparser.ConfigParser()
        parser.read(import_rules.ROOT / "setup.cfg")
        requirements = parser["options"]["install_requires"].split("\n")
        assert f"transformers{registration.SUPPORTED_TRANSFORMERS}" in requirements

    def test_range_is_the_one_of_the_model_code(self):
        from hysparse_hf.modeling import compat_transformers

        assert compat_transformers.SUPPORTED_TRANSFORMERS == registration.SUPPORTED_TRANSFORMERS


class TestRegister:
    def test_auto_classes_know_every_model_type(self):
        for model_type, entry in registration.MODEL_TYPES.items():
            config = transformers.AutoConfig.for_model(model_type)
            assert type(config).__name__ == entry.configuration[1]
            for auto_name, class_name in entry.auto_classes.items():
                found = getattr(transformers, auto_name)._model_mapping[type(config)]
                assert found.__name__ == class_name

    def test_classes_are_marked_to_carry_their_code(self):
        import hysparse_hf

        assert hysparse_hf.HySparseConfig._auto_class == "AutoConfig"
        assert hysparse_hf.HySparseModel._auto_class == "AutoModel"
        assert hysparse_hf.HySparseForCausalLM._auto_class == "AutoModelForCausalLM"

    def test_twice_changes_nothing(self):
        import hysparse_hf

        before = dict(transformers.AutoModelForCausalLM._model_mapping._extra_content)
        registration.register()
        registration.register()
        assert transformers.AutoModelForCausalLM._model_mapping._extra_content == before
        assert before[hysparse_hf.HySparseConfig] is hysparse_hf.HySparseForCausalLM

    def test_import_changes_only_our_entries(self):
        code = """if True:
            import transformers
            from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING
            models = (AutoModel._model_mapping, AutoModelForCausalLM._model_mapping)
            state = lambda: [set(CONFIG_MAPPING._extra_content), *(
                {config.model_type for config in mapping._extra_content} for mapping in models)]
            before = state()
            import hysparse_hf
            from hysparse_hf.registration import MODEL_TYPES
            print([new - old <= set(MODEL_TYPES) for old, new in zip(before, state())])
        """
        done = _run(code)
        assert done.stdout.strip() == "[True, True, True]", done.stderr


class TestPublicNames:
    def test_every_name_of_all_resolves(self):
        import hysparse_hf

        for name in hysparse_hf.__all__:
            assert getattr(hysparse_hf, name) is not None

    def test_unknown_name_is_an_attribute_error(self):
        import hysparse_hf

        with pytest.raises(AttributeError, match="has no attribute 'HySparseOther'"):
            hysparse_hf.HySparseOther  # noqa: B018 - the access is what is tested

    def test_version_is_the_one_of_the_metadata(self):
        import hysparse_hf

        parser = configparser.ConfigParser()
        parser.read(import_rules.ROOT / "setup.cfg")
        assert hysparse_hf.__version__ == parser["metadata"]["version"]
