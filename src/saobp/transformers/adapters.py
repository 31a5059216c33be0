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
LOADED = "saobp_loaded"
"""Attribute of a config that was read from a saved adapter."""


def patch_adapters(tuners: ModuleType) -> None:
    """Wrap ``inject_adapter``, which all kinds of adapters use, and note which configs were loaded."""
    original = tuners.BaseTuner.inject_adapter
    if hasattr(original, "saobp"):
        return
    mixin = next(kind for kind in tuners.PeftConfig.__mro__ if "from_pretrained" in vars(kind))
    read_config = mixin.from_pretrained.__func__

    @wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        mark_adapter(self.peft_config[adapter_name], model)
        return original(self, model, adapter_name, *args, **kwargs)

    @wraps(read_config)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = read_config(cls, *args, **kwargs)
        setattr(config, LOADED, True)
        return config

    inject_adapter.saobp = True  # type: ignore[attr-defined]
    tuners.BaseTuner.inject_adapter = inject_adapter
    mixin.from_pretrained = classmethod(from_pretrained)


def mark_adapter(config: Any, model: nn.Module) -> None:
    """Name the refinement in a new adapter's config; warns if a saved one was made for a model of the other
    kind, plain or with learned strengths."""
    if not hasattr(config, "modules_to_save"):
        return
    saved = list(config.modules_to_save or ())
    is_refined = any(True for _ in named_refinements(model))
    if is_refined and SUBMODULE not in saved:
        if hasattr(config, LOADED) and strength_parameters(model):
            warnings.warn(
                "this adapter holds no learned strengths, since its model had none when it was added: those "
                "of the base stay as they are and are not trained with it",
                UserWarning,
                stacklevel=2,
            )
            return
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
