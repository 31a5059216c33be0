"""Arithmetic in bfloat16, two numbers to an instruction, for messages of weak strengths.

A tile's weights are rounded to that type anyway before they meet values on the tensor cores. Rounding the
prior weight first and refining it there halves the instructions, which is what limits these kernels. In other types
(tests send them this way) the functions round as often.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.arithmetic import INTERPRETED


@triton.jit
def multiply_add(a, b, c):
    """a b + c, rounded once."""
    if INTERPRETED or a.dtype != tl.bfloat16:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.bfloat16, True, 2
        )


@triton.jit
def multiply_add16(a, b, c):
    """a b + c in float16, rounded once."""
    if INTERPRETED:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.float16, True, 2
        )


@triton.jit
def multiply(a, b):
    """a b, rounded once."""
    return multiply_add(a, b, tl.full([1, 1], -0.0, a.dtype))


@triton.jit
def pair_message(message, KIND: tl.constexpr):
    """gamma and the coefficients of ``boosted`` in the type KIND."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    return gamma.to(KIND), (r1 / r0).to(KIND), (r2 / r0).to(KIND)


@triton.jit
def boosted(a, pair):
    """a / (1 - gamma a) but for a factor that all entries share, as a + a (c1 a + c2 a^2), which rounds little."""
    gamma, c1, c2 = pair
    slope = multiply_add(a, c2, c1)
    return multiply_add(a, multiply(a, slope), a)


@triton.jit
def log2_parts(message):
    """Coefficients of ``short_log2`` in float16, and the factor that it leaves out."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    slope = tl.where(l0 == 0.0, 1.0, l0)  # a head of strength 0 says nothing, but the quotients would not
    return l0, (l1 / slope).to(tl.float16), (l2 / slope).to(tl.float16)


@triton.jit
def short_log2(a, parts):
    """log2(1 - gamma a) over its slope at 0, in float16."""
    _, c1, c2 = parts
    slope = multiply_add16(a, c2, c1)
    return multiply_add16(a, multiply_add16(a, slope, tl.full([1, 1], 0.0, tl.float16)), a)
