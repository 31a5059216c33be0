"""Measured times of training steps, for the arena's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saobp.lab.arena_records import ORIGINAL
from saobp.lab.statistics import paired_gain
from saobp.storage.json_files import read_object

SHARED = ("family", "size", "batch_size", "length")
LATER: dict[str, Any] = {"optimizer": "adamw", "masked_share": 0.15}
"""Fields in which a recipe must agree with the measured one; the later ones with what they were before."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by method, one number per round; rounds are comparable across methods."""

    file: str
    setting: Mapping[str, Any]
    seconds: Mapping[str, list[float]]
    environment: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> StepTimes:
        content = read_object(path)
        missing = [name for name in (*SHARED, "seconds", "environment") if name not in content]
        if missing:
            raise ValueError(f"{path} holds no times of steps, as it has no {', '.join(missing)}")
        if not content["seconds"].get(ORIGINAL):
            raise ValueError(
                f"{path} has no times of plain attention ({ORIGINAL}), which others are relative to"
            )
        setting = {name: content[name] for name in SHARED} | {
            n: content.get(n, was) for n, was in LATER.items()
        }
        return cls(path.name, setting, content["seconds"], content["environment"])

    def fits(self, recipe: Mapping[str, Any]) -> bool:
        return all(recipe.get(name, LATER.get(name)) == value for name, value in self.setting.items())

    def ratio(self, method: str) -> str:
        """``1.03 [1.02, 1.04]``: time relative to plain attention in the same round, with a 95 % interval."""
        pairs = zip(self.seconds.get(method, []), self.seconds.get(ORIGINAL, []), strict=False)
        more = {number: seconds / plain - 1 for number, (seconds, plain) in enumerate(pairs)}
        gain = paired_gain(more, dict.fromkeys(more, 0.0), higher_is_better=False)
        if gain is None or method == ORIGINAL:
            return ""
        interval = (
            "" if gain.low is None or gain.high is None else f" [{1 + gain.low:.2f}, {1 + gain.high:.2f}]"
        )
        return f"{1 + gain.difference:.2f}{interval}"

    def describe(self) -> str:
        plain = self.seconds[ORIGINAL]
        gpu = self.environment.get("GPU", self.environment["CPU"]).partition(",")[0]
        return (
            f"Times of a training step are relative to plain attention's "
            f"{1e3 * sum(plain) / len(plain):.2f} ms, alone on a quiet {gpu}, in turns, "
            f"{len(plain)} rounds ([{self.file}]({self.file}))."
        )
