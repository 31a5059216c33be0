"""The kernels: rows of states ``[batch, heads, length, dim]``, a row for each token and head.

A row x becomes y = e^b x r, with r = 1 / sqrt(mean(x^2) + epsilon) and b of its head (0 if SCALED is 0).
Backward, for a gradient g of y: dx = e^b r (g - x r^2 mean(x g)), and db is the sum of x g e^b r. Forward stores r.

Rows are counted with heads fastest, as they lie in the memory of a model, so that programs read it in order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(base, batch_stride, head_stride, row_stride, rows, heads, length, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Pointers ``[ROWS, WIDTH]`` of this program's rows, which of them are real, their numbers and heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, token = row % heads, row // heads
    place = (token // length).to(tl.int64) * batch_stride + (token % length).to(tl.int64) * row_stride
    place += head.to(tl.int64) * head_stride
    column = tl.arange(0, WIDTH)
    real = (row < rows)[:, None] & (column < DIM)[None, :]
    return base + place[:, None] + column[None, :], real, row, head


@triton.jit
def scale_of(log_scale_ptr, head, SCALED: tl.constexpr):
    """e^b of each row's head."""
    if SCALED:
        return tl.exp(tl.load(log_scale_ptr + head).to(tl.float32))
    return head.to(tl.float32) * 0.0 + 1.0


@triton.jit
def unit_rows(
    x_ptr, log_scale_ptr, out_ptr, inverse_ptr, x_batch, x_head, x_row, rows, heads, length, epsilon,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Forward; the output is contiguous ``[batch, length, heads, dim]``."""
    place, real, row, head = rows_of(x_ptr, x_batch, x_head, x_row, rows, heads, length, DIM, WIDTH, ROWS)
    x = tl.load(place, mask=real, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    factor = inverse * scale_of(log_scale_ptr, head, SCALED)
    out = out_ptr + row.to(tl.int64)[:, None] * DIM + tl.arange(0, WIDTH)[None, :]
    tl.store(out, (x * factor[:, None]).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def unit_rows_gradient(
    x_ptr, log_scale_ptr, grad_ptr, inverse_ptr, dx_ptr, parts_ptr, x_batch, x_head, x_row, g_batch, g_head, g_row,
    rows, heads, length,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Backward: dx, contiguous as the output, and this program's part of db ``[programs, heads]``."""
    place, real, row, head = rows_of(x_ptr, x_batch, x_head, x_row, rows, heads, length, DIM, WIDTH, ROWS)
    x = tl.load(place, mask=real, other=0.0).to(tl.float32)
    place, _, _, _ = rows_of(grad_ptr, g_batch, g_head, g_row, rows, heads, length, DIM, WIDTH, ROWS)
    grad = tl.load(place, mask=real, other=0.0).to(tl.float32)
    inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)
    factor = inverse * scale_of(log_scale_ptr, head, SCALED)
    along = tl.sum(x * grad, 1)
    dx = factor[:, None] * (grad - x * (inverse * inverse * along / DIM)[:, None])
    out = dx_ptr + row.to(tl.int64)[:, None] * DIM + tl.arange(0, WIDTH)[None, :]
    tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=real)
    if SCALED:
        every = tl.arange(0, HEADS)
        part = tl.sum(tl.where(head[:, None] == every[None, :], (along * factor)[:, None], 0.0), 0)
        tl.store(parts_ptr + tl.program_id(0) * heads + every, part, mask=every < heads)
