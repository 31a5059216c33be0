"""The self-attention of every layer of a model as it runs: from queries and keys, else from returned maps."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from saobp.metrics.attention_inputs import AttentionInputs, inputs_of
from saobp.metrics.returned_maps import ReturnedMaps
from saobp.transformers.apply import uses_registry
from saobp.transformers.capture import AttentionCall, Watcher

OnLayer = Callable[[str, str, AttentionInputs], object]
"""Called with the name of a layer, the stack of layers that it belongs to, and its attention."""


class ObservedAttention:
    """Calls ``on_layer`` for each self-attention of each forward of ``model`` inside :meth:`observing`.

    A model of the attention registry shows its queries and keys, any other Transformers model the maps that
    it returns (``from_maps``). ``on_skipped`` gets the names of layers that are left out. The first ``texts``
    texts of a batch count.
    """

    def __init__(
        self,
        model: nn.Module,
        on_layer: OnLayer,
        on_skipped: Callable[[str], object] = lambda _: None,
        texts: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"a Transformers model is needed, not {type(model).__name__}")
        self.on_layer, self.on_skipped, self.texts = on_layer, on_skipped, texts
        in_registry = has_registry_attention(model)
        returned = None if in_registry else ReturnedMaps(model, on_layer, on_skipped, texts)
        self._source: Watcher | ReturnedMaps
        self._thread: int | None = None
        if returned is not None and returned.parts:
            self._source = returned
            return
        self._source = Watcher(model, self._on_call)
        for name in self._source.left_out:
            on_skipped(name)

    @property
    def from_maps(self) -> bool:
        return isinstance(self._source, ReturnedMaps)

    def attached(self) -> AbstractContextManager[None]:
        """To be entered before a forward that calls ``observing`` in a hook of its own."""
        return self._source.attached() if isinstance(self._source, ReturnedMaps) else nullcontext()

    def observing(self) -> AbstractContextManager[None]:
        if isinstance(self._source, ReturnedMaps):
            return self._source.observing()
        return self._watching(self._source)

    @contextmanager
    def _watching(self, source: Watcher) -> Iterator[None]:
        self._thread = threading.get_ident()
        with source.watching():
            yield

    def _on_call(self, call: AttentionCall) -> None:
        if threading.get_ident() != self._thread:  # of a forward that is not measured
            return
        heads = inputs_of(call, self.texts, linear=True)
        if heads is None:
            self.on_skipped(call.name)
            return
        self.on_layer(call.name, re.split(r"\.\d+(?:\.|$)", call.name)[0], heads)


def has_registry_attention(model: nn.Module) -> bool:
    """Whether calls of attention can be watched in this model, or in a part of it."""
    return any(uses_registry(type(module)) for module in model.modules())
