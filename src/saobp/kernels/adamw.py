"""Gradient norm, clipping and AdamW of many float32 tensors, from tables of their addresses.

Tensors are divided into blocks; ``tensor_of`` and ``start_of`` say which one, and where in it, a block is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squares(gradients, tensor_of, start_of, sizes, sums, BLOCK: tl.constexpr):
    """The sum of squares of each block."""
    block = tl.program_id(0)
    tensor = tl.load(tensor_of + block)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    there = tl.load(gradients + tensor).to(tl.pointer_type(tl.float32)) + at
    own = tl.load(tl.multiple_of(there, 16), mask=at < tl.load(sizes + tensor), other=0.0)
    tl.store(sums + block, tl.sum(own * own, 0))


@triton.jit
def factors(
    sums,
    blocks,
    steps,
    norms,
    numbers,
    limit,
    LOG1: tl.constexpr,
    LOG2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the step; the norm, what clipping multiplies by, and AdamW's two corrections of this step.

    LOG1, LOG2: logarithms of the betas; powers near 1 need float64.
    """
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < blocks, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    step = tl.load(steps) + 1.0
    tl.store(steps, step)
    tl.store(norms, norm)
    tl.store(numbers, tl.minimum(limit / (norm + 1e-6), 1.0))
    count = step.to(tl.float64)
    tl.store(numbers + 1, (1 - tl.exp(count * LOG1)).to(tl.float32))
    tl.store(numbers + 2, tl.sqrt((1 - tl.exp(count * LOG2)).to(tl.float32)))


@triton.jit
def update(
    parameters,
    gradients,
    firsts,
    seconds,
    tensor_of,
    start_of,
    sizes,
    groups,
    decays,
    rates,
    numbers,
    epsilon,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW of each block with the clipped gradient; the gradient itself stays as it is."""
    block = tl.program_id(0)
    tensor = tl.load(tensor_of + block)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + tensor)
    rate = tl.load(rates + tl.load(groups + tensor))
    parameter_at = tl.multiple_of(tl.load(parameters + tensor).to(tl.pointer_type(tl.float32)) + at, 16)
    gradient_at = tl.multiple_of(tl.load(gradients + tensor).to(tl.pointer_type(tl.float32)) + at, 16)
    first_at = tl.multiple_of(tl.load(firsts + tensor).to(tl.pointer_type(tl.float32)) + at, 16)
    second_at = tl.multiple_of(tl.load(seconds + tensor).to(tl.pointer_type(tl.float32)) + at, 16)
    parameter = tl.load(parameter_at, mask=inside, other=0.0)
    gradient = tl.load(gradient_at, mask=inside, other=0.0) * tl.load(numbers)
    first = tl.load(first_at, mask=inside, other=0.0)
    second = tl.load(second_at, mask=inside, other=0.0)
    first += (1 - BETA1) * (gradient - first)
    second = second * BETA2 + (1 - BETA2) * gradient * gradient
    size = tl.sqrt(second) / tl.load(numbers + 2) + epsilon
    parameter = parameter * (1 - rate * tl.load(decays + tensor)) - rate / tl.load(numbers + 1) * first / size
    tl.store(parameter_at, parameter, mask=inside)
    tl.store(first_at, first, mask=inside)
    tl.store(second_at, second, mask=inside)
