# mypy: ignore-errors
"""Gradients of ElemMul: sweeps over keys, rows and keys again, no atomics.

With P_ik = A_ik n_k / z_i and B_kj = A_jk / n_k, the weights of the two attentions O = P G and G = B V of ``forward.py``:

1. ``row_terms``: D_i = dO_i . O_i.
2. ``gathered_gradient`` (over keys): dG = P^T dO and F = P^T D.
3. ``row_gradients`` (over rows): dV_i = sum_k B_ki dG_k and E_i = sum_k A_ik dA_ik, then dQ.
4. ``elemmul_key_gradient`` (over keys): dK.

The scores' gradient is dS_ik = A_ik (dA_ik - E_i) with

    A_ik dA_ik = P_ik (dO_i . G_k - D_i) + B_ki (dG_k . V_i - F_k)

F is dG . G minus the gradient of log n, which needs no sweep of its own. E could be computed from D, F and dV,
or split off the sum over keys as in ``bidirectional/backward.py``; but summed from the same entries that it is
subtracted from, it makes rows of dS sum to 0 however G, dG and O were rounded, and a collapsed head's gradient
is a difference of large terms. For the same reason E is divided by the row's computed sum of A: with large scores
the log-sum-exp has so few digits that this sum is 1 only to 1e-4. Padding rows have no B.

G is stored minus the mean c of V, and dG_k minus the mean g of dO times m_k = sum_i P_ik, to keep small
differences: D becomes dO . (O - c), and dG_k . V_i the stored part's product plus m_k (g . V_i).

Names in the code: ``delta`` is D, ``d_gathered`` dG, ``key_delta`` F, ``mass`` m, ``prior_delta`` E, ``offset`` g . V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.sums import raw_scores
from saobp.kernels.elemmul.centering import geometric_mean, load_centre, with_digits_of
from saobp.kernels.elemmul.forward import FLOOR
from saobp.kernels.library.arithmetic import (
    load_lse,
    load_rows,
    load_vector,
    real_tokens,
    relative,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate, row_bases, states_base, tile_walk

STRETCH = tl.constexpr(2.0**14)
"""P, which is at most 1, is scaled by this before it is rounded: differences from the mean are small for float16."""


@triton.jit
def row_terms(
    grad_ptr, out_ptr, v_ptr, cu_ptr, centre_ptr, d_centre_ptr, delta_ptr, offset_ptr,
    g_batch, g_head, g_row, o_batch, o_head, o_row, v_batch, v_head, v_row,
    heads, group, length, blocks,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """D = dO . (O - c) and ``offset`` g . V of a block of rows, in float32."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    rows = block * ROWS + tl.arange(0, ROWS)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    o_base = states_base(out_ptr, batch, head, first, o_batch, o_head, o_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    row_base = head_base(0, batch, head, first, heads, length)
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
    out = load_rows(o_base, block * ROWS, tokens, o_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
    v = load_rows(v_base, block * ROWS, tokens, v_row, ROWS, DIM, BLOCK_DIM, True).to(tl.float32)
    delta = tl.sum(grad * (out - load_centre(centre_ptr, blocks, BLOCK_DIM)), 1)
    offset = tl.sum(v * load_centre(d_centre_ptr, blocks, BLOCK_DIM), 1)
    tl.store(delta_ptr + row_base + rows, delta, mask=rows < tokens)
    tl.store(offset_ptr + row_base + rows, offset, mask=rows < tokens)


@triton.jit
def _gathered_loop(
    d_gathered, key_delta, mass, k, stretched, mean_weight, q_base, q_row, g_base, g_row, lse_base, low_plane, inverse_base, delta_base,
    start, stop, tokens, score_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dG with weights centred (``mean_weight``) and scaled; F and m before the key's common factor n."""
    for begin in tl.range(start, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_base, low_plane, rows, tokens, PRECISE, TAIL)
        inverse = load_vector(inverse_base, rows, tokens, 0.0, TAIL)
        delta = load_vector(delta_base, rows, tokens, 0.0, TAIL)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(relative(raw, high[None, :], low[None, :], score_scale, PRECISE))
        if MASKED:
            p += FLOOR
        p *= inverse[None, :]
        mass += tl.sum(p, 1)
        key_delta += tl.sum(p * delta[None, :], 1)
        p = p * stretched[:, None] - mean_weight[:, None]
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        d_gathered = tl.dot(p.to(grad.dtype), grad, d_gathered, input_precision=PRECISION)
    return d_gathered, key_delta, mass


@triton.jit
def gathered_gradient(
    q_ptr, k_ptr, grad_ptr, mask_ptr, cu_ptr, lse_ptr, received_ptr, inverse_ptr, delta_ptr,
    centre_ptr, q_centre_ptr, level_ptr, d_centre_ptr, d_level_ptr, d_gathered_ptr, key_delta_ptr, mass_ptr, inverse_received_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, g_batch, g_head, g_row, m_batch, m_head, m_row,
    heads, group, length, blocks, low_plane, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dG, centred, F, m and 1 / n of a block of keys; 0 for keys that no row attends to."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base = head_base(0, batch, head, first, heads, length)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    received = load_vector(received_ptr + row_base, keys, tokens, 0.0, True)
    mean_weight = geometric_mean(k, q_centre_ptr, level_ptr, blocks, score_scale, BLOCK_DIM)
    mean_weight *= received * tl.exp2(tl.load(d_level_ptr + tl.program_id(0) // blocks))
    mean_weight = with_digits_of(mean_weight, grad_ptr.dtype.element_ty) * STRETCH
    stretched = received * STRETCH
    d_gathered = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    key_delta = tl.zeros([KEYS], tl.float32)
    mass = tl.zeros([KEYS], tl.float32)
    walk = tile_walk(tokens, ROWS)
    for TAIL in tl.static_range(2):
        d_gathered, key_delta, mass = _gathered_loop(
            d_gathered, key_delta, mass, k, stretched, mean_weight, q_base, q_row, g_base, g_row, lse_ptr + row_base, low_plane,
            inverse_ptr + row_base, delta_ptr + row_base,
            walk[TAIL], walk[TAIL + 1], tokens, score_scale, ROWS, DIM, BLOCK_DIM, TAIL, PRECISE, MASKED, PRECISION,
        )  # fmt: skip
    attended = received > 0
    mass = tl.where(attended, mass * received, 0.0)
    d_centre = load_centre(d_centre_ptr, blocks, BLOCK_DIM)
    d_gathered = (
        d_gathered * (1.0 / STRETCH) - (mass - tokens * mean_weight * (1.0 / STRETCH))[:, None] * d_centre
    )
    d_gathered = tl.where(attended[:, None], d_gathered, 0.0).to(d_gathered_ptr.dtype.element_ty)
    key_delta = key_delta * received + tl.sum(
        (d_gathered.to(tl.float32) + mass[:, None] * d_centre) * load_centre(centre_ptr, blocks, BLOCK_DIM), 1
    )
    d_base = states_base(d_gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    store_rows(d_base, block * KEYS, tokens, m_row, d_gathered, KEYS, DIM, BLOCK_DIM)
    tl.store(key_delta_ptr + row_base + keys, tl.where(attended, key_delta, 0.0), mask=keys < tokens)
    tl.store(mass_ptr + row_base + keys, mass, mask=keys < tokens)
    inverse_received = tl.where(attended, 1.0 / tl.where(attended, received, 1.0), 0.0)
    tl.store(inverse_received_ptr + row_base + keys, inverse_received, mask=keys < tokens)


@triton.jit
def _score_parts(
    raw, high, low, received, inverse, inverse_received, d_out, delta, d_value, offset, mass, key_delta, rows_real, score_scale,
    PRECISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A, B and A dA of a tile; vectors are shaped to broadcast against ``raw``, d_out is dO . G,
    d_value + mass offset is dG . V.
    """
    a = tl.exp2(relative(raw, high, low, score_scale, PRECISE))
    b = a * inverse_received
    if MASKED:
        b = tl.where(rows_real, b, 0.0)
    return a, b, a * received * inverse * (d_out - delta) + b * (d_value + (mass * offset - key_delta))


@triton.jit
def _row_loop(
    out, prior_delta, prior_sum, shares, q, v, grad, high, low, inverse, delta, offset, rows_real,
    k_base, k_row, gathered_base, d_base, m_row, mask_base, received_base, inverse_received_base, key_delta_base,
    mass_base, start, stop, tokens, score_scale,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr, SECOND: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """First pass: ``out`` is dV; accumulates the sums over k of A dA, A and B_ki m_k. SECOND: ``out`` is dQ and E is known."""
    for begin in tl.range(start, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        gathered = load_rows(gathered_base, begin, tokens, m_row, KEYS, DIM, BLOCK_DIM, TAIL)
        d_gathered = load_rows(d_base, begin, tokens, m_row, KEYS, DIM, BLOCK_DIM, TAIL)
        received = load_vector(received_base, keys, tokens, 0.0, TAIL)
        inverse_received = load_vector(inverse_received_base, keys, tokens, 0.0, TAIL)
        key_delta = load_vector(key_delta_base, keys, tokens, 0.0, TAIL)
        mass = load_vector(mass_base, keys, tokens, 0.0, TAIL)
        real = real_tokens(mask_base, keys, tokens, MASKED)
        a, b, parts = _score_parts(
            raw_scores(q, k, real, TAIL or MASKED, PRECISION), high[:, None], low[:, None],
            received[None, :], inverse[:, None], inverse_received[None, :],
            tl.dot(grad, tl.trans(gathered), input_precision=PRECISION), delta[:, None],
            tl.dot(v, tl.trans(d_gathered), input_precision=PRECISION), offset[:, None],
            mass[None, :], key_delta[None, :],
            rows_real[:, None], score_scale, PRECISE, MASKED,
        )  # fmt: skip
        if SECOND:
            d_scores = parts - a * prior_delta[:, None]
            out = tl.dot(d_scores.to(k.dtype), k, out, input_precision=PRECISION)
        else:
            prior_delta += tl.sum(parts, 1)
            prior_sum += tl.sum(a, 1)
            shares += tl.sum(b * mass[None, :], 1)
            out = tl.dot(b.to(d_gathered.dtype), d_gathered, out, input_precision=PRECISION)
    return out, prior_delta, prior_sum, shares


@triton.jit
def row_gradients(
    q_ptr, k_ptr, v_ptr, grad_ptr, gathered_ptr, d_gathered_ptr, mask_ptr, cu_ptr, lse_ptr, received_ptr,
    inverse_received_ptr, key_delta_ptr, mass_ptr, inverse_ptr, delta_ptr, offset_ptr, d_centre_ptr, prior_delta_ptr,
    dq_ptr, dv_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    m_batch, m_head, m_row, d_batch, d_head, d_row,
    heads, group, length, blocks, low_plane, scale, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV and E of a block of rows in a first pass over the keys, dQ in a second."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    gathered_base = states_base(gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    d_base = states_base(d_gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    rows_real = real_tokens(mask_base, rows, tokens, MASKED)
    q = load_rows(q_base, block * ROWS, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * ROWS, tokens, v_row, ROWS, DIM, BLOCK_DIM, True)
    grad = load_rows(g_base, block * ROWS, tokens, g_row, ROWS, DIM, BLOCK_DIM, True)
    high, low = load_lse(lse_ptr + row_base, low_plane, rows, tokens, PRECISE, True)
    inverse = load_vector(inverse_ptr + row_base, rows, tokens, 0.0, True)
    delta = load_vector(delta_ptr + row_base, rows, tokens, 0.0, True)
    offset = load_vector(offset_ptr + row_base, rows, tokens, 0.0, True)
    walk = tile_walk(tokens, KEYS)

    prior_delta = tl.zeros([ROWS], tl.float32)
    prior_sum = tl.zeros([ROWS], tl.float32)
    shares = tl.zeros([ROWS], tl.float32)
    for SECOND in tl.static_range(2):
        out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        for TAIL in tl.static_range(2):
            out, prior_delta, prior_sum, shares = _row_loop(
                out, prior_delta, prior_sum, shares, q, v, grad, high, low, inverse, delta, offset, rows_real,
                k_base, k_row, gathered_base, d_base, m_row, mask_base, received_ptr + row_base,
                inverse_received_ptr + row_base, key_delta_ptr + row_base, mass_ptr + row_base, walk[TAIL], walk[TAIL + 1],
                tokens, score_scale, KEYS, DIM, BLOCK_DIM, TAIL, SECOND, PRECISE, MASKED, PRECISION,
            )  # fmt: skip
        if SECOND:
            store_rows(dq_base, block * ROWS, tokens, d_row, out * scale, ROWS, DIM, BLOCK_DIM)
        else:
            out += shares[:, None] * load_centre(d_centre_ptr, blocks, BLOCK_DIM)
            out = tl.where(rows_real[:, None], out, 0.0)
            store_rows(dv_base, block * ROWS, tokens, d_row, out, ROWS, DIM, BLOCK_DIM)
            prior_delta /= tl.where(prior_sum > 0, prior_sum, 1.0)
            tl.store(prior_delta_ptr + row_base + rows, prior_delta, mask=rows < tokens)


@triton.jit
def _key_loop(
    dk, k, gathered, d_gathered, received, inverse_received, key_delta, mass,
    q_base, q_row, v_base, v_row, g_base, g_row, mask_base, lse_base, low_plane,
    inverse_base, delta_base, offset_base, prior_delta_base,
    start, stop, tokens, score_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for begin in tl.range(start, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        v = load_rows(v_base, begin, tokens, v_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        high, low = load_lse(lse_base, low_plane, rows, tokens, PRECISE, TAIL)
        inverse = load_vector(inverse_base, rows, tokens, 0.0, TAIL)
        delta = load_vector(delta_base, rows, tokens, 0.0, TAIL)
        offset = load_vector(offset_base, rows, tokens, 0.0, TAIL)
        prior_delta = load_vector(prior_delta_base, rows, tokens, 0.0, TAIL)
        rows_real = real_tokens(mask_base, rows, tokens, MASKED)
        a, _, parts = _score_parts(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), high[None, :], low[None, :],
            received[:, None], inverse[None, :], inverse_received[:, None],
            tl.dot(gathered, tl.trans(grad), input_precision=PRECISION), delta[None, :],
            tl.dot(d_gathered, tl.trans(v), input_precision=PRECISION), offset[None, :],
            mass[:, None], key_delta[:, None],
            rows_real[None, :], score_scale, PRECISE, MASKED,
        )  # fmt: skip
        d_scores = parts - a * prior_delta[None, :]
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk


@triton.jit
def elemmul_key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, gathered_ptr, d_gathered_ptr, mask_ptr, cu_ptr, lse_ptr, received_ptr,
    inverse_received_ptr, key_delta_ptr, mass_ptr, inverse_ptr, delta_ptr, offset_ptr, prior_delta_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    m_batch, m_head, m_row, d_batch, d_head, d_row,
    heads, group, length, blocks, low_plane, scale, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys."""
    block, batch, head, first, tokens = locate(tl.program_id(0), blocks, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    gathered_base = states_base(gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    d_base = states_base(d_gathered_ptr, batch, head, first, m_batch, m_head, m_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    gathered = load_rows(gathered_base, block * KEYS, tokens, m_row, KEYS, DIM, BLOCK_DIM, True)
    d_gathered = load_rows(d_base, block * KEYS, tokens, m_row, KEYS, DIM, BLOCK_DIM, True)
    received = load_vector(received_ptr + row_base, keys, tokens, 0.0, True)
    inverse_received = load_vector(inverse_received_ptr + row_base, keys, tokens, 0.0, True)
    key_delta = load_vector(key_delta_ptr + row_base, keys, tokens, 0.0, True)
    mass = load_vector(mass_ptr + row_base, keys, tokens, 0.0, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    walk = tile_walk(tokens, ROWS)
    for TAIL in tl.static_range(2):
        dk = _key_loop(
            dk, k, gathered, d_gathered, received, inverse_received, key_delta, mass,
            q_base, q_row, v_base, v_row, g_base, g_row, mask_base, lse_ptr + row_base, low_plane,
            inverse_ptr + row_base, delta_ptr + row_base, offset_ptr + row_base, prior_delta_ptr + row_base,
            walk[TAIL], walk[TAIL + 1], tokens, score_scale, ROWS, DIM, BLOCK_DIM, TAIL, PRECISE, MASKED, PRECISION,
        )  # fmt: skip
    dk = tl.where(keys_real[:, None], dk * scale, 0.0)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)
