"""Refined attention for inference on a CPU: the reference's arithmetic with little memory traffic.

The maps of a few heads at a time are computed in two reused buffers that fit the CPU cache. The belief is the
softmax of scores plus received log messages, as in the reference, so that no row underflows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saobp.propagation.factors import (
    STRONG,
    Potts,
    PottsKeyBias,
    PottsListing,
    Similarity,
    floored,
    get_factor,
)
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import head_strength, share_heads
from saobp.refinement import Refinement

ENTRIES_PER_THREAD = 1 << 16
"""Map entries per thread and chunk: two buffers of them in single precision fill half a megabyte of cache."""

_TINY = 1e-20
"""Below this sum of similarities a row of ElemMul is affected by the floor under each of them."""

_SUPPORTED = (Potts, PottsKeyBias, PottsListing, Similarity)
Slices = tuple[slice, slice]
WHOLE: Slices = (slice(None), slice(None))


def cpu_obstacle(
    refinement: Refinement,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    dropout_p: float,
) -> str | None:
    """Why a call on a CPU with states of these shapes cannot take this path; None where it can.

    Also requires :func:`needs_values_only`: under ``torch.compile`` the fused reference is faster.
    """
    factor = get_factor(refinement.factor)
    if type(factor) not in _SUPPORTED:
        return f"factor {refinement.factor!r} has only the reference on a CPU"
    if dropout_p:
        return "dropout is for training"
    if refinement.steps != 1:
        return f"{refinement.steps} steps were asked for and the CPU path does one"
    if refinement.message_stride > 1:
        return "messages from a part of the rows have only the reference on a CPU"
    if 0 in query or 0 in value:
        return "there is nothing to compute"
    if isinstance(factor, Similarity) and query[2] != key[2]:
        return f"{query[2]} queries and {key[2]} keys differ in number"
    return None


def needs_values_only(*states: Tensor) -> bool:
    """Whether only values are needed: no gradient of any kind, autocast, compiler, tracer or subclass."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        return False
    return takes_operators(*states)


