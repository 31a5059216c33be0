"""Attention inputs from a captured attention call of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from saobp.metrics.attention_inputs import AttentionInputs
from saobp.transformers.attention_function import KNOWN_ARGUMENTS
from saobp.transformers.capture import AttentionCall

ROWS_AT_ONCE = 1024


def inputs_of(
    call: AttentionCall, texts: int | None = None, *, linear: bool = False
) -> AttentionInputs | None:
    """Inputs of one call for its first ``texts`` texts; None for cross-attention and cached decoding.

    ``linear`` detects a causal or full mask in a 4-D one, so that the sampled method can use fused kernels.
    """
    length = call.query.shape[-2]
    if length != call.key.shape[-2] or is_cross_attention(call):
        return None
    check_options(call)
    refinement, strength = call.refinement()
    query, key = call.query.detach()[:texts], call.key.detach()[:texts]
    if strength.ndim > 1 and strength.shape[1] > 1:
        strength = strength[:, :texts]
    mask = call.mask
    padding: Tensor | None = None
    if call.sequences is None and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        padding = None if mask is None else mask[:texts, -length:].bool()
        applies = mask is not None or call.implementation != "eager"
        window = call.sliding_window if "flash" in call.implementation or call.is_refined else None
        window = None if window is None or window >= length else window
        causal = call.is_causal and applies
        return AttentionInputs(
            query, key, strength.detach(), refinement, causal, call.scaling, padding, window
        )
    graph, bias = call.graph()
    assert graph.visible is not None
    visible = graph.visible[:texts].expand(-1, -1, length, length)
    real = visible.any(-1) if graph.senders is None else visible.any(-1) & graph.senders[:texts, ..., 0]
    bias = None if bias is None or not bool(bias.any()) else bias[:texts].expand(-1, -1, length, length)
    if not bool(real.all()):
        padding = real.any(1).expand(len(query), -1)
    causal = False
    kind = _mask_kind(visible, padding) if linear and bias is None else None
    if kind is not None:
        causal = kind == "causal"
    return AttentionInputs(
        query,
        key,
        strength.detach(),
        refinement,
        causal,
        call.scaling,
        padding,
        visible=visible if kind is None else None,
        bias=bias,
        causal_messages=call.is_causal,
    )


def _mask_kind(visible: Tensor, padding: Tensor | None) -> str | None:
    """``causal`` or ``full`` if the mask equals that, up to padding, in all real rows."""
    length = visible.shape[-1]
    keys = torch.arange(length, device=visible.device)
    fits = {"full": True, "causal": True}
    for positions in keys.split(ROWS_AT_ONCE):
        seen = visible[:, :, positions]
        for kind in fits:
            expected = (keys <= positions[:, None])[None, None] if kind == "causal" else torch.ones_like(seen)
            if padding is not None:
                expected = expected & padding[:, None, None, :]
            differs = seen != expected
            if padding is not None:
                differs = differs & padding[:, None, positions, None]
            fits[kind] = fits[kind] and not bool(differs.any())
    return next((kind for kind, fit in fits.items() if fit), None)


def is_cross_attention(call: AttentionCall) -> bool:
    """Whether keys come from another sequence; equal lengths do not rule that out."""
    own = call.name.rpartition(".")[2].lower()
    named = any(word in own for word in ("cross", "encoder_attn", "encdecattention"))
    return named or ".crossattention" in call.name or bool(getattr(call.module, "is_cross_attention", False))


def check_options(call: AttentionCall) -> None:
    """Raises for options that change the rows."""
    for name, value in call.options.items():
        if name in KNOWN_ARGUMENTS or value is None or value is False:
            continue
        raise ValueError(
            f"{type(call.module).__name__} passes {name!r} to its attention, which changes the rows in a way "
            "that saobp's statistics do not know"
        )
