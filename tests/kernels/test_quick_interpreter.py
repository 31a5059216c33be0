"""The quicker interpreter of the tests gives the numbers of Triton's own."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU here", allow_module_level=True)

import quick_interpreter as quick
import triton
import triton.language as tl
from quick_interpreter import np_types, reduced
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from saobp.kernels.fused import fused_attention
from saobp.refinement import Refinement


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


def test_products_do_not_depend_on_places() -> None:
    """Equal rows and columns have equal products, and a sum of many equal terms is off by a few roundings."""
    generator = np.random.default_rng(0)
    row, column = (generator.normal(size=128).astype(np.float32) for _ in range(2))
    exact = row.astype(np.float64) @ column.astype(np.float64)
    found = quick.product(np.tile(row, (32, 1)), np.tile(column[:, None], 64), np.dtype(np.float32))
    assert found.dtype == np.float32
    assert (found == found[0, 0]).all()
    assert abs(found[0, 0] - exact) < 16 * 2**-24 * np.abs(row * column).sum()
    narrow = quick.product(row[None, :4], column[:4, None], np.dtype(np.float32))
    np.testing.assert_allclose(narrow[0, 0], row[:4] @ column[:4], rtol=1e-5)


def test_types_are_those_of_the_interpreter() -> None:
    kinds = [tl.int1, tl.int32, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.float16)]
    for kind in [*kinds, *(tl.block_type(kind, [4, 2]) for kind in kinds)]:
        assert np_types(kind) == np_types.original(kind)
        assert isinstance(np_types(kind), np.dtype)


def test_types_and_values_are_filled_alike() -> None:
    for kind in (tl.int1, tl.bfloat16, tl.pointer_type(tl.float16)):
        for shape in ([4, 2], [tl.constexpr(8)], tl.tuple([1, 16])):
            alike, again, own = (tl.block_type.__new__(tl.block_type) for _ in range(3))
            quick.fill_block_type(alike, kind, shape)
            quick.fill_block_type(again, kind, shape)
            quick.fill_block_type.original(own, kind, shape)
            for one in (alike, again):
                assert one == own
                assert (one.name, one.numel, [*one.shape]) == (own.name, own.numel, [*own.shape])
            values = [tl.tensor.__new__(tl.tensor) for _ in range(3)]
            for value, fill in zip(
                values, (quick.fill_tensor, quick.fill_tensor, quick.fill_tensor.original), strict=True
            ):
                fill(value, None, own)
                assert [one.value for one in value.shape] == [*own.shape]
                assert (value.numel.value, value.dtype, value.type) == (own.numel, kind, own)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])


def _as_triton_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name, function in (
        (interpreter, "_get_np_dtype", np_types),
        (interpreter, "_patch_lang", quick.patch_once),
        (interpreter, "_patch_attr", quick.patch_member),
        (tl.block_type, "__init__", quick.fill_block_type),
        (tl.tensor, "__init__", quick.fill_tensor),
        (tl.dtype, "__eq__", quick.same_type),
        (tl.core, "_unwrap_if_constexpr", quick.without_constexpr),
        (TritonSemantic, "broadcast_impl_value", quick.broadcast),
    ):
        assert getattr(place, name) is function
        monkeypatch.setattr(place, name, function.original)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduced.element_by_element)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))


def test_a_call_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, found = torch.Generator().manual_seed(0), []
    states = [torch.randn(1, 2, 20, 16, generator=generator, requires_grad=True) for _ in range(3)]
    strength = torch.tensor([0.3, 0.7], requires_grad=True)
    for original in (False, True):
        if original:
            _as_triton_has_it(monkeypatch)
        torch.manual_seed(1)  # of the entries that are dropped
        out = fused_attention(*states, Refinement("high", "learned"), strength, is_causal=True, dropout_p=0.1)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*states, strength])])
    assert all(torch.equal(quickly, slowly) for quickly, slowly in zip(*found, strict=True))
