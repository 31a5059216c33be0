"""Cached decoding: the summed log messages of earlier rows are stored in the key-value cache.

Each cache layer is replaced by one that also stores ``[steps, batch, heads, keys]`` and updates it like its
keys: beam reordering, repeating, selecting, cropping, resetting and the eviction of a sliding window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

if TYPE_CHECKING:
    from saobp.transformers.cached_attention import Prefill

MAX_CROPPED_ROWS = 128
"""Rows that ``crop`` can remove from a cache which records its past."""
ROWS_PER_CHUNK = 1024
"""Rows of a prompt refined at a time, which bounds the map in memory."""


class MessageCacheLayer(ABC):
    """Mixin for a cache layer: the sum of all rows' log messages about each key.

    totals:    ``[steps, batch, heads, keys]`` for the keys that the layer holds
    past:      the same for the keys of the current call, perhaps without its new ones, whose sums are 0; None
               in the first call
    filled_by: the refinement of these messages, in text form
    stale:     keys were added without their rows' messages, so ``totals`` is out of date
    prefill:   a first call whose messages are not computed yet; only a later call needs them
    snapshots: with ``record_past``, totals before and after each of the last rows, for ``crop``
    """

    totals: Tensor | None = None
    past: Tensor | None = None
    snapshots: tuple[Tensor | None, ...] = ()
    filled_by: str | None = None
    prefill: Prefill | None = None
    record_past: bool = False
    stale: bool = False
    keys: Tensor | None
    get_seq_length: Callable[[], int]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.flush()
        before = self._length_before()
        states = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if not self.stale:
            self._align(before, key_states.shape[-2], states[0].shape[-2])
        self.stale = True
        return states

    def past_of(self, keys: int) -> Tensor | None:
        """``past`` for so many keys."""
        if self.past is None or self.past.shape[-1] == keys:
            return self.past
        return functional.pad(self.past, (0, keys - self.past.shape[-1]))

    def check_refinement(self, text: str) -> None:
        """Raises if messages of another refinement are stored."""
        if self.filled_by is None:
            self.filled_by = text
        elif not torch.compiler.is_compiling() and self.filled_by != text:
            raise ValueError(
                f"this cache was filled under another refinement ({self.filled_by}), whose messages are "
                "other ones: start from an empty cache"
            )

    def defer(self, prefill: Prefill) -> None:
        """Defer the messages of a first call: training and scoring never need them."""
        self.prefill = prefill
        self.stale = False

    def flush(self) -> None:
        """Compute deferred messages."""
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            prefill.compute_messages(self)

    def __getstate__(self) -> dict[str, Any]:
        """Copies, pickles and exported inputs hold tensors and plain values, never a deferred call."""
        self.flush()
        return self.__dict__

    def row_chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Chunks of rows to refine at a time: single rows if ``crop`` may remove them."""
        single = min(rows, MAX_CROPPED_ROWS) if self.record_past else 0
        start = 0
        while start < rows:
            stop = min(start + ROWS_PER_CHUNK, rows - single) if start < rows - single else start + 1
            yield start, stop
            start = stop

    @abstractmethod
    def store(self, history: list[Tensor]) -> None:
        """Store totals, given after each chunk of the call's rows; the last is current."""

    def _length_before(self) -> int:
        return 0

    @abstractmethod
    def _align(self, before: int, new: int, returned: int) -> None:
        """Extend or evict totals to match the keys that an update returned."""

    def _change_totals(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the totals and their snapshots."""
        if self.totals is not None:
            self.totals = change(self.totals)
        self.snapshots = tuple(None if past is None else change(past) for past in self.snapshots)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.flush()
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._change_totals(lambda totals: totals.index_select(1, beam_idx.to(totals.device)))

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.stale = False
        self.past = self.prefill = self.filled_by = None
        self.snapshots = ()


class DynamicMessages(MessageCacheLayer):
    """For layers that grow by concatenation, with or without a sliding window."""

    evicted: Tensor | None = None
    values: Tensor | None
    is_initialized: bool

    def _align(self, before: int, new: int, returned: int) -> None:  # noqa: ARG002
        if self.totals is None:
            return
        unseen = self.totals.shape[-1] + new - returned
        self.evicted, self.past = self.totals[..., :unseen], self.totals[..., unseen:]

    def store(self, history: list[Tensor]) -> None:
        assert self.keys is not None
        evicted = self.evicted
        self.evicted = self.past = None
        if evicted is not None and evicted.shape[-1]:
            history = [torch.cat([evicted, totals], -1) for totals in history]
        if self.record_past:
            recorded = (self.snapshots or (self.totals,)) + _row_totals(history)
            self.snapshots = recorded[-MAX_CROPPED_ROWS - 1 :]
        else:
            self.snapshots = ()
        self.totals = history[-1][..., -self.keys.shape[-2] :]
        self.stale = False

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        self.flush()
        before = self.get_seq_length()
        super().crop(tokens_to_remove)  # type: ignore[misc]
        after = self.get_seq_length()
        removed = before - after
        if after == 0:
            self.totals, self.snapshots = None, ()
            return
        if removed:
            if removed >= len(self.snapshots):
                self.stale = True
                raise ValueError(
                    f"cannot take back {removed} rows: only a cache on which activate_past_recording() "
                    f"was called remembers how, for up to {MAX_CROPPED_ROWS} rows; run the prompt again"
                )
            self.snapshots = self.snapshots[:-removed]
            self.totals = self.snapshots[-1]
        if self.totals is not None and self.keys is not None:
            self.totals = self.totals[..., -self.keys.shape[-2] :]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.flush()
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._change_totals(lambda totals: totals.repeat_interleave(repeats, dim=1))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.flush()
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._change_totals(lambda totals: totals[:, indices])

    def reset(self) -> None:
        super().reset()
        self.totals = self.evicted = None
        self.keys = self.values = None  # older versions of Transformers only zero them
        self.is_initialized = False


class StaticMessages(MessageCacheLayer):
    """For preallocated layers: one tensor, updated in place, so that compiled steps keep its address."""

    def _align(self, before: int, new: int, returned: int) -> None:  # noqa: ARG002
        self.past = self.totals

    def store(self, history: list[Tensor]) -> None:
        assert self.keys is not None
        updated = history[-1][..., -self.keys.shape[-2] :]
        if self.totals is None:
            self.totals = updated.clone()
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.totals)
        else:
            self.totals.copy_(updated)
        self.past = None
        self.stale = False

    def reset(self) -> None:
        super().reset()
        if self.totals is not None:
            self.totals.zero_()


class MessageDynamicLayer(DynamicMessages, DynamicLayer):
    pass


class MessageSlidingLayer(DynamicMessages, DynamicSlidingWindowLayer):
    pass


class MessageStaticLayer(StaticMessages, StaticLayer):
    pass


class MessageStaticSlidingLayer(StaticMessages, StaticSlidingWindowLayer):
    def _length_before(self) -> int:
        return self.cumulative_length_int

    def _align(self, before: int, new: int, returned: int) -> None:
        if self.totals is None or before + new <= self.max_cache_len:
            self.past = self.totals
        elif before >= self.max_cache_len:
            self.past = functional.pad(self.totals[..., 1:], (0, new))
        else:
            self.past = functional.pad(self.totals[..., :before], (0, returned - before))


_LAYER_TYPES: dict[type, Any] = {
    DynamicLayer: MessageDynamicLayer,
    DynamicSlidingWindowLayer: MessageSlidingLayer,
    StaticLayer: MessageStaticLayer,
    StaticSlidingWindowLayer: MessageStaticSlidingLayer,
}


def cache_layer(cache: Cache, index: int) -> Any:
    """The cache's layer of that index; created if the cache is lazy."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


def message_layer(cache: Cache, index: int) -> MessageCacheLayer:
    """The cache's layer of that index, replaced on first use by one that also stores messages."""
    layer = cache_layer(cache, index)
    if isinstance(layer, MessageCacheLayer):
        return layer
    kind = _LAYER_TYPES.get(type(layer))
    if kind is None:
        raise ValueError(
            f"saobp cannot carry its messages in a {type(layer).__name__} of a {type(cache).__name__}: use a "
            "DynamicCache or StaticCache, or generate with use_cache=False"
        )
    if holds_keys(layer):
        raise ValueError(
            "this cache was filled by another attention implementation, so the messages of its rows are "
            "unknown: start from an empty cache, or generate with use_cache=False"
        )
    replacement = kind.__new__(kind)
    replacement.__dict__.update(layer.__dict__)
    if getattr(cache, "saobp_records_past", False):
        replacement.record_past = True
    cache.layers[index] = replacement
    return replacement


def holds_keys(layer: Any) -> bool:
    """Whether a cache layer has keys; a compiled call cannot inspect a static one and assumes so."""
    if not layer.is_initialized:
        return False
    if isinstance(layer, StaticLayer) and torch.compiler.is_compiling():
        return True
    return bool(layer.get_seq_length() > 0)


def patch_past_recording() -> None:
    """Make caches store that their past is recorded, for layers created later or that ignore it."""
    activate = Cache.activate_past_recording
    if hasattr(activate, "saobp"):
        return

    def activate_past_recording(self: Cache) -> None:
        self.saobp_records_past = True  # type: ignore[attr-defined]
        activate(self)

    activate_past_recording.saobp = True  # type: ignore[attr-defined]
    activate_past_recording.__doc__ = activate.__doc__
    Cache.activate_past_recording = activate_past_recording  # type: ignore[method-assign]


def _row_totals(history: list[Tensor]) -> tuple[Tensor, ...]:
    """Totals after each single row, cut at that row's own key, newest last."""
    last = len(history) - 1
    return tuple(totals[..., : totals.shape[-1] - (last - row)] for row, totals in enumerate(history))
