# mypy: ignore-errors
"""Small kernels before the strict causal backward sweeps, over vectors with a number per row or key of every head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prepared_rows(
    message_sums_ptr, belief_ptr, remaining_sums_ptr, inverse_ptr, count, SIZE: tl.constexpr, WEAK: tl.constexpr
):  # fmt: skip
    """Copies the message sums, from which sweeps then subtract each row's; if WEAK, also inverse normalisers ``2^-belief``."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real = places < count
    tl.store(remaining_sums_ptr + places, tl.load(message_sums_ptr + places, mask=real), mask=real)
    if WEAK:
        belief = tl.load(belief_ptr + places, mask=real, other=0.0)
        tl.store(inverse_ptr + places, tl.exp2(-belief), mask=real)


@triton.jit
def paired_rows(lse_ptr, delta_ptr, pairs_ptr, count, SIZE: tl.constexpr):
    """Log-sum-exp and D interleaved, ``[rows, 2]``: ``weak_climb`` loads both at once."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real = places < count
    tl.store(pairs_ptr + places * 2, tl.load(lse_ptr + places, mask=real), mask=real)
    tl.store(pairs_ptr + places * 2 + 1, tl.load(delta_ptr + places, mask=real), mask=real)


@triton.jit
def lowest_of_heads(lowest_ptr, head_lowest_ptr, blocks, BLOCKS: tl.constexpr):
    """The smallest normaliser of a head's rows from those of its blocks, so that sweeps load one number."""
    line, places = tl.program_id(0), tl.arange(0, BLOCKS)
    lowest = tl.load(lowest_ptr + line * blocks + places, mask=places < blocks, other=1.0)
    tl.store(head_lowest_ptr + line, tl.min(lowest, 0))


@triton.jit
def is_careful_head(head_lowest_ptr, line, lowest_sum):
    """1 if a refined row of the head has a normaliser so small that a product of weights may underflow."""
    return tl.where(tl.load(head_lowest_ptr + line) < lowest_sum, 1, 0)
