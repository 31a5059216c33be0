# mypy: ignore-errors
"""Gradients of strict causal attention, any strength, half types: gradients of scores are stored, not computed three times.

In the notation of ``backward.py``, with d = dT + gamma H, which is dS but for -a t:

1. ``stored_climb`` (over keys, from the last row up): messages, refined weights and their gradients, all that is costly, once.
   dV, the gradient of gamma, and d, rounded, in ``terms`` ``[blocks of rows, keys up to the block's last row, rows of a block]``.
2. ``stored_query_gradient`` (over rows): t = rowsum(d), dQ = d K - t (a K) / rowsum(a), of rounded d and a: what rounding changes
   is then multiplied by differences of keys only, which are small where one key has nearly all of a row.
3. ``stored_key_gradient`` (over keys): dK = (d - a t)^T Q.

That is 10 products and four exponentials an entry, where ``backward.py`` has 14 and six, and one logarithm for its three. ``terms``
is as large as the maps, so calls of long sequences take ``backward.py``. P is relative to its row's normaliser as a logarithm, so
nothing underflows, and no head has to be computed again.

Messages that attract (factor ``low``) leave refined rows nearly one-hot. Then D of the rounded output leaves rowsum(dT) off 0 by as
much as the terms of the gradient of gamma, in which all later rows add up. So with that factor, unless gamma is known to be above -1,
``stored_mean_parts`` and ``stored_row_means`` first sum up D from P and dP in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.causal.block_indexing import slot_place
from saobp.kernels.causal.forward import causal_scores, lower_triangle, scores_by_key, upper_triangle
from saobp.kernels.causal.weak_forward import (
    any_column,
    load_pairs,
    store_pairs,
    sums_over_rows,
    weak_log_messages,
    weak_triangle,
)
from saobp.kernels.library.arithmetic import (
    divided_by_message,
    drop,
    drop_scaled,
    head_dropout,
    head_message,
    load_rows,
    load_vector,
    real_tokens,
    store_rows,
)
from saobp.kernels.library.indexing import head_base, locate_sorted, mask_base_of, row_bases, states_base
from saobp.kernels.library.packed_bf16 import (
    messages_and_ratios,
    pair_logarithm,
    rounded,
    sums_by_thread,
    widened,
)


@triton.jit
def _terms_pointers(terms_base, place, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Pointers ``[KEYS, ROWS]`` to a tile of ``terms``."""
    return terms_base + place * ROWS + (tl.arange(0, KEYS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :])


@triton.jit
def store_terms(terms_base, place, keys, tokens, terms, TAIL: tl.constexpr):
    """Stores a tile ``[keys, rows]`` of d; ``place``: the ``slot_place`` of its rows plus its first key."""
    pointers = _terms_pointers(terms_base, place, terms.shape[1], terms.shape[0])
    if TAIL:
        tl.store(pointers, terms, mask=(keys < tokens)[:, None])
    else:
        tl.store(pointers, terms)


