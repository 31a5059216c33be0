"""The attention function of the kernel for the hub: ``attn_implementation="repository:saobp_attention"``.

It imports only torch and what the kernel carries. How to refine is in the model's ``config.saobp``. Learned
strengths, variants and the messages of a cache are attached to a model by saobp itself or by the code of a
portable folder, not by a function, so calls that need them are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saobp.arguments import NEUTRAL_ARGUMENTS, check_not_decoder
from saobp.functional import attention
from saobp.propagation.factors import has_strength
from saobp.refinement import Refinement


def saobp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Refined attention for a model: states ``[batch, heads, length, dim]``, mask ``[batch, keys]`` or None.

    Returns ``[batch, length, heads, dim]``, and no attention rows.
    """
    for name, given in kwargs.items():
        if name not in NEUTRAL_ARGUMENTS and given is not None and given is not False:
            raise ValueError(
                f"{type(module).__name__} passes {name!r}, which refined attention cannot honour"
            )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"the kernel reads masks [batch, keys], not {tuple(attention_mask.shape)}: use "
            "saobp.apply(model, refinement)"
        )
    if attention_mask is None:
        _reject_packed(query, kwargs.get("position_ids"))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and is_causal is None:
        check_not_decoder(module)
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{query.shape[-2]} queries see {key.shape[-2]} keys of a cache, which lacks the messages of "
            "earlier rows: generate with use_cache=False, or load the model with saobp or its portable code"
        )
    refinement = layer_refinement(module)
    states = attention(
        query, key, value, refinement, attention_mask=attention_mask, is_causal=bool(causal),
        dropout_p=dropout, scale=scaling, sliding_window=sliding_window,
    )  # fmt: skip
    return states.transpose(1, 2).contiguous(), None


def layer_refinement(module: nn.Module) -> Refinement:
    """The refinement in the config of a module, with the strength of its layer."""
    written: Any = getattr(getattr(module, "config", None), "saobp", None)
    if written is None:
        raise ValueError(
            "config.saobp does not say how to refine: set it, as in model.config.saobp = "
            "{'factor': 'high', 'strength': 0.2}"
        )
    strength = written.get("strength", "auto")
    if isinstance(strength, str) and has_strength(written.get("factor", "high")):
        raise ValueError(
            f"strength {strength!r} needs values that the kernel alone does not have: load the model with "
            "saobp, or with trust_remote_code=True from a portable folder"
        )
    if isinstance(strength, list | tuple):
        layer: Any = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(
                f"{type(module).__name__} does not tell its layer, so it needs one strength for all: load "
                "the model with saobp"
            )
        strength = [strength[layer]]
    return Refinement.from_dict({**written, "strength": strength})


def _reject_packed(query: Tensor, position_ids: Tensor | None) -> None:
    """Raise if several texts are packed into one row, which position ids that begin again show."""
    if position_ids is None or query.shape[0] != 1 or torch.compiler.is_compiling():
        return
    if bool((position_ids.diff(dim=-1) < 0).any()):
        raise ValueError("position ids begin again, so texts are packed: use saobp.apply(model, refinement)")
