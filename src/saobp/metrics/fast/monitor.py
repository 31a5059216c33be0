"""The fast tier on a model as it runs: no eager attention, no maps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from saobp.metrics.attention_inputs import check_options, is_cross_attention
from saobp.metrics.fast.fast_statistics import FIRST, check_first, padded_rows, sweep
from saobp.metrics.fast.head_watch import HeadWatch
from saobp.metrics.health.measured_forwards import WithBlock, forwards_of
from saobp.metrics.health.recorder import layer_name
from saobp.metrics.observed_attention import has_registry_attention
from saobp.propagation.row_statistics import RowMask
from saobp.refinement import check_count
from saobp.transformers.apply import other_attention
from saobp.transformers.capture import AttentionCall, Watcher
from saobp.transformers.masks import SEEN_BY_PADDING, read_mask


def watch(
    model: nn.Module, *, every: int = 1, texts: int | None = None, first: int = FIRST
) -> AbstractContextManager[HeadWatch]:
    """Context manager that measures largest logit, entropy and sinks of every head; yields a HeadWatch.

    For any attention implementation, with padding, windows, packed sequences and calls with a cache.
    With ``every=n`` only each n-th forward is measured, with ``texts=n`` the first n of a batch; ``first``
    is the k of ``sink_share_first_k``. Numbers of a refined model are those of its rows before refinement.
    Measured forwards of a compiled model run eagerly.
    """
    return WithBlock(_watching(Monitor(model, texts, first), model, every), "saobp.watch(model)")


@contextmanager
def _watching(monitor: Monitor, model: nn.Module, every: int) -> Iterator[HeadWatch]:
    with forwards_of(model, monitor.measuring, every, "watch"):
        yield monitor.health


class Monitor:
    """Sweeps over the queries and keys of a model's attention calls inside ``measuring()``."""

    def __init__(self, model: nn.Module, texts: int | None = None, first: int = FIRST) -> None:
        if texts is not None:
            check_count("texts", texts)
        check_first(first)
        self.texts, self.first = texts, first
        self.health = HeadWatch()
        if isinstance(model, nn.Module) and not has_registry_attention(model) and other_attention(model):
            raise ValueError(
                f"{type(model).__name__} computes its attention without Transformers' attention registry, so "
                "saobp.watch cannot reach it: saobp.probe measures such models from the maps that they return"
            )
        self._watcher = Watcher(model, self._record)
        self.health.skipped |= self._watcher.left_out
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
        sums = sweep(query, key, value, mask, call.scaling, self.first)
        self.health.add(layer_name(call.name, self._calls), sums)

    def _mask(self, call: AttentionCall) -> RowMask:
        """The call's mask, read once for all layers that share it."""
        if call.mask is None:
            return row_mask_of(call)
        key = (id(call.mask), call.query.shape[-2], call.key.shape[-2], call.sliding_window or 0)
        if key not in self._masks:
            self._masks[key] = call.mask, row_mask_of(call)
        return self._masks[key][1]


ROWS_AT_ONCE = 256


def row_mask_of(call: AttentionCall) -> RowMask:
    """The mask of a call, whose meaning depends on the attention implementation."""
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if call.sequences is not None and (call.mask is None or _is_2d(call.mask)):
        starts, ends = sequence_limits(call.sequences)
        return RowMask(call.is_causal, call.window, starts=starts, ends=ends)
    if call.mask is None:
        # A missing mask of eager attention hides nothing; sdpa then hides later keys itself.
        causal = call.is_causal and call.implementation != "eager" and queries > 1
        if causal and queries != keys and not call.knows_window:
            return RowMask(
                entries=torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device).tril()
            )
        return RowMask(causal, call.window)
    if _is_2d(call.mask):
        return padded_rows(call.mask[:, -keys:].bool(), queries, causal=call.is_causal, window=call.window)
    read_mask(
        call.mask[..., :1, :] if isinstance(call.mask, Tensor) else call.mask, 1, keys
    )  # checks its form
    entries = call.mask[..., :keys]
    seen, rows = _columns_seen(entries), None
    if entries.dtype == torch.int8:
        rows = ~(entries == SEEN_BY_PADDING).any(-1).any(1)
    elif queries == keys:
        rows = seen
    batch = len(call.query)
    starts = seen.int().argmax(-1).int().expand(batch)
    if rows is None:
        return RowMask(entries=entries, starts=starts)
    return RowMask(
        entries=entries, starts=starts, real_keys=seen.expand(batch, -1), real_rows=rows.expand(batch, -1)
    )


def first_texts(mask: RowMask, texts: int) -> RowMask:
    """The mask of the first ``texts`` texts of a batch."""
    parts: dict[str, Any] = {
        name: part[:texts] for name, part in vars(mask).items() if isinstance(part, Tensor)
    }
    return replace(mask, **parts)


def sequence_limits(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """First token, and token after the last, of each token's sequence: int32 ``[batch, length]`` each."""
    length = sequences.shape[-1]
    positions = torch.arange(length, device=sequences.device)
    begins = functional.pad(sequences.diff(dim=-1) != 0, (1, 0), value=True)
    starts = torch.where(begins, positions, 0).cummax(-1).values
    after = torch.where(functional.pad(begins[:, 1:], (0, 1), value=True), positions + 1, length)
    ends = after.flip(-1).cummin(-1).values.flip(-1)
    return starts.int(), ends.int()


def _columns_seen(entries: Tensor) -> Tensor:
    """Keys that any row sees, bool ``[batch or 1, keys]``, some rows at a time."""
    lowest = torch.finfo(entries.dtype).min / 2 if entries.is_floating_point() else 0
    visible = None
    for rows in entries.split(ROWS_AT_ONCE, -2):
        seen = (rows > lowest).any(-2).any(1)
        visible = seen if visible is None else visible | seen
    assert visible is not None
    return visible


def _is_2d(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 2
