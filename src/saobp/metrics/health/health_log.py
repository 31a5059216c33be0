"""Attention health in training logs, for any tracker and any training loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch

from saobp.metrics.health.head_health import CROSS_LAYER, HeadHealth
from saobp.metrics.health.verdicts import ALARMING

LISTED = 8
"""Heads named in a warning line; the others are counted."""
LARGEST = ("max_logit",)
"""Statistics of which layers and models have the largest, not the mean."""

SHOWN = {"gtd": "GTD", "attention_entropy": "entropy"}
"""Statistics named beside a verdict, but for sinks."""

Range = tuple[float | None, float | None]
RANGES: Mapping[str, Range] = {"max_logit": (None, 100.0)}
"""Ranges that heads should stay in, unless others are given; None is no limit."""

logger = logging.getLogger("saobp")


class Statistics(Protocol):
    """What is logged: a Health of the thorough tier, or a HeadWatch of the fast one."""

    @property
    def statistics(self) -> tuple[str, ...]: ...
    @property
    def layers(self) -> Mapping[str, Any]: ...
    def heads(self) -> list[HeadHealth]: ...
    def cross_layer_gtd(self) -> dict[str, float]: ...
    def reduced(self) -> Statistics: ...
    def reset(self) -> None: ...


class Alert(NamedTuple):
    """A head that has left its range: where, when, and why in words, as in ``max_logit 153 above 100``."""

    step: int
    layer: int
    name: str
    head: int
    reason: str


def health_metrics(health: Statistics, prefix: str = "health") -> dict[str, float]:
    """Flat numbers for a tracker: each statistic per layer and over all heads, and heads per verdict.

    Verdicts need GTD.
    """
    heads = health.heads()
    if not heads:
        return {}
    logs: dict[str, float] = {}
    for statistic in health.statistics:
        for layer, name in enumerate(health.layers):
            values = [head.values[statistic] for head in heads if head.name == name]
            if values:
                logs[f"{prefix}/layer_{layer:02d}/{statistic}"] = _together(statistic, values)
        logs[f"{prefix}/{statistic}"] = _together(statistic, [head.values[statistic] for head in heads])
    layer_numbers = {name: layer for layer, name in enumerate(health.layers)}
    for name, value in health.cross_layer_gtd().items():
        logs[f"{prefix}/layer_{layer_numbers[name]:02d}/{CROSS_LAYER}"] = value
    for verdict in ("localised", "sink", "diffuse") if "gtd" in health.statistics else ():
        logs[f"{prefix}/{verdict}_heads"] = float(sum(head.verdict == verdict for head in heads))
    return logs


class HealthLog:
    """Sends health to a tracker and warns of heads that leave their range.

    ``log`` takes a dict of numbers and the step: ``accelerator.log``, ``wandb.log`` and ``trackio.log`` do.
    ``ranges`` gives the lowest and highest value of a statistic (None: no limit), by default ``max_logit`` up
    to 100; with GTD measured, verdicts such as ``diffuse`` count too. Heads that are newly outside are named
    in one warning line, counted in the logged number ``alerts``, and passed to ``on_alert`` one by one.
    ``untrained`` says that the model starts from random weights, whose attention is diffuse: then only heads
    that were inside can leave.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], Any],
        prefix: str = "health",
        *,
        untrained: bool = False,
        ranges: Mapping[str, Range] | None = None,
        on_alert: Callable[[Alert], object] | None = None,
    ) -> None:
        for name, callback in (("log", log), ("on_alert", on_alert)):
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} must be a function, not {type(callback).__name__}")
        self.log, self.prefix, self.untrained, self.on_alert = log, prefix, untrained, on_alert
        self.ranges = dict(RANGES) if ranges is None else checked_ranges(ranges)
        self._may_lack = tuple(RANGES) if ranges is None else ()
        self._before: dict[tuple[str, int], set[str]] = {}
        self._inside: set[tuple[str, int, str]] = set()

    def __call__(self, health: Statistics, step: int) -> None:
        """Sum over processes, log, warn, and reset; all processes of a run must call it together."""
        if not health:
            return
        total = health.reduced()
        self.check_measured(total.statistics)
        heads = total.heads()
        alerts = self._alerts(heads, step)
        if alerts and _is_main_process():
            logger.warning(_warning(alerts, len(heads)))
            for alert in alerts if self.on_alert is not None else ():
                self.on_alert(alert)  # type: ignore[misc]
        logs = health_metrics(total, self.prefix)
        self.log({**logs, f"{self.prefix}/alerts": float(len(alerts))} if logs else logs, step)
        health.reset()

    def check_measured(self, statistics: Collection[str]) -> None:
        """Raises on a range of the caller's for a statistic that is not measured."""
        unknown = [name for name in self.ranges if name not in statistics and name not in self._may_lack]
        if unknown:
            raise ValueError(
                f"there is a range for {', '.join(unknown)}, but measured are {', '.join(statistics)}"
            )

    def _alerts(self, heads: list[HeadHealth], step: int) -> list[Alert]:
        alerts = []
        for head in heads:
            head_key, reasons = (head.name, head.head), self._reasons(head)
            new = [
                words
                for (statistic, state), words in reasons.items()
                if state not in self._before.get(head_key, ())
                and (not self.untrained or state == "undefined" or (*head_key, statistic) in self._inside)
            ]
            if new:
                alerts.append(Alert(step, head.layer, head.name, head.head, " and ".join(new)))
            outside = {statistic for statistic, _ in reasons}
            measured = {name for name in self.ranges if name in head.values} - outside
            if head.verdict == "healthy":
                measured.add("verdict")
            self._inside |= {(*head_key, statistic) for statistic in measured}
            self._before[head_key] = {state for _, state in reasons}
        return alerts

    def _reasons(self, head: HeadHealth) -> dict[tuple[str, str], str]:
        """Why a head is outside, in words, by statistic and state."""
        reasons = {}
        has_meaning = "gtd" in head.values or not all(map(math.isfinite, head.values.values()))
        if has_meaning and head.verdict in ALARMING:  # without GTD only ``undefined`` has
            reasons["verdict", str(head.verdict)] = _format_reason(head)
        for statistic, (low, high) in self.ranges.items():
            value = head.values.get(statistic, math.nan)
            if low is not None and value < low:
                reasons[statistic, f"{statistic} below"] = f"{statistic} {value:.4g} below {low:g}"
            if high is not None and value > high:
                reasons[statistic, f"{statistic} above"] = f"{statistic} {value:.4g} above {high:g}"
        return reasons


