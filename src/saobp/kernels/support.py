"""What the fused operation supports, without importing it."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from saobp.refinement import Refinement

TRITON_FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Both are asked once: the compiler cannot trace such questions."""

POTTS = {"high": (1.0, True), "low": (-1.0, True), "high-listing": (1.0, False), "low-listing": (-1.0, False)}
"""Sign of the strength, and whether rows hear each other."""

HALF_STRONGEST = 8.0
"""Beyond this strength weights and gradients of single entries leave the range of float16."""


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    is_causal: bool,
    scale: float | None,
    dropout_p: float = 0.0,
    strongest: float | None = None,
) -> str | None:
    """Why the kernels cannot do this call, in words that fit behind 'because'; None if they can.

    ``strongest`` is a bound on the strengths, if one is known.
    """
    if not TRITON_FOUND:
        return "Triton is not installed"
    if query.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {query.device.type}, not on a CUDA GPU"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{query.dtype} is not float16, bfloat16 or float32"
    if INTERPRETED and query.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if refinement.factor not in POTTS and refinement.factor != "elemmul":
        return f"factor {refinement.factor!r} has no kernel"
    if refinement.factor == "elemmul" and is_causal:
        return "causal 'elemmul' has no kernel"
    if refinement.factor == "elemmul" and dropout_p:
        return "dropout on 'elemmul' needs the entries of A A^T, which its kernels never form"
    known = 0.0 if strongest is None or refinement.factor not in POTTS else strongest
    if known > HALF_STRONGEST and query.dtype != torch.float32:
        return f"strength {known:g} is more than the {HALF_STRONGEST:g} that {query.dtype} has range for"
    if refinement.steps != 1:
        return f"{refinement.steps} steps were asked for and the kernels do one"
    if is_causal and refinement.future == "paper" and POTTS[refinement.factor][1]:
        return "the leaking form of causal attention has no kernel"
    if query.shape[2] != key.shape[2]:
        return f"{query.shape[2]} queries and {key.shape[2]} keys differ in number"
    if value.shape[3] != query.shape[3]:
        return f"keys of size {query.shape[3]} and values of size {value.shape[3]} differ"
    if not 1 <= query.shape[3] <= 256:
        return f"head size {query.shape[3]} is not between 1 and 256"
    if scale is not None and scale <= 0:
        return f"scale {scale} is not positive"
    if 0 in query.shape:
        return "there is nothing to compute"
    return None
