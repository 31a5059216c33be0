"""PEFT adapters of refined models.

An adapter always names ``saobp`` in its ``modules_to_save``: learned strengths are trained and saved with it,
and its config shows that it belongs to a refined model.
"""

from __future__ import annotations

import sys
import warnings
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from saobp.transformers.layer_refinement import SUBMODULE, named_refinements, strength_parameters

TUNERS = "peft.tuners.tuners_utils"
"""The PEFT module that defines the injection of adapters."""


def patch_adapters(tuners: ModuleType) -> None:
    """Wrap ``inject_adapter``, which all kinds of adapters use, when created and when loaded."""
    original = tuners.BaseTuner.inject_adapter
    if hasattr(original, "saobp"):
        return

    @wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        mark_adapter(self.peft_config[adapter_name], model)
        return original(self, model, adapter_name, *args, **kwargs)

    inject_adapter.saobp = True  # type: ignore[attr-defined]
    tuners.BaseTuner.inject_adapter = inject_adapter


def mark_adapter(config: Any, model: nn.Module) -> None:
    """Name the refinement in an adapter's config; warns if one that names it is added to a plain model."""
    if not hasattr(config, "modules_to_save"):
        return
    saved = list(config.modules_to_save or ())
    is_refined = any(True for _ in named_refinements(model))
    if is_refined and SUBMODULE not in saved:
        config.modules_to_save = [*saved, SUBMODULE]
    if not is_refined and SUBMODULE in saved:
        warnings.warn(
            "this adapter was made for a model with refined attention and the base model is plain, so its "
            "rows are not refined: call saobp.apply(base, refinement), or load the base with saobp.load, "
            "before the adapter is put into it",
            UserWarning,
            stacklevel=2,
        )


def warn_of_earlier_adapter(model: nn.Module) -> None:
    """Warn if a model that gets learned strengths has an adapter already, which does not save them."""
    if strength_parameters(model) and has_adapter(model):
        warnings.warn(
            "this model has an adapter already, which does not save learned strengths: call saobp.apply on "
            "the base model, then add the adapter",
            UserWarning,
            stacklevel=3,
        )


def has_adapter(model: nn.Module) -> bool:
    """Whether layers of PEFT stand in the model."""
    tuners = sys.modules.get(TUNERS)
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())
