"""The command line: fast help, late imports, readable errors."""

import subprocess
import sys
import types

import pytest

from hysparse_hf import cli


def _run(*arguments, before=""):
    """Run the command in a fresh process as its console script does, then name the heavy modules that it loaded."""
    code = f"""if True:
        import sys
        sys.argv = ["hysparse", *{list(arguments)!r}]
        {before}
        from hysparse_hf.cli import main
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
        print("loaded:", *sorted({{"torch", "transformers", "triton"}} & set(sys.modules)))
        sys.exit(status)
    """
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["--help"], ["env", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments):
    done = _run(*arguments)
    assert done.returncode == 0
    assert "usage: hysparse" in done.stdout
    assert done.stdout.rstrip().endswith("loaded:")


def test_help_names_every_command():
    done = _run("--help")
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.help.split()[0] in done.stdout


def test_env_names_versions_card_and_back_end(capsys):
    assert cli.main(["env"]) == 0
    names = [line[:14].strip() for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "python",
        *("hysparse_hf", "torch", "transformers", "triton", "accelerate", "peft", "safetensors"),
        "card",
        "back end",
    ]


def test_env_answers_where_transformers_is_out_of_range():
    done = _run("env", before='import types; sys.modules["transformers"] = types.SimpleNamespace(__version__="4.0.0")')
    assert done.returncode == 0, done.stderr


def test_missing_command_is_a_usage_error():
    done = _run()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


@pytest.fixture
def planted(monkeypatch):
    """A command whose module is planted and whose `run` raises what the test puts there."""
    module = types.ModuleType("planted_command")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)
    module.run = lambda args: print("size", args.size)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    command = cli.Command("do nothing", module.__name__, needs_registration=False)
    monkeypatch.setitem(cli.COMMANDS, "planted", command)
    return module


def test_command_gets_its_own_arguments(planted, capsys):
    assert cli.main(["planted", "--size", "3"]) == 0
    assert capsys.readouterr().out == "size 3\n"


def test_status_of_the_command_is_returned(planted):
    planted.run = lambda args: 7
    assert cli.main(["planted"]) == 7


def test_expected_error_is_one_line(planted, capsys):
    def run(args):
        raise ValueError("`--size` must be even, got 3; use 2 or 4.")

    planted.run = run
    assert cli.main(["planted"]) == 1
    assert (
        capsys.readouterr().err == "hysparse: error: `--size` must be even, got 3; use 2 or 4. (--debug shows where)\n"
    )


def test_debug_shows_the_traceback(planted):
    def run(args):
        raise ValueError("here")

    planted.run = run
    with pytest.raises(ValueError, match="here"):
        cli.main(["--debug", "planted"])
