# mypy: ignore-errors
"""The last step of a backward pass: the gradient of a head's strength from that of gamma, which kernels give per row."""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import MAX_STRENGTH


@triton.jit
def strength_gradient(
    gamma_grad_ptr, strength_ptr, strength_grad_ptr, batch, heads, length, sign, SIZE: tl.constexpr
):
    """``[heads]`` from gamma's gradient by row, ``[batch, heads, length]``. A program per head: the order of summation is fixed."""
    head = tl.program_id(0)
    sums = tl.zeros([SIZE], tl.float32)
    for start in tl.range(0, batch * length, SIZE):
        places = start + tl.arange(0, SIZE)
        rows = ((places // length).to(tl.int64) * heads + head) * length + places % length
        sums += tl.load(gamma_grad_ptr + rows, mask=places < batch * length, other=0.0)
    strength = tl.load(strength_ptr + head).to(tl.float32)
    slope = tl.where(tl.abs(strength) <= MAX_STRENGTH, sign * tl.exp(-sign * strength), 0.0)
    tl.store(strength_grad_ptr + head, tl.sum(sums, 0) * slope)
