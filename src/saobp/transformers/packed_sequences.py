"""Packed sequences: several texts in one row of tokens, each attending to itself alone.

Their mask is int64 ``[batch, length]``: the sequence number of each token. It comes from position ids that
restart, which Transformers' mask creation detects, or from ``cu_seq_lens_q``, which data collators add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
)
from transformers.utils.import_utils import is_tracing

from saobp.packing import attention_packed
from saobp.refinement import Refinement

_AND_MASKS = and_masks(causal_mask_function).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_WITHOUT_DISTANCES = (causal_mask_function, bidirectional_mask_function)
"""Mask functions that are the same in positions of a row and of a sequence in it."""
# From Transformers 5.23 on, other mask functions get positions within each sequence.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = None if _remap is None else _remap(causal_mask_function, torch.zeros(1, 1)).__code__


def packed_sequences(mask_function: Callable) -> Tensor | None:
    """Sequence numbers ``[batch, length]`` of a mask function that is just causal or not, and packed.

    Transformers builds it from closures; if they differ, or in a compiled call, returns None, and the
    mask is built as for any other mask function.
    """
    if torch.compiler.is_compiling():
        return None
    others = [part for part in _conjuncts(mask_function) if part not in _WITHOUT_DISTANCES]
    if len(others) != 1 or getattr(others[0], "__code__", None) is not _PACKED:
        return None
    sequences = _captured(others[0])["packed_sequence_mask"]
    return None if is_tracing(sequences) else sequences


def _conjuncts(mask_function: Callable) -> list[Callable]:
    """The mask functions of which all have to hold."""
    code = getattr(mask_function, "__code__", None)
    if code is _AND_MASKS:
        parts = _captured(mask_function)["mask_functions"]
        return [conjunct for part in parts for conjunct in _conjuncts(part)]
    if code is not None and code is _REMAPPED:
        inner = _captured(mask_function)["mask_function"]
        return [inner if inner in _WITHOUT_DISTANCES else mask_function]
    return [mask_function]


def _captured(function: Any) -> dict[str, Any]:
    """Variables of a closure, by name."""
    values = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, values, strict=True))


def are_sequences(mask: object) -> TypeGuard[Tensor]:
    """Whether a mask holds sequence numbers of packed tokens rather than padding."""
    return isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype != torch.bool


def same_sequence(sequences: Tensor) -> Tensor:
    """Which tokens are in the same sequence, ``[batch, 1, queries, keys]``."""
    return sequences[:, None, :, None] == sequences[:, None, None, :]


def sequence_numbers(cumulative_lengths: Tensor, query: Tensor, keys: int) -> Tensor:
    """Sequence number of each token, int64 ``[1, length]``, from ``cu_seq_lens_q`` ``[sequences + 1]``."""
    if query.shape[0] != 1 or query.shape[-2] != keys:
        raise ValueError(
            "cu_seq_lens_q describes sequences packed into one row of tokens, not a batch of "
            f"{query.shape[0]} with {query.shape[-2]} queries and {keys} keys: leave it out, or pass one row"
        )
    ends = cumulative_lengths[1:].to(query.device)
    return torch.bucketize(torch.arange(keys, device=query.device), ends, right=True)[None]


def with_sequences(mask: Tensor | None, sequences: Tensor) -> Tensor:
    """A mask that also separates packed sequences."""
    if mask is None or are_sequences(mask):
        return sequences
    if mask.ndim == 2:
        raise ValueError(
            "cu_seq_lens_q and an attention_mask with padding contradict each other: packed sequences have "
            "no padding, so pass one of the two"
        )
    lowest = float("-inf") if mask.is_floating_point() else 0
    return mask[..., : sequences.shape[-1]].masked_fill(~same_sequence(sequences), lowest)


def attention_of_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    sequences: Tensor,
    lengths: Tensor | None,
    longest: Any,
    options: dict[str, Any],
) -> Tensor:
    """Attention within each packed sequence, ``[batch, heads, length, dim]``, without a map of all tokens.

    lengths and longest, if known: cumulative lengths of all sequences, and the length of the longest.
    """
    if lengths is None:
        starts = functional.pad(sequences.diff(dim=-1) != 0, (1, 0), value=True).flatten().nonzero()[:, 0]
        lengths = functional.pad(starts, (0, 1), value=sequences.numel())
        longest = lengths.diff().max()
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    lengths = lengths.to(query.device, torch.int32)
    longest = None if longest is None else int(longest)
    output = attention_packed(query, key, value, refinement, lengths, max_seqlen=longest, **options)
    return output.unflatten(0, sequences.shape).transpose(1, 2)
