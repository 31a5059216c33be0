"""What the fused operation supports, and the call into it."""

from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor

from saobp.refinement import Refinement

TRITON_FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Both are asked once: the compiler cannot trace such questions."""

POTTS = {"high": (1.0, True), "low": (-1.0, True), "high-listing": (1.0, False), "low-listing": (-1.0, False)}
"""Sign of the strength, and whether rows hear each other."""


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    is_causal: bool,
    scale: float | None,
    dropout_p: float = 0.0,
) -> str | None:
    """Why the kernels cannot do this call, in words that fit behind 'because'; None if they can."""
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
    if refinement.factor == "elemmul" and query.dtype == torch.bfloat16:
        return "the kernels of 'elemmul' miss their error budget in bfloat16"
    if refinement.factor == "elemmul" and dropout_p:
        return "dropout on 'elemmul' needs the entries of A A^T, which its kernels never form"
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


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    refinement: Refinement,
    strength: Tensor,
    *,
    strongest: float | None = None,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    cumulative_lengths: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Refined attention by the kernels; arguments as in :func:`saobp.attention`, checked already.

    ``strongest`` bounds |strength|, where that is known without asking the GPU; kernels that know a bound give
    the strength no gradient, so it only counts for one that does not learn. A packed batch is one of
    batch size 1 with ``cumulative_lengths`` and the length of its ``longest`` sequence.
    """
    from saobp.kernels.causal_operator import causal_refined_attention
    from saobp.kernels.elemmul_operator import elemmul_attention
    from saobp.kernels.operator import refined_attention
    from saobp.kernels.problem import is_short
    from saobp.kernels.short_operator import short_refined_attention, short_refined_output

    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    longest = query.shape[2] if longest is None else longest
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if padding_mask is not None:
        padding_mask = padding_mask.contiguous()
    if refinement.factor == "elemmul":
        out, *_ = elemmul_attention(query, key, value, padding_mask, cumulative_lengths, longest, scale)
        return out
    sign, hears = POTTS[refinement.factor]
    known = strongest is not None and not strength.requires_grad
    bound = -math.expm1(-sign * strongest) if known else 0.0  # type: ignore[operator]
    seed = torch.randint(2**31, (1,), device=query.device) if dropout_p else None
    arguments = (
        query, key, value, strength, padding_mask, cumulative_lengths, seed,
        longest, scale, dropout_p, sign, hears, bound,
    )  # fmt: skip
    if is_causal:
        return causal_refined_attention(*arguments)[0]
    if not is_short(longest, query.shape[3], query.dtype):
        return refined_attention(*arguments)[0]
    if learns(query, key, value, strength):
        return short_refined_attention(*arguments)[0]
    return short_refined_output(*arguments)


def learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
