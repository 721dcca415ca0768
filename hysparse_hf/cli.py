"""The `hysparse` command: parsing only. A command's module is imported when that command is asked for."""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


_REPORTED_PACKAGES = ("hysparse_hf", "torch", "transformers", "triton", "accelerate", "peft", "safetensors")


class Command(NamedTuple):
    """One sub-command: its line in the help, and the module with `add_arguments(parser)` and `run(args)`."""

    help: str
    module: str
    needs_registration: bool = True


COMMANDS = {
    "env": Command("print versions, the card and the back end that would be used", __name__, needs_registration=False),
    "plan": Command("measure which layers should stay full", "hysparse_hf.conversion.measure_plan"),
    "convert": Command("turn a dense checkpoint into a HySparse checkpoint", "hysparse_hf.conversion.convert"),
    "verify": Command("check a converted checkpoint and measure the ladder to it", "hysparse_hf.conversion.verify"),
    "compare": Command("measure how far one checkpoint is from another", "hysparse_hf.conversion.compare"),
    "recall": Command("show what a reused selection catches of each layer's attention", "hysparse_hf.oracle_recall"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse env`: none."""


def run(args: argparse.Namespace) -> int:
    """Print what a bug report needs to say about the environment."""
    lines = {"python": f"{platform.python_version()} on {platform.platform()}"}
    for package in _REPORTED_PACKAGES:
        try:
            lines[package] = version(package)
        except PackageNotFoundError:
            lines[package] = "not installed"
    lines["card"] = _card()
    lines["back end"] = _backend()
    for name, value in lines.items():
        print(f"{name:14}{value}")
    return 0


def _card() -> str:
    """Return name, capability and memory of each CUDA device, or why there is none."""
    try:
        import torch
    except ImportError as error:
        return f"unknown: torch cannot be imported ({error})"
    if not torch.cuda.is_available():
        return "none"
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(
        f"{card.name} (capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB)" for card in cards
    )


def _backend() -> str:
    """Return the back end that `backend="auto"` stands for here."""
    try:
        from hysparse_hf.modeling.attention_hysparse import resolve_backend

        return resolve_backend("auto")
    except (ImportError, ValueError) as error:
        return f"unknown: {error}"


def _build_parser(selected: str | None) -> argparse.ArgumentParser:
    """Build the parser; only the selected command's module is imported, for its arguments."""
    parser = argparse.ArgumentParser(prog="hysparse", description="HySparse for Hugging Face transformers.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == selected:
            _hook(command, "add_arguments")(subparser)
    return parser


def _hook(command: Command, name: str) -> Callable:
    """Return a function of the command's module, importing the module."""
    return getattr(import_module(command.module), name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; those of the process by default.
    Returns:
        `int`: 0 on success, 1 after an error that the message explains; argparse itself exits with 2.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    selected = next((argument for argument in arguments if not argument.startswith("-")), None)
    debug = "--debug" in arguments
    try:
        args = _build_parser(selected).parse_args(arguments)
        if COMMANDS[args.command].needs_registration:
            from hysparse_hf.registration import register

            register()
        return _hook(COMMANDS[args.command], "run")(args) or 0
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        if debug:
            raise
        print(f"hysparse: error: {error} (--debug shows where)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
