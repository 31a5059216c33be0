"""256 tokens of unknown strength: row and key sums in one sweep instead of the two of ``sums``.

A tile ``[keys, rows]`` has all keys, so its rows' normalisers are known before their messages are needed: scores and
exponentials are computed once. Four messages about a key share a logarithm, in the registers of one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.short_weak import inverse_or_zero, real_or, store_lse
from saobp.kernels.library.arithmetic import _hardware_log2, head_message, load_rows, real_tokens
from saobp.kernels.library.indexing import head_base, locate, mask_base_of, states_base


@triton.jit
def product(x, y):
    return x * y


@triton.jit
def log_products(left):
    """Sum over rows of log2 of a tile ``[keys, rows]``: one logarithm for four entries, 8 rows apart."""
    KEYS: tl.constexpr = left.shape[0]
    ROWS: tl.constexpr = left.shape[1]
    fours = tl.reshape(left, [KEYS, ROWS // 32, 4, 8])
    logs = _hardware_log2(tl.reduce(fours, 2, product))
    return tl.sum(logs, 1)


@triton.jit
def row_and_key_sums(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr, strength_ptr, parts_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, group, length, blocks, score_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TAIL: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of SPAN rows, and the sums of their base-2 log messages about each key, in ``parts [.., blocks, KEYS]``."""
    pid = tl.program_id(0)
    block, batch, head, first, tokens = locate(pid, blocks, heads, length, cu_ptr, PACKED)
    GAPS: tl.constexpr = TAIL or MASKED
    keys = tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    mask_base = mask_base_of(mask_ptr, batch, length)
    lse_base = head_base(lse_ptr, batch, head, first, heads, length)
    gamma = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)[0]
    k = load_rows(k_base, 0, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
    bound = real_or(mask_base, keys, tokens, float("inf"), float("-inf"), MASKED)
    sums = tl.zeros([KEYS, 8], tl.float32)
    for start in tl.range(block * SPAN, tl.minimum((block + 1) * SPAN, tokens), ROWS):
        q = load_rows(q_base, start, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if GAPS:
            raw = tl.minimum(raw, bound[:, None])
        high = tl.max(raw, 0) * score_scale
        if GAPS:
            high = tl.where(high > float("-inf"), high, 0.0)
        e = tl.exp2(raw * score_scale - high[None, :])
        total = tl.sum(e, 0)
        rows = start + tl.arange(0, ROWS)
        store_lse(lse_base, rows, tokens, high, total, GAPS)
        slope = gamma * inverse_or_zero(total, GAPS)
        if GAPS:
            slope = tl.where(real_tokens(mask_base, rows, tokens, MASKED), slope, 0.0)
        sums += log_products(1.0 - slope[None, :] * e)
    tl.store(parts_ptr + pid.to(tl.int64) * KEYS + keys, tl.sum(sums, 1))


@triton.jit
def key_weights_of_parts(
    mask_ptr, cu_ptr, parts_ptr, heard_ptr, weight_ptr, heads, length, blocks,
    BLOCKS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As ``sums.key_weights``, of a whole head, from its parts."""
    pid = tl.program_id(0)
    _, batch, head, first, tokens = locate(pid, 1, heads, length, cu_ptr, PACKED)
    keys = tl.arange(0, KEYS)
    places = tl.arange(0, BLOCKS)
    base = parts_ptr + pid.to(tl.int64) * blocks * KEYS
    parts = tl.load(base + places[:, None] * KEYS + keys[None, :], mask=places[:, None] < blocks, other=0.0)
    heard = tl.sum(parts, 0)
    real = real_tokens(mask_base_of(mask_ptr, batch, length), keys, tokens, MASKED)
    heard = tl.where(real, heard, float("-inf"))
    peak = tl.max(heard, 0)
    heard -= tl.where(peak == float("-inf"), 0.0, peak)
    row_base = head_base(0, batch, head, first, heads, length)
    tl.store(heard_ptr + row_base + keys, heard, mask=keys < tokens)
    tl.store(weight_ptr + row_base + keys, tl.exp2(heard), mask=keys < tokens)
