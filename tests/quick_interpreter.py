"""Triton's interpreter with less overhead: the same numbers in a fraction of the time.

It looks through all of Triton's language at every call of a device function, builds a table of types for
every value, and reduces tiles element by element: most of the time of a kernel's test.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def np_types(kind: Any) -> np.dtype:
    """The type that values of a Triton type have in NumPy."""
    return np.dtype("u8") if kind.scalar.is_ptr() else _scalar_type(kind.scalar)


def reduced(operation: Any, tiles: tuple[Any, ...]) -> Any:
    """Combine whole slices along the axis, in the order in which single elements would be."""
    if operation.axis is None or len(tiles) != 1 or tiles[0].handle.data.ndim < 2:
        return reduced.element_by_element(operation, tiles)
    (tile,) = tiles
    slices = np.moveaxis(tile.handle.data, operation.axis, 0)
    result = operation.to_tensor(slices[0], tile.dtype)
    for one in slices[1:]:
        result = operation.combine_fn.fn(result, operation.to_tensor(one, tile.dtype))
    data = np.expand_dims(result.handle.data, operation.axis) if operation.keep_dims else result.handle.data
    return [operation.to_tensor(data, tile.dtype)]


def patch_once(function: Any) -> Any:
    """Nothing where a kernel that calls this device function has patched the language already."""
    languages = [one for one in function.__globals__.values() if one is tl or one is tl.core]
    if languages and not any(tl.core.is_builtin(one.load) for one in languages):
        return interpreter._LangPatchScope()
    return patch_once.original(function)


np_types.original, _scalar_type = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
patch_once.original = interpreter._patch_lang
reduced.element_by_element = interpreter.ReduceOps.generic_reduce


def speed_up() -> None:
    """Patch the interpreter of this process."""
    interpreter._get_np_dtype, interpreter._patch_lang = np_types, patch_once
    interpreter.ReduceOps.generic_reduce = reduced
