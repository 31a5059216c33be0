"""Batches without padding: the tokens of all sequences in one row, and refined attention on them.

Packed states are ``[total, heads, dim]``, sequence after sequence; ``cumulative_lengths``, int32
``[sequences + 1]`` from 0 to total, says where each begins and ends.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from saobp.functional import (
    Backend,
    attention,
    call_strength,
    check_numbers,
    check_states,
    choose_path,
    warn_of_leak,
)
from saobp.refinement import Refinement


def pack(padding_mask: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Cumulative lengths, and each of the states without its padding.

    States ``[batch, length, ...]`` become ``[total, ...]``. padding_mask ``[batch, length]`` is True for
    real tokens, which may stand anywhere. A sequence that is all padding becomes an empty one.
    """
    _check_mask(padding_mask)
    for padded in states:
        if padded.shape[:2] != padding_mask.shape:
            raise ValueError(
                f"padding_mask {tuple(padding_mask.shape)} and states {tuple(padded.shape)} differ in "
                "batch or length: states must be [batch, length, ...]"
            )
    lengths = padding_mask.sum(1).cumsum(0)
    cumulative_lengths = torch.cat([lengths.new_zeros(1), lengths]).to(torch.int32)
    return cumulative_lengths, *(padded[padding_mask] for padded in states)


def unpack(padding_mask: Tensor, packed: Tensor) -> Tensor:
    """The inverse of :func:`pack`: ``[total, ...]`` to ``[batch, length, ...]``, padding 0."""
    _check_mask(padding_mask)
    padded = packed.new_zeros(*padding_mask.shape, *packed.shape[1:])
    batch, position = padding_mask.nonzero(as_tuple=True)
    if len(batch) != len(packed):
        raise ValueError(
            f"padding_mask has {len(batch)} real tokens and the packed states have {len(packed)}"
        )
    return padded.index_put((batch, position), packed)


def attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement | str,
    cumulative_lengths: Tensor,
    *,
    max_length: int | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
    strength: Tensor | None = None,
    strongest: float | None = None,
) -> Tensor:
    """:func:`saobp.attention` within each of several sequences packed into one row.

    query ``[total, heads, dim]``, key and value ``[total, key_heads, dim]``; cumulative_lengths int32
    ``[sequences + 1]`` on the same device, from 0 to total. Empty sequences are allowed. Returns
    ``[total, heads, dim]``: what each sequence would give alone.

    max_length is the length of the longest sequence. Without it the kernels prepare for one of ``total``
    tokens, which costs time but not correctness.

    The reference path checks the values of cumulative_lengths and max_length. The fused path does so only
    for lengths on the CPU: reading them from a GPU would hold up the program. Lengths that do not rise from
    0 to total, or a max_length that is too small, give undefined results there.
    """
    refinement = Refinement.of(refinement)
    if not query.ndim == key.ndim == value.ndim == 3:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"packed query, key and value must be [total, heads, dim], not {shapes}")
    q, k, v = (packed.transpose(0, 1).unsqueeze(0) for packed in (query, key, value))
    check_states(q, k, v)
    check_numbers(dropout_p, scale, strongest)
    total = query.shape[0]
    if key.shape[0] != total:
        raise ValueError(f"packed query and key must have the same tokens, not {total} and {key.shape[0]}")
    _check_lengths(cumulative_lengths, max_length, query)
    if strength is None:
        strongest = refinement.strongest
    strength = call_strength(refinement, strength, query.shape[1], query.device)
    if is_causal and refinement.future == "paper":
        warn_of_leak()
    longest = total if max_length is None else min(max_length, total)
    path = choose_path(
        q, k, v, refinement, strength, backend=backend,
        is_causal=is_causal, scale=scale, dropout_p=dropout_p, strongest=strongest, longest=longest,
    )  # fmt: skip
    fused = path.name == "fused"
    if not (fused and cumulative_lengths.is_cuda):
        _check_values(cumulative_lengths, max_length, total)
    if fused:
        from saobp.kernels.fused import fused_attention

        out = fused_attention(
            q, k, v, refinement, strength,
            strongest=strongest, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
            cumulative_lengths=cumulative_lengths.contiguous(),
            longest=longest,
        )  # fmt: skip
        return out.squeeze(0).transpose(0, 1)
    lengths = cumulative_lengths.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=query.device) < lengths[:, None]
    q, k, v = (unpack(mask, packed).transpose(1, 2) for packed in (query, key, value))
    padded = attention(
        q, k, v, refinement,
        padding_mask=mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        backend="reference", strength=strength,
    )  # fmt: skip
    return padded.transpose(1, 2)[mask]


def _check_mask(padding_mask: Tensor) -> None:
    if padding_mask.dtype != torch.bool or padding_mask.ndim != 2:
        what = f"{padding_mask.dtype} of shape {tuple(padding_mask.shape)}"
        raise ValueError(f"padding_mask must be bool [batch, length], True for real tokens, not {what}")


def _check_lengths(cumulative_lengths: Tensor, max_length: int | None, query: Tensor) -> None:
    """What can be seen without reading the lengths from a GPU."""
    if cumulative_lengths.dtype != torch.int32 or cumulative_lengths.ndim != 1 or not len(cumulative_lengths):
        what = f"{cumulative_lengths.dtype} of shape {tuple(cumulative_lengths.shape)}"
        raise ValueError(f"cumulative_lengths must be int32 [sequences + 1], not {what}")
    if cumulative_lengths.device != query.device:
        where = f"{cumulative_lengths.device} and {query.device}"
        raise ValueError(f"cumulative_lengths and query must be on the same device, not {where}")
    if max_length is not None and max_length < 0:
        raise ValueError(f"max_length must not be negative, unlike {max_length}")
    if len(query) and (len(cumulative_lengths) == 1 or max_length == 0):
        raise ValueError(f"{len(query)} tokens were given, but only empty sequences or none")


def _check_values(cumulative_lengths: Tensor, max_length: int | None, total: int) -> None:
    places = cumulative_lengths.tolist()
    if places[0] != 0 or places[-1] != total:
        ends = f"from {places[0]} to {places[-1]}"
        raise ValueError(f"cumulative_lengths must run from 0 to the {total} tokens of query, not {ends}")
    lengths = [end - start for start, end in pairwise(places)]
    if min(lengths, default=0) < 0:
        raise ValueError(f"cumulative_lengths must not decrease, unlike {places}")
    if max_length is not None and max_length < max(lengths, default=0):
        raise ValueError(f"max_length {max_length} is less than the longest sequence's {max(lengths)} tokens")
