"""The public operation: check the input, then compute by the reference or the fused path."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from saobp.arguments import (
    BoundedStrength,
    check_causal,
    check_lengths,
    check_no_variants,
    check_numbers,
    check_states,
    check_symmetric_mask,
    four_dimensional,
    read_attn_mask,
    read_padding,
    read_strength,
    read_window,
    require_tensors,
    under_autocast,
)
from saobp.kernels.calls import Backend, Call, Path
from saobp.kernels.dispatch import select
from saobp.propagation.cpu_inference import cpu_attention, failed_to_mask, plain_attention
from saobp.propagation.graph import FactorGraph, in_window
from saobp.propagation.reference import head_strength, reference_attention, refine_scores
from saobp.refinement import Refinement

LEAK_WARNING = (
    "future='paper' lets rows receive messages of later rows, so a causal model sees the tokens it has to "
    "predict; its losses and perplexities mean nothing beside a causal model's. Use future='strict' for "
    "anything but reproducing the paper's decoder table."
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement | str,
    *,
    attention_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
    strength: Tensor | BoundedStrength | None = None,
    padding_mask: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Scaled dot-product attention whose rows are refined by belief propagation.

    query ``[batch, heads, queries, dim]``, key and value ``[batch, key_heads, keys, dim]`` with key_heads
    dividing heads; attention_mask ``[batch, keys]`` is True or 1 for real tokens (padding_mask is its older
    name). Returns ``[batch, heads, queries, dim]``. Padding rows send no message; rows that see no key give
    zeros. Under autocast the states are cast, as for PyTorch's own attention.

    strength ``[heads]``, of either sign, overrides ``refinement.strength``, for trained values; several steps
    may have their own, ``[steps, heads]``, of which the last is for all further steps. The kernels
    are for strengths up to 8, and up to 2 for several steps: beyond, half precision lacks range and single
    precision errs by 0.05 and more on rows with all weight on one key.

    attn_mask, broadcastable to ``[batch, heads, queries, keys]``, is that of PyTorch's
    ``scaled_dot_product_attention``: bool, True where a row may attend, or numbers added to the scores, minus
    infinity where it may not. A masked entry has weight 0 and sends the neutral message. A token counts as
    padding if its row may attend to no key or no row may attend to it. Without is_causal all other rows
    send messages to each other, so a mask that is not symmetric between them (a causal or a prefix mask)
    raises, except for ``none``, the listing factors and ElemMul. With is_causal later keys are hidden too and
    rows receive messages of earlier ones, under any mask.

    sliding_window: a row sees fewer than this many keys back, and as many forward if not causal. Without
    is_causal, kernels compute windows and masks in memory linear in length, the mask itself and its gradient
    apart.

    backend ``auto`` takes the fused kernels on a CUDA GPU where they support the call and warns once why
    where they do not; ``fused`` raises instead. On a CPU, ``auto`` takes a faster path where no gradient is
    needed; for ``none`` it takes PyTorch's own attention. Causal ElemMul is computed in chunks of rows, on a
    CPU from 128 tokens on, with gradients too. ``reference`` is the specification.

    Queries may differ in number from keys where that has a meaning: without causality (all queries then
    count as real), or for causal ``none`` and the listing factors (the last query is aligned with the last
    key).
    """
    checked = checked_call(
        query, key, value, refinement, attention_mask=attention_mask, attn_mask=attn_mask,
        is_causal=is_causal, dropout_p=dropout_p, scale=scale, backend=backend, strength=strength,
        padding_mask=padding_mask, sliding_window=sliding_window,
    )  # fmt: skip
    query, key, value, refinement, strength, padding_mask, seen, bias, call = checked
    warn_of_leak(refinement, is_causal)
    path = select_path(call)
    if path.family == "masked":
        from saobp.kernels.masked.attention import masked_attention

        nodes = None if padding_mask is None else padding_mask[:, None]
        if seen is not None and attn_mask is not None:
            nodes = nodes_of_mask(attn_mask, checked)
            attn_mask = four_dimensional(attn_mask)
        return masked_attention(
            query, key, value, refinement, strength, nodes=nodes, mask=attn_mask, window=call.window,
            is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    if path.name == "fused":
        from saobp.kernels.fused import fused_attention

        return fused_attention(
            query, key, value, refinement, strength, strongest=call.strongest,
            padding_mask=padding_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    if path.name == "chunked":
        from saobp.kernels.elemmul.causal_operator import causal_elemmul_attention

        return causal_elemmul_attention(query, key, value, padding_mask, scale)
    graph = checked.graph()
    if path.name == "cpu inference":
        output = cpu_attention(query, key, value, refinement, strength, graph, scale=scale)
    elif path.name == "torch":
        no_mask = padding_mask is None and seen is None and call.window is None
        triangle = is_causal and no_mask and query.shape[-2] == key.shape[-2]
        output = plain_attention(
            query, key, value, None if triangle else graph.visible,
            bias=bias, is_causal=triangle, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    if path.name != "reference" and not failed_to_mask(output, graph):
        return output
    return reference_attention(
        query, key, value, refinement, strength, graph, bias=bias, dropout_p=dropout_p, scale=scale
    ).output


_nodes_of_masks = WeakTensorKeyDictionary()


def nodes_of_mask(attn_mask: Tensor, checked: CheckedCall) -> Tensor:
    """Tokens that are nodes under a caller's mask, bool ``[.., keys]``; raises if it is not symmetric."""

    def compute() -> Tensor:
        senders = checked.graph().senders
        assert senders is not None
        return senders.squeeze(-1)

    if checked.padding_mask is not None:
        return compute()
    return remembered_nodes(attn_mask, (checked.call.window, checked.refinement.factor), compute)


def remembered_nodes(mask: Tensor, state: tuple[Any, ...], compute: Callable[[], Tensor]) -> Tensor:
    """``compute()``, or its earlier result for this mask if neither the mask nor ``state`` has changed.

    Layers share a mask, and reading it on a GPU needs a sync.
    """
    if torch.compiler.is_compiling() or mask.is_inference():
        return compute()
    state = (mask._version, *state)
    cached = _nodes_of_masks.get(mask)
    if cached is None or cached[0] != state:
        cached = _nodes_of_masks[mask] = (state, compute())
    nodes: Tensor = cached[1]
    return nodes


def attention_with_rows(
    query: Tensor, key: Tensor, value: Tensor, refinement: Refinement | str, **options: Any
) -> tuple[Tensor, Tensor]:
    """:func:`attention` by the reference, and the refined rows ``[batch, heads, queries, keys]``."""
    checked = checked_call(query, key, value, refinement, **options)
    warn_of_leak(checked.refinement, checked.call.is_causal)
    output, rows, _ = reference_attention(
        checked.query, checked.key, checked.value, checked.refinement, checked.strength, checked.graph(),
        bias=checked.bias, dropout_p=checked.call.dropout_p, scale=checked.call.scale,
    )  # fmt: skip
    return output, rows


class CheckedCall(NamedTuple):
    """The arguments of :func:`attention`, checked.

    query, key, value: cast under autocast
    strength:          ``[heads]``, or of each step ``[steps, heads]``
    padding_mask:      bool ``[batch, keys]``
    seen, bias:        of ``attn_mask``: visible entries, and numbers added to the scores
    """

    query: Tensor
    key: Tensor
    value: Tensor
    refinement: Refinement
    strength: Tensor
    padding_mask: Tensor | None
    seen: Tensor | None
    bias: Tensor | None
    call: Call

    def graph(self) -> FactorGraph:
        """The factor graph; raises if ``attn_mask`` is not symmetric where it has to be."""
        queries, keys, is_causal = self.query.shape[-2], self.key.shape[-2], self.call.is_causal
        graph = build_graph(
            queries, keys, self.refinement, self.padding_mask, is_causal, self.query.device,
            seen=self.seen, window=self.call.window,
        )  # fmt: skip
        if self.seen is not None:
            check_symmetric_mask(graph, self.refinement, is_causal)
        return graph


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement | str,
    *,
    attention_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
    strength: Tensor | BoundedStrength | None = None,
    padding_mask: Tensor | None = None,
    sliding_window: int | None = None,
) -> CheckedCall:
    """Check and normalise the arguments of :func:`attention`."""
    refinement = Refinement.of(refinement)
    check_no_variants(refinement)
    require_tensors(query=query, key=key, value=value)
    query, key, value = under_autocast(query, key, value)
    check_states(query, key, value)
    check_numbers(is_causal, dropout_p, scale)
    (batch, heads, queries, _), keys, device = query.shape, key.shape[-2], query.device
    real = read_padding(attention_mask, padding_mask, (batch, keys), device)
    seen = bias = None
    if attn_mask is not None:
        seen, bias = read_attn_mask(attn_mask, (batch, heads, queries, keys), device)
    check_lengths(queries, keys, refinement, is_causal)
    window = read_window(sliding_window, queries, keys)
    strengths, strongest = read_strength(refinement, strength, heads, device, by_step=True)
    call = Call.of(
        query, key, value, refinement, strengths, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        backend=backend, strongest=strongest, has_attn_mask=seen is not None, bias=bias, window=window,
    )  # fmt: skip
    return CheckedCall(query, key, value, refinement, strengths, real, seen, bias, call)


def select_path(call: Call) -> Path:
    """The path of this call.

    Warns once on a fallback from the kernels; raises if backend='fused' and they do not support the call.
    """
    path = select(call)
    if path.is_fallback and not torch.compiler.is_compiling():
        _warn_of_fallback(path.reason)
    return path


def refine(
    probabilities: Tensor,
    refinement: Refinement | str,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    strength: Tensor | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Refine given attention maps: ``[..., heads, length, length]`` in and out.

    An entry of 0 is a key that the row cannot see. attention_mask ``[batch, length]`` is True or 1 for real
    tokens (padding_mask is its older name); for maps without a batch, ``[heads, length, length]`` or
    ``[length, length]``, it is ``[length]``. Invalid entries (negative, NaN) give NaN rows.
    """
    refinement = Refinement.of(refinement)
    check_no_variants(refinement)
    require_tensors(probabilities=probabilities)
    if probabilities.ndim < 2 or not probabilities.is_floating_point():
        what = f"{probabilities.dtype} of shape {tuple(probabilities.shape)}"
        raise ValueError(f"probabilities must be floating point with at least two dimensions, not {what}")
    queries, keys = probabilities.shape[-2:]
    batch = probabilities.shape[:1] if probabilities.ndim > 3 else ()
    padding_mask = read_padding(attention_mask, padding_mask, (*batch, keys), probabilities.device)
    check_causal(is_causal)
    check_lengths(queries, keys, refinement, is_causal)
    warn_of_leak(refinement, is_causal)
    heads = probabilities.shape[-3] if probabilities.ndim > 2 else 1
    strengths, _ = read_strength(refinement, strength, heads, probabilities.device)
    rows = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    if padding_mask is not None:
        padding_mask = padding_mask.view(*batch, *[1] * (probabilities.ndim - 3), keys)
    graph = build_graph(queries, keys, refinement, padding_mask, is_causal, rows.device, groups=())
    seen = rows != 0
    graph = FactorGraph(
        seen if graph.visible is None else seen & graph.visible, senders=graph.senders, causal=graph.causal
    )
    scores = torch.where(seen, rows, 1.0).log()
    by_head = head_strength(strengths, scores)
    refined = refine_scores(scores, refinement, by_head if probabilities.ndim > 2 else by_head[0], graph)
    return refined.rows.to(probabilities.dtype)


def build_graph(
    queries: int,
    keys: int,
    refinement: Refinement,
    padding_mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
    groups: tuple[int, ...] = (1,),
    seen: Tensor | None = None,
    window: int | None = None,
) -> FactorGraph:
    """The graph of a padded or causal batch; ``groups`` are the dimensions between batch and node.

    ``seen`` is the caller's own mask ``[.., queries or 1, keys]``: a token that no row sees is padding;
    ``window`` as in :func:`in_window`.
    """
    visible = senders = None
    if window is not None:
        visible = in_window(window, queries, keys, is_causal, device)
    elif is_causal:
        positions = torch.arange(keys - queries, keys, device=device)
        visible = positions[:, None] >= torch.arange(keys, device=device)
    if padding_mask is not None:
        real = padding_mask.view(*padding_mask.shape[:-1], *groups, keys)
        visible = real.unsqueeze(-2) if visible is None else visible & real.unsqueeze(-2)
        if queries == keys:
            senders = real.unsqueeze(-1)
    if seen is not None:
        visible = seen if visible is None else visible & seen
        senders = visible.any(-2).unsqueeze(-1) if queries == keys else None
    return FactorGraph(visible, senders, causal=is_causal and refinement.future == "strict")


def warn_of_leak(refinement: Refinement, is_causal: bool) -> None:
    if is_causal and refinement.future == "paper" and not torch.compiler.is_compiling():
        warnings.warn(LEAK_WARNING, UserWarning, stacklevel=3)


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    warnings.warn(f"attention is refined by the slower reference path {reason}", UserWarning, stacklevel=4)
