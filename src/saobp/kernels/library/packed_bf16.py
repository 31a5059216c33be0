# mypy: ignore-errors
"""Arithmetic in half types, a packed pair of numbers to an instruction, and messages in blocks of assembly.

A tile's weights are rounded to bfloat16 anyway before the tensor cores multiply them by values. For weak strengths, rounding
the prior weight first and refining it in bfloat16 halves the instructions, which limit these kernels. In other types (used
by tests) the functions round as often. Log messages, which are summed, are in float16. For any strength, four entries
share a reciprocal or a logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import INTERPRETED, _hardware_log2, relative


def _powers(count: int) -> tl.constexpr:
    """Assembly for powers of 2 of ``count`` numbers x, the last by a cubic of its fraction: to 9e-5, from 2^-126 to 2^127.

    That x is recomputed as 254 y - 127 with y saturated to [0, 1]: saturation is free, comparisons are not.
    Minus infinity gives 0: the exponent's bits are 0, and the fraction's power is 1, whose bits are 0 too.
    """
    exponentials = [f"ex2.approx.ftz.f32 ${place}, ${count + place};" for place in range(count - 1)]
    raw, scale, shift = (f"${(block + 1) * count - 1}" for block in (2, 3, 4))
    cubic = (
        f"fma.rn.sat.f32 y, {raw}, {scale}, {shift}; fma.rm.f32 r, y, 0f437E0000, 0f4B3FFF81;"
        "sub.f32 t, 0f4B3FFF81, r; fma.rn.f32 t, y, 0f437E0000, t;"
        "fma.rn.f32 p, t, 0f3D9DD550, 0f3E691BC6; fma.rn.f32 p, p, t, 0f3F31F32C; fma.rn.f32 p, p, t, 0f3F800000;"
        f"shl.b32 i, r, 23; mov.b32 j, p; add.s32 i, i, j; mov.b32 ${count - 1}, i;"
    )
    return tl.constexpr("{ .reg .f32 y, t, r, p; .reg .b32 i, j; " + " ".join(exponentials) + cubic + " }")


_EIGHT_POWERS = _powers(8)
_EIGHT_REGISTERS = tl.constexpr(",".join(["=f"] * 8 + ["f"] * 32))


@triton.jit
def powers(raw, reference, score_scale, PRECISE: tl.constexpr):
    """2 to the power of scores relative to a reference.

    In half precision an eighth of the entries uses plain arithmetic: the special function unit is the bottleneck.
    """
    x = relative(raw, reference, 0.0, score_scale, PRECISE)
    if INTERPRETED or PRECISE != 0:
        return tl.exp2(x)
    else:
        scale, shift = score_scale * (1.0 / 254), 0.5 - reference * (1.0 / 254)
        operands = [x, raw, scale, shift]
        return tl.inline_asm_elementwise(_EIGHT_POWERS, _EIGHT_REGISTERS, operands, tl.float32, True, 8)


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """float32 to KIND, two at a time: the compiler by itself may use a slower instruction for each."""
    if INTERPRETED or KIND.primitive_bitwidth != 16:
        return x.to(KIND)
    elif KIND.is_fp16():
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, True, 2)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, True, 2)


@triton.jit
def widened(x):
    """A half type to float32: exact, one instruction per number."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )


@triton.jit
def multiply_add(a, b, c):
    """a b + c, rounded once."""
    if INTERPRETED or (a.dtype != tl.bfloat16 and a.dtype != tl.float16):
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    elif a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.float16, True, 2
        )
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.bfloat16, True, 2
        )


@triton.jit
def multiply(a, b):
    """a b, rounded once."""
    return multiply_add(a, b, tl.cast(-0.0, a.dtype))


@triton.jit
def pair_message(message, KIND: tl.constexpr):
    """gamma, and the coefficients c1, c2 of ``boosted``, in the type KIND."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    return gamma.to(KIND), (r1 / r0).to(KIND), (r2 / r0).to(KIND)


@triton.jit
def boosted(a, pair):
    """u = a / (1 - gamma a) without the polynomial's factor r0, which all entries share: a + a (c1 a + c2 a^2), which rounds little."""
    gamma, c1, c2 = pair
    slope = multiply_add(a, c2, c1)
    return multiply_add(a, multiply(a, slope), a)


