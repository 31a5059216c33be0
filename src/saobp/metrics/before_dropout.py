"""Attention maps as they are before dropout, for models that return them after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class BeforeDropout(TorchFunctionMode):
    """Remembers what dropout was applied to, of anything shaped like a map, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (functional.dropout, torch.dropout):
            given = args[0] if args else (kwargs or {})["input"]
            if given.ndim > 2 and given.shape[-1] == given.shape[-2] and result is not given:
                self._inputs[result.data_ptr()] = result, given
        return result

    def of(self, rows: Tensor) -> Tensor:
        """The map ``[batch, heads, length, length]`` that dropout turned into ``rows``; else ``rows``."""
        dropped, given = self._inputs.get(rows.data_ptr(), (None, rows))
        if dropped is None or dropped.numel() != rows.numel():
            return rows
        return given if given.shape == rows.shape else given.reshape(rows.shape)
