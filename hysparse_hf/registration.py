"""Registration of our model types with the Auto classes of transformers: tables in, no patching."""

from importlib import import_module
from typing import NamedTuple


SUPPORTED_TRANSFORMERS = ">=5.17,<6"


class ModelType(NamedTuple):
    """Where one model type's classes are, and which Auto class loads which of them."""

    configuration: tuple[str, str]  # module, class
    modeling: str
    auto_classes: dict[str, str]  # Auto class -> model class


MODEL_TYPES = {
    "hysparse": ModelType(
        configuration=("hysparse_hf.modeling.configuration_hysparse", "HySparseConfig"),
        modeling="hysparse_hf.modeling.modeling_hysparse",
        auto_classes={
            "AutoModel": "HySparseModel",
            "AutoModelForCausalLM": "HySparseForCausalLM",
            "AutoModelForSequenceClassification": "HySparseForSequenceClassification",
        },
    ),
    "hysparse2": ModelType(
        configuration=("hysparse_hf.modeling.configuration_hysparse2", "HySparse2Config"),
        modeling="hysparse_hf.modeling.modeling_hysparse2",
        auto_classes={"AutoModel": "HySparse2Model", "AutoModelForCausalLM": "HySparse2ForCausalLM"},
    ),
}


def check_transformers_version() -> None:
    """Stop where the installed transformers is outside the supported range.

    Raises:
        ImportError: transformers is missing, or its release is outside the range, which the message names.
    """
    remedy = f'pip install "transformers{SUPPORTED_TRANSFORMERS}"'
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"hysparse_hf needs transformers{SUPPORTED_TRANSFORMERS}, got none; {remedy}") from error
    from packaging.version import Version

    # By release number, so that a development version counts as the release that it precedes.
    release = Version(transformers.__version__).release
    if not (5, 17) <= release < (6,):
        raise ImportError(
            f"hysparse_hf needs transformers{SUPPORTED_TRANSFORMERS}, got {transformers.__version__}; {remedy}"
        )


def register() -> None:
    """Register every model type with AutoConfig and its Auto classes; calling it again changes nothing.

    The classes are also marked so that `save_pretrained` copies their code into the checkpoint.

    Raises:
        ImportError: transformers is missing or outside the supported range.
    """
    check_transformers_version()
    import transformers

    for model_type, entry in MODEL_TYPES.items():
        module, name = entry.configuration
        config_class = getattr(import_module(module), name)
        transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
        config_class.register_for_auto_class("AutoConfig")
        modeling = import_module(entry.modeling)
        for auto_name, class_name in entry.auto_classes.items():
            model_class = getattr(modeling, class_name)
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_name)
