"""Triton's interpreter with less overhead: the same numbers in a fraction of the time.

It looks through all of Triton's language at every call of a device function, builds types and shapes anew
for every value, computes whether integers overflow without telling anybody, and reduces tiles element by
element: most of the time of a kernel's test.

Products alone are others: BLAS rounds them as its kernels for a CPU do, on some so badly that collapsed
heads, where large numbers cancel, leave their error budget.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
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


@functools.cache
def _languages(function: Any) -> tuple[Any, ...]:
    return tuple(one for one in function.__globals__.values() if one is tl or one is tl.core)


def patch_once(function: Any) -> Any:
    """Nothing where a kernel that calls this device function has patched the language already."""
    languages = _languages(function)
    if languages and not any(tl.core.is_builtin(one.load) for one in languages):
        return interpreter._LangPatchScope()
    return patch_once.original(function)


def patch_member(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:  # noqa: ARG001
    """As the original, without a copy of the arguments at every call."""

    def interpreted(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return member(*arguments, **named)

    scope.set_attr(place, name, interpreted)


def fill_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """A type of tiles; what follows from its shape and elements is computed and checked once."""
    key = element_ty.name, tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
    if (known := _block_types.get(key)) is None:
        fill_block_type.original(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(known, element_ty=element_ty)


def fill_tensor(self: Any, handle: Any, type: Any) -> None:
    """A value; what follows from its shape is computed once."""
    key = tuple(type.shape) if type.is_block() else ()
    if (known := _tensor_shapes.get(key)) is None:
        fill_tensor.original(self, handle, type)
        _tensor_shapes[key] = {name: vars(self)[name] for name in ("shape", "numel")}
    else:
        vars(self).update(known, handle=handle, type=type, dtype=type.scalar)


def same_type(self: Any, other: Any) -> bool:
    return self is other or same_type.original(self, other)


def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Both as they are where their shapes are one."""
    if left.type.is_block() and right.type.is_block() and [*left.type.shape] == [*right.type.shape]:
        return left, right
    return broadcast.original(self, left, right)


def without_constexpr(value: Any) -> Any:
    """The value itself; tuples and lists, which may have some inside, go through the original."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, (list, tuple, tl.tuple)):
        return without_constexpr.original(value)
    return value


def product(left: Any, right: Any, kind: np.dtype, terms: int | None = None) -> Any:
    """``[m, n]`` times ``[n, k]``, rounded after every 8 or, in half types, 16 terms, as by tensor cores."""
    steps = max(1, left.shape[1] // (terms or (8 if left.dtype == np.float32 else 16)))
    lefts = np.moveaxis(left.astype(np.float64).reshape(len(left), steps, -1), 1, 0)
    rights = right.astype(np.float64).reshape(steps, -1, right.shape[1])
    total = np.zeros((len(left), right.shape[1]), kind)
    for step in np.matmul(lefts, rights):
        total = (total + step).astype(kind)
    return total


def create_dot(self: Any, left: Any, right: Any, added: Any, *_: Any) -> Any:  # noqa: ARG001
    total = product(left.data, right.data, added.data.dtype) + added.data
    return interpreter.TensorHandle(total, added.dtype.scalar)


_block_types: dict[Any, dict[str, Any]] = {}
_tensor_shapes: dict[Any, dict[str, Any]] = {}
np_types.original, _scalar_type = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
patch_once.original = interpreter._patch_lang
patch_member.original = interpreter._patch_attr
reduced.element_by_element = interpreter.ReduceOps.generic_reduce
fill_block_type.original = tl.block_type.__init__
fill_tensor.original = tl.tensor.__init__
same_type.original = tl.dtype.__eq__
without_constexpr.original = tl.core._unwrap_if_constexpr
broadcast.original = TritonSemantic.broadcast_impl_value


def speed_up() -> None:
    """Patch the interpreter of this process."""
    interpreter._get_np_dtype, interpreter._patch_lang = np_types, patch_once
    interpreter._patch_attr = patch_member
    interpreter.ReduceOps.generic_reduce = reduced
    interpreter.InterpreterBuilder.create_dot = create_dot
    tl.block_type.__init__, tl.tensor.__init__ = fill_block_type, fill_tensor
    tl.dtype.__eq__ = same_type
    tl.core._unwrap_if_constexpr = without_constexpr
    TritonSemantic.broadcast_impl_value = broadcast
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
