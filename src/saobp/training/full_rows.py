"""No attention masks for full rows: SDPA chooses its fast kernels only without a mask.

Transformers leaves out a mask that hides nothing, but up to 5.17 not while a model is being compiled: there
plain attention got an all-true mask, and with it a slower kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)

SDPA = "sdpa"


@contextmanager
def no_masks_for_full_rows() -> Iterator[None]:
    """Context in which models with SDPA build no mask for rows without padding, compiled or not."""
    build: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]

    def mask(**options: Any) -> Tensor | None:
        return None if hides_nothing(**options) else build(**options)

    ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[SDPA]  # the override
        if ALL_MASK_ATTENTION_FUNCTIONS[SDPA] is not build:
            ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = build


def hides_nothing(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether a mask, built from these arguments of Transformers, says no more than SDPA's ``is_causal``."""
    starts = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    causal = mask_function is causal_mask_function and allow_is_causal_skip
    both_ways = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
    return attention_mask is None and starts and (causal or both_ways)
