"""FlashAttention 3 and 4 as rivals of the kernels, wherever they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

FLASH = {"flash 3": "flash_attn_interface", "flash 4": "flash_attn.cute"}
"""Column of a table to the module that has its ``flash_attn_func``."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def flash_versions(causal: bool) -> dict[str, Attend]:
    """Plain attention by each version of FlashAttention that can be imported."""
    found: dict[str, Attend] = {}
    for name, module in FLASH.items():
        try:
            function = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
        found[name] = partial(attend_flash, function, causal)
    return found


def attend_flash(function: Callable[..., Any], causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """States ``[batch, heads, length, dim]``; the function takes ``[batch, length, heads, dim]``."""
    states = (x.transpose(1, 2) for x in (q, k, v))
    out = function(*states, causal=causal)
    output: Tensor = out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp too
    return output.transpose(1, 2)
