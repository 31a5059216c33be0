# mypy: ignore-errors
"""What the backward sweeps share: D, dO over the rows' normalisers, and recomputed weights of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import (
    inverse_message,
    load_rows,
    load_vector,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, states_base
from saobp.kernels.library.packed_bf16 import multiply


@triton.jit
def row_products(
    grad_ptr, out_ptr, rest_ptr, cu_ptr, delta_ptr, g_batch, g_head, g_row, o_batch, o_head, o_row, heads, length, blocks,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, RESTS: tl.constexpr,
):  # fmt: skip
    """D = rowsum(dO * O), as the diagonal of a product; RESTS: with the rounding error of O added back.

    The sweeps subtract D from products of dO and V made by the same instructions in the same order. So a row that
    sees one key, where O is V, gets a difference of exactly 0; a plain sum would leave a rounding error.
    """
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    o_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    delta_base = head_base(delta_ptr, batch, head, first, heads, length)
    # Sweeps of half types multiply 64 rows at once; in float32 any number has the same order of summation.
    PART: tl.constexpr = 16 if grad_ptr.dtype.element_ty == tl.float32 or BLOCK_DIM > 128 else 64
    places = tl.arange(0, PART)
    diagonal = places[:, None] == places[None, :]
    for start in tl.range(block * ROWS, tl.minimum((block + 1) * ROWS, tokens), PART):
        grad = load_rows(g_base, start, tokens, g_row, PART, DIM, BLOCK_DIM, True)
        out = load_rows(o_base, start, tokens, o_row, PART, DIM, BLOCK_DIM, True)
        products = tl.dot(grad, tl.trans(out), input_precision="ieee")
        if RESTS:
            rest_base = head_base(0, batch, head, first, heads, length) * DIM + rest_ptr
            rest = load_rows(rest_base, start, tokens, DIM, PART, DIM, BLOCK_DIM, True)
            products = tl.dot(grad, tl.trans(rest), products, input_precision="ieee")
        delta = tl.sum(tl.where(diagonal, products, 0.0), 1)
        tl.store(delta_base + start + places, delta, mask=start + places < tokens)


@triton.jit
def store_scaled_gradients(
    block, batch, head, first, tokens, grad_ptr, out_ptr, inverse_ptr, scaled_ptr, delta_ptr, parts_ptr, power_ptr,
    g_batch, g_head, g_row, o_batch, o_head, o_row, s_batch, s_head, s_row, part_row, heads, length,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, POWER: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """``scaled``, dO over the rows' normalisers, and D of that; for half types D also in ``parts`` ``[rows, 16]``: D rounded to the
    type, what that left, and zeros, for products of the tensor cores.

    POWER: float16 lacks range for large inverses, so a power of two is split off and applied to the weights.
    """
    rows = block * ROWS + tl.arange(0, ROWS)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    o_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    s_base = states_base(scaled_ptr, batch, head, first, s_batch, s_head, s_row)
    row_base = head_base(0, batch, head, first, heads, length)
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    out = load_rows(o_base, block * ROWS, tokens, o_row, ROWS, DIM, BLOCK_DIM, True)
    inverse = tl.load(inverse_ptr + row_base + rows, mask=rows < tokens, other=0.0)
    if POWER:
        power = tl.where(inverse > 1.0, tl.exp2(tl.floor(tl.log2(tl.maximum(inverse, 1.0)))), 1.0)
        tl.store(power_ptr + row_base + rows, power, mask=rows < tokens)
        inverse /= power
    KIND: tl.constexpr = grad_ptr.dtype.element_ty
    scaled = (grad.to(tl.float32) * inverse[:, None]).to(KIND)
    store_rows(s_base, block * ROWS, tokens, s_row, scaled, ROWS, DIM, BLOCK_DIM)
    delta = tl.sum(scaled.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + row_base + rows, delta, mask=rows < tokens)
    if PRECISE != 2:
        large = delta.to(KIND)
        small = (delta - large.to(tl.float32)).to(KIND)
        columns = tl.arange(0, 16)[None, :]
        parts = tl.where(columns == 0, large[:, None], tl.where(columns == 1, small[:, None], 0.0))
        store_rows(parts_ptr + row_base * part_row, block * ROWS, tokens, part_row, parts, ROWS, 16, 16)


@triton.jit
def scaled_gradients(
    grad_ptr, out_ptr, cu_ptr, inverse_ptr, scaled_ptr, delta_ptr, parts_ptr, power_ptr,
    g_batch, g_head, g_row, o_batch, o_head, o_row, s_batch, s_head, s_row, part_row, heads, length, blocks,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
    POWER: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """``store_scaled_gradients`` of the program's block."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    store_scaled_gradients(
        block, batch, head, first, tokens, grad_ptr, out_ptr, inverse_ptr, scaled_ptr, delta_ptr, parts_ptr, power_ptr,
        g_batch, g_head, g_row, o_batch, o_head, o_row, s_batch, s_head, s_row, part_row, heads, length,
        DIM, BLOCK_DIM, ROWS, POWER, PRECISE,
    )  # fmt: skip


