"""Switch a refinement on in a model, and off again."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from saobp.functional import LEAK_WARNING
from saobp.propagation.factors import get_factor, has_strength
from saobp.refinement import NO_CAUSAL_STRIDE, Refinement
from saobp.transformers.adapters import warn_of_earlier_adapter
from saobp.transformers.layer_refinement import (
    CONFIG_FIELD,
    IMPLEMENTATION,
    IMPLEMENTATION_FIELD,
    SUBMODULE,
    LayerRefinement,
    add_cache_hook,
    is_causal_call,
    named_refinements,
    reject_cross_attention,
    remove_cache_hook,
    strength_parameters,
)

Model = TypeVar("Model", bound=PreTrainedModel)
Modules = list[tuple[str, nn.Module]]

_BEFORE = "_saobp_before"
"""Attribute of a refined model and its parts that have a config: their attention implementation before."""
_FLASH = "_supports_flash_attn"
_MPNET = "transformers.models.mpnet.modeling_mpnet"
NEGLIGIBLE_STRENGTH = 0.03
"""Strengths below this hardly change rows: the paper's smallest is 0.05."""


def apply(model: Model, refinement: Refinement | str | Mapping[str, Any]) -> Model:
    """Refine the attention rows of a Transformers model, in place, and return it.

    ``refinement`` may be in text form, for instance ``"high:0.2"``. It is written to ``config.saobp`` and is
    saved with the model, learned strengths with the weights. Applying again replaces the refinement; the
    same one again keeps what was learned.
    """
    refinement = Refinement.of(refinement)
    check_model(model)
    put_through_registry(model)
    modules = attention_modules(model)
    if refinement.message_stride > 1 and any(is_causal_call(module) for _, module in modules):
        raise ValueError(f"{NO_CAUSAL_STRIDE}: {type(model).__name__} is causal")
    parameters = model.num_parameters() - sum(p.numel() for p in strength_parameters(model))
    if refinement.strength == "auto":
        refinement = refinement.resolved(parameters)
        warn_of_strength(refinement, parameters)
    layer_refinements = build(modules, refinement)
    before = dict(named_refinements(model))
    for layer, (name, _) in enumerate(modules):
        if name in before and before[name].refinement == refinement:
            # Itself, since its parameters may be in an optimiser.
            layer_refinements[layer] = before[name].at(layer, len(modules))
    _detach(model)
    separate_configs(model)
    attach(modules, layer_refinements)
    switch_on(model, modules, refinement)
    warn_of_earlier_adapter(model)
    return model


def warn_of_strength(refinement: Refinement, parameters: int) -> None:
    """Warn if ``auto`` gives a strength far from the paper's, made for 11 to 41 million parameters."""
    if not has_strength(refinement.factor):
        return
    if 0 < (refinement.strongest or 0) < NEGLIGIBLE_STRENGTH:
        warnings.warn(
            f"strength 'auto' gives {refinement.strongest:.1g} for a model of {parameters} parameters, which "
            f"is all but nothing: '{refinement.factor}:learned' trains a strength for each head",
            UserWarning,
            stacklevel=3,
        )
    if (refinement.strongest or 0) > 1:
        warnings.warn(
            f"strength 'auto' gives {refinement.strongest:.3g} for a model of {parameters} parameters, "
            "far above the paper's 0.05 to 0.2: name a strength, for instance 'high:0.2'",
            UserWarning,
            stacklevel=3,
        )


