# mypy: ignore-errors
"""Gradients of heads in which a product of weights may have underflowed: all sweeps of ``backward`` in one program per head.

After a kernel that computes every head without logarithms. Few heads, if any, need it, so it is made to be quick where there
is nothing to do: one launch in place of four, and a program looks at several heads at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.backward import (
    store_key_gradient,
    store_query_gradient,
    store_value_gradient,
)
from saobp.kernels.bidirectional.forward import is_careful
from saobp.kernels.bidirectional.gradient_terms import store_scaled_gradients
from saobp.kernels.library.indexing import locate


@triton.jit
def careful_gradients(
    q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, mask_ptr, seed_ptr, strength_ptr, lse_ptr, message_sums_ptr, anchor_ptr, inverse_ptr,
    lowest_ptr, scaled_ptr, delta_ptr, power_ptr, sums_grad_ptr, minus_gamma_dc_ptr, row_term_ptr,
    dq_ptr, dk_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    o_batch, o_head, o_row, s_batch, s_head, s_row, d_batch, d_head, d_row,
    heads, group, length, lines, lowest_blocks, low_plane, scale, score_scale, lowest_sum, drop_threshold,
    keep_scale, sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, LOWEST_BLOCKS: tl.constexpr, TAIL: tl.constexpr,
    POWER: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, HEADS_EACH: tl.constexpr,
):  # fmt: skip
    """All gradients of those of HEADS_EACH heads that have a row with a normaliser below ``lowest_sum``, in tiles of SIZE x SIZE.

    Each of ``lowest_blocks`` blocks of a head's rows recorded its smallest normaliser. Careful sweeps take D as it is, not
    in half-type parts, so there are none.
    """
    begin = tl.program_id(0) * HEADS_EACH
    end = tl.minimum(begin + HEADS_EACH, lines)
    places = begin * lowest_blocks + tl.arange(0, HEADS_EACH * LOWEST_BLOCKS)
    if tl.min(tl.load(lowest_ptr + places, mask=places < end * lowest_blocks, other=1.0), 0) >= lowest_sum:
        return
    for line in tl.range(begin, end):
        if is_careful(lowest_ptr, line, lowest_blocks, lowest_sum, LOWEST_BLOCKS) == 1:
            _, batch, head, first, tokens = locate(line, 1, heads, length, mask_ptr, False)
            for start in tl.range(0, tokens, SIZE):
                store_scaled_gradients(
                    start // SIZE, batch, head, first, tokens, grad_ptr, out_ptr, inverse_ptr, scaled_ptr, delta_ptr, None,
                    power_ptr, g_batch, g_head, g_row, o_batch, o_head, o_row, s_batch, s_head, s_row, 0, heads, length,
                    DIM, BLOCK_DIM, SIZE, POWER, 2,
                )  # fmt: skip
            tl.debug_barrier()
            for start in tl.range(0, tokens, SIZE):
                store_value_gradient(
                    start // SIZE, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, scaled_ptr, mask_ptr, seed_ptr,
                    strength_ptr, lse_ptr, message_sums_ptr, anchor_ptr, power_ptr, delta_ptr, None, dv_ptr,
                    sums_grad_ptr, minus_gamma_dc_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
                    s_batch, s_head, s_row, d_batch, d_head, d_row, 0, heads, group, length, low_plane, score_scale,
                    drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
                    DIM, BLOCK_DIM, SIZE, SIZE, True, TAIL, POWER, RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
                )  # fmt: skip
            tl.debug_barrier()
            for start in tl.range(0, tokens, SIZE):
                store_query_gradient(
                    start // SIZE, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, scaled_ptr, mask_ptr, seed_ptr,
                    strength_ptr, lse_ptr, message_sums_ptr, anchor_ptr, inverse_ptr, power_ptr, delta_ptr, sums_grad_ptr,
                    minus_gamma_dc_ptr, dq_ptr, strength_grad_ptr, row_term_ptr, q_batch, q_head, q_row, k_batch, k_head,
                    k_row, v_batch, v_head, v_row, s_batch, s_head, s_row, d_batch, d_head, d_row, heads, group, length,
                    low_plane, scale, score_scale, drop_threshold, keep_scale, sign, r0, r1, r2, l0, l1, l2,
                    DIM, BLOCK_DIM, SIZE, SIZE, True, TAIL, POWER, RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
                )  # fmt: skip
            tl.debug_barrier()
            for start in tl.range(0, tokens, SIZE):
                store_key_gradient(
                    start // SIZE, batch, head, first, tokens, q_ptr, k_ptr, v_ptr, scaled_ptr, mask_ptr, seed_ptr,
                    strength_ptr, lse_ptr, message_sums_ptr, anchor_ptr, power_ptr, delta_ptr, sums_grad_ptr, row_term_ptr,
                    dk_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, s_batch, s_head, s_row,
                    d_batch, d_head, d_row, heads, group, length, low_plane, scale, score_scale, drop_threshold, keep_scale,
                    sign, r0, r1, r2, l0, l1, l2,
                    DIM, BLOCK_DIM, SIZE, SIZE, True, TAIL, POWER, RECEIVES, PRECISE, MASKED, DROPS, PRECISION,
                )  # fmt: skip
            tl.debug_barrier()
