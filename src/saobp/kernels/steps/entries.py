# mypy: ignore-errors
"""The beliefs of one entry of the map, step by step, from its prior and vectors of its row and its key.

Step t (from 0) turns beliefs b_t into b_t+1; b_0 is the prior a, and gamma_t the weight of its messages:

    m_t = 1 - gamma_t b_t        u_t = a weight_t[key] / m_t * norm_t[row]        b_t+1 = (1 - damping) u_t + damping b_t

m_t is the message that a row sends about a key, ``c_t`` (``message_sums``) the sum over rows of log2(m_t), one per key, and
``weight_t = 2^(c_t)``, both relative to the head's largest; ``norm_t`` is one over the row's sum of the weights before it. An
entry depends on others only through these vectors. So every sweep recomputes the beliefs of its tiles from a, and 2 T vectors
are stored instead of T maps. ``key_part`` is weight_t, or c_t if CAREFUL; ``anchor`` what a row's logarithms are relative to.

RECEIVES is 1 above: a row receives all messages but its own, hence / m_t. 2: its own too, without / m_t; 0: none, so
weight_t is left out. PRECISE is that of ``CallSpec.precise``.

Undamped, with x = 1 - gamma_0 a, two steps need one division: m_1 = y / x with y = x - gamma_1 a weight_0 norm_0. And the
sum over rows of log y is that of log m_1 plus that of log m_0, which is known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.bidirectional.forward import is_careful
from saobp.kernels.library.arithmetic import (
    _hardware_inverse,
    _hardware_log2,
    head_message,
    inverse_message,
    load_vector,
    log2_message,
)


@triton.jit
def head_messages(strength_ptr, head, heads, sign, r0, r1, r2, l0, l1, l2, STEPS: tl.constexpr):
    """``head_message`` of each step, as a tuple; strengths are ``[steps, heads]``."""
    messages = ()
    for step in tl.static_range(STEPS):
        messages = messages + (head_message(strength_ptr + step * heads, head, sign, r0, r1, r2, l0, l1, l2),)
    return messages


@triton.jit
def row_messages(messages, sends, STEPS: tl.constexpr, MASKED: tl.constexpr):
    """``head_messages`` by row: gamma is 0 where ``sends`` is False, since padding sends no messages."""
    if MASKED:
        sent = sends.to(tl.float32)
        by_row = ()
        for step in tl.static_range(STEPS):
            gamma, r0, r1, r2, l0, l1, l2 = messages[step]
            by_row = by_row + ((gamma * sent, r0, r1 * sent, r2 * sent, l0 * sent, l1 * sent, l2 * sent),)
        return by_row
    else:
        return messages


@triton.jit
def load_steps(
    base, plane, places, tokens, other, STEPS: tl.constexpr, TAIL: tl.constexpr, AXIS: tl.constexpr
):
    """A vector of each step, ``plane`` apart, with a new axis to broadcast along."""
    vectors = ()
    for step in tl.static_range(STEPS):
        vector = load_vector(base + step * plane, places, tokens, other, TAIL)
        vectors = vectors + (tl.expand_dims(vector, AXIS),)
    return vectors


@triton.jit
def load_key_parts(
    base, plane, keys, tokens, STEPS: tl.constexpr, TAIL: tl.constexpr, AXIS: tl.constexpr, RECEIVES: tl.constexpr
):  # fmt: skip
    """``key_part`` of each step: weight_t of keys, or c_t for a CAREFUL sweep; zeros, with nothing read, if RECEIVES is 0."""
    if RECEIVES:
        return load_steps(base, plane, keys, tokens, 0.0, STEPS, TAIL, AXIS)
    else:
        return load_steps(base, 0, keys, 0, 0.0, STEPS, True, AXIS)


@triton.jit
def weigh(scores, a, key_part, anchor, RECEIVES: tl.constexpr, CAREFUL: tl.constexpr):
    """a weight_t. CAREFUL: ``key_part`` is the logarithm c_t, and the product is divided by 2^anchor of its row."""
    if CAREFUL:
        return tl.exp2(scores + key_part - anchor)
    elif RECEIVES:
        return a * key_part
    else:
        return a


@triton.jit
def normalise(weights, norm, PRECISE: tl.constexpr):
    """Weights times ``norm``. PRECISE 2: ``norm`` is the row's sum, and a row with one nonzero weight gets exactly 1."""
    if PRECISE == 2:
        return tl.div_rn(weights, tl.broadcast_to(norm, weights.shape))
    else:
        return weights * norm


@triton.jit
def mix(updated, before, damping, PRECISE: tl.constexpr, DAMPED: tl.constexpr):
    """The belief after a step, in float32 at most 1: with gamma near 1, messages of a larger one would be below 0."""
    if DAMPED:
        updated += damping * (before - updated)
    return tl.minimum(updated, 1.0) if PRECISE == 2 else updated


