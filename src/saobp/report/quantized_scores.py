"""Scores of a head quantized to 16 bits an entry, to be embedded in a page.

Softmax is invariant to a constant added to a row, so log probabilities are as good as scores. Each is stored
as the integer ``sqrt(-log p) / step``. With the usual step the error of a probability is
below 5e-5 and that of its logarithm a few parts in ten thousand, at large and small values alike; half
precision would lose four times as much near p = 0.4, and needs more code to read in a browser.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy
from numpy.typing import NDArray

USUAL_STEP = 1e-4
HIDDEN = 65535
"""The code of a masked key."""


def encode_head(log_rows: NDArray[numpy.float64]) -> dict[str, Any]:
    """Log probabilities ``[length, length]``, minus infinity at masked keys, to JSON.

    A head whose range exceeds the usual step's gets a larger step. Of a causal head only the lower triangle
    is stored, row-major.
    """
    seen = numpy.isfinite(log_rows)
    roots = numpy.sqrt(numpy.maximum(-numpy.where(seen, log_rows, 0.0), 0.0))
    step = max(USUAL_STEP, float(roots.max(initial=0.0)) / (HIDDEN - 1))
    codes = numpy.where(seen, numpy.rint(roots / step), HIDDEN).astype("<u2")
    triangle = bool((codes[~numpy.tri(len(codes), dtype=bool)] == HIDDEN).all()) and len(codes) > 1
    if triangle:
        codes = codes[numpy.tri(len(codes), dtype=bool)]
    return {"step": step, "triangle": triangle, "codes": base64.b64encode(codes.tobytes()).decode()}


def decode_head(head: dict[str, Any], length: int) -> NDArray[numpy.float64]:
    """Decoded log probabilities, as the page has them, ``[length, length]``."""
    codes = numpy.frombuffer(base64.b64decode(head["codes"]), "<u2")
    values = numpy.where(codes == HIDDEN, -numpy.inf, -((codes * head["step"]) ** 2))
    if not head["triangle"]:
        return values.reshape(length, length)
    rows = numpy.full((length, length), -numpy.inf)
    rows[numpy.tri(length, dtype=bool)] = values
    return rows