@triton.jit
def pair_logarithm(message):
    """l0, the slope of log2(1 - gamma a) at a = 0, rounded to float16, and the coefficients c1, c2 of ``half_log2`` in that type."""
    gamma, r0, r1, r2, l0, l1, l2 = message
    slope = tl.where(l0 == 0.0, 1.0, l0)  # strength 0 sends no message; avoids 0 / 0
    return l0.to(tl.float16).to(tl.float32), (l1 / slope).to(tl.float16), (l2 / slope).to(tl.float16)


@triton.jit
def half_log2(a, logarithm):
    """log2(1 - gamma a) / l0 in float16. Used by every sweep, so that backward subtracts the messages that forward added."""
    l0, c1, c2 = logarithm
    slope = multiply_add(a, c2, c1)
    return multiply_add(a, multiply(a, slope), a)


@triton.jit
def sums_by_thread(tile):
    """Partial row sums ``[rows, 8]`` of a tile. A thread holds columns 8 apart: no communication between threads."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8]), 1)


@triton.jit
def _halves(tile):
    """Even and odd groups of 8 columns of a tile, as two tiles of half the width: a thread has both, so nothing is exchanged."""
    ROWS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    eights = tl.reshape(tile, [ROWS, HALF // 8, 2, 8])
    even, odd = tl.split(tl.permute(eights, (0, 1, 3, 2)))
    return tl.reshape(even, [ROWS, HALF]), tl.reshape(odd, [ROWS, HALF])


@triton.jit
def half_sums(tile):
    """Partial row sums ``[rows, 8]`` in float32 of a float16 tile: three packed additions, then float32."""
    for _ in tl.static_range(3):
        even, odd = _halves(tile)
        tile = multiply_add(even, tl.full([1, 1], 1.0, tile.dtype), odd)
    return sums_by_thread(tile.to(tl.float32))


@triton.jit
def sums_of_logarithms(tile):
    """Partial row sums ``[rows, 8]`` of the base-2 logarithms of messages. Four entries of a thread share a logarithm: the
    range of float32 holds products of four messages."""
    for _ in tl.static_range(2):
        even, odd = _halves(tile)
        tile = even * odd
    return sums_by_thread(_hardware_log2(tile))


@triton.jit
def row_pairs(tile):
    """Two tiles ``[rows / 2, keys]``: of every 16 rows the first 8 and the last 8. A thread that holds entries of a product
    has a row of both, so nothing is exchanged."""
    ROWS: tl.constexpr = tile.shape[0]
    KEYS: tl.constexpr = tile.shape[1]
    top, bottom = tl.split(tl.permute(tl.reshape(tile, [ROWS // 16, 2, 8, KEYS]), (0, 2, 3, 1)))
    return tl.reshape(top, [ROWS // 2, KEYS]), tl.reshape(bottom, [ROWS // 2, KEYS])


@triton.jit
def from_row_pairs(top, bottom):
    """The tile that ``row_pairs`` was given."""
    ROWS: tl.constexpr = 2 * top.shape[0]
    KEYS: tl.constexpr = top.shape[1]
    pairs = tl.reshape(tl.join(top, bottom), [ROWS // 16, 8, KEYS, 2])
    return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), [ROWS, KEYS])


_LEFT = (
    "fma.rn.f32 t, $3, $7, 0f3F800000; fma.rn.f32 u, $4, $8, 0f3F800000;"
    " fma.rn.f32 b, $5, $9, 0f3F800000; fma.rn.f32 c, $6, $10, 0f3F800000;"
    " mul.f32 p, t, b; mul.f32 q, u, c;"
)
_LOGARITHMS = " lg2.approx.ftz.f32 x, p; lg2.approx.ftz.f32 y, q; cvt.rn.f16x2.f32 $2, y, x;"
_INVERSES = (
    " mul.f32 r, p, q; rcp.approx.ftz.f32 r, r; mul.f32 q, r, q; mul.f32 p, r, p;"
    " mul.f32 x, q, b; mul.f32 y, p, c; mul.f32 b, q, t; mul.f32 c, p, u;"
    " mul.f32 x, x, $3; mul.f32 y, y, $4; mul.f32 b, b, $5; mul.f32 c, c, $6;"
    " cvt.rn.KIND.f32 $0, y, x; cvt.rn.KIND.f32 $1, c, b;"
)
_PLAIN = " cvt.rn.KIND.f32 $0, $4, $3; cvt.rn.KIND.f32 $1, $6, $5;"
_REGISTERS = tl.constexpr("=&r,=&r,=&r" + ",f" * 8)


def _messages(weights: str, kind: str) -> tl.constexpr:
    body = _LEFT + _LOGARITHMS + weights.replace("KIND", kind)
    return tl.constexpr("{ .reg .f32 t, u, b, c, p, q, r, x, y; " + body + " }")


_INVERSE_BF16, _INVERSE_F16 = _messages(_INVERSES, "bf16x2"), _messages(_INVERSES, "f16x2")
_PLAIN_BF16, _PLAIN_F16 = _messages(_PLAIN, "bf16x2"), _messages(_PLAIN, "f16x2")


@triton.jit
def messages_and_weights(e, slope, KIND: tl.constexpr, OWN: tl.constexpr):
    """Base-2 log messages log2(1 - slope e) in float16, summed over ``row_pairs``, and e / (1 - slope e) in KIND; if OWN just e.

    For any strength. Four entries share one reciprocal and two logarithms: the range of float32 holds products of four
    messages. One block of assembly: the compiler would keep every intermediate of a tile in registers.
    """
    if INTERPRETED:
        left = 1.0 - slope[:, None] * e
        top, bottom = row_pairs(left)
        sent = tl.log2(top * bottom).to(tl.float16)
        refined = e.to(KIND) if OWN else (e / left).to(KIND)
        return sent, refined
    else:
        top, bottom = row_pairs(e)
        minus_top, minus_bottom = row_pairs(tl.broadcast_to(-slope[:, None], e.shape))
        operands = [top, bottom, minus_top, minus_bottom]
        if KIND.is_fp16():
            first, second, sent = tl.inline_asm_elementwise(
                _PLAIN_F16 if OWN else _INVERSE_F16, _REGISTERS, operands, (tl.float16, tl.float16, tl.float16), True, 2
            )  # fmt: skip
        else:
            first, second, sent = tl.inline_asm_elementwise(
                _PLAIN_BF16 if OWN else _INVERSE_BF16, _REGISTERS, operands, (tl.bfloat16, tl.bfloat16, tl.float16), True, 2
            )  # fmt: skip
        return sent, from_row_pairs(first, second)


_UNPACK_BF16 = (
    "shl.b32 i, $3, 16; mov.b32 d, i; and.b32 i, $3, 0xffff0000; mov.b32 e, i;"
    " shl.b32 i, $4, 16; mov.b32 f, i; and.b32 i, $4, 0xffff0000; mov.b32 g, i;"
)
_SHRINK = " mul.f32 d, d, $9; mul.f32 e, e, $10; mul.f32 f, f, $11; mul.f32 g, g, $12;"
_PACKED_LEFT = (
    " fma.rn.f32 t, d, $5, 0f3F800000; fma.rn.f32 u, e, $6, 0f3F800000;"
    " fma.rn.f32 b, f, $7, 0f3F800000; fma.rn.f32 c, g, $8, 0f3F800000; mul.f32 p, t, b; mul.f32 q, u, c;"
)
_PACKED_INVERSES = (
    " mul.f32 r, p, q; rcp.approx.ftz.f32 r, r; mul.f32 q, r, q; mul.f32 p, r, p;"
    " mul.f32 x, q, b; mul.f32 y, p, c; mul.f32 b, q, t; mul.f32 c, p, u;"
    " mul.f32 d, d, x; mul.f32 e, e, y; mul.f32 f, f, b; mul.f32 g, g, c;"
)
_PACK_BF16 = " cvt.rn.bf16x2.f32 $0, e, d; cvt.rn.bf16x2.f32 $1, g, f;"


def _packed_messages(shrinks: bool, own: bool) -> tl.constexpr:
    """Assembly of ``packed_messages``. A pair that neither shrinks nor is divided stays as it is."""
    parts = [_UNPACK_BF16, _SHRINK * shrinks, _PACKED_LEFT, _LOGARITHMS, _PACKED_INVERSES * (not own)]
    parts.append(_PACK_BF16 if shrinks or not own else " mov.b32 $0, $3; mov.b32 $1, $4;")
    return tl.constexpr(
        "{ .reg .b32 i; .reg .f32 d, e, f, g, t, u, b, c, p, q, r, x, y; " + "".join(parts) + " }"
    )


_SHRUNK_INVERSE, _PACKED_INVERSE = _packed_messages(True, False), _packed_messages(False, False)
_SHRUNK_PLAIN, _PACKED_PLAIN = _packed_messages(True, True), _packed_messages(False, True)
_PACKED_REGISTERS = tl.constexpr("=&r,=&r,=&r,r,r" + ",f" * 8)


@triton.jit
def packed_messages(e, slope, shrink, SHRINKS: tl.constexpr, OWN: tl.constexpr):
    """``messages_and_weights`` of weights in bfloat16, rounded again; if SHRINKS of these times ``shrink``, a factor of rows."""
    if INTERPRETED:
        wide = e.to(tl.float32)
        if SHRINKS:
            wide *= shrink[:, None]
        return messages_and_weights(wide, slope, e.dtype, OWN)
    else:
        top, bottom = row_pairs(e)
        minus_top, minus_bottom = row_pairs(tl.broadcast_to(-slope[:, None], e.shape))
        shrink_top, shrink_bottom = row_pairs(tl.broadcast_to(shrink[:, None], e.shape))
        operands = [top, bottom, minus_top, minus_bottom, shrink_top, shrink_bottom]
        if SHRINKS:
            text: tl.constexpr = _SHRUNK_PLAIN if OWN else _SHRUNK_INVERSE
        else:
            text: tl.constexpr = _PACKED_PLAIN if OWN else _PACKED_INVERSE
        first, second, sent = tl.inline_asm_elementwise(
            text, _PACKED_REGISTERS, operands, (tl.bfloat16, tl.bfloat16, tl.float16), True, 2
        )
        return sent, from_row_pairs(first, second)


def _ratios() -> tl.constexpr:
    """Assembly of ``messages_and_ratios`` for four entries: log messages twice, then the ratios, from a and minus the slope."""
    text = " ".join(
        f"fma.rn.f32 m{i}, ${10 + i}, ${14 + i}, 0f3F800000; lg2.approx.ftz.f32 ${2 + i}, m{i};"
        for i in range(4)
    )
    text += " cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;"
    text += " mul.f32 p, m0, m1; mul.f32 q, m2, m3; mul.f32 r, p, q; rcp.approx.ftz.f32 r, r;"
    text += " mul.f32 q, r, q; mul.f32 p, r, p;"
    for i, other, shared in ((0, 1, "q"), (1, 0, "q"), (2, 3, "p"), (3, 2, "p")):
        text += f" mul.f32 r, {shared}, m{other}; mul.f32 ${6 + i}, ${10 + i}, r;"
    return tl.constexpr("{ .reg .f32 m0, m1, m2, m3, p, q, r; " + text + " }")


_RATIOS = _ratios()
_RATIO_REGISTERS = tl.constexpr(",".join(["=&r"] * 2 + ["=&f"] * 8 + ["f"] * 8))


@triton.jit
def messages_and_ratios(a, slope):
    """Base-2 log messages log2(1 - slope a) in float16 and in float32, and a / (1 - slope a), for any strength.

    One block of assembly, so that 1 - slope a is computed once and not kept. Four entries share a reciprocal.
    """
    if INTERPRETED:
        left = 1.0 - slope * a
        messages = tl.log2(left)
        return messages.to(tl.float16), messages, a / left
    else:
        operands = [a, tl.broadcast_to(-slope, a.shape)]
        return tl.inline_asm_elementwise(
            _RATIOS, _RATIO_REGISTERS, operands, (tl.float16, tl.float32, tl.float32), True, 4
        )
