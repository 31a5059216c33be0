"""The fast tier on a model as it runs: no eager attention, no maps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from saobp.metrics.attention_calls import check_options, is_cross_attention
from saobp.metrics.fast.call_masks import first_texts, row_mask_of
from saobp.metrics.fast.fast_statistics import FIRST, sweep
from saobp.metrics.fast.head_watch import HeadWatch
from saobp.metrics.health.recorder import forwards_of, layer_name
from saobp.propagation.row_statistics import RowMask
from saobp.refinement import check_count
from saobp.transformers.capture import AttentionCall, Watcher


@contextmanager
def watch(
    model: nn.Module, *, every: int = 1, texts: int | None = None, first: int = FIRST
) -> Iterator[HeadWatch]:
    """Measure FAST statistics of every head in each forward inside this context; yields a growing HeadWatch.

    For any attention implementation, with padding, windows, packed sequences and calls with a cache.
    ``every`` measures only each so-many-th forward, ``texts`` only the first texts of each batch; ``first``
    is the k of ``sink_share_first_k``. Numbers of a refined model are those of its rows before refinement.
    Measured forwards of a compiled model run eagerly.
    """
    monitor = Monitor(model, texts, first)
    with forwards_of(model, monitor.measuring, every, "watch"):
        yield monitor.health


class Monitor:
    """Sweeps over the queries and keys of a model's attention calls inside ``measuring()``."""

    def __init__(self, model: nn.Module, texts: int | None = None, first: int = FIRST) -> None:
        if texts is not None:
            check_count("texts", texts)
        if not 1 <= first <= 64:
            raise ValueError(f"first must be between 1 and 64 tokens, not {first}")
        self.texts, self.first = texts, first
        self.health = HeadWatch()
        self._watcher = Watcher(model, self._record)
        self._calls: dict[str, int] = {}
        self._masks: dict[tuple[int, ...], tuple[object, RowMask]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure every forward inside this context; compiled parts run eagerly."""
        self._calls.clear()
        self.health.forwards += 1
        try:
            with torch.compiler.set_stance("force_eager"), self._watcher.watching():
                yield
        finally:
            self._masks.clear()

    def _record(self, call: AttentionCall) -> None:
        if is_cross_attention(call):
            self.health.skipped.add(call.name)
            return
        check_options(call)
        query, key, value, mask = call.query, call.key, call.value, self._mask(call)
        if self.texts is not None:
            query, key, value = (states[: self.texts] for states in (query, key, value))
            mask = first_texts(mask, self.texts)
        found = sweep(query, key, value, mask, call.scaling, self.first)
        self.health.add(layer_name(call.name, self._calls), found)

    def _mask(self, call: AttentionCall) -> RowMask:
        """The call's mask, read once for all layers that share it."""
        if call.mask is None:
            return row_mask_of(call)
        key = (id(call.mask), call.query.shape[-2], call.key.shape[-2], call.sliding_window or 0)
        if key not in self._masks:
            self._masks[key] = call.mask, row_mask_of(call)
        return self._masks[key][1]
