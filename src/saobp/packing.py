"""Batches without padding: the tokens of all sequences in one row, and refined attention on them.

Packed states are ``[total, heads, dim]``, sequence after sequence; ``cu_seqlens``, cumulative lengths
int32 ``[sequences + 1]`` from 0 to total, says where each begins and ends.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from saobp.arguments import (
    BoundedStrength,
    check_no_variants,
    check_numbers,
    check_states,
    one_of,
    read_strength,
    read_zeros_and_ones,
    require_tensors,
    under_autocast,
)
from saobp.functional import attention, select_path, warn_of_leak
from saobp.kernels.calls import Backend, Call
from saobp.refinement import Refinement


def pack(attention_mask: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Cumulative lengths, and each of the states without its padding.

    States ``[batch, length, ...]`` become ``[total, ...]``. attention_mask ``[batch, length]`` is True or 1
    for real tokens, at any positions. A sequence that is all padding becomes an empty one.
    """
    real = _read_mask(attention_mask)
    for padded in states:
        require_tensors(states=padded)
        if padded.shape[:2] != real.shape:
            raise ValueError(
                f"attention_mask {tuple(real.shape)} and states {tuple(padded.shape)} differ in "
                "batch or length: states must be [batch, length, ...]"
            )
    lengths = real.sum(1).cumsum(0)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths]).to(torch.int32)
    return cu_seqlens, *(padded[real] for padded in states)


def unpack(attention_mask: Tensor, packed: Tensor) -> Tensor:
    """The inverse of :func:`pack`: ``[total, ...]`` to ``[batch, length, ...]``, padding 0."""
    real = _read_mask(attention_mask)
    require_tensors(packed=packed)
    padded = packed.new_zeros(*real.shape, *packed.shape[1:])
    batch, position = real.nonzero(as_tuple=True)
    if len(batch) != len(packed):
        raise ValueError(
            f"attention_mask has {len(batch)} real tokens and the packed states have {len(packed)}"
        )
    return padded.index_put((batch, position), packed)


def attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement | str,
    cu_seqlens: Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: Backend = "auto",
    strength: Tensor | BoundedStrength | None = None,
    cumulative_lengths: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """:func:`saobp.attention` within each of several sequences packed into one row.

    query ``[total, heads, dim]``, key and value ``[total, key_heads, dim]``; cu_seqlens int32
    ``[sequences + 1]`` on the same device, from 0 to total. Empty sequences are allowed. Returns
    ``[total, heads, dim]``, equal to separate calls for each sequence.

    max_seqlen is the length of the longest sequence. Without it the kernels prepare for one of ``total``
    tokens, which costs time but not correctness.

    The reference path checks the values of cu_seqlens and max_seqlen. The fused path does so only for
    lengths on the CPU, because reading them from a GPU would need a sync. Lengths that do not rise from 0 to
    total, or a max_seqlen that is too small, give undefined results there.

    cumulative_lengths and max_length are older names of cu_seqlens and max_seqlen.
    """
    refinement = Refinement.of(refinement)
    check_no_variants(refinement)
    cu_seqlens = one_of("cu_seqlens", cu_seqlens, "cumulative_lengths", cumulative_lengths)
    max_seqlen = one_of("max_seqlen", max_seqlen, "max_length", max_length)
    require_tensors(query=query, key=key, value=value, cu_seqlens=cu_seqlens)
    assert cu_seqlens is not None
    query, key, value = under_autocast(query, key, value)
    if not query.ndim == key.ndim == value.ndim == 3:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"packed query, key and value must be [total, heads, dim], not {shapes}")
    q, k, v = (packed.transpose(0, 1).unsqueeze(0) for packed in (query, key, value))
    check_states(q, k, v)
    check_numbers(is_causal, dropout_p, scale)
    total = query.shape[0]
    if key.shape[0] != total:
        raise ValueError(f"packed query and key must have the same tokens, not {total} and {key.shape[0]}")
    _check_lengths(cu_seqlens, max_seqlen, query)
    strength, strongest = read_strength(refinement, strength, query.shape[1], query.device, by_step=True)
    warn_of_leak(refinement, is_causal)
    longest = total if max_seqlen is None else min(max_seqlen, total)
    call = Call.of(
        q, k, v, refinement, strength, backend=backend,
        is_causal=is_causal, scale=scale, dropout_p=dropout_p, strongest=strongest, longest=longest,
    )  # fmt: skip
    path = select_path(call).name
    fused = path == "fused"
    if not (fused and cu_seqlens.is_cuda):
        _check_values(cu_seqlens, max_seqlen, total)
    if fused:
        from saobp.kernels.fused import fused_attention

        out = fused_attention(
            q, k, v, refinement, strength,
            strongest=strongest, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
            cumulative_lengths=cu_seqlens.contiguous(),
            longest=longest,
        )  # fmt: skip
        return out.squeeze(0).transpose(0, 1)
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=query.device) < lengths[:, None]
    q, k, v = (unpack(mask, packed).transpose(1, 2) for packed in (query, key, value))
    padded = attention(
        q, k, v, refinement,
        attention_mask=mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        backend="auto" if path == "chunked" else "reference", strength=strength,
    )  # fmt: skip
    return padded.transpose(1, 2)[mask]


def _read_mask(attention_mask: Tensor) -> Tensor:
    real = read_zeros_and_ones("attention_mask", attention_mask)
    if real.ndim != 2:
        raise ValueError(f"attention_mask must be [batch, length], not of shape {tuple(real.shape)}")
    return real


def _check_lengths(cu_seqlens: Tensor, max_seqlen: int | None, query: Tensor) -> None:
    """Checks that need no device sync."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or not len(cu_seqlens):
        what = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens must be int32 [sequences + 1], not {what}")
    if cu_seqlens.device != query.device:
        where = f"{cu_seqlens.device} and {query.device}"
        raise ValueError(f"cu_seqlens and query must be on the same device, not {where}")
    if max_seqlen is not None and max_seqlen < 0:
        raise ValueError(f"max_seqlen must not be negative, unlike {max_seqlen}")
    if len(query) and (len(cu_seqlens) == 1 or max_seqlen == 0):
        raise ValueError(f"{len(query)} tokens were given, but only empty sequences or none")


def _check_values(cu_seqlens: Tensor, max_seqlen: int | None, total: int) -> None:
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != total:
        bounds = f"from {ends[0]} to {ends[-1]}"
        raise ValueError(f"cu_seqlens must run from 0 to the {total} tokens of query, not {bounds}")
    lengths = [end - start for start, end in pairwise(ends)]
    if min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must not decrease, unlike {ends}")
    if max_seqlen is not None and max_seqlen < max(lengths, default=0):
        raise ValueError(f"max_seqlen {max_seqlen} is less than the longest sequence's {max(lengths)} tokens")
