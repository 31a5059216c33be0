# mypy: ignore-errors
"""Rows that send messages, if not all do: every STRIDE-th real row of a sequence, the first included.

Without a padding mask those are the tokens 0, STRIDE, 2 STRIDE, ...; with one, ``find_senders`` lists them. Vectors of one
number per sending row are compact: the i-th number is of the i-th sending row. Their messages are multiplied by
``rows_per_sender``, real rows over sending rows, so that their sum estimates that of all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import load_rows


@triton.jit
def find_senders(mask_ptr, senders_ptr, sends_ptr, length, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """``senders`` of a padded sequence: their number, that of real rows, then their positions. ``sends``: 1 where a row is one."""
    batch = tl.program_id(0).to(tl.int64)
    base = senders_ptr + batch * ((length + STRIDE - 1) // STRIDE + 2)
    before = tl.program_id(0) * 0
    for start in tl.range(0, length, SIZE):
        places = start + tl.arange(0, SIZE)
        real = tl.load(mask_ptr + batch * length + places, mask=places < length, other=0) != 0
        rank = before + tl.cumsum(real.to(tl.int32), 0) - 1
        sends = real & (rank % STRIDE == 0)
        tl.store(base + 2 + rank // STRIDE, places, mask=sends)
        tl.store(sends_ptr + batch * length + places, sends.to(tl.int32), mask=places < length)
        before += tl.sum(real.to(tl.int32), 0)
    tl.store(base, (before + STRIDE - 1) // STRIDE)
    tl.store(base + 1, before)


@triton.jit
def sending_rows(senders_ptr, batch, tokens, length, STRIDE: tl.constexpr, MASKED: tl.constexpr):
    """Pointer to the list of sending rows (only if MASKED), their number, and ``rows_per_sender``."""
    if STRIDE == 1:
        return senders_ptr, tokens, 1.0
    elif MASKED:
        base = senders_ptr + batch.to(tl.int64) * ((length + STRIDE - 1) // STRIDE + 2)
        count, real = tl.load(base), tl.load(base + 1)
        return base + 2, count, real.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)
    else:
        count = (tokens + STRIDE - 1) // STRIDE
        return senders_ptr, count, tokens.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def sender_places(sender_list, rows, count, STRIDE: tl.constexpr, MASKED: tl.constexpr):
    """Positions in the sequence of sending rows, from their numbers among the sending rows."""
    if MASKED and STRIDE > 1:
        return tl.load(sender_list + rows, mask=rows < count, other=0)
    return rows * STRIDE


@triton.jit
def load_senders(
    base, sender_list, start, count, stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """States of sending rows from the one numbered ``start`` on, as ``load_rows``; ``stride`` is that of all rows."""
    if MASKED and STRIDE > 1:
        rows, dims = start + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)[None, :]
        places = sender_places(sender_list, rows, count, STRIDE, MASKED).to(tl.int64)
        inside = (rows < count)[:, None] & (dims < DIM)
        return tl.load(base + places[:, None] * stride + dims, mask=inside, other=0.0)
    else:
        return load_rows(base, start, count, stride * STRIDE, ROWS, DIM, BLOCK_DIM, TAIL)


@triton.jit
def senders_of_map(real, places, tokens, STRIDE: tl.constexpr, MASKED: tl.constexpr):
    """Which rows of a whole map send messages, and ``rows_per_sender``; ``real``: which tokens are no padding."""
    if STRIDE == 1:
        return real, 1.0
    elif MASKED:
        counted = real.to(tl.int32)
        count = tl.sum(counted, 0)
        sends = real & ((tl.cumsum(counted, 0) - 1) % STRIDE == 0)
        return sends, count.to(tl.float32) / tl.maximum((count + STRIDE - 1) // STRIDE, 1).to(tl.float32)
    else:
        rows_per_sender = tokens.to(tl.float32) / tl.maximum((tokens + STRIDE - 1) // STRIDE, 1).to(
            tl.float32
        )
        return (places < tokens) & (places % STRIDE == 0), rows_per_sender
