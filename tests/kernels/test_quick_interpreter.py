"""The quicker interpreter of the tests gives the numbers of Triton's own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU here", allow_module_level=True)

import triton
import triton.language as tl
from quick_interpreter import np_types, reduced
from triton.runtime import interpreter


@triton.jit
def _last_positive(one, other):
    return tl.where(other > 0, other, one)


@triton.jit
def _kernel(x_ptr, y_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    places = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = tl.reduce(tl.load(x_ptr + places), AXIS, _last_positive, keep_dims=KEEP)
    if KEEP:
        tl.store(y_ptr + (tl.arange(0, 8)[None, :] if AXIS == 0 else tl.arange(0, 4)[:, None]), found)
    else:
        tl.store(y_ptr + tl.arange(0, 8 if AXIS == 0 else 4), found)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_tiles_are_reduced_alike(axis: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), []
    for reduce in (reduced.element_by_element, reduced):
        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", lambda *given, way=reduce: way(*given))
        y = torch.zeros(4 if axis else 8)
        _kernel[(1,)](x, y, axis, keep)
        found.append(y)
    assert torch.equal(*found)
    assert found[0].abs().min() > 0


def test_types_are_those_of_the_interpreter() -> None:
    kinds = [tl.int1, tl.int32, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.float16)]
    for kind in [*kinds, *(tl.block_type(kind, [4, 2]) for kind in kinds)]:
        assert np_types(kind) == np_types.original(kind)
        assert isinstance(np_types(kind), np.dtype)