@triton.jit
def prior_weights(
    raw, high, low, keys_real, score_scale, TAIL: tl.constexpr, PRECISE: tl.constexpr
):  # fmt: skip
    """Scores minus log-sum-exp (``high`` and ``low``), and prior weights, of a tile; vectors are shaped to broadcast to it."""
    if TAIL:
        raw = tl.where(keys_real, raw, float("-inf"))
    scores = relative(raw, high, low, score_scale, PRECISE)
    return scores, tl.exp2(scores)


@triton.jit
def sender_inverse(a, rows_real, message, PRECISE: tl.constexpr, MASKED: tl.constexpr):
    """1 / (1 - gamma a); 1 for padding rows, which send no message."""
    inverse = inverse_message(a, message, PRECISE)
    if MASKED:
        inverse = tl.where(rows_real, inverse, 1.0)
    return inverse


@triton.jit
def sender_pair(pair, sends, MASKED: tl.constexpr):
    """The coefficients of ``boosted`` per row; ``sends`` is 0 for padding rows, which keep their weights. Fewer
    instructions than ``tl.where`` on two tiles of a half type.
    """
    if MASKED:
        pair = (pair[0], multiply(sends, pair[1]), multiply(sends, pair[2]))
    return pair


@triton.jit
def unnormalised_weights(
    scores, u, inverse, anchor, power, key_part, RECEIVES: tl.constexpr, CAREFUL: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    """Refined weights times their row's normaliser. ``key_part``: CAREFUL, c_k minus its largest; else weight_k, 2 to the power of it.

    ``u`` are the prior weights, divided by the own message unless the row receives that too (RECEIVES 2).
    """
    if CAREFUL:
        if RECEIVES:
            scores += key_part
        weights = tl.exp2(scores - anchor)
        if RECEIVES != 2:
            weights *= inverse
    elif RECEIVES:
        weights = u * key_part
    else:
        weights = u
    if POWER:
        weights *= power
    return weights


@triton.jit
def load_power(base, rows, tokens, TAIL: tl.constexpr, POWER: tl.constexpr):
    """The power of two that ``scaled_gradients`` split off each row's inverse normaliser; zeros, with nothing read, unless POWER."""
    if POWER:
        return load_vector(base, rows, tokens, 0.0, TAIL)
    else:
        return tl.zeros_like(rows).to(tl.float32)


@triton.jit
def closeness(inverse):
    """Estimate, from 0 to 1, of how far each row of P lies along its row of a, from the inverse of the row's normaliser.

    The normaliser is the mean of the keys' factors under the row's prior: 1 if messages suppress none of the keys that it attends
    to. Its eighth power.
    """
    mean = tl.minimum(tl.where(inverse > 0.0, 1.0 / tl.where(inverse > 0.0, inverse, 1.0), 0.0), 1.0)
    square = mean * mean
    return square * square * square * square
