# mypy: ignore-errors
"""Two undamped steps of any strength: what sweeps need of an entry, with few instructions (notation as in ``entries``).

    x = m_0 = 1 - gamma_0 a        y = m_0 m_1 = x - slope weight_0 a        slope = gamma_1 norm_0
    u_0 = a norm_0 weight_0 / x        u_1 = a norm_1 weight_1 x / y        u_0 / m_1 = a norm_0 weight_0 / y

``slope`` is one number per row. A factor of a row or key is applied once, to the sum over it. Where two weights are multiplied, that
is so for one of them only: the product of two weights that are not normalised would underflow. Not for CAREFUL sweeps, whose weights
are logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saobp.kernels.library.arithmetic import INTERPRETED, _hardware_inverse, _hardware_log2
from saobp.kernels.library.packed_bf16 import _halves

_PAIR = tl.constexpr(
    "{ .reg .f32 r; mul.f32 r, $2, $3; rcp.approx.ftz.f32 r, r; mul.f32 $0, r, $3; mul.f32 $1, r, $2; }"
)


@triton.jit
def paired_inverse(y):
    """1 / y, two entries by one reciprocal: the range of float32 holds products of four messages."""
    if INTERPRETED:
        return 1.0 / y
    else:
        return tl.inline_asm_elementwise(_PAIR, "=&f,=&f,f,f", [y], tl.float32, True, 2)


@triton.jit
def paired_log2(y):
    """Log2 of a tile, of which entries 8 columns apart are added: ``[rows, columns / 2]``, by one logarithm for two."""
    even, odd = _halves(y)
    return _hardware_log2(even * odd)


@triton.jit
def message_products(a, messages, slope, weight):
    """x, y and slope weight_0."""
    x = 1.0 - messages[0][0] * a
    received = slope * weight
    return x, x - received * a, received


@triton.jit
def score_gradients(
    a, d_belief, messages, weights, norms, slope, deltas, sums_grads
):  # fmt: skip
    """dT_0 + dT_1 and a H_0 of a tile, from ``d_belief``, which is G_2: dS = dT_0 + dT_1 + gamma_0 a H_0 - a E (``backward``)."""
    x, y, _ = message_products(a, messages, slope, weights[0])
    both = _hardware_inverse(x * y)
    inverse, inverse_2 = both * y, both * x * x
    last = a * weights[1] * inverse_2 * (norms[1] * d_belief - norms[1] * deltas[1])
    a_inverse = a * inverse
    first = a_inverse * weights[0] * (inverse_2 * (last - sums_grads[1]) * slope - norms[0] * deltas[0])
    return last + first, a_inverse * (first - sums_grads[0])