@triton.jit
def load_terms(terms_base, place, keys, tokens, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr):
    """What ``store_terms`` stored, 0 beyond the sequence."""
    pointers = _terms_pointers(terms_base, place, ROWS, KEYS)
    if TAIL:
        return tl.load(pointers, mask=(keys < tokens)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _mean_parts_base(mean_parts_ptr, batch, head, first, heads, length, blocks):
    """The sums of ``stored_mean_parts`` over a head's first block of keys, of ``[batch, heads, blocks, length, 2]``."""
    return mean_parts_ptr + 2 * ((batch.to(tl.int64) * heads + head) * blocks * length + first)


@triton.jit
def message_triangle(message, ROWS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr):
    """``[sender, receiver]``: the unit of ``sent_messages`` where the receiver gets the sender's, else 0."""
    if PRECISE == 0:
        return weak_triangle(pair_logarithm(message), ROWS, RECEIVES, True)
    else:
        return upper_triangle(ROWS, tl.float16, RECEIVES == 2)


@triton.jit
def sent_messages(a, message, PRECISE: tl.constexpr):
    """Log messages of a tile ``[keys, rows]`` in float16, over their slope l0 if PRECISE is 0; their sums over rows ``[keys]``; and u."""
    if PRECISE == 0:
        logarithm = pair_logarithm(message)
        messages = weak_log_messages(a, logarithm)
        sums = sums_over_rows(messages, tl.full([a.shape[1], 16], 1.0, tl.float16)) * logarithm[0]
        return messages, sums, divided_by_message(a, message, PRECISE)
    else:
        messages, exact, ratios = messages_and_ratios(a, message[0])
        return messages, tl.sum(exact, 1), ratios


@triton.jit
def refined_tile(
    message_sums, k, q, keys, rows, lse, belief, message, triangle, mask_base, tokens, score_scale, on_diagonal,
    PRECISE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and u of a tile ``[keys, rows]``, and the log-message sums of rows before it, from those up to its last row."""
    raw = scores_by_key(k, q, keys, rows, keys, False, False, PRECISION)
    if on_diagonal:
        raw = tl.where(keys[:, None] <= rows[None, :], raw, float("-inf"))
    scores = raw * score_scale - lse[None, :]
    a = tl.exp2(scores)
    if MASKED:  # padding rows send no message
        a = tl.where(real_tokens(mask_base, rows, tokens, MASKED)[None, :], a, 0.0)
    messages, sums, sent = sent_messages(a, message, PRECISE)
    message_sums -= sums
    # Within a tile the sum has at most ROWS terms, so half precision suffices.
    beliefs = tl.dot(messages, triangle, scores + message_sums[:, None])
    return tl.exp2(beliefs - belief[None, :]), sent, message_sums


@triton.jit(do_not_specialize=["section"])
def stored_mean_parts(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, belief_ptr, message_sums_ptr, mean_parts_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    heads, group, length, blocks, section, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``mean_parts``: sums of P dP and of P over a block of keys, in float32, for all rows that see them."""
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    parts_base = (
        _mean_parts_base(mean_parts_ptr, batch, head, first, heads, length, blocks) + 2 * block * length
    )
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    message_sums = load_vector(message_sums_ptr + row_base, keys, tokens, 0.0, True)
    triangle = message_triangle(message, ROWS, RECEIVES, PRECISE)
    local = tl.arange(0, ROWS)
    last = tl.cdiv(tokens, ROWS) - 1
    for step in tl.range(0, last + 1 - block):
        begin = tl.multiple_of((last - step) * ROWS, ROWS)
        rows = begin + local
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        lse = load_vector(lse_ptr + row_base + begin, local, tokens - begin, float("inf"), TAIL)
        belief = load_vector(belief_ptr + row_base + begin, local, tokens - begin, float("inf"), TAIL)
        refined, _sent, message_sums = refined_tile(
            message_sums, k, q, keys, rows, lse, belief, message, triangle, mask_base, tokens, score_scale,
            step == last - block, PRECISE, MASKED, PRECISION,
        )  # fmt: skip
        if MASKED:
            refined = tl.where(keys_real[:, None], refined, 0.0)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        store_pairs(parts_base, rows, tokens, tl.sum(refined * dp, 0), tl.sum(refined, 0))


@triton.jit(do_not_specialize=["section"])
def stored_row_means(
    cu_ptr, mean_parts_ptr, delta_ptr, heads, length, blocks, section, ROWS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """D of a block of rows: the mean of dP by weights P, which need not sum up to exactly 1."""
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * ROWS >= tokens:
        return
    rows = block * ROWS + tl.arange(0, ROWS)
    parts_base = _mean_parts_base(mean_parts_ptr, batch, head, first, heads, length, blocks)
    products, weights = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for part in tl.range(0, block + 1):
        product, weight = load_pairs(parts_base + 2 * part * length, block * ROWS, tokens, 0.0, ROWS, True)
        products += product
        weights += weight
    means = tl.where(weights > 0.0, products / tl.where(weights > 0.0, weights, 1.0), 0.0)
    tl.store(head_base(delta_ptr, batch, head, first, heads, length) + rows, means, mask=rows < tokens)


@triton.jit(do_not_specialize=["section"])
def stored_climb(
    q_ptr, k_ptr, v_ptr, grad_ptr, mask_ptr, cu_ptr, seed_ptr, strength_ptr,
    lse_ptr, belief_ptr, delta_ptr, message_sums_ptr, terms_ptr, dv_ptr, strength_grad_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, score_scale, drop_threshold, keep_scale,
    sign, r0, r1, r2, l0, l1, l2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    RECEIVES: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, DROPS: tl.constexpr,
    LEARNS: tl.constexpr, ATTRACTS: tl.constexpr, RESTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV of a block of keys, d of all rows that see them and, if LEARNS, the gradient of gamma: by key, where other
    kernels have it by row.

    RESTS: D is that of an unrounded output, and dT of unrounded weights.
    ATTRACTS: D is that of ``stored_row_means``, dT of unrounded weights, and its sum over later rows that of two numbers of
    the half type, the second what rounding the first left.
    """
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    v_base = states_base(v_ptr, batch, head // group, first, v_batch, v_head, v_row)
    g_base = states_base(grad_ptr, batch, head, first, g_batch, g_head, g_row)
    dv_base = states_base(dv_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    terms_base = terms_ptr + head_base(0, batch, head, first, heads, sums_plane) * ROWS
    message = head_message(strength_ptr, head, sign, r0, r1, r2, l0, l1, l2)
    dropout = head_dropout(seed_ptr, row_base, drop_threshold, keep_scale, DROPS)
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    v = load_rows(v_base, block * KEYS, tokens, v_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    message_sums = load_vector(message_sums_ptr + row_base, keys, tokens, 0.0, True)
    KIND: tl.constexpr = k.dtype
    triangle, ones = message_triangle(message, ROWS, RECEIVES, PRECISE), tl.full([ROWS, 16], 1.0, KIND)
    after = tl.zeros([KEYS, 16], tl.float32)  # the sum of dT of later rows, in every column
    gamma_grad = tl.zeros([KEYS, 8], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    local = tl.arange(0, ROWS)
    last = tl.cdiv(tokens, ROWS) - 1
    place = slot_place(last, 0, length, ROWS, PACKED) + block * KEYS
    for step in tl.range(0, last + 1 - block):
        begin = tl.multiple_of((last - step) * ROWS, ROWS)
        rows = begin + local
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        grad = load_rows(g_base, begin, tokens, g_row, ROWS, DIM, BLOCK_DIM, TAIL)
        lse = load_vector(lse_ptr + row_base + begin, local, tokens - begin, float("inf"), TAIL)
        belief = load_vector(belief_ptr + row_base + begin, local, tokens - begin, float("inf"), TAIL)
        delta = load_vector(delta_ptr + row_base + begin, local, tokens - begin, 0.0, TAIL)
        exact, sent, message_sums = refined_tile(
            message_sums, k, q, keys, rows, lse, belief, message, triangle, mask_base, tokens, score_scale,
            step == last - block, PRECISE, MASKED, PRECISION,
        )  # fmt: skip
        refined = rounded(exact, KIND)
        weights = drop(refined, dropout, rows[None, :], keys[:, None], DROPS)
        dv = tl.dot(weights, grad, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dp = drop_scaled(dp, dropout, rows[None, :], keys[:, None], DROPS)
        # Of rounded weights where D is of a rounded output: otherwise errors would add up in ``after`` over rows.
        d_logits = (exact if ATTRACTS or RESTS else widened(refined)) * (dp - delta[None, :])
        narrow = rounded(d_logits, KIND)
        receivers = lower_triangle(ROWS, KIND, RECEIVES == 2)
        within = tl.dot(narrow, receivers, input_precision="ieee")
        if ATTRACTS:
            rest = rounded(d_logits - widened(narrow), KIND)
            within = tl.dot(rest, receivers, within, input_precision="ieee")
        later = within + any_column(after)[:, None]
        after = tl.dot(narrow, ones, after, input_precision="ieee")
        if ATTRACTS:
            after = tl.dot(rest, ones, after, input_precision="ieee")
        through = sent * later
        if LEARNS:
            gamma_grad -= sums_by_thread(through)
        terms = rounded(d_logits - message[0] * through, KIND)
        if MASKED:
            terms = tl.where(keys_real[:, None], terms, 0.0)
        store_terms(terms_base, place, keys, tokens, terms, TAIL)
        place -= length if PACKED else begin
    if DROPS:
        dv *= keep_scale
    dv = tl.where(keys_real[:, None], dv, 0.0)
    store_rows(dv_base, block * KEYS, tokens, d_row, dv, KEYS, DIM, BLOCK_DIM)
    if LEARNS:
        by_key = tl.where(keys_real, tl.sum(gamma_grad, 1), 0.0)
        tl.store(strength_grad_ptr + row_base + keys, by_key, mask=keys < tokens)


@triton.jit(do_not_specialize=["section"])
def stored_query_gradient(
    q_ptr, k_ptr, mask_ptr, cu_ptr, lse_ptr, terms_ptr, dq_ptr, term_pairs_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, scale, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, RESTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows, and ``term_pairs`` ``[rows, 2]``: log-sum-exp and t."""
    slot, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    slot = blocks - 1 - slot
    row_start = slot * ROWS
    if row_start >= tokens:
        return
    rows = row_start + tl.arange(0, ROWS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    dq_base = states_base(dq_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base = head_base(0, batch, head, first, heads, length)
    terms_base = terms_ptr + head_base(0, batch, head, first, heads, sums_plane) * ROWS
    place = slot_place(slot, 0, length, ROWS, PACKED)
    mask_base = mask_base_of(mask_ptr, batch, length)
    q = load_rows(q_base, row_start, tokens, q_row, ROWS, DIM, BLOCK_DIM, True)
    lse = load_vector(lse_ptr + row_base, rows, tokens, float("inf"), True)
    dq = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    prior_k = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    row_terms, ones = tl.zeros([ROWS, 16], tl.float32), tl.full([KEYS, 16], 1.0, q.dtype)
    prior_sums = tl.zeros([ROWS, 16], tl.float32)
    for step in tl.range(0, slot + 1):
        begin = tl.multiple_of(step * KEYS, KEYS)
        keys = begin + tl.arange(0, KEYS)
        k = load_rows(k_base, begin, tokens, k_row, KEYS, DIM, BLOCK_DIM, TAIL)
        terms = tl.trans(load_terms(terms_base, place + begin, keys, tokens, ROWS, KEYS, TAIL))
        keys_real = real_tokens(mask_base, keys, tokens, MASKED)
        raw = causal_scores(q, k, rows, keys, keys_real, False, MASKED, PRECISION)
        if step == slot:
            raw = tl.where(keys[None, :] <= rows[:, None], raw, float("-inf"))
        a = tl.exp2(raw * score_scale - lse[:, None])
        dq = tl.dot(terms, k, dq, input_precision=PRECISION)
        row_terms = tl.dot(terms, ones, row_terms, input_precision="ieee")
        prior = rounded(a, q.dtype)
        prior_k = tl.dot(prior, k, prior_k, input_precision=PRECISION)
        if RESTS:
            prior_sums = tl.dot(prior, ones, prior_sums, input_precision="ieee")
    row_term = any_column(row_terms)
    if RESTS:
        prior_sum = any_column(prior_sums)
        prior_k *= tl.where(prior_sum > 0.0, 1.0 / prior_sum, 0.0)[:, None]
    dq = (dq - row_term[:, None] * prior_k) * scale
    store_rows(dq_base, row_start, tokens, d_row, dq, ROWS, DIM, BLOCK_DIM)
    store_pairs(term_pairs_ptr + row_base * 2, rows, tokens, lse, row_term)


@triton.jit(do_not_specialize=["section"])
def stored_key_gradient(
    q_ptr, k_ptr, mask_ptr, cu_ptr, term_pairs_ptr, terms_ptr, dk_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, d_batch, d_head, d_row,
    heads, group, length, blocks, section, sums_plane, scale, score_scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys."""
    block, batch, head, first, tokens, _ = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    if block * KEYS >= tokens:
        return
    keys = block * KEYS + tl.arange(0, KEYS)
    q_base = states_base(q_ptr, batch, head, first, q_batch, q_head, q_row)
    k_base = states_base(k_ptr, batch, head // group, first, k_batch, k_head, k_row)
    dk_base = states_base(dk_ptr, batch, head, first, d_batch, d_head, d_row)
    row_base, mask_base = row_bases(mask_ptr, batch, head, first, heads, length)
    terms_base = terms_ptr + head_base(0, batch, head, first, heads, sums_plane) * ROWS
    k = load_rows(k_base, block * KEYS, tokens, k_row, KEYS, DIM, BLOCK_DIM, True)
    keys_real = real_tokens(mask_base, keys, tokens, MASKED)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    place = slot_place(block, 0, length, ROWS, PACKED) + block * KEYS
    for step in tl.range(0, tl.cdiv(tokens, ROWS) - block):
        begin = tl.multiple_of((block + step) * ROWS, ROWS)
        rows = begin + tl.arange(0, ROWS)
        q = load_rows(q_base, begin, tokens, q_row, ROWS, DIM, BLOCK_DIM, TAIL)
        lse, row_term = load_pairs(term_pairs_ptr + row_base * 2, begin, tokens, float("inf"), ROWS, TAIL)
        terms = load_terms(terms_base, place, keys, tokens, ROWS, KEYS, TAIL)
        place += length if PACKED else begin + ROWS
        raw = scores_by_key(k, q, keys, rows, keys_real, False, False, PRECISION)
        if step == 0:
            raw = tl.where(keys[:, None] <= rows[None, :], raw, float("-inf"))
        a = tl.exp2(raw * score_scale - lse[None, :])
        # One difference, not one of two products: in collapsed rows of strong messages both would be large.
        d_scores = widened(terms) - row_term[None, :] * a
        dk = tl.dot(rounded(d_scores, k.dtype), q, dk, input_precision=PRECISION)
    dk = tl.where(keys_real[:, None], dk * scale, 0.0)
    store_rows(dk_base, block * KEYS, tokens, d_row, dk, KEYS, DIM, BLOCK_DIM)
