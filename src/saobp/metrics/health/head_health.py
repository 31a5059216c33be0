"""Running statistics of every head of a model: sums on the device, read on request."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saobp.metrics.health.verdicts import UniformMap, Verdict, judged
from saobp.metrics.sampling import Estimate

CROSS_LAYER = "cross_layer_gtd"
QUERIES_AND_KEYS, RETURNED_MAPS = "queries and keys", "the maps that the model returns"
"""What heads are measured from: ``Health.measured_from``."""


@dataclass(frozen=True)
class HeadHealth:
    """One head: its layer (in order of execution) and module, its statistics with errors, and the verdict.

    An error is that of the mean over all texts measured; with a single text it is the estimate's own. A
    diagnosis adds what the head looks at: its kind, if it has a known one, and the shares of attention.
    """

    layer: int
    name: str
    head: int
    values: dict[str, float]
    errors: dict[str, float]
    verdict: Verdict
    texts: int
    kind: str | None = None
    shares: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Flat and ready for JSON or a table."""
        errors = {f"{name}_error": value for name, value in self.errors.items()}
        shares = {f"share_{name.replace(' ', '_')}": value for name, value in self.shares.items()}
        return {
            "layer": self.layer,
            "name": self.name,
            "head": self.head,
            "verdict": self.verdict,
            "texts": self.texts,
            **self.values,
            **errors,
            **({"kind": self.kind, **shares} if shares else {}),
        }


class RunningSums:
    """Sums over texts for one layer: value, square, squared error ``[3, statistics, heads]``, and context."""

    def __init__(self, statistics: int, heads: int, device: torch.device) -> None:
        precision = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(3, statistics, heads, dtype=precision, device=device)
        self.context = torch.zeros(6, dtype=precision, device=device)

    def add(self, results: list[Estimate], uniform: UniformMap, across: Tensor | None) -> None:
        """results ``[texts, heads]`` each; across (cross-layer GTD) ``[texts]``."""
        values = torch.stack([result.value for result in results]).to(self.sums.dtype)
        errors = torch.stack([result.standard_error for result in results]).to(self.sums.dtype)
        self.sums += torch.stack([values.sum(1), values.square().sum(1), errors.square().sum(1)])
        texts = torch.tensor(float(values.shape[1]), device=values.device)
        crossed = (
            torch.zeros(2, device=values.device) if across is None else torch.stack([across.sum(), texts])
        )
        sums = [texts, *crossed, *(part.sum() for part in uniform)]
        self.context += torch.stack([one.to(self.context.dtype) for one in sums])


class Health:
    """Statistics a probe has gathered so far; updated as the model runs, readable at any time.

    ``skipped`` names attention that was left out, ``measured_from`` says what the numbers come from.
    """

    def __init__(self, statistics: tuple[str, ...]) -> None:
        self.statistics = statistics
        self.layers: dict[str, RunningSums] = {}
        self.forwards = 0
        self.skipped: set[str] = set()
        self.measured_from = QUERIES_AND_KEYS

    def __bool__(self) -> bool:
        return bool(self.layers)

    def add(
        self, name: str, found: Mapping[str, Estimate], uniform: UniformMap, across: Tensor | None = None
    ) -> None:
        """Add the statistics of some texts, and those of uniform maps under the same mask."""
        results = [found[statistic] for statistic in self.statistics]
        if name not in self.layers:
            self.layers[name] = RunningSums(len(results), results[0].value.shape[-1], results[0].value.device)
        self.layers[name].add(results, uniform, across)

    def reset(self) -> None:
        """Forget everything measured so far."""
        self.layers = {}
        self.forwards = 0

    def reduced(self) -> Health:
        """The sum over the processes of a distributed run, by one packed all-reduce; all must take part.

        All must have measured the same layers, in any order (layers may be dropped at random). Returns itself
        without a process group.
        """
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized() or not self.layers:
            return self
        total = copy.deepcopy(self)
        parts = [part for _, layer in sorted(total.layers.items()) for part in (layer.sums, layer.context)]
        packed = torch.cat([part.flatten() for part in parts])
        distributed.all_reduce(packed)
        for part, summed in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))
        return total

    def heads(self) -> list[HeadHealth]:
        """Every head measured, first layer first; none of a layer that has seen only padding."""
        heads = []
        for layer, (name, totals) in enumerate(self.layers.items()):
            texts, _, _, *uniform = totals.context.tolist()
            if not texts:
                continue
            means, squares, noise = (totals.sums / texts).cpu()
            spread = (squares - means.square()).clamp(min=0) / max(texts - 1, 1)
            errors = (spread if texts > 1 else noise).sqrt()
            for head in range(means.shape[-1]):
                values = dict(zip(self.statistics, means[:, head].tolist(), strict=True))
                heads.append(
                    HeadHealth(
                        layer,
                        name,
                        head,
                        values,
                        dict(zip(self.statistics, errors[:, head].tolist(), strict=True)),
                        judged(values, *(one / texts for one in uniform)),
                        int(texts),
                    )
                )
        return heads

    def values(self, statistic: str) -> dict[str, Tensor]:
        """Mean of one statistic per head, ``[heads]`` on the CPU, by layer name."""
        if statistic not in self.statistics:
            raise ValueError(f"{statistic!r} was not measured: there is {', '.join(self.statistics)}")
        index = self.statistics.index(statistic)
        return {
            name: (totals.sums[0, index] / totals.context[0]).cpu() for name, totals in self.layers.items()
        }

    def cross_layer_gtd(self) -> dict[str, float]:
        """GTD along the depth by layer name, from the second layer on; empty unless requested."""
        contexts = {name: totals.context.tolist() for name, totals in self.layers.items()}
        return {name: across / texts for name, (_, across, texts, *_) in contexts.items() if texts}
