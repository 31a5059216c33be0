"""Attention health in training logs, for any tracker and any training loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from saobp.metrics.health.head_health import CROSS_LAYER, HeadHealth, Health
from saobp.metrics.health.verdicts import ALARMING, Verdict

LISTED = 8
"""Heads named in a warning line; the others are counted."""

logger = logging.getLogger("saobp")


def health_metrics(health: Health, prefix: str = "health") -> dict[str, float]:
    """Flat numbers for a tracker: each statistic per layer and over all heads, and heads per verdict.

    Verdicts need GTD.
    """
    heads = health.heads()
    if not heads:
        return {}
    logs: dict[str, float] = {}
    for statistic in health.statistics:
        for layer, name in enumerate(health.layers):
            own = [head.values[statistic] for head in heads if head.name == name]
            if own:
                logs[f"{prefix}/layer_{layer:02d}/{statistic}"] = sum(own) / len(own)
        logs[f"{prefix}/{statistic}"] = sum(head.values[statistic] for head in heads) / len(heads)
    places = {name: layer for layer, name in enumerate(health.layers)}
    for name, value in health.cross_layer_gtd().items():
        logs[f"{prefix}/layer_{places[name]:02d}/{CROSS_LAYER}"] = value
    for verdict in ("localised", "sink", "diffuse") if "gtd" in health.statistics else ():
        logs[f"{prefix}/{verdict}_heads"] = float(sum(head.verdict == verdict for head in heads))
    return logs


class HealthLog:
    """Sends health to a tracker and warns of heads that leave the healthy range.

    ``log`` takes a dict of numbers and the step: ``accelerator.log``, ``wandb.log`` and ``trackio.log`` do.
    ``untrained`` says that the model starts from random weights, whose attention is diffuse: then only heads
    that were in the healthy range can leave it.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], Any],
        prefix: str = "health",
        *,
        untrained: bool = False,
    ) -> None:
        self.log, self.prefix, self.untrained = log, prefix, untrained
        self._before: dict[tuple[str, int], Verdict] = {}
        self._healthy: set[tuple[str, int]] = set()

    def __call__(self, health: Health, step: int) -> None:
        """Sum over processes, log, warn, and reset; all processes of a run must call it together."""
        if not health:
            return
        total = health.reduced()
        heads = total.heads()
        line = self._warning(heads, step)
        if line and _is_main_process():
            logger.warning(line)
        self.log(health_metrics(total, self.prefix), step)
        health.reset()

    def _warning(self, heads: list[HeadHealth], step: int) -> str:
        judged = [head for head in heads if _is_judged(head)]
        left = [
            head
            for head in judged
            if head.verdict in ALARMING
            and self._before.get((head.name, head.head)) != head.verdict
            and (not self.untrained or head.verdict == "undefined" or (head.name, head.head) in self._healthy)
        ]
        self._healthy |= {(head.name, head.head) for head in heads if head.verdict == "healthy"}
        self._before = {(head.name, head.head): head.verdict for head in judged}
        if not left:
            return ""
        named = [f"layer {head.layer} head {head.head} {_in_words(head)}" for head in left[:LISTED]]
        more = f" and {len(left) - LISTED} more" if len(left) > LISTED else ""
        which = f"{len(left)} of {len(heads)} heads: {', '.join(named)}{more}"
        return f"attention health at step {step}: newly outside the healthy range are {which}"


def _is_judged(head: HeadHealth) -> bool:
    """Whether its verdict is meaningful: without GTD only ``not finite`` is."""
    return "gtd" in head.values or not all(map(math.isfinite, head.values.values()))


def _in_words(head: HeadHealth) -> str:
    return f"{head.verdict} (GTD {head.values['gtd']:.2f})" if "gtd" in head.values else head.verdict


def _is_main_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
