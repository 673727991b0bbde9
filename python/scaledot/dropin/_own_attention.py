"""Models of transformers that compute attention themselves, wholly or in a part, for scaledot.dropin.transformers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["adds_the_mask", "check_model", "is_ours", "refuse_in_class_tables"]

# Model folders with attention implementations, where another class adds the mask to its scores, or to a bias, as the
# number that "eager" gets: BigBirdPegasus's full attention, GIT's text, Informer's sparse attention, BEiT's position
# bias; in transformers 5.4 also the indices of GLM's sparse attention and PP-DocLayout's reading order. In BLT, rows of
# padding reach other rows through patches, so a row without keys has to be what "eager" makes of it. DeepSeek V4
# appends such numbers to the mask, for its compressed keys.
_ADDS_THE_MASK = frozenset(
    {"beit", "bigbird_pegasus", "blt", "deepseek_v4", "git", "glm_moe_dsa", "informer", "pp_doclayout_v2"}
)


def _class_tables(modeling: ModuleType) -> list[dict[str, Any]]:
    """The module's tables of attention classes by the name of the implementation."""
    tables = (table for name, table in vars(modeling).items() if name.endswith("ATTENTION_CLASSES"))
    return [table for table in tables if isinstance(table, dict)]


def _modeling(config: Any) -> ModuleType | None:
    """The module of the model of a config, if it has been imported."""
    name = type(config).__module__
    inside = name.startswith("transformers.models.")
    return sys.modules.get(name.replace(".configuration_", ".modeling_")) if inside else None


def is_ours(implementation: str | None) -> bool:
    """Whether the attention implementation is one that `register` made."""
    from transformers import AttentionInterface

    return hasattr(AttentionInterface().get(implementation), "_scaledot")


def _refuse(config: Any) -> NoReturn:
    raise ValueError(
        f"attn_implementation: got {config._attn_implementation!r} for {type(config).__name__}; needs 'eager', because "
        "this model computes its attention itself"
    )


def check_model(config: Any) -> None:
    """Refuses models that compute attention themselves: they would add our boolean mask to their scores.

    transformers refuses these in `set_attn_implementation`, but not where a model is made.
    """
    modeling = _modeling(config)
    if modeling is not None and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        _refuse(config)


def adds_the_mask(config: Any) -> bool:
    """Whether the model needs the mask as the number to add to scores. None then hides nothing."""
    return type(config).__module__.removeprefix("transformers.models.").split(".")[0] in _ADDS_THE_MASK


def refuse_in_class_tables(model_class: type, name: str) -> None:
    """Makes `name` an error that says what to do in models that look their attention class up by the implementation.

    The error is raised only if a layer asks the table for `name`.
    """
    for table in _class_tables(sys.modules[model_class.__module__]):
        table.setdefault(name, _refused_class)


def _refused_class(config: Any, *_: Any, **__: Any) -> NoReturn:
    """Stands in a table for the attention class of an implementation of ours."""
    _refuse(config)