def remove(model: Model) -> Model:
    """Remove a refinement, in place: the model is as before :func:`apply`."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"saobp.remove takes a Transformers model, not {type(model).__name__}")
    _detach(model)
    _restore(model.modules())
    return model


def override_refinement(model: Model, refinement: Refinement | None) -> Model:
    """A loaded model with the refinement given instead of its own, if one is; ``none`` takes it off."""
    if refinement is None:
        return model
    return remove(model) if refinement.is_plain else apply(model, refinement)


def _detach(model: PreTrainedModel) -> None:
    """Remove refinements, and restore configs and attention implementations."""
    for name, _ in list(named_refinements(model)):
        module = model.get_submodule(name)
        remove_cache_hook(module)
        delattr(module, SUBMODULE)
    for module in model.modules():
        if _BEFORE in vars(module):
            module.config._attn_implementation_internal = vars(module).pop(_BEFORE)  # type: ignore[union-attr]
        if isinstance(module, PreTrainedModel):
            vars(module).pop(_FLASH, None)
            if vars(module).get("generate") is refuse_to_generate:
                del vars(module)["generate"]
    for config in _configs(_with_config(model, [])):
        vars(config).pop(CONFIG_FIELD, None)
        vars(config).pop(IMPLEMENTATION_FIELD, None)


def check_model(model: Any) -> None:
    """Raises for models that cannot be refined as a whole."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"saobp.apply takes a Transformers model, not {type(model).__name__}: give it the model inside, "
            "before it is compiled or wrapped, or build one of your own from saobp.nn"
        )
    for field in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(model.config, field, False) and has_decoder(model):
            raise ValueError(
                f"{type(model).__name__} has cross-attention (config.{field}), whose rows and keys are "
                "different tokens: saobp refines self-attention only, for instance a whole model's encoder, "
                "saobp.apply(model.get_encoder(), refinement)"
            )


def has_decoder(model: PreTrainedModel) -> bool:
    """Whether a model or a part of it has cross-attention to an encoder.

    T5's encoder and decoder are of one class, which says whether it is the decoder.
    """
    parts = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and getattr(module, "is_decoder", None) is not False
    ]
    return any("encoder_hidden_states" in inspect.signature(part.forward).parameters for part in parts)


def attention_modules(model: nn.Module) -> Modules:
    """The attention modules of a model that use the attention registry, with names, first layer first.

    Raises if there are none, or if there are others.
    """
    modules = reachable_attention(model)
    others = other_attention(model)
    if others:
        raise ValueError(
            f"{type(model).__name__} computes part of its attention without Transformers' attention registry "
            f"({class_names(others)}), so saobp cannot reach all of it"
        )
    return modules


def reachable_attention(model: nn.Module) -> Modules:
    """The same of a model that may have others; raises only if none uses the registry."""
    modules = _registry_modules(model)
    if not modules:
        what = (
            "computes its attention"
            if other_attention(model)
            else "has no attention layers, or computes them"
        )
        raise ValueError(
            f"{type(model).__name__} {what} without Transformers' attention registry, so saobp cannot "
            "reach it"
        )
    return modules


def other_attention(model: nn.Module) -> Modules:
    """Attention modules that neither use the registry nor hold or belong to one that does."""
    reachable = [name for name, _ in _registry_modules(model)]
    found = []
    for name, module in model.named_modules():
        if "attention" not in type(module).__name__.lower() or not any(True for _ in module.parameters()):
            continue
        related = any(
            name == other or other.startswith(f"{name}.") or name.startswith(f"{other}.")
            for other in reachable
        )
        if not related:
            found.append((name, module))
    return found


def class_names(modules: Modules) -> str:
    return ", ".join(sorted({type(module).__name__ for _, module in modules}))


def _registry_modules(model: nn.Module) -> Modules:
    if not isinstance(model, nn.Module):
        raise TypeError(f"a Transformers model is needed, not {type(model).__name__}")
    return [(name, module) for name, module in model.named_modules() if uses_registry(type(module))]


def put_through_registry(model: nn.Module) -> list[nn.Module]:
    """Give modules whose own code bypasses the registry (MPNet's) a class that uses it; returns those."""
    if _MPNET not in sys.modules:
        return []
    changed: list[nn.Module] = import_module("saobp.transformers.mpnet").use_registry(model)
    return changed


def _restore(modules: Iterable[nn.Module]) -> None:
    """Undo ``put_through_registry``."""
    if _MPNET in sys.modules:
        import_module("saobp.transformers.mpnet").restore(modules)


@contextmanager
def through_registry(model: nn.Module) -> Iterator[None]:
    """All attention modules use the registry inside; after it, those without a refinement are as before."""
    changed = put_through_registry(model)
    try:
        yield
    finally:
        _restore(module for module in changed if not hasattr(module, SUBMODULE))


def uses_registry(kind: type) -> bool:
    """Whether a module's own code looks its attention function up in the registry, or can be made to."""
    if issubclass(kind, PreTrainedModel):
        return False
    if (kind.__module__, kind.__name__) == (_MPNET, "MPNetSelfAttention"):
        return True
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for member in vars(base).values():
            function = inspect.unwrap(member) if isinstance(member, FunctionType) else None
            if isinstance(function, FunctionType) and "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
                return True
    return False


