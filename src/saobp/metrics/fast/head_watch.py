"""Numbers of the fast tier, gathered for every head over the forwards of a model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from saobp.metrics.fast.fast_statistics import FAST, statistics_of
from saobp.metrics.health.head_health import HeadHealth
from saobp.propagation.row_statistics import RowSums

MAX_PENDING = 1024
"""Calls whose sums are kept before they are added up, many at once: that takes fewer kernels."""


class LayerTotals:
    """Over all texts of a layer: largest logit ``[heads]``, sums of other means and texts ``[heads, 5]``."""

    def __init__(self, top: Tensor, sums: Tensor) -> None:
        self.top, self.sums = top, sums

    def add(self, top: Tensor, sums: Tensor) -> None:
        self.top, self.sums = torch.maximum(self.top, top), self.sums + sums


class HeadWatch:
    """What ``watch`` has gathered so far; updated as the model runs, readable at any time.

    ``max_logit`` is the largest over all texts, the other statistics are means over texts.
    """

    statistics = FAST

    def __init__(self) -> None:
        self.forwards = 0
        self.skipped: set[str] = set()
        self._totals: dict[str, LayerTotals] = {}
        self._pending: list[tuple[str, RowSums]] = []

    def __bool__(self) -> bool:
        return bool(self._totals or self._pending)

    @property
    def layers(self) -> dict[str, LayerTotals]:
        """Totals by layer name, first layer first."""
        order = [name for name, _ in self._pending if name not in self._totals]
        alike: dict[tuple[torch.Size, torch.Size], list[tuple[str, RowSums]]] = {}
        for name, pending in self._pending:
            alike.setdefault((pending.top.shape, pending.sums.shape), []).append((name, pending))
        self._pending = []
        added: dict[str, LayerTotals] = {}
        for group in alike.values():
            together = RowSums(
                *(
                    torch.stack(parts)
                    for parts in zip(*(layer_totals for _, layer_totals in group), strict=True)
                )
            )
            values, counted = statistics_of(together), together.sums[..., 4].sum(-1) > 0
            means = torch.cat([values[..., 1:], torch.ones_like(values[..., :1])], -1)
            tops, sums = values[..., 0].amax(1), torch.where(counted[..., None], means, 0.0).sum(1)
            for (name, _), top, layer_sums in zip(group, tops, sums, strict=True):
                totals = self._totals if name in self._totals else added
                if name in totals:
                    totals[name].add(top, layer_sums)
                else:
                    added[name] = LayerTotals(top, layer_sums)
        self._totals |= {name: added[name] for name in dict.fromkeys(order)}
        return self._totals

    def add(self, name: str, found: RowSums) -> None:
        self._pending.append((name, found))
        if len(self._pending) >= MAX_PENDING:
            _ = self.layers

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._totals, self._pending, self.forwards = {}, [], 0

    def reduced(self) -> HeadWatch:
        """Over the processes of a distributed run, by two packed all-reduces; all must take part."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized() or not self:
            return self
        layers = self.layers
        names = sorted(layers)
        tops = torch.cat([layers[name].top for name in names])
        sums = torch.cat([layers[name].sums for name in names])
        distributed.all_reduce(tops, op=distributed.ReduceOp.MAX)
        distributed.all_reduce(sums)
        whole, heads = copy.deepcopy(self), [len(layers[name].top) for name in names]
        for name, top, layer_sums in zip(names, tops.split(heads), sums.split(heads), strict=True):
            whole._totals[name] = LayerTotals(top, layer_sums)
        return whole

    def max_logits(self) -> dict[str, Tensor]:
        """Largest logit of each head, ``[heads]`` on the model's device, by layer name."""
        return {name: totals.top for name, totals in self.layers.items()}

    def values(self, statistic: str) -> dict[str, Tensor]:
        """One statistic per head, ``[heads]`` on the CPU, by layer name."""
        if statistic not in FAST:
            raise ValueError(f"{statistic!r} was not measured: there is {', '.join(FAST)}")
        index = FAST.index(statistic)
        return {name: _means(totals)[:, index].cpu() for name, totals in self.layers.items()}

    def heads(self) -> list[HeadHealth]:
        """Every head measured, first layer first; the verdict, which needs GTD, stays undefined."""
        heads = []
        for layer, (name, totals) in enumerate(self.layers.items()):
            texts = int(totals.sums[:, -1].max())
            for head, values in enumerate(_means(totals).tolist() if texts else []):
                statistics = dict(zip(FAST, values, strict=True))
                heads.append(HeadHealth(layer, name, head, statistics, {}, "undefined", texts))
        return heads

    def cross_layer_gtd(self) -> dict[str, float]:
        """Empty: only :func:`saobp.probe` measures it."""
        return {}


def _means(totals: LayerTotals) -> Tensor:
    """FAST statistics ``[heads, 5]``."""
    return torch.cat([totals.top[:, None], totals.sums[:, :4] / totals.sums[:, 4:].clamp(min=1)], -1)
