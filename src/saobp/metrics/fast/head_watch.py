"""Numbers of the fast tier, gathered for every head over the forwards of a model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from saobp.metrics.fast.fast_statistics import FAST, statistics_of
from saobp.metrics.health.head_health import HeadHealth
from saobp.propagation.row_statistics import RowSums

MAX_PENDING = 32
"""Calls of a layer whose sums are kept before they are added up: adding costs several small kernels."""


class LayerTotals:
    """Over all texts of one layer: the largest logit ``[heads]``, sums of the other means, and the texts."""

    def __init__(self) -> None:
        self.pending: list[RowSums] = []
        self._top: Tensor | None = None
        self._sums: Tensor | None = None

    def add(self, found: RowSums) -> None:
        self.pending.append(found)
        if len(self.pending) >= MAX_PENDING:
            self.totals()

    def totals(self) -> tuple[Tensor, Tensor]:
        """Largest logit ``[heads]``, and per head the sums of four means and the texts, ``[heads, 5]``."""
        if self.pending:
            found = RowSums(*(torch.cat(parts) for parts in zip(*self.pending, strict=True)))
            self.pending.clear()
            values, counted = statistics_of(found), found.sums[..., 4] > 0
            top = torch.where(counted, values[..., 0], float("-inf")).amax(0)
            means = torch.cat([values[..., 1:], torch.ones_like(values[..., :1])], -1)
            sums = torch.where(counted[..., None], means, 0.0).sum(0)
            self._top = top if self._top is None else torch.maximum(self._top, top)
            self._sums = sums if self._sums is None else self._sums + sums
        assert self._top is not None
        assert self._sums is not None
        return self._top, self._sums

    def replace(self, top: Tensor, sums: Tensor) -> None:
        self._top, self._sums = top, sums


class HeadWatch:
    """What ``watch`` has gathered so far; updated as the model runs, readable at any time.

    ``max_logit`` is the largest over all texts, the other statistics are means over texts.
    """

    statistics = FAST

    def __init__(self) -> None:
        self.layers: dict[str, LayerTotals] = {}
        self.forwards = 0
        self.skipped: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.layers)

    def add(self, name: str, found: RowSums) -> None:
        if name not in self.layers:
            self.layers[name] = LayerTotals()
        self.layers[name].add(found)

    def reset(self) -> None:
        """Forget everything measured so far."""
        self.layers = {}
        self.forwards = 0

    def reduced(self) -> HeadWatch:
        """Over the processes of a distributed run, by two packed all-reduces; all must take part."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized() or not self.layers:
            return self
        names = sorted(self.layers)
        totals = [self.layers[name].totals() for name in names]
        tops, sums = torch.cat([top for top, _ in totals]), torch.cat([sums for _, sums in totals])
        distributed.all_reduce(tops, op=distributed.ReduceOp.MAX)
        distributed.all_reduce(sums)
        whole, heads = copy.deepcopy(self), [len(top) for top, _ in totals]
        for name, top, own in zip(names, tops.split(heads), sums.split(heads), strict=True):
            whole.layers[name].replace(top, own)
        return whole

    def max_logits(self) -> dict[str, Tensor]:
        """Largest logit of each head, ``[heads]`` on the model's device, by layer name."""
        return {name: totals.totals()[0] for name, totals in self.layers.items()}

    def values(self, statistic: str) -> dict[str, Tensor]:
        """One statistic per head, ``[heads]`` on the CPU, by layer name."""
        if statistic not in FAST:
            raise ValueError(f"{statistic!r} was not measured: there is {', '.join(FAST)}")
        place = FAST.index(statistic)
        return {name: self._means(name)[:, place].cpu() for name in self.layers}

    def heads(self) -> list[HeadHealth]:
        """Every head measured, first layer first; the verdict, which needs GTD, stays undefined."""
        found = []
        for layer, name in enumerate(self.layers):
            texts = int(self.layers[name].totals()[1][:, -1].max())
            for head, values in enumerate(self._means(name).tolist() if texts else []):
                own = dict(zip(FAST, values, strict=True))
                found.append(HeadHealth(layer, name, head, own, {}, "undefined", texts))
        return found

    def cross_layer_gtd(self) -> dict[str, float]:
        """Nothing: it belongs to the thorough tier."""
        return {}

    def _means(self, name: str) -> Tensor:
        top, sums = self.layers[name].totals()
        return torch.cat([top[:, None], sums[:, :4] / sums[:, 4:].clamp(min=1)], -1)
