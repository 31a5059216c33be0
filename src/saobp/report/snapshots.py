"""The health of all heads at one step, read from a run or a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from saobp.metrics.diagnosis.diagnose import Diagnosis
from saobp.metrics.diagnosis.head_kinds import KINDS
from saobp.metrics.health.head_health import CROSS_LAYER, HeadHealth
from saobp.metrics.health.verdicts import UniformMap, Verdict, judged, uniform_map
from saobp.runs.tolerant_reader import number

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Grid = list[list[float | None]]


@dataclass(frozen=True)
class Snapshot:
    """One grid ``[layer][head]`` per statistic, and the verdict of every head.

    step:      of training; None for a diagnosis
    errors:    grids of standard errors, where they are known
    strengths: grid of lambda, for a model that learns it
    across:    cross-layer GTD by layer, from the second layer on
    largest_entropy: of uniform rows, if the length of the texts is known
    kinds:     what each head looks at, in a diagnosis; empty for no known kind
    """

    step: int | None
    layers: list[str]
    statistics: dict[str, Grid]
    verdicts: list[list[Verdict]]
    errors: dict[str, Grid] = field(default_factory=dict)
    strengths: Grid | None = None
    across: dict[int, float] = field(default_factory=dict)
    largest_entropy: float | None = None
    kinds: list[list[str]] | None = None

    def count(self, kind: Verdict) -> int:
        return sum(word == kind for row in self.verdicts for word in row)

    @property
    def heads(self) -> int:
        return sum(map(len, self.verdicts))

    @property
    def cells(self) -> int:
        """Number of values in all grids."""
        return self.heads * (1 + len(self.statistics) + len(self.errors) + (self.strengths is not None))

    def to_dict(self) -> dict[str, Any]:
        """For the page: rounded, verdicts by index, strengths among the values."""
        grids = {**self.statistics, **({} if self.strengths is None else {"strengths": self.strengths})}
        return {
            "step": self.step,
            "values": {name: _rounded(grid) for name, grid in grids.items()},
            "verdicts": [[VERDICTS.index(word) for word in row] for row in self.verdicts],
            "across": [[layer, round(value, 4)] for layer, value in self.across.items()],
            "kinds": self.kinds,
        }

    def diagnosis(self, subject: str) -> Diagnosis:
        """The same as a diagnosis, for the figures."""
        nan = float("nan")
        heads = [
            HeadHealth(
                layer,
                name,
                head,
                {
                    key: nan if (v := grid[layer][head]) is None else v
                    for key, grid in self.statistics.items()
                },
                {},
                word,
                1,
            )
            for layer, name in enumerate(self.layers)
            for head, word in enumerate(self.verdicts[layer])
        ]
        return Diagnosis(subject, tuple(heads), self.across, tuple(self.statistics), 0, 0)


def read_snapshot(entry: dict[str, Any], length: float | None, causal: bool | None) -> Snapshot | None:
    """A line of ``health.jsonl``; None if it does not have that form.

    Verdicts compare with the uniform map if length and causality are known.
    """
    step, names, statistics = number(entry.get("step")), entry.get("layers"), entry.get("statistics")
    if step is None or not isinstance(names, list) or not names or not isinstance(statistics, dict):
        return None
    grids = {str(name): grid for name, values in statistics.items() if (grid := _grid(values, len(names)))}
    shapes = {tuple(map(len, grid)) for grid in grids.values()}
    if len(grids) != len(statistics) or len(shapes) != 1:
        return None
    strengths = _grid(entry.get("strengths"), len(names))
    if strengths is not None and tuple(map(len, strengths)) not in shapes:
        strengths = None
    uniform = None
    if length is not None and length >= 2 and causal is not None:
        uniform = uniform_map(torch.tensor([length]), causal=causal)
    return Snapshot(
        int(step),
        [str(name) for name in names],
        grids,
        _verdicts(grids, uniform),
        strengths=strengths,
        across=_across(entry.get(CROSS_LAYER), len(names)),
        largest_entropy=None if uniform is None else uniform.entropy.item(),
    )


def diagnosed(record: dict[str, Any]) -> Snapshot | None:
    """A record of ``diagnosis.json``; None if it does not have that form."""
    heads = record.get("heads")
    if not isinstance(heads, list) or not all(isinstance(head, dict) for head in heads) or not heads:
        return None
    try:
        indices = [(int(head["layer"]), int(head["head"])) for head in heads]
        widths = [0] * (1 + max(layer for layer, _ in indices))
        for layer, head_place in indices:
            widths[layer] = max(widths[layer], 1 + head_place)
        names = {int(head["layer"]): str(head["name"]) for head in heads}
        words: list[list[Verdict]] = [["undefined"] * width for width in widths]
        known = [name.removesuffix("_error") for name in heads[0] if name.endswith("_error")]
        grids: dict[str, Grid] = {name: [[None] * width for width in widths] for name in known}
        errors: dict[str, Grid] = {name: [[None] * width for width in widths] for name in known}
        kinds = [[""] * width for width in widths]
        for (layer, index), head in zip(indices, heads, strict=True):
            if head.get("kind") in KINDS:
                kinds[layer][index] = head["kind"]
            if head["verdict"] in VERDICTS:
                words[layer][index] = head["verdict"]
            for name in known:
                grids[name][layer][index] = number(head.get(name))
                errors[name][layer][index] = number(head.get(f"{name}_error"))
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    crossed = record.get(CROSS_LAYER)
    across = {
        int(layer): float(value)
        for layer, value in (crossed.items() if isinstance(crossed, dict) else ())
        if str(layer).isdigit() and number(value) is not None
    }
    layers = [names.get(layer, f"layer {layer}") for layer in range(len(widths))]
    has_kinds = any("kind" in head for head in heads)
    return Snapshot(None, layers, grids, words, errors, across=across, kinds=kinds if has_kinds else None)


def _across(values: Any, layers: int) -> dict[int, float]:
    """Cross-layer GTD of a log line, from the second layer on."""
    if not isinstance(values, list) or len(values) != layers - 1:
        return {}
    numbers = {layer: number(value) for layer, value in enumerate(values, 1)}
    return {layer: value for layer, value in numbers.items() if value is not None}


def _verdicts(grids: dict[str, Grid], uniform: UniformMap | None) -> list[list[Verdict]]:
    beside = () if uniform is None else tuple(value.item() for value in uniform)
    return [
        [
            judged({name: grid[layer][head] for name, grid in grids.items()}, *beside)
            for head in range(len(row))
        ]
        for layer, row in enumerate(next(iter(grids.values())))
    ]


def _grid(values: Any, layers: int) -> Grid | None:
    if not isinstance(values, list) or len(values) != layers:
        return None
    if not all(isinstance(row, list) and row for row in values):
        return None
    return [[number(value) for value in row] for row in values]


def _rounded(grid: Sequence[Sequence[float | None]]) -> Grid:
    return [[None if value is None else round(value, 4) for value in row] for row in grid]
