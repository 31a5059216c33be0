"""The public operation: check the input, then compute by the reference or the fused path."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from saobp.kernels.dispatch import Backend, Call, Path, select
from saobp.propagation.beliefs import propagate
from saobp.propagation.cpu_inference import lean_attention, plain_attention
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import head_strength, reference_attention
from saobp.refinement import Refinement

LEAK_WARNING = (
    "future='paper' lets every row hear later rows, so a causal model sees the tokens it has to predict; "
    "its losses and perplexities mean nothing beside a causal model's. Use future='strict' for anything but "
    "reproducing the paper's decoder table."
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement | str,
    *,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
    strength: Tensor | None = None,
    strongest: float | None = None,
) -> Tensor:
    """Scaled dot-product attention whose rows are refined by belief propagation.

    query ``[batch, heads, queries, dim]``, key and value ``[batch, key_heads, keys, dim]`` with key_heads
    dividing heads; padding_mask ``[batch, keys]`` is True for real tokens. Returns
    ``[batch, heads, queries, dim]``. Padding rows send no message; rows that see no key give zeros.

    strength ``[heads]``, of either sign, takes the place of ``refinement.strength``: the way in for
    trained values; ``strongest``, an upper bound on it if one is known and no head's is negative, makes the
    kernels faster. In half precision the kernels have range for strengths up to 8.

    backend ``auto`` takes the fused kernels on a CUDA GPU where they support the call and says once why
    where they do not; ``fused`` insists on them. On a CPU, ``auto`` takes a lean path where no gradient is
    needed; for ``none`` it takes PyTorch's own attention. ``reference`` is the specification.

    Queries may differ in number from keys where that has a meaning: without causality (all queries then
    count as real), or for causal ``none`` and the listing factors (the last query is aligned with the last
    key).
    """
    refinement = Refinement.of(refinement)
    check_no_variants(refinement)
    check_states(query, key, value)
    check_numbers(dropout_p, scale, strongest)
    queries, keys = query.shape[-2], key.shape[-2]
    if padding_mask is not None:
        check_padding(padding_mask, (query.shape[0], keys), query.device)
    check_lengths(queries, keys, refinement, is_causal)
    if strength is None:
        strongest = refinement.strongest
    strength = call_strength(refinement, strength, query.shape[1], query.device)
    if is_causal and refinement.future == "paper":
        warn_of_leak()
    path = choose_path(
        query, key, value, refinement, strength, backend=backend,
        is_causal=is_causal, scale=scale, dropout_p=dropout_p, strongest=strongest,
    )  # fmt: skip
    if path.name == "fused":
        from saobp.kernels.fused import fused_attention

        return fused_attention(
            query, key, value, refinement, strength, strongest=strongest,
            padding_mask=padding_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    graph = build_graph(queries, keys, refinement, padding_mask, is_causal, query.device)
    if path.name == "torch":
        triangle = is_causal and padding_mask is None and queries == keys
        return plain_attention(
            query, key, value, None if triangle else graph.visible,
            is_causal=triangle, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    if path.name == "cpu inference":
        return lean_attention(query, key, value, refinement, strength, graph, scale=scale)
    return reference_attention(
        query, key, value, refinement, strength, graph, dropout_p=dropout_p, scale=scale
    ).output


def choose_path(
    query: Tensor, key: Tensor, value: Tensor, refinement: Refinement, strength: Tensor, **options: Any
) -> Path:
    """Who computes this call; options as in :class:`saobp.kernels.dispatch.Call`.

    Warns once where the kernels would have been better, and raises where backend='fused' cannot do it.
    """
    path = select(Call.of(query, key, value, refinement, strength, **options))
    if path.is_fallback and not torch.compiler.is_compiling():
        _warn_of_fallback(path.reason)
    return path


def refine(
    probabilities: Tensor,
    refinement: Refinement | str,
    *,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    strength: Tensor | None = None,
) -> Tensor:
    """Refine rows of attention that are already there: ``[..., heads, length, length]`` in and out.

    An entry of 0 is a key that the row cannot see. padding_mask ``[batch, length]`` is True for real
    tokens; for maps without a batch, ``[heads, length, length]`` or ``[length, length]``, it is ``[length]``.
    Entries that are no probability (negative, NaN) give NaN rows.
    """
    refinement = Refinement.of(refinement)
    check_no_variants(refinement)
    if probabilities.ndim < 2 or not probabilities.is_floating_point():
        what = f"{probabilities.dtype} of shape {tuple(probabilities.shape)}"
        raise ValueError(f"probabilities must be floating point with at least two dimensions, not {what}")
    queries, keys = probabilities.shape[-2:]
    if padding_mask is not None:
        batch = probabilities.shape[:1] if probabilities.ndim > 3 else ()
        check_padding(padding_mask, (*batch, keys), probabilities.device)
    check_lengths(queries, keys, refinement, is_causal)
    if is_causal and refinement.future == "paper":
        warn_of_leak()
    heads = probabilities.shape[-3] if probabilities.ndim > 2 else 1
    strengths = call_strength(refinement, strength, heads, probabilities.device)
    rows = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    if padding_mask is not None:
        padding_mask = padding_mask.view(*batch, *[1] * (probabilities.ndim - 3), keys)
    graph = build_graph(queries, keys, refinement, padding_mask, is_causal, rows.device, groups=())
    seen = rows != 0
    graph = FactorGraph(
        seen if graph.visible is None else seen & graph.visible, speaks=graph.speaks, causal=graph.causal
    )
    scores = torch.where(seen, rows, 1.0).log()
    by_head = head_strength(strengths, scores)
    refined = propagate(
        scores,
        get_factor(refinement.factor),
        by_head if probabilities.ndim > 2 else by_head[0],
        graph,
        steps=refinement.steps,
        damping=refinement.damping,
    ).rows
    return refined.to(probabilities.dtype)


def build_graph(
    queries: int,
    keys: int,
    refinement: Refinement,
    padding_mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
    groups: tuple[int, ...] = (1,),
) -> FactorGraph:
    """The graph of a plain padded or causal batch; ``groups`` are the dimensions between batch and node."""
    visible = speaks = None
    if is_causal:
        positions = torch.arange(keys - queries, keys, device=device)
        visible = positions[:, None] >= torch.arange(keys, device=device)
    if padding_mask is not None:
        real = padding_mask.view(*padding_mask.shape[:-1], *groups, keys)
        visible = real.unsqueeze(-2) if visible is None else visible & real.unsqueeze(-2)
        if queries == keys:
            speaks = real.unsqueeze(-1)
    return FactorGraph(visible, speaks, causal=is_causal and refinement.future == "strict")


def check_no_variants(refinement: Refinement) -> None:
    if refinement.variants:
        raise ValueError(
            f"{', '.join(refinement.variants)} has parameters or inputs that only a model has: use "
            "saobp.apply(model, refinement)"
        )


def warn_of_leak() -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(LEAK_WARNING, UserWarning, stacklevel=3)


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    warnings.warn(f"attention is refined by the slower reference path {reason}", UserWarning, stacklevel=4)


def call_strength(
    refinement: Refinement, strength: Tensor | None, heads: int, device: torch.device
) -> Tensor:
    if strength is not None:
        if not isinstance(strength, Tensor) or strength.is_complex():
            raise ValueError(f"strength must be a tensor of one real number per head, not {_kind(strength)}")
        if strength.shape != (heads,):
            raise ValueError(
                f"strength must have shape ({heads},), one per head, not {tuple(strength.shape)}"
            )
        return strength.to(device)
    factor = get_factor(refinement.factor)
    if factor is None or not factor.has_strength:
        return torch.zeros(heads, device=device)
    kind = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have
    if isinstance(refinement.strength, float):
        # No copy from the host, so that a CUDA graph can hold it.
        return torch.full((heads,), refinement.strength, dtype=kind, device=device)
    return refinement.layer_strengths(0, 1, heads).to(kind).to(device)


def check_states(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            f"query, key and value must be [batch, heads, length, dim], not {_shapes(query, key, value)}"
        )
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        kinds = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"query, key and value must share one floating-point type, not {kinds}")
    if not query.device == key.device == value.device:
        where = f"{query.device}, {key.device} and {value.device}"
        raise ValueError(f"query, key and value must be on the same device, not {where}")
    (batch, heads, _, dim), (key_batch, key_heads, keys, key_dim) = query.shape, key.shape
    if batch != key_batch or dim != key_dim or value.shape[:3] != (batch, key_heads, keys):
        raise ValueError(f"query, key and value do not fit together: {_shapes(query, key, value)}")
    if dim == 0:
        raise ValueError(f"query and key must have a head size of at least 1: {_shapes(query, key, value)}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"query heads must be a multiple of key heads, not {heads} and {key_heads}")


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _kind(given: object) -> str:
    return str(given.dtype) if isinstance(given, Tensor) else type(given).__name__


def check_padding(padding_mask: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(padding_mask, Tensor) or padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask must be bool (True for real tokens), not {_kind(padding_mask)}")
    if tuple(padding_mask.shape) != shape:
        raise ValueError(f"padding_mask must have shape {shape}, not {tuple(padding_mask.shape)}")
    if padding_mask.device != device:
        raise ValueError(f"padding_mask must be on {device} like the rest, not on {padding_mask.device}")


def check_numbers(dropout_p: float, scale: float | None, strongest: float | None) -> None:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must lie from 0 up to but not including 1, not {dropout_p}")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, not {scale}")
    if strongest is not None and not strongest >= 0:
        raise ValueError(f"strongest must be a bound of at least 0 on all strengths, not {strongest}")


def check_lengths(queries: int, keys: int, refinement: Refinement, is_causal: bool) -> None:
    if queries == keys or not is_causal:
        return
    factor = get_factor(refinement.factor)
    if factor is not None and factor.remembers:
        raise ValueError(
            f"causal {refinement.factor!r} with {queries} queries and {keys} keys lacks the messages of the "
            "earlier rows: pass all rows, or decode through a model that saobp.apply has prepared"
        )
    if queries > keys:
        raise ValueError(f"causal attention needs at least as many keys as queries, not {keys} and {queries}")
