"""Operations of Gluon that Triton 3.8 and 3.9 renamed, under one name for all versions from 3.6 on."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _named(place: Any, name: str, older: str) -> Any:
    """``place.name``, in older versions ``place.older``. Newer ones may keep the older name to raise an error."""
    return getattr(place, name, None) or getattr(place, older)


tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(tma, "async_store", "async_copy_shared_to_global")
async_load = _named(async_copy, "async_load", "async_copy_global_to_shared")
reinterpret = _named(shared_memory_descriptor, "reinterpret", "_reinterpret")
"""Shared memory with another type, shape and layout. From Triton 3.8 on it has to be of the same size."""
