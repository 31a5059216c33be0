"""Kernels in Gluon on a CPU, through Triton's interpreter, which knows nothing of Gluon by itself.

Layouts are ignored; shared memory, barriers, TMA and the tensor cores are emulated in numpy, as
late as allowed. Fetched tiles are NaN until they are waited for, and waiting for a fetch never started
raises where a GPU would hang. Asynchronous products are computed when started and again when waited for, so
that operands overwritten too early are detected. Threads run in lockstep: a missing barrier between them is
not detected. There is float16, but no bfloat16.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

OPERATIONS = {
    "gl", "tma", "mbarrier", "fence_async_shared", "mma_v2", "warpgroup_mma", "warpgroup_mma_init",
    "async_copy", "warpgroup_mma_wait", "tma_load", "tma_store", "async_load", "reinterpret",
}  # fmt: skip
NUMBERS = {tl.float16: np.float16, tl.float32: np.float32, tl.int64: np.int64}


def to_tensor(values: np.ndarray, kind: Any) -> Any:
    return tl.tensor(TensorHandle(values.copy(), kind), tl.block_type(kind, list(values.shape)))


def plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def access(name: str, *given: Any, mask: Any = None, **named: Any) -> Any:
    """A load or store. A mask may come from a Python bool, which the interpreter takes as int32."""
    if isinstance(mask, tl.tensor):
        mask = tl.tensor(TensorHandle(mask.handle.data.astype(bool), tl.int1), mask.type)
    return getattr(tl, name)(*given, mask=mask, **named)


def number(value: Any) -> int:
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(plain(value))


class Memory:
    """A piece of shared memory, or a view of one."""

    def __init__(self, kind: Any, values: np.ndarray, whole: np.ndarray) -> None:
        self.dtype, self.values, self.whole = kind, values, whole
        self.shape = list(values.shape)

    def load(self, layout: Any) -> Any:  # noqa: ARG002
        return to_tensor(self.values, self.dtype)

    def store(self, tensor: Any) -> None:
        assert list(tensor.handle.data.shape) == self.shape
        self.values[...] = tensor.handle.data

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Memory:
        start = number(start)
        place = (slice(None),) * plain(dim) + (slice(start, start + plain(length)),)
        return Memory(self.dtype, self.values[place], self.whole)

    def index(self, place: Any) -> Memory:
        part = self.values[number(place)]
        return Memory(self.dtype, part, part.reshape(-1))

    def permute(self, order: Any) -> Memory:
        return Memory(self.dtype, self.values.transpose([plain(one) for one in order]), self.whole)

    def reinterpret(self, kind: Any, shape: Any, layout: Any) -> Memory:  # noqa: ARG002
        shape = [plain(one) for one in shape]
        assert int(np.prod(shape)) == self.values.size, "Triton 3.8 refuses another size"
        return Memory(plain(kind), self.whole[: int(np.prod(shape))].reshape(shape), self.whole)


@dataclass
class Barrier:
    """An mbarrier: a phase completes when all expected bytes have arrived."""

    opened: int = 0
    expected: int | None = None
    brought: list[tuple[Memory, np.ndarray]] = field(default_factory=list)

    def wait(self, parity: int) -> None:
        if self.opened % 2 == parity:
            size = sum(values.nbytes for _, values in self.brought)
            if self.expected is None or size != self.expected:
                raise RuntimeError(
                    f"would wait for ever: {self.expected} bytes expected, {size} on their way"
                )
            for into, values in self.brought:
                into.values[...] = values
            self.expected, self.brought = None, []
            self.opened += 1


class Barriers:
    """Several of them, of which each is used by itself."""

    def __init__(self, count: int) -> None:
        self.every = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        return self.every[number(place)]


class TileMap:
    """``[batch, heads, length, columns]`` as TMA sees it: tiles of so many rows of a head."""

    dtype = tl.float16

    def __init__(self, descriptor: TensorDescriptor) -> None:
        self.layout, self.rows = descriptor.layout, descriptor.block_shape[2]
        self.tensor = descriptor.base.detach().as_strided(descriptor.shape, descriptor.strides)

    def tile(self, place: list[Any]) -> Tensor:
        batch, head, start, _ = map(number, place)
        return self.tensor[batch, head, start : start + self.rows]

    def take(self, place: list[Any]) -> np.ndarray:
        found = self.tile(place).numpy()
        return np.pad(found, ((0, self.rows - found.shape[0]), (0, 0)))[None, None]

    def put(self, place: list[Any], values: np.ndarray) -> None:
        there = self.tile(place)
        there.copy_(torch.from_numpy(values[0, 0, : there.shape[0]].copy()))


@dataclass
class Product:
    """An asynchronous product."""

    compute: Callable[[], np.ndarray]
    values: np.ndarray

    def check(self) -> None:
        same = np.array_equal(self.compute(), self.values, equal_nan=True)
        assert same, "an operand was overwritten too early"


class Hopper:
    """Emulation of Gluon's operations."""

    def __init__(self, warps: int, assembly: dict[str, Callable[..., Any]]) -> None:
        self.running: list[Product] = []
        self.copies: list[list[tuple[Memory, np.ndarray]]] = [[]]
        self.gl = types.SimpleNamespace(
            **{name: getattr(gluon_language, name) for name in dir(gluon_language)}
        )
        for name in (
            "max", "min", "sum", "where", "minimum", "maximum", "exp2", "log2",
            "program_id", "num_programs", "permute",
        ):  # fmt: skip
            setattr(self.gl, name, lambda *given, name=name, **named: getattr(tl, name)(*given, **named))
        for name in ("load", "store"):
            setattr(self.gl, name, lambda *given, name=name, **named: access(name, *given, **named))
        self.gl.num_warps = lambda: warps
        self.gl.to_tensor = lambda value: tl.full(
            [], value, tl.float32 if isinstance(value, float) else tl.int32
        )
        self.gl.static_range = lambda count: range(plain(count))
        self.gl.arange = lambda start, end, layout: tl.arange(plain(start), plain(end))  # noqa: ARG005
        self.gl.full = lambda shape, value, kind, layout: tl.full(  # noqa: ARG005
            [plain(one) for one in shape], value, plain(kind)
        )
        self.gl.convert_layout = lambda tensor, layout: tensor  # noqa: ARG005
        self.gl.allocate_shared_memory = self.allocate
        self.gl.inline_asm_elementwise = lambda text, *rest: assembly[plain(text)](*rest[1])
        self.reinterpret = Memory.reinterpret
        self.tma = types.SimpleNamespace(store_wait=lambda pendings: None)  # noqa: ARG005
        self.async_copy = types.SimpleNamespace(
            commit_group=lambda: self.copies.append([]),
            wait_group=self.wait_for_copies,
        )
        self.mbarrier = types.SimpleNamespace(
            init=lambda barrier, count: None,  # noqa: ARG005
            expect=self.expect,
            wait=lambda barrier, parity: barrier.wait(number(parity)),
            MBarrierLayout=lambda: Barrier,
        )
        self.fence_async_shared = lambda: None

    def allocate(self, kind: Any, shape: Any, layout: Any) -> Any:
        shape = [plain(one) for one in shape]
        if layout is Barrier:
            return Barrier() if len(shape) == 1 else Barriers(shape[0])
        whole = np.full(int(np.prod(shape)), np.nan, NUMBERS[plain(kind)])
        return Memory(plain(kind), whole.reshape(shape), whole)

    @staticmethod
    def tma_load(tiles: TileMap, place: list[Any], barrier: Barrier, into: Memory) -> None:
        into.values[...] = np.nan
        barrier.brought.append((into, tiles.take(place)))

    @staticmethod
    def tma_store(tiles: TileMap, place: list[Any], memory: Memory) -> None:
        tiles.put(place, memory.values)

    def async_load(self, into: Memory, pointers: Any) -> None:
        into.values[...] = np.nan
        self.copies[-1].append((into, tl.load(pointers).handle.data))

    def wait_for_copies(self, outstanding: Any) -> None:
        """Until so many groups of copies are on their way."""
        while len(self.copies) > plain(outstanding) + 1:
            for into, values in self.copies.pop(0):
                into.values[...] = values

    @staticmethod
    def expect(barrier: Barrier, size: Any) -> None:
        assert barrier.expected is None, "expected twice"
        barrier.expected = plain(size)

    def warpgroup_mma(self, a: Any, b: Memory, acc: Any, *, use_acc: Any, is_async: bool) -> Product:
        assert is_async
        before = acc.values if isinstance(acc, Product) else acc.handle.data
        left = a.values if isinstance(a, Memory) else a.handle.data

        def compute() -> np.ndarray:
            product = left.astype(np.float32) @ b.values.astype(np.float32)
            return product + before if plain(use_acc) else product

        self.running.append(Product(compute, compute()))
        return self.running[-1]

    def warpgroup_mma_wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        assert outstanding == 0
        for product in self.running:
            product.check()
        self.running = []
        done = tuple(to_tensor(one.values, tl.float32) if isinstance(one, Product) else one for one in deps)
        return done if len(done) > 1 else done[0]

    @staticmethod
    def warpgroup_mma_init(value: Any) -> Any:
        return value

    @staticmethod
    def mma_v2(a: Any, b: Any, acc: Any) -> Any:
        return tl.dot(a, b, acc)


