"""bfloat16 in Triton's interpreter, which keeps it as integers of 16 bits and computes with these.

Here sums, products, comparisons and casts are those of the numbers, rounded to the nearest even; matrix
products are summed up as other half types'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from quick_interpreter import product
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

HALF, NAN = np.uint32(0x7FFF), np.uint16(0x7FC0)


def widened(bits: np.ndarray) -> np.ndarray:
    """The numbers of these bits, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers rounded to bfloat16."""
    numbers = np.asarray(numbers, np.float32)
    bits = np.ascontiguousarray(numbers).view(np.uint32).reshape(numbers.shape)
    nearest = ((bits + HALF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), NAN, nearest)


def is_bfloat16(value: Any) -> bool:
    return bool(value.dtype.scalar == tl.bfloat16)


def cast(self: Any, value: TensorHandle, kind: Any) -> TensorHandle:
    if is_bfloat16(value) and kind.scalar != tl.bfloat16:
        return cast.original(self, TensorHandle(widened(value.data), tl.float32), kind)
    if kind.scalar == tl.bfloat16 and not is_bfloat16(value):
        return TensorHandle(rounded(value.data), tl.bfloat16)
    return cast.original(self, value, kind)


def cast_floats(self: Any, value: TensorHandle, kind: Any, rounding: Any) -> TensorHandle:
    if is_bfloat16(value) or kind.scalar == tl.bfloat16:
        return cast(self, value, kind)
    return cast_floats.original(self, value, kind, rounding)


def combine(self: Any, left: TensorHandle, right: TensorHandle, operation: Any) -> TensorHandle:
    if not is_bfloat16(left):
        return combine.original(self, left, right, operation)
    found = operation(widened(left.data), widened(right.data))
    return TensorHandle(found, tl.int1) if found.dtype == bool else TensorHandle(rounded(found), tl.bfloat16)


def apply(self: Any, value: TensorHandle, operation: Any) -> TensorHandle:
    if not is_bfloat16(value):
        return apply.original(self, value, operation)
    return TensorHandle(rounded(operation(widened(value.data))), tl.bfloat16)


def dot(self: Any, left: TensorHandle, right: TensorHandle, added: TensorHandle, *given: Any) -> TensorHandle:
    if not is_bfloat16(left):
        return dot.original(self, left, right, added, *given)
    total = product(widened(left.data), widened(right.data), added.data.dtype, terms=16) + added.data
    return TensorHandle(total, added.dtype.scalar)


def constant(self: Any, value: float) -> TensorHandle:  # noqa: ARG001
    return TensorHandle(rounded(np.array([value])), tl.bfloat16)


def add_bfloat16() -> None:
    """Patch the interpreter of this process; other types are computed as before."""
    for name, replacement in {
        "cast_impl": cast,
        "create_fp_to_fp": cast_floats,
        "binary_op": combine,
        "unary_op": apply,
        "create_dot": dot,
    }.items():
        replacement.original = getattr(InterpreterBuilder, name)  # type: ignore[attr-defined]
        setattr(InterpreterBuilder, name, replacement)
    InterpreterBuilder.get_bf16 = constant