def build(modules: Modules, refinement: Refinement) -> list[LayerRefinement]:
    """One refinement per attention module, to be attached; does not change the model."""
    if refinement.is_learned and not has_strength(refinement.factor):
        raise ValueError(f"factor {refinement.factor!r} has no strength that could be learned")
    factor = get_factor(refinement.factor)
    for _, module in modules:
        reject_cross_attention(module)
        in_order = refinement.future == "strict" and is_causal_call(module)
        if factor is not None and (why := factor.obstacle(1, 1, in_order)) is not None:
            raise ValueError(why)
    return [
        LayerRefinement(
            refinement,
            layer,
            len(modules),
            head_count(module),
            width(module),
            head_dim(module),
            next(module.parameters(), None),
        )
        for layer, (_, module) in enumerate(modules)
    ]


def separate_configs(model: PreTrainedModel) -> None:
    """Copy a model's configs, which other models built from the same config may share."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)


def attach(modules: Modules, layer_refinements: list[LayerRefinement]) -> None:
    for (_, module), layer_refinement in zip(modules, layer_refinements, strict=True):
        module.add_module(SUBMODULE, layer_refinement.train(module.training))
        add_cache_hook(module)


def switch_on(model: PreTrainedModel, modules: Modules, refinement: Refinement) -> None:
    """Write the refinement to the configs and select the implementation, storing the earlier one.

    Configs of parts, such as CLIP's towers, are included: a part may be loaded by its own class.
    """
    owners = _with_config(model, modules)
    for owner in owners:
        vars(owner)[_BEFORE] = owner.config._attn_implementation
    for config in _configs(owners):
        layers = [layer for layer, (_, module) in enumerate(modules) if module.config is config]
        strength = refinement.strength
        if config is not model.config and isinstance(strength, tuple):
            strength = tuple(strength[layer] for layer in layers)
        if layers or config is model.config:
            setattr(config, CONFIG_FIELD, replace(refinement, strength=strength).to_dict())
            if not refinement.is_plain:
                setattr(config, IMPLEMENTATION_FIELD, IMPLEMENTATION)
        config._attn_implementation_internal = IMPLEMENTATION
    model.__dict__[_FLASH] = False  # so that servers do not switch to a plain softmax that is faster
    if refinement.future == "paper" and any(is_causal_call(module) for _, module in modules):
        warnings.warn(LEAK_WARNING, UserWarning, stacklevel=3)
        model.__dict__["generate"] = refuse_to_generate


def refuse_to_generate(*_: Any, **__: Any) -> NoReturn:
    """Replaces ``generate`` of a model with ``future="paper"``."""
    raise ValueError(
        "future='paper' lets rows receive messages of later rows, which do not exist yet while a text is "
        "generated: apply a refinement with future='strict'"
    )


def head_count(module: nn.Module) -> int:
    """How many query heads an attention module has."""
    for owner in (module, getattr(module, "config", None)):
        for name in ("num_attention_heads", "num_heads", "n_heads", "n_head"):
            heads = getattr(owner, name, None)
            if isinstance(heads, int):
                return heads
    raise ValueError(f"{type(module).__name__} does not tell its number of heads")


def width(module: nn.Module) -> int:
    """Hidden size of an attention module's input."""
    size: Any = getattr(getattr(module, "config", None), "hidden_size", 0)
    return size if isinstance(size, int) else 0


def head_dim(module: nn.Module) -> int:
    """Size of a head's queries."""
    named = getattr(module, "head_dim", None) or getattr(module, "key_value_proj_dim", None)
    size: Any = named or width(module) // head_count(module)
    return size if isinstance(size, int) else 0


def _with_config(model: PreTrainedModel, modules: Modules) -> list[Any]:
    """A model's parts whose config names the implementation, for attention modules and for masks."""
    owners = [model, *(module for _, module in modules)]
    owners += [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [owner for owner in owners if hasattr(owner, "config")]


def _configs(owners: list[Any]) -> list[Any]:
    return list({id(owner.config): owner.config for owner in owners}.values())
