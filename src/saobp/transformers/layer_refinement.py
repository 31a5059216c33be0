"""What :func:`saobp.apply` attaches to each attention module of a model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

from saobp.propagation.factors import Similarity, get_factor
from saobp.refinement import Refinement
from saobp.transformers.cache import (
    MessageCacheLayer,
    StaticMessages,
    cache_layer,
    holds_keys,
    message_layer,
)
from saobp.variants import KINDS, Variant

IMPLEMENTATION = "saobp"
"""Name of the attention implementation in Transformers' registries."""
PER_HEAD = ("strength_bias", "head_bias")
"""Name suffixes of parameters with one or a few numbers per head."""
SUBMODULE = "saobp"
"""Name of the attached submodule of an attention module."""
CONFIG_FIELD = "saobp"
"""Field of a model's config that holds the refinement as a dict."""
IMPLEMENTATION_FIELD = "attn_implementation"
"""Field of a saved config that names the implementation. Transformers reads it, but does not write it."""


class CallState(threading.local):
    """Values that pre-hooks of an attention module hand to its attention function, which is not passed them.

    Each thread has its own: a server's threads may share a model. Copies and pickles start empty.

    messages: the cache layer of the call
    inputs:   the inputs of the module, for variants
    """

    messages: MessageCacheLayer | None = None
    inputs: Tensor | None = None

    def __reduce__(self) -> tuple[type[CallState], tuple[()]]:
        return CallState, ()


class LayerRefinement(nn.Module):
    """The refinement of one attention module: a strength per head.

    Learned strengths are the parameter ``strength_bias``: optimisers that exclude biases from weight
    decay, as Trainer does, exclude it too. Fixed strengths are a non-persistent buffer in single precision.
    Calling the module returns the strengths, so that hooks which fetch weights just in time (Accelerate's
    offloading, ZeRO-3) and wrappers that replace it (PEFT's ``modules_to_save``) see the access.
    """

    fixed: Tensor

    def __init__(
        self,
        refinement: Refinement,
        layer: int,
        layers: int,
        heads: int,
        width: int,
        dim: int,
        like: Tensor | None,
    ) -> None:
        super().__init__()
        self.refinement, self.layer, self.layers, self.heads = refinement, layer, layers, heads
        self.row_refinement, self.text = replace(refinement, variants=()), str(refinement)
        self.call = CallState()
        is_float = like is None or like.is_floating_point()
        like = torch.empty(0) if like is None else like
        like = torch.empty(0, dtype=like.dtype if is_float else None, device=like.device)
        self.variants = nn.ModuleDict(
            {name: KINDS[name](heads, width, dim, like) for name in refinement.variants}
        )
        if refinement.is_learned:
            self.strength_bias = nn.Parameter(like.new_zeros(heads))
        else:
            self.register_buffer("fixed", self.fixed_strengths(like.device), persistent=False)

    @property
    def active(self) -> LayerRefinement:
        """Itself; PEFT's wrapper forwards this attribute to the active adapter's copy."""
        return self

    def at(self, layer: int, layers: int) -> LayerRefinement:
        """Itself as layer ``layer`` of ``layers``, to be attached again; it may warn again."""
        self.layer, self.layers = layer, layers
        self.__dict__.pop("warned", None)
        return self

    def forward(self) -> Tensor:
        """Strengths ``[heads]``."""
        return self.strength_bias if self.refinement.is_learned else self.fixed

    def strengths(self, lengths: tuple[int, int]) -> Tensor:
        """Strengths of a call with so many queries and keys: ``[heads]``, or as ``Variant.strength``."""
        strength = self()
        for variant in variants_of(self):
            strength = variant.strength(strength, lengths, self.call.inputs)
        return strength

    def fixed_strengths(self, device: torch.device) -> Tensor:
        if self.row_refinement.is_plain:
            return torch.zeros(self.heads, device=device)
        return self.refinement.layer_strengths(self.layer, self.layers, self.heads).float().to(device)

    def reset_parameters(self) -> None:
        """Set the initial values: fixed strengths, or 0 if learned, and those of variants."""
        if self.refinement.is_learned:
            nn.init.zeros_(self.strength_bias)
        for variant in self.variants.values():
            variant.reset_parameters()  # type: ignore[operator]
        self.reset_fixed()

    def reset_fixed(self) -> None:
        if not self.refinement.is_learned:
            self.fixed = self.fixed_strengths(self.fixed.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Restores values that ``to_empty`` leaves undefined and fixed strengths that a cast would round."""
        before = self.forward()
        was_meta = before.is_meta
        super()._apply(fn, recurse)
        after = self.forward()
        if was_meta and not after.is_meta:
            self.reset_parameters()
        elif after is not before:
            self.reset_fixed()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.refinement.to_dict().items())


def get_layer_refinement(module: nn.Module) -> LayerRefinement | None:
    """The refinement attached to an attention module, for the active adapter where PEFT has wrapped it."""
    layer_refinement: Any = module._modules.get(SUBMODULE)
    return None if layer_refinement is None else layer_refinement.active


def bind_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: stores the inputs for the attention function."""
    layer_refinement: Any = get_layer_refinement(module)
    layer_refinement.call.inputs = args[0] if args else kwargs["hidden_states"]


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The key-value cache among the arguments of an attention module, whatever its name there."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache):
            return value.self_attention_cache if isinstance(value, EncoderDecoderCache) else value
    return None


def bind_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: stores the cache layer of the call, since the attention
    function does not get the cache."""
    layer_refinement: Any = get_layer_refinement(module)
    if layer_refinement.call.messages is not None:
        layer_refinement.call.messages = None
    implementation = _implementation(module.config)
    if implementation != IMPLEMENTATION:
        warn_of_other_attention(layer_refinement, implementation)
        return
    cache = find_cache(args, kwargs)
    if cache is None:
        return
    refinement: Refinement = layer_refinement.refinement
    factor = get_factor(refinement.factor)
    if factor is None or not factor.remembers:
        return
    index = getattr(module, "layer_idx", None)
    if index is None:
        name = type(module).__name__
        raise ValueError(f"{name} does not tell its place in the cache: generate with use_cache=False")
    if cache.layer_class_to_replicate is None and index >= len(cache.layers):
        return  # it reads the keys of another layer
    if refinement.future == "paper" or isinstance(factor, Similarity) or not is_causal_call(module):
        layer = cache_layer(cache, index)
        if isinstance(layer, StaticLayer) or holds_keys(layer):
            raise ValueError(f"{_why_not_cached(refinement, factor)}: generate with use_cache=False")
        return
    messages = message_layer(cache, index)
    if messages.stale:
        raise ValueError(
            "this cache holds keys whose rows saobp did not see, so their messages are unknown: start from "
            "an empty cache, or generate with use_cache=False"
        )
    if isinstance(messages, StaticMessages) and any(v.reads_positions for v in variants_of(layer_refinement)):
        raise ValueError(
            f"{layer_refinement.text!r} needs the distance of rows and keys, which a static cache does not "
            "tell: use a DynamicCache, or generate with use_cache=False"
        )
    messages.check_refinement(layer_refinement.text)
    layer_refinement.call.messages = messages


def _implementation(config: Any) -> str | None:
    """``config._attn_implementation``, bypassing a config's slow attribute lookup unless compiled."""
    if torch.compiler.is_compiling():
        return config._attn_implementation
    return object.__getattribute__(config, "_attn_implementation_internal")


def warn_of_other_attention(layer_refinement: Any, implementation: str | None) -> None:
    """Warn once that another attention implementation was selected while the refinement is attached."""
    if layer_refinement.layer or layer_refinement.__dict__.get("warned") or torch.compiler.is_compiling():
        return
    layer_refinement.warned = True
    warnings.warn(
        f"attention implementation {implementation!r} was selected after saobp.apply, so rows are not "
        "refined although config.saobp says so: call model.set_attn_implementation('saobp') to refine them "
        "again, or saobp.remove(model) if they are meant to be plain",
        UserWarning,
        stacklevel=2,
    )


def add_cache_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(bind_cache, with_kwargs=True)
    if any(variant.needs_inputs for variant in variants_of(get_layer_refinement(module))):
        module.register_forward_pre_hook(bind_inputs, with_kwargs=True)


def variants_of(layer_refinement: LayerRefinement | None) -> list[Variant]:
    """Variants of a module's attention, besides its refinement."""
    if layer_refinement is None or not layer_refinement.refinement.variants:
        return []
    return list(layer_refinement.variants.values())  # type: ignore[arg-type]


def remove_cache_hook(module: nn.Module) -> None:
    """Remove the hooks; finds them by identity, so that it works on copies of a model too."""
    hooks = (bind_cache, bind_inputs)
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook in hooks]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def reject_cross_attention(module: nn.Module) -> None:
    """Raises for a module whose rows and keys are different tokens."""
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        raise ValueError(
            f"{type(module).__name__} is cross-attention, whose rows and keys are different tokens: "
            "saobp refines self-attention only"
        )


