"""The library's own model tests, from the source distribution of the transformers that is installed."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers


SUITE = Path(__file__).with_name("library_suite.py")
# What the tests import from folders that the source distribution leaves out.
LEFT_OUT = {
    "__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: pass",
    "generation/test_utils.py": "class GenerationTesterMixin: pass",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}",
}


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the library's tests as `tests`, and what they need."""
    folder = tmp_path_factory.mktemp("library")
    wanted = f"transformers=={transformers.__version__}"
    pip("download", "--no-deps", "--no-binary=transformers", "--no-build-isolation", "--dest", str(folder), wanted)
    pip("install", "--no-deps", "--target", str(folder), "parameterized")
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (folder / archive.name.removesuffix(".tar.gz") / "tests").rename(folder / "tests")
    for name, text in LEFT_OUT.items():
        path = folder / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.mark.network
@pytest.mark.parametrize("name", ["First", "Second"])
@pytest.mark.parametrize("experts", ["", "WithExperts"], ids=["dense", "experts"])
def test_the_librarys_model_tests_pass(library, name, experts):
    # Away from this repository's settings, which make some of the library's warnings errors.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(library)]
        + ["-W", "ignore", f"{SUITE}::{name}Generation{experts}"],
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 90