def checked_ranges(ranges: Mapping[str, Range]) -> dict[str, Range]:
    if not isinstance(ranges, Mapping):
        raise TypeError(f"ranges must be a dict such as {{'gtd': (0.5, None)}}, not {type(ranges).__name__}")
    for statistic, ends in ranges.items():
        if not isinstance(ends, Sequence) or len(ends) != 2 or not all(map(_is_limit, ends)):
            raise ValueError(
                f"the range of {statistic} must be its lowest and highest value, a number or None each, "
                f"not {ends!r}"
            )
        low, high = ends
        if low is not None and high is not None and low > high:
            raise ValueError(f"the range of {statistic} ends at {high:g}, below its start {low:g}")
    return dict(ranges)


def _is_limit(end: object) -> bool:
    return end is None or (isinstance(end, Real) and not math.isnan(end))


def _warning(alerts: list[Alert], heads: int) -> str:
    named = [f"layer {alert.layer} head {alert.head} {alert.reason}" for alert in alerts[:LISTED]]
    more = f" and {len(alerts) - LISTED} more" if len(alerts) > LISTED else ""
    which = f"{len(alerts)} of {heads} heads: {', '.join(named)}{more}"
    return f"attention health at step {alerts[0].step}: newly outside the healthy range are {which}"


def _together(statistic: str, values: list[float]) -> float:
    """One number for several heads; not a number if any is not."""
    if statistic in LARGEST and not any(map(math.isnan, values)):
        return max(values)
    return sum(values) / len(values)


def _format_reason(head: HeadHealth) -> str:
    """The verdict with the numbers that it looks at."""
    shown = {"sink_mass": "sink mass"} if head.verdict == "sink" else SHOWN
    numbers = [f"{words} {head.values[name]:.2f}" for name, words in shown.items() if name in head.values]
    return f"{head.verdict} ({', '.join(numbers)})" if numbers else head.verdict


def _is_main_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
