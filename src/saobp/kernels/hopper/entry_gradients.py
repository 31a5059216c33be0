# mypy: ignore-errors
"""Gradients of a block of scores, for ``whole_map_backward``, up to a term that needs the sums of whole rows.

Notation of ``bidirectional/backward.py``; dP is dO V^T, with dO times n, one over the row's normaliser.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import INTERPRETED, over_message


def _entry_gradients(receives: int, shares: bool) -> tl.constexpr:
    """Assembly of ``entry_gradients`` for eight entries, four of each of two rows; four share a reciprocal.

    Sums over entries of a row come in place of four entries: of H, dT, a P and a a; or twice of H and dT, over two entries.
    """
    inputs = ("raw", "d", "scale", "low", "gamma", "delta", "weight", "dc")
    operands = {f"{name}{i}": 8 * block + i for block, name in enumerate(("e", "x", "sum")) for i in range(8)}
    operands |= {f"{name}{i}": 24 + 8 * block + i for block, name in enumerate(inputs) for i in range(8)}

    def each(text: str) -> str:
        return " ".join(text.format(i=i) for i in range(8))

    def dot(into: str, left: str, right: str, entries: tuple[int, ...]) -> str:
        first, *others = entries
        start = f" mul.f32 {into}, {left}{first}, {right}{first};"
        return start + "".join(f" fma.rn.f32 {into}, {left}{i}, {right}{i}, {into};" for i in others)

    text = each(
        "fma.rn.f32 e{i}, raw{i}, scale{i}, low{i}; ex2.approx.ftz.f32 e{i}, e{i};"
        " fma.rn.f32 m{i}, e{i}, gamma{i}, 0f3F800000;"
    )
    for a, b, c, d in ((0, 1, 2, 3), (4, 5, 6, 7)):
        text += (
            f" mul.f32 p, m{a}, m{b}; mul.f32 q, m{c}, m{d}; mul.f32 r, p, q; rcp.approx.ftz.f32 r, r;"
            f" mul.f32 q, r, q; mul.f32 p, r, p; mul.f32 r, q, m{b}; mul.f32 m{b}, q, m{a}; mov.f32 m{a}, r;"
            f" mul.f32 r, p, m{d}; mul.f32 m{d}, p, m{c}; mov.f32 m{c}, r;"
        )
    sent = "e" if receives == 2 else "u"
    text += each(
        " sub.f32 z{i}, d{i}, delta{i}; mul.f32 u{i}, e{i}, m{i};"
        " mul.f32 w{i}, SENT{i}, weight{i}; mul.f32 z{i}, w{i}, z{i};".replace("SENT", sent)
    )
    if receives == 2:  # H = -u dc, dT + gamma H = dT + dc - dc / (1 - gamma a)
        text += each(" neg.f32 h{i}, dc{i}; add.f32 r, z{i}, dc{i}; fma.rn.f32 x{i}, m{i}, h{i}, r;")
    else:  # H = u (dT - dc), dT + gamma H = (dT - dc) / (1 - gamma a) + dc
        text += each(" sub.f32 h{i}, z{i}, dc{i}; fma.rn.f32 x{i}, m{i}, h{i}, dc{i};")
    for row in (0, 2):
        if shares:
            entries = (row, row + 1, row + 4, row + 5)
            text += dot(f"sum{row}", "u", "h", entries) + dot(f"sum{row + 4}", "e", "w", entries)
            text += dot(f"sum{row + 5}", "e", "e", entries)
            text += f" add.f32 p, z{row}, z{row + 1}; add.f32 q, z{row + 4}, z{row + 5}; add.f32 sum{row + 1}, p, q;"
        else:
            for pair in (row, row + 4):
                text += dot(f"sum{pair}", "u", "h", (pair, pair + 1))
                text += f" add.f32 sum{pair + 1}, z{pair}, z{pair + 1};"
    for name, operand in operands.items():
        text = re.sub(rf"\b{name}\b", f"${operand}", text)
    registers = ", ".join(f"{name}{i}" for name in "muwzh" for i in range(8))
    return tl.constexpr(f"{{ .reg .f32 p, q, r, {registers}; {text} }}")


_GRADIENTS, _GRADIENTS_ALONE = _entry_gradients(1, True), _entry_gradients(1, False)
_BIASED, _BIASED_ALONE = _entry_gradients(2, True), _entry_gradients(2, False)
_ENTRY_REGISTERS = tl.constexpr(",".join(["=&f"] * 24 + ["f"] * 64))


@triton.jit
def entry_gradients(
    raw, d_rows, score_scale, high, gamma, delta, weight, sums_grad,
    RECEIVES: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """a, dT + gamma H, and sums over each of PARTS parts of the keys, of H, of dT and, if SHARES, of a P / n and of a a
    in turn: ``[rows, sums PARTS]``.

    One block of assembly: a, u, dO V^T and dK would not fit in registers all at once.
    """
    ROWS: tl.constexpr = raw.shape[0]
    KEYS: tl.constexpr = raw.shape[1]
    PART: tl.constexpr = KEYS // PARTS
    if INTERPRETED:
        a = tl.exp2(raw * score_scale - high[:, None])
        u = over_message(a, gamma[:, None])
        weights = (a if RECEIVES == 2 else u) * weight[None, :]
        d_logits = weights * (d_rows - delta[:, None])
        d_message = u * (-sums_grad[None, :] if RECEIVES == 2 else d_logits - sums_grad[None, :])
        sums = tl.sum(tl.reshape(tl.join(d_message, d_logits), [ROWS, PARTS, PART, 2]), 2)
        if SHARES:
            others = tl.sum(tl.reshape(tl.join(a * weights, a * a), [ROWS, PARTS, PART, 2]), 2)
            sums = tl.permute(tl.join(sums, others), (0, 1, 3, 2))
        d_scores = d_logits + gamma[:, None] * d_message
    else:
        operands = [
            raw, d_rows, score_scale, -high[:, None], -gamma[:, None], delta[:, None], weight[None, :], sums_grad[None, :]
        ]  # fmt: skip
        if SHARES:
            text: tl.constexpr = _BIASED if RECEIVES == 2 else _GRADIENTS
        else:
            text: tl.constexpr = _BIASED_ALONE if RECEIVES == 2 else _GRADIENTS_ALONE
        a, d_scores, sums = tl.inline_asm_elementwise(
            text, _ENTRY_REGISTERS, operands, (tl.float32, tl.float32, tl.float32), True, 8
        )
        if SHARES:  # by eights of columns, even and odd ones
            sums = tl.reshape(sums, [ROWS, PARTS, PART // 16, 2, 4, 2])
            sums = tl.sum(tl.sum(sums, 2), 3)
        else:
            sums = tl.sum(tl.reshape(sums, [ROWS, PARTS, PART // 2, 2]), 2)
    return a, d_scores, tl.reshape(sums, [ROWS, 4 * PARTS if SHARES else 2 * PARTS])
