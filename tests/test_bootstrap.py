"""The choices of bootstrap.py; making an environment for real is what `make test` itself does."""

import importlib.util

import pytest

import import_rules


@pytest.fixture
def bootstrap(monkeypatch, tmp_path):
    """The script as a fresh module whose repository root is an empty folder."""
    spec = importlib.util.spec_from_file_location("bootstrap", import_rules.ROOT / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


class TestTorch:
    def test_requirement_of_the_user_wins(self, bootstrap, monkeypatch):
        monkeypatch.setattr(bootstrap, "has_gpu", lambda: True)
        chosen, reason = bootstrap.choose_torch("torch==2.12.0 --index-url https://example.org")
        assert chosen == ["torch==2.12.0", "--index-url", "https://example.org"]
        assert reason == "HYSPARSE_TORCH"

    @pytest.mark.parametrize(
        ("gpu", "system", "answers", "chosen"),
        [
            pytest.param(True, "Linux", True, ["torch>=2.11"], id="gpu"),
            pytest.param(False, "Darwin", False, ["CPU"], id="no-gpu-mac"),
            pytest.param(False, "Linux", True, ["CPU", "--index-url", "INDEX"], id="no-gpu-index-answers"),
            pytest.param(False, "Linux", False, ["CPU"], id="no-gpu-no-index"),
        ],
    )
    def test_choice_by_machine(self, bootstrap, monkeypatch, gpu, system, answers, chosen):
        monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
        monkeypatch.setattr(bootstrap.platform, "system", lambda: system)
        monkeypatch.setattr(bootstrap, "reachable", lambda url, seconds: answers)
        words = {"CPU": bootstrap.CPU_TORCH, "INDEX": bootstrap.CPU_INDEX}
        assert bootstrap.choose_torch("")[0] == [words.get(word, word) for word in chosen]

    def test_address_without_an_answer_is_not_reachable(self, bootstrap):
        assert not bootstrap.reachable("http://127.0.0.1:9/", seconds=2)


def test_folder_of_somebody_else_is_refused(bootstrap, tmp_path):
    (tmp_path / ".venv").mkdir()
    with pytest.raises(SystemExit, match=r"\.venv/ exists and was not made by this script"):
        bootstrap.Environment(".venv").stamp()


@pytest.mark.parametrize("value", ["yes", "2"])
def test_wrong_switch_is_refused(bootstrap, monkeypatch, value):
    monkeypatch.setenv("HYSPARSE_SYSTEM_SITE", value)
    with pytest.raises(SystemExit, match="must be 0, 1 or unset"):
        bootstrap.read_variables()


@pytest.mark.parametrize("arguments", [[], ["unknown"]], ids=["none", "unknown"])
def test_wrong_task_prints_the_usage(bootstrap, capsys, arguments):
    assert bootstrap.main(arguments) == 2
    assert "python3 bootstrap.py test" in capsys.readouterr().out


@pytest.fixture
def environment(bootstrap, monkeypatch, tmp_path):
    """An environment whose making and installing are only recorded, in `environment.calls`."""
    for name in ("bootstrap.py", "pyproject.toml", "setup.cfg"):
        (tmp_path / name).write_text(name)
    for name in bootstrap.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environment = bootstrap.Environment(".venv")
    environment.calls = []

    def create(environment, system_site):
        environment.calls.append("create on system" if system_site else "create")
        environment.folder.mkdir()

    monkeypatch.setattr(bootstrap, "create", create)
    monkeypatch.setattr(bootstrap, "imports_torch", lambda: False)
    monkeypatch.setattr(bootstrap, "install", lambda environment, task, variables: environment.calls.append("install"))
    monkeypatch.setattr(
        bootstrap, "install_on_system", lambda environment, task, variables: environment.calls.append("add")
    )
    return environment


class TestPrepare:
    def test_second_time_does_nothing(self, bootstrap, environment):
        bootstrap.prepare(environment, "test")
        bootstrap.prepare(environment, "test")
        assert environment.calls == ["create", "install"]

    def test_other_task_adds_to_the_environment(self, bootstrap, environment):
        for name in ("test", "demo", "test", "demo"):
            bootstrap.prepare(environment, name)
        assert environment.calls == ["create", "install", "install"]

    def test_changed_metadata_installs_again(self, bootstrap, environment, tmp_path):
        bootstrap.prepare(environment, "test")
        (tmp_path / "setup.cfg").write_text("changed")
        bootstrap.prepare(environment, "test")
        assert environment.calls == ["create", "install", "install"]

    def test_changed_variable_makes_it_anew(self, bootstrap, environment, monkeypatch):
        bootstrap.prepare(environment, "test")
        monkeypatch.setenv("TRANSFORMERS", "5.17.0")
        bootstrap.prepare(environment, "test")
        assert environment.calls == ["create", "install", "create", "install"]

    def test_torch_of_the_system_is_built_on(self, bootstrap, environment, monkeypatch):
        monkeypatch.setattr(bootstrap, "imports_torch", lambda: True)
        bootstrap.prepare(environment, "test")
        assert environment.calls == ["create on system", "add"]

    @pytest.mark.parametrize(("value", "calls"), [("0", ["create", "install"]), ("1", ["create on system", "add"])])
    def test_variable_overrides_what_the_system_has(self, bootstrap, environment, monkeypatch, value, calls):
        monkeypatch.setattr(bootstrap, "imports_torch", lambda: value == "0")
        monkeypatch.setenv("HYSPARSE_SYSTEM_SITE", value)
        bootstrap.prepare(environment, "test")
        assert environment.calls == calls
