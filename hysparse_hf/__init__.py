"""HySparse for Hugging Face transformers.

Importing this package registers its model types with the Auto classes and changes nothing else. The public names
are loaded on first use.
"""

import sys
from importlib import import_module
from pathlib import Path

from hysparse_hf.registration import register


__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "HySparseConfig": "hysparse_hf.modeling.configuration_hysparse",
    "HySparseForCausalLM": "hysparse_hf.modeling.modeling_hysparse",
    "HySparseForSequenceClassification": "hysparse_hf.modeling.modeling_hysparse",
    "HySparseModel": "hysparse_hf.modeling.modeling_hysparse",
    "HySparse2Config": "hysparse_hf.modeling.configuration_hysparse2",
    "HySparse2ForCausalLM": "hysparse_hf.modeling.modeling_hysparse2",
    "HySparse2Model": "hysparse_hf.modeling.modeling_hysparse2",
    "HySparseCache": "hysparse_hf.modeling.cache_hysparse",
    "convert": "hysparse_hf.conversion.convert",
    "compare": "hysparse_hf.conversion.compare",
    "load_parts": "hysparse_hf.peft_helpers",
    "lora_targets": "hysparse_hf.peft_helpers",
    "measure_cache_bytes": "hysparse_hf.cache_accounting",
    "measure_plan": "hysparse_hf.conversion.measure_plan",
    "measure_recall": "hysparse_hf.oracle_recall",
    "predict_cache_bytes": "hysparse_hf.cache_accounting",
    "save_parts": "hysparse_hf.peft_helpers",
    "train_parts": "hysparse_hf.peft_helpers",
    "verify": "hysparse_hf.conversion.verify",
}

__all__ = ["__version__", "register", *_PUBLIC]  # noqa: PLE0604 - names come from the table


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names whether loaded or not."""
    return sorted({*globals(), *_PUBLIC})


# The `hysparse` command answers `--help` and `env` without loading torch, `env` even where transformers is out of
# range; it calls register() itself before any command that needs the model classes.
if Path(sys.argv[0] if sys.argv else "").stem != "hysparse":
    register()