class OnCpu:
    """A kernel in Gluon, launched like any other; ``assembly`` has a function for each text of assembly."""

    def __init__(self, kernel: GluonJITFunction, assembly: dict[str, Callable[..., Any]]) -> None:
        self.kernel, self.assembly = kernel, assembly
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **_: Any) -> None:
            scope = _scope(self.kernel, Hopper(num_warps, self.assembly))
            maps = [TileMap(one) if isinstance(one, TensorDescriptor) else one for one in arguments]
            _interpreted(self.kernel, scope).run(*maps, grid=grid, warmup=False)

        return launch


def _scope(kernel: GluonJITFunction, hopper: Hopper) -> dict[str, Any]:
    """A kernel's globals, with Gluon's operations replaced, and in functions of other modules too."""
    scope = dict(kernel.fn.__globals__)
    for name, value in list(scope.items()):
        if name in OPERATIONS:
            scope[name] = getattr(hopper, name)
        elif isinstance(value, GluonJITFunction):
            elsewhere = value.fn.__globals__ is not kernel.fn.__globals__
            scope[name] = _interpreted(value, _scope(value, hopper) if elsewhere else scope)
    return scope


def _interpreted(function: GluonJITFunction, scope: dict[str, Any]) -> InterpretedFunction:
    """The function with other globals."""
    original = function.fn
    copy = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__module__ = original.__module__
    return InterpretedFunction(copy)
