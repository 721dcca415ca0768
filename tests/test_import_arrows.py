"""Imports follow the arrows of the tables in import_rules.py."""

import pytest

import import_rules


def _path(file):
    return file.relative_to(import_rules.ROOT).as_posix()


@pytest.mark.parametrize("file", import_rules.package_files(), ids=_path)
def test_file_follows_the_arrows(file):
    assert import_rules.arrow_violations(file.read_text(), _path(file)) == []


OUTSIDE_MODELING = [file for file in import_rules.package_files() if file.parent.name != "modeling"]


@pytest.mark.parametrize("file", OUTSIDE_MODELING, ids=_path)
def test_file_asks_the_config_not_the_class(file):
    assert import_rules.isinstance_violations(file.read_text(), _path(file)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("modeling/triton_block_sparse.py", "from .reference_hysparse import block_sparse"),
        ("modeling/triton_block_sparse.py", "def f():\n    from .reference_hysparse import block_sparse"),
        ("modeling/reference_hysparse.py", "from .triton_block_sparse import f"),
        ("modeling/reference_hysparse.py", "from .attention_hysparse import f"),
        ("modeling/selection_hysparse.py", "from .reference_hysparse import f"),
        ("modeling/attention_hysparse.py", "from .cache_hysparse import f"),
        ("modeling/attention_hysparse.py", "from .modeling_hysparse import f"),
        ("modeling/cache_hysparse.py", "from .modeling_hysparse import f"),
        ("modeling/modeling_hysparse.py", "from .triton_block_sparse import f"),
        ("modeling/modeling_hysparse.py", "from .reference_hysparse import f"),
        ("modeling/configuration_hysparse.py", "from .compat_transformers import f"),
        ("modeling/cache_hysparse.py", "import hysparse_hf.conversion.convert"),
        ("modeling/cache_hysparse.py", "from hysparse_hf import registration"),
        ("conversion/convert.py", "from hysparse_hf.registration import register"),
        ("conversion/convert.py", "from hysparse_hf import registration"),
        ("conversion/convert.py", "from ..registration import register"),
        ("hysparse_hf/registration.py", "from hysparse_hf.conversion import convert"),
        ("hysparse_hf/registration.py", "from hysparse_hf import conversion"),
        ("hysparse_hf/registration.py", "from .conversion.convert import run"),
        ("modeling/helpers.py", "import torch"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_planted_violation_is_found(path, source):
    assert len(import_rules.arrow_violations(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("modeling/modeling_hysparse2.py", "from .modeling_hysparse import A\nfrom .decoder_hysparse2 import f"),
        ("modeling/attention_hysparse.py", "from .triton_block_sparse import f\nfrom .reference_hysparse import g"),
        ("modeling/triton_block_sparse.py", "from .triton_common import f\nfrom .selection_hysparse import g"),
        ("conversion/convert.py", "from hysparse_hf.modeling.configuration_hysparse import HySparseConfig"),
        ("conversion/convert.py", "from .families import FAMILIES\nfrom hysparse_hf.conversion.fit import f"),
        ("hysparse_hf/cli.py", "def f():\n    from hysparse_hf.conversion import convert"),
        ("hysparse_hf/cache_accounting.py", "from hysparse_hf.modeling.cache_hysparse import f\nimport torch"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_allowed_import_passes(path, source):
    assert import_rules.arrow_violations(source, path) == []


@pytest.mark.parametrize("kind", ["HySparseConfig", "(int, modeling.HySparseCache)"])
def test_planted_isinstance_is_found(kind):
    assert len(import_rules.isinstance_violations(f"isinstance(x, {kind})", "hysparse_hf/planted.py")) == 1