def takes_operators(*states: Tensor) -> bool:
    """Whether operators that have no forward derivatives can stand in for PyTorch's own.

    That is, no tracer but ``torch.compile``, no transform of ``torch.func`` and no subclass.
    """
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    if torch.jit.is_tracing() or torch.autograd.forward_ad._current_level >= 0:
        return False
    return not any(
        type(x) not in (Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(x)
        for x in states
    )


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Attention without refinement by PyTorch's own operation; rows that see no key give zeros.

    ``visible`` as in a FactorGraph, and with it ``bias``, added to the scores; ``is_causal`` is a
    square causal mask.
    """
    key, value = share_heads(key, query.shape[1]), share_heads(value, query.shape[1])
    if visible is None:
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    seen = visible.any(-1, keepdim=True)
    mask = visible | ~seen
    if bias is not None:
        mask = torch.where(mask, bias.to(query.dtype), float("-inf"))
    output = scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout_p, scale=scale)
    return output.masked_fill(~seen, 0.0)


def failed_to_mask(output: Tensor, graph: FactorGraph) -> bool:
    """Whether a hidden score may have reached the output: minus infinity added to NaN or infinity is NaN.

    A weight that is NaN makes its row's output NaN in all dimensions, so one of them is looked at.
    """
    if graph.visible is None or output.device.type != "cpu" or not output.numel():
        return False
    return math.isnan(float(output[..., 0].sum()))


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    graph: FactorGraph,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention with refined rows if ``cpu_obstacle`` is None; arguments as ``reference_attention``.

    The output ``[batch, heads, queries, dim]`` is a view of ``[batch, queries, heads, dim]``, the layout that
    models use next. Half precision is computed in single precision throughout.
    """
    factor = get_factor(refinement.factor)
    batch, heads, queries, dim = query.shape
    scale = dim**-0.5 if scale is None else scale
    arithmetic = torch.promote_types(query.dtype, torch.float32)
    key, value = share_heads(key, heads), share_heads(value, heads)
    bias, sees = _bias_and_rows(graph, arithmetic)
    if isinstance(factor, Potts):
        exponent = head_strength(strength * -factor.sign, arithmetic)
        strong = not float(exponent.min()) >= -STRONG  # or not a number
        message = torch.expm1(exponent)
        for sends in (sees, graph.senders):
            message = message if sends is None else message * sends
    output = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    for part in _parts(batch, heads, queries * key.shape[-2]):
        q, k, v = [_at(x, part).to(arithmetic).flatten(0, 1) for x in (query, key, value)]
        scores, rows = _two_maps(q.shape[0], queries, k.shape[1], arithmetic)
        hidden = None if bias is None else _spread(bias, part, batch, heads)
        if hidden is None:
            torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
        else:
            torch.baddbmm(hidden.expand_as(scores), q, k.mT, alpha=scale, out=scores)
        torch.softmax(scores, -1, out=rows)
        if isinstance(factor, Potts):
            gammas = _spread(message, part, batch, heads)
            if strong:
                rows.copy_(_strong_messages(rows, gammas, _spread(exponent, part, batch, heads)))
            else:
                rows.mul_(gammas).log1p_()
            _refine_potts(scores, rows, graph.causal, factor)
            refined = torch.bmm(rows, v)
        else:
            assert isinstance(factor, Similarity)
            if sees is not None and hidden is not None and hidden.shape[1] > 1:
                rows.mul_(_spread(sees, part, batch, heads))
            refined = _elemmul(scores, rows, v, hidden, factor.prior)
        target = _at(output, part)
        target.copy_(refined.view(target.shape))
    if sees is not None:
        output.masked_fill_(~sees, 0.0)
    return output


def _strong_messages(rows: Tensor, message: Tensor, exponent: Tensor) -> Tensor:
    """Log messages as :class:`Potts` has them, exact near 1; arguments ``[chunk, node or 1, label or 1]``.

    message is -gamma = e^exponent - 1, and 0 for rows that send none.
    """
    near_one = (rows > 0.5) & (message != 0)
    others = rows.masked_fill(near_one, 0.0).sum(-1, keepdim=True)
    exact = torch.log(others + rows * torch.exp(exponent))
    return torch.where(near_one, exact, torch.log1p(rows * message))


def _refine_potts(scores: Tensor, rows: Tensor, causal: bool, factor: Potts) -> None:
    """Log messages in ``rows`` to refined rows ``[chunk, node, label]``, in place; overwrites ``scores``."""
    if isinstance(factor, PottsListing):
        scores.sub_(rows)
    elif causal and factor.includes_own_message:
        scores.add_(rows.cumsum_(1))
    elif causal:
        scores[:, 1:].add_(rows.cumsum_(1)[:, :-1])
    else:
        scores.add_(rows.sum(1, keepdim=True))
        if not factor.includes_own_message:
            scores.sub_(rows)
    torch.softmax(scores, -1, out=rows)


def _elemmul(scores: Tensor, rows: Tensor, value: Tensor, hidden: Tensor | None, prior: bool) -> Tensor:
    """ElemMul: A (A^T V) without A A^T where each row sees the same keys and no row's sum underflows."""
    if not prior and (hidden is None or hidden.shape[1] == 1):
        if hidden is None:
            received, total = torch.bmm(rows.mT, value), rows.sum(1).unsqueeze(-1)
        else:
            real = hidden.mT.isfinite().to(value)
            received, total = torch.bmm(rows.mT, value * real), torch.bmm(rows.mT, real)
        norm = torch.bmm(rows, total)
        if norm.min() > _TINY:
            return torch.bmm(rows, received).div_(norm)
    alike = floored(torch.bmm(rows, rows.mT)).log_()
    if not prior:
        scores.zero_() if hidden is None else scores.copy_(hidden.expand_as(scores))
    torch.softmax(scores.add_(alike), -1, out=rows)
    return torch.bmm(rows, value)


def _parts(batch: int, heads: int, entries: int) -> Iterator[Slices]:
    """Batch and head slices of about equal work: several sequences with all heads, or some heads of one."""
    budget = ENTRIES_PER_THREAD * torch.get_num_threads()
    if batch * heads * entries <= budget:
        yield WHOLE
        return
    some_heads = min(heads, max(1, budget // entries))
    some_batch = max(1, budget // (entries * heads))
    for first in range(0, batch, some_batch):
        for head in range(0, heads, some_heads):
            yield slice(first, first + some_batch), slice(head, head + some_heads)


class _Scratch(threading.local):
    """Thread-local buffer for maps, reused across calls: page faults cost as much as a softmax."""

    buffer: Tensor | None = None


_scratch = _Scratch()


def _two_maps(chunk: int, queries: int, keys: int, arithmetic: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two uninitialised ``[chunk, queries, keys]``, valid until the next call on this thread."""
    entries, budget = chunk * queries * keys, ENTRIES_PER_THREAD * torch.get_num_threads()
    if entries > budget or arithmetic != torch.float32:
        buffer = torch.empty(2, entries, dtype=arithmetic)
    else:
        if _scratch.buffer is None or _scratch.buffer.shape[1] != budget:
            with torch.inference_mode(False):
                _scratch.buffer = torch.empty(2, budget, dtype=torch.float32)
        buffer = _scratch.buffer[:, :entries]
    first, second = buffer.view(2, chunk, queries, keys).unbind()
    return first, second


def _at(values: Tensor, part: Slices) -> Tensor:
    """The slices of the first two dimensions."""
    return values if part is WHOLE else values[part]


def _spread(values: Tensor, part: Slices, batch: int, heads: int) -> Tensor:
    """``[chunk, n, m]`` from values ``[batch or 1, heads or 1, n, m]`` or ``[heads, n, m]``."""
    return _at(values.expand(batch, heads, *values.shape[-2:]), part).flatten(0, 1)


def _bias_and_rows(graph: FactorGraph, arithmetic: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """0 where a row sees and minus infinity elsewhere ``[batch or 1, heads or 1, node or 1, label]``; rows
    that see a key ``[.., node or 1, 1]``, the others having a bias of 0 throughout."""
    if graph.visible is None:
        return None, None
    visible = graph.visible.view(*[1] * (4 - graph.visible.ndim), *graph.visible.shape)
    sees = visible.any(-1, keepdim=True)
    return torch.where(visible | ~sees, 0.0, -math.inf).to(arithmetic), sees