def is_causal_call(module: nn.Module, is_causal: bool | None = None) -> bool:
    """Whether rows may see earlier keys only: from the call, else the config, else the module."""
    if is_causal is not None:
        return is_causal
    if not getattr(module, "is_causal", True):
        return False
    return getattr(getattr(module, "config", None), "is_causal", None) is not False


def named_refinements(model: nn.Module) -> Iterator[tuple[str, LayerRefinement]]:
    """Every attached refinement of a model with the name of its attention module, first layer first."""
    for name, module in model.named_modules():
        layer_refinement = get_layer_refinement(module)
        if layer_refinement is not None:
            yield name, layer_refinement


def strength_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The learned strengths of a model, one ``[heads]`` per attention module, for an optimiser group.

    Includes other per-head parameters of variants.
    """
    return list(named_strengths(model).values())


def named_strengths(model: nn.Module) -> dict[str, nn.Parameter]:
    """The same by number of the layer and name, as in ``0.strength_bias``."""
    return {
        f"{layer}.{name}": parameter
        for layer, (_, layer_refinement) in enumerate(named_refinements(model))
        for name, parameter in layer_refinement.named_parameters()
        if name.endswith(PER_HEAD)
    }


def _why_not_cached(refinement: Refinement, factor: Any) -> str:
    if refinement.future == "paper":
        return (
            "future='paper' lets rows receive messages of later rows, so it cannot decode step by step and "
            "must not generate"
        )
    if isinstance(factor, Similarity):
        return (
            f"{refinement.factor!r} compares every row with every other, which a cache of keys does not hold"
        )
    return "attention that is not causal changes earlier rows with every new token, which a cache cannot hold"
