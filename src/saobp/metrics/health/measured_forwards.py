"""Which forwards of a model are measured, and the ``with`` block in which that happens."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from saobp.refinement import check_count

Found = TypeVar("Found")


class WithBlock(AbstractContextManager[Found]):
    """What ``saobp.probe`` and ``saobp.watch`` return: measures inside a ``with`` block only."""

    def __init__(self, block: AbstractContextManager[Found], call: str) -> None:
        self._block, self._call = block, call

    def __enter__(self) -> Found:
        return self._block.__enter__()

    def __exit__(self, *problem: Any) -> bool | None:
        return self._block.__exit__(*problem)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._call} measures inside a with block, which gives what has {name!r}: "
            f"with {self._call} as health: ..."
        )


@contextmanager
def forwards_of(
    model: nn.Module, measuring: Callable[[], AbstractContextManager[None]], every: int, observer: str
) -> Iterator[None]:
    """Enter ``measuring`` around each ``every``-th forward; ``observer`` warns if there was none."""
    check_count("every", every)
    forwards = ForwardHooks(measuring, every)
    with forwards.of(model):
        yield
    if not forwards.seen:
        warnings.warn(
            f"{observer} saw no forward: run the very model that it was given, compiled or not", stacklevel=6
        )


class ForwardHooks:
    """Enters ``measuring`` around each ``every``-th call of a model.

    Calls of another thread meanwhile are not measured.
    """

    def __init__(self, measuring: Callable[[], AbstractContextManager[None]], every: int) -> None:
        self.measuring, self.every, self.seen = measuring, every, 0
        self._open: dict[int, list[ExitStack]] = {}
        self._measuring = False

    def __deepcopy__(self, _: object) -> ForwardHooks:
        """Hooks that do nothing: a copy of the model made meanwhile, which keeps them, is not measured."""
        return ForwardHooks(nullcontext, 1)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Hooks a model; one compiled in place is wrapped, since hooks would run inside its compiled call."""
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is not None:
            model.__dict__["_compiled_call_impl"] = self._around(compiled)
            try:
                yield
            finally:
                model.__dict__["_compiled_call_impl"] = compiled
            return
        handles = [
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before()
            try:
                return compiled(*args, **kwargs)
            finally:
                self._after()

        return call

    def _before(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._open.setdefault(threading.get_ident(), [])
        calls.append(ExitStack())
        if len(calls) == 1:
            self.seen += 1
            if (self.seen - 1) % self.every == 0 and not self._measuring:
                calls[0].enter_context(self._alone())
                calls[0].enter_context(self.measuring())

    def _after(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._open.get(threading.get_ident())
        if calls:
            calls.pop().close()
        if not calls:
            self._open.pop(threading.get_ident(), None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False