@triton.jit
def run_steps(
    scores, a, key_parts, anchors, norms, messages, damping,
    STEPS: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, CAREFUL: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """b_t, u_t and 1 / m_t of each step, as three tuples."""
    if STEPS == 2 and PRECISE == 1 and RECEIVES == 1 and not DAMPED:
        x = 1.0 - messages[0][0] * a
        first = weigh(scores, a, key_parts[0], anchors[0], RECEIVES, CAREFUL) * norms[0]
        y = x - messages[1][0] * first
        both = _hardware_inverse(x * y)
        inverse, inverse_2 = both * y, both * x * x
        first *= inverse
        second = weigh(scores, a, key_parts[1], anchors[1], RECEIVES, CAREFUL) * norms[1] * inverse_2
        return (a, first), (first, second), (inverse, inverse_2)
    else:
        before, updated, inverses = (), (), ()
        belief = a
        for step in tl.static_range(STEPS):
            inverse = inverse_message(belief, messages[step], PRECISE)
            new = weigh(scores, a, key_parts[step], anchors[step], RECEIVES, CAREFUL)
            if RECEIVES != 2:
                new *= inverse
            new = normalise(new, norms[step], PRECISE)
            before, updated, inverses = before + (belief,), updated + (new,), inverses + (inverse,)
            belief = mix(new, belief, damping, PRECISE, DAMPED)
        return before, updated, inverses


@triton.jit
def belief_before(
    scores, a, key_parts, anchors, norms, messages, damping,
    STEP: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, CAREFUL: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """b_t for t = STEP."""
    belief = a
    for step in tl.static_range(STEP):
        new = weigh(scores, a, key_parts[step], anchors[step], RECEIVES, CAREFUL)
        if RECEIVES != 2:
            new *= inverse_message(belief, messages[step], PRECISE)
        new = normalise(new, norms[step], PRECISE)
        belief = mix(new, belief, damping, PRECISE, DAMPED)
    return belief


@triton.jit
def own_inverse(
    scores, a, belief, key_parts, anchors, norms, messages,
    STEP: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, CAREFUL: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """1 / m_t for t = STEP from b_t; for the second of undamped steps m_1 = y / x, as above."""
    if STEP == 1 and PRECISE == 1 and RECEIVES == 1 and not DAMPED:
        x = 1.0 - messages[0][0] * a
        first = weigh(scores, a, key_parts[0], anchors[0], RECEIVES, CAREFUL) * norms[0]
        return x * _hardware_inverse(x - messages[1][0] * first)
    else:
        return inverse_message(belief, messages[STEP], PRECISE)


@triton.jit
def log2_sent(
    scores, a, key_parts, anchors, norms, messages, damping,
    STEP: tl.constexpr, RECEIVES: tl.constexpr, PRECISE: tl.constexpr, CAREFUL: tl.constexpr, DAMPED: tl.constexpr,
):  # fmt: skip
    """log2(m_t) for t = STEP; of the second undamped step log2(y) = log2(m_0 m_1): ``step_messages`` subtracts c_0."""
    if STEP == 1 and PRECISE == 1 and RECEIVES == 1 and not DAMPED:
        first = weigh(scores, a, key_parts[0], anchors[0], RECEIVES, CAREFUL) * norms[0]
        return _hardware_log2(1.0 - messages[0][0] * a - messages[1][0] * first)
    else:
        belief = belief_before(
            scores, a, key_parts, anchors, norms, messages, damping, STEP, RECEIVES, PRECISE, CAREFUL, DAMPED
        )
        return log2_message(belief, messages[STEP], PRECISE)


@triton.jit
def any_careful(lowest_ptr, line, blocks, plane, lowest_sum, STEPS: tl.constexpr, BLOCKS: tl.constexpr):
    """1 if in one of the first STEPS steps a normaliser of this head was so small that products may underflow."""
    careful = line * 0
    for step in tl.static_range(STEPS):
        careful = tl.maximum(careful, is_careful(lowest_ptr + step * plane, line, blocks, lowest_sum, BLOCKS))
    return careful


@triton.jit
def first_block_of(blocks, blocks_each, CAREFUL: tl.constexpr):
    """The block that a program works on, among those of all heads, ``blocks`` each; CAREFUL: the first of its ``blocks_each``."""
    pid = tl.program_id(0)
    if CAREFUL:
        parts = tl.cdiv(blocks, blocks_each)
        return pid // parts * blocks + pid % parts * blocks_each
    else:
        return pid


@triton.jit
def block_count(first_block, blocks_each, tokens, SIZE: tl.constexpr, CAREFUL: tl.constexpr):
    """How many blocks of SIZE tokens a program works on: one, or if CAREFUL up to ``blocks_each``."""
    if CAREFUL:
        return tl.minimum(blocks_each, tl.cdiv(tokens, SIZE) - first_block)
    else:
        return 1
