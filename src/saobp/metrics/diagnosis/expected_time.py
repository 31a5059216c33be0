"""Progress of a diagnosis, layer by layer, and the time that it will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from saobp.metrics.diagnosis.text_batches import Note
from saobp.transformers.apply import uses_registry

ANNOUNCED_FROM = 3.0
"""Seconds from which the expected time is announced."""
GROWTH = 1.5
"""Exponent by which the time of a text is taken to grow with its length: between products and maps."""
TIMED_LAYER = 2
"""Layer of the first text, the longest, by which the expected time is told; in the first, tables are made."""


class ExpectedTime:
    """Forwards progress, in texts and parts of texts, and reports the expected time once it can be estimated.

    ``layers`` is the number of self-attentions in a forward.
    """

    def __init__(
        self, encoded: Sequence[Tensor], layers: int, progress: Callable[[float], object], note: Note
    ) -> None:
        self.lengths, self.layers = [len(ids) for ids in encoded], max(1, layers)
        self.progress, self.note, self.start, self.announced = progress, note, monotonic(), False
        self._texts, self._layers_done, self._passed_on, self._layer_before = 0, 0, 0.0, self.start

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Count the layers of the forwards inside this context, if they use the attention registry."""
        modules = [module for module in model.modules() if uses_registry(type(module))]
        handles = [module.register_forward_hook(self._layer) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, texts: int) -> None:
        """Before the forward of a batch."""
        self._texts, self._layers_done, self._passed_on = texts, 0, 0.0

    def end(self) -> None:
        """After it."""
        self._announce(monotonic() - self.start, 1.0)
        self.progress(self._texts - self._passed_on)

    def _layer(self, *_: Any) -> None:
        self._layers_done += 1
        if self._layers_done >= self.layers:  # cross-attention counts too, so there may be more
            return
        self._passed_on += self._texts / self.layers
        self.progress(self._texts / self.layers)
        if not self.announced and self._layers_done == TIMED_LAYER:
            self._announce((monotonic() - self._layer_before) * self.layers, TIMED_LAYER / self.layers)
        self._layer_before = monotonic()

    def _announce(self, first: float, done: float) -> None:
        """Report the remaining time once, from the seconds of the first text and the share of it done."""
        if self.announced:
            return
        self.announced = True
        longest = self.lengths[0]
        seconds = first * (sum((length / longest) ** GROWTH for length in self.lengths) - done)
        if seconds >= ANNOUNCED_FROM:
            count, tokens = len(self.lengths), sum(self.lengths)
            time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            self.note(f"measuring {count} text{'s' if count > 1 else ''}, {tokens:,} tokens: about {time}")
