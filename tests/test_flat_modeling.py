"""modeling/ must be readable by the remote-code loader: flat, sibling imports only."""

import pytest

import import_rules


SIBLINGS = {"__init__", "cache_hysparse", "modeling_hysparse", "triton_common"}


@pytest.mark.parametrize("path", import_rules.modeling_files(), ids=lambda path: path.stem)
def test_file_is_flat(path):
    siblings = {file.stem for file in import_rules.modeling_files()}
    assert import_rules.flat_violations(path.read_text(), path.name, siblings) == []


def test_modeling_holds_files_only():
    folders = [
        path.name
        for path in (import_rules.ROOT / "modeling").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    ]
    assert folders == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("from . import cache_hysparse\n", "not seen by the loader", id="bare-dot"),
        pytest.param("from ..modeling import x\n", "two dots", id="two-dots"),
        pytest.param("from .kernels.deep import x\n", "is a package", id="package"),
        pytest.param("from .ghost import x\n", "no sibling file", id="missing-sibling"),
        pytest.param(
            "try:\n    from .ghost import x\nexcept ImportError:\n    x = None\n", "no sibling file", id="try"
        ),
        pytest.param("from .__init__ import x\n", "no sibling file", id="init"),
        pytest.param("def f():\n    from . import cache_hysparse\n", "not seen by the loader", id="in-function"),
        pytest.param('"""Words.\n\nfrom .ghost import x\n"""\n', "takes this line of text", id="docstring"),
        pytest.param('"""Words.\n\n    from .ghost\n"""\n', "takes this line of text", id="docstring-indented"),
        pytest.param("import hysparse_hf.modeling\n", "does not travel", id="installed-package"),
        pytest.param("from hysparse_hf import register\n", "does not travel", id="from-installed-package"),
        pytest.param("def f():\n    import numpy\n", "does not travel", id="third-party-in-function"),
        pytest.param("import triton\n", "inside `try`", id="triton"),
        pytest.param("import triton.language as tl\n", "inside `try`", id="triton-submodule"),
        pytest.param("def f():\n    from triton import jit\n", "inside `try`", id="triton-in-function"),
        pytest.param("try:\n    x = 1\nexcept E:\n    x = 2\nimport triton\n", "inside `try`", id="triton-after-try"),
    ],
)
def test_planted_violation_is_found(source, words):
    found = import_rules.flat_violations(source, "planted.py", SIBLINGS)
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("from .cache_hysparse import A, B\n", id="sibling"),
        pytest.param("from .cache_hysparse import (\n    A,\n    B,\n)\n", id="sibling-lines"),
        pytest.param("def f():\n    from .triton_common import g\n    return g\n", id="sibling-in-function"),
        pytest.param(
            "import math\nfrom torch.nn import functional\nimport transformers.utils\n", id="allowed-packages"
        ),
        pytest.param("try:\n    import triton\nexcept ImportError:\n    triton = None\n", id="triton-in-try"),
        pytest.param('"""Imported from .cache_hysparse, say."""\n', id="docstring-words-first"),
    ],
)
def test_allowed_source_passes(source):
    assert import_rules.flat_violations(source, "planted.py", SIBLINGS) == []
