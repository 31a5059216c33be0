"""What :func:`saobp.apply` attaches to each attention module of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer

from saobp.propagation.factors import Similarity, get_factor
from saobp.refinement import Refinement
from saobp.transformers.cache import Memory, cache_layer, holds_keys, remembering_layer, self_attention_cache
from saobp.variants import KINDS, Variant

IMPLEMENTATION = "saobp"
"""Name of the attention implementation in Transformers' registries."""
PER_HEAD = ("strength_bias", "head_bias")
"""How the names of parameters end that hold one number per head."""
ATTACHED = "saobp"
"""Name of the attached module inside an attention module, and of the field in a model's config."""


class LayerRefinement(nn.Module):
    """One attention module's share of a refinement: a strength per head and, in a cached call, its memory.

    Learned strengths are the parameter ``strength_bias``: optimisers that spare biases weight decay, as
    Trainer does, spare it too. Fixed strengths are a buffer that is not saved and keeps single precision.
    """

    fixed: Tensor

    def __init__(
        self, refinement: Refinement, layer: int, layers: int, heads: int, width: int, like: Tensor
    ) -> None:
        super().__init__()
        self.refinement, self.layer, self.layers, self.heads = refinement, layer, layers, heads
        self.of_rows = replace(refinement, variants=())
        self.memory: Memory | None = None
        self.inputs: Tensor | None = None
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        like = torch.empty(0, dtype=dtype, device=like.device)
        self.variants = nn.ModuleDict({name: KINDS[name](heads, width, like) for name in refinement.variants})
        if refinement.is_learned:
            self.strength_bias = nn.Parameter(like.new_zeros(heads))
        else:
            self.register_buffer("fixed", self.fixed_strengths(like.device), persistent=False)

    @property
    def strength(self) -> Tensor:
        """``[heads]``"""
        return self.strength_bias if self.refinement.is_learned else self.fixed

    def fixed_strengths(self, device: torch.device) -> Tensor:
        if self.of_rows.is_plain:
            return torch.zeros(self.heads, device=device)
        return self.refinement.layer_strengths(self.layer, self.layers, self.heads).float().to(device)

    def fill_fixed(self) -> None:
        """Write fixed strengths again, after something replaced or rounded them."""
        if not self.refinement.is_learned:
            self.fixed = self.fixed_strengths(self.fixed.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        if not self.refinement.is_learned and self.fixed.dtype != torch.float32:
            self.fill_fixed()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.refinement.to_dict().items())


def note_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: the attention function itself never sees its inputs."""
    module.saobp.inputs = args[0] if args else kwargs["hidden_states"]  # type: ignore[union-attr]


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The key-value cache among the arguments of an attention module, whatever its name there."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache):
            return self_attention_cache(value)
    return None


def note_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: the attention function itself never sees the cache."""
    own: LayerRefinement = module.saobp  # type: ignore[assignment]
    if own.memory is not None:
        own.memory = None
    cache = find_cache(args, kwargs)
    if cache is None:
        return
    factor = get_factor(own.refinement.factor)
    in_use = module.config._attn_implementation == IMPLEMENTATION  # type: ignore[union-attr]
    if not in_use or factor is None or not factor.remembers:
        return
    index = getattr(module, "layer_idx", None)
    if index is None:
        name = type(module).__name__
        raise ValueError(f"{name} does not tell its place in the cache: generate with use_cache=False")
    if own.refinement.future == "paper" or isinstance(factor, Similarity) or not is_causal_call(module):
        layer = cache_layer(cache, index)
        if isinstance(layer, StaticLayer) or holds_keys(layer):
            raise ValueError(f"{_why_not_cached(own.refinement, factor)}: generate with use_cache=False")
        return
    own.memory = remembering_layer(cache, index)
    if own.memory.waiting:
        raise ValueError(
            "this cache holds keys whose rows saobp did not see, so their messages are unknown: start from "
            "an empty cache, or generate with use_cache=False"
        )
    if own.memory.sent_by is None:
        own.memory.sent_by = own.refinement
    elif not torch.compiler.is_compiling() and own.memory.sent_by != own.refinement:
        raise ValueError(
            "this cache was filled under another refinement, whose messages are other ones: start from an "
            "empty cache"
        )


def note_cache_of(module: nn.Module) -> None:
    module.register_forward_pre_hook(note_cache, with_kwargs=True)
    if any(variant.needs_inputs for variant in variants_of(module)):
        module.register_forward_pre_hook(note_inputs, with_kwargs=True)


def variants_of(module: nn.Module) -> list[Variant]:
    """What else changes the attention of a module beside its refinement."""
    own = getattr(module, ATTACHED, None)
    return list(own.variants.values()) if isinstance(own, LayerRefinement) else []  # type: ignore[arg-type]


def forget_cache_of(module: nn.Module) -> None:
    """Take the hooks away again; looked up by identity, so that it works on copies of a model too."""
    hooks = (note_cache, note_inputs)
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook in hooks]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def is_causal_call(module: nn.Module, is_causal: bool | None = None) -> bool:
    """Whether rows may see earlier keys only: the call's word, else the config's, else the module's."""
    if is_causal is not None:
        return is_causal
    if not getattr(module, "is_causal", True):
        return False
    return getattr(getattr(module, "config", None), "is_causal", None) is not False


def attached(model: nn.Module) -> Iterator[tuple[str, LayerRefinement]]:
    """Every attached refinement of a model with the name of its attention module, first layer first."""
    for name, module in model.named_modules():
        if isinstance(module, LayerRefinement):
            yield name.rpartition(".")[0], module


def strength_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The learned strengths of a model, one ``[heads]`` per attention module, for an optimiser group.

    With them whatever else variants of attention learn as one number per head.
    """
    return [
        parameter
        for _, own in attached(model)
        for name, parameter in own.named_parameters()
        if name.endswith(PER_HEAD)
    ]


def _why_not_cached(refinement: Refinement, factor: Any) -> str:
    if refinement.future == "paper":
        return (
            "future='paper' lets rows hear later rows, so it cannot decode step by step and must not generate"
        )
    if isinstance(factor, Similarity):
        return (
            f"{refinement.factor!r} compares every row with every other, which a cache of keys does not hold"
        )
    return "attention that is not causal changes earlier rows with every new token, which a cache cannot hold"
