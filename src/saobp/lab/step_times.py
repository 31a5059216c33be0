"""Times of training steps measured by ``benchmarks/time_of_methods.py``, relative to Original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saobp.lab.statistics import paired_gain
from saobp.storage.json_files import read_object

SHARED = ("family", "size", "batch_size", "length")
LATER: dict[str, Any] = {"optimizer": "adamw", "masked_share": 0.15}
"""Fields in which a recipe must agree with the measured one; the later ones with what they were before."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by method, one number per round; rounds are comparable across methods."""

    setting: Mapping[str, Any]
    seconds: Mapping[str, list[float]]
    environment: Mapping[str, str]
    command: str

    @classmethod
    def read(cls, path: Path) -> StepTimes | None:
        """The file's times, None if there is no file."""
        if not path.exists():
            return None
        found = read_object(path)
        setting = {name: found[name] for name in SHARED} | {n: found.get(n, was) for n, was in LATER.items()}
        return cls(setting, found["seconds"], found["environment"], found["command"])

    def fits(self, recipe: Mapping[str, Any]) -> bool:
        return all(recipe.get(name, LATER.get(name)) == value for name, value in self.setting.items())

    def ratio(self, method: str, original: str) -> str:
        """``1.03 [1.02, 1.04]``: time relative to Original of the same round, with a 95 % interval."""
        pairs = zip(self.seconds.get(method, []), self.seconds.get(original, []), strict=False)
        more = {number: own / plain - 1 for number, (own, plain) in enumerate(pairs)}
        gain = paired_gain(more, dict.fromkeys(more, 0.0), higher_is_better=False)
        if gain is None or method == original:
            return ""
        interval = (
            "" if gain.low is None or gain.high is None else f" [{1 + gain.low:.2f}, {1 + gain.high:.2f}]"
        )
        return f"{1 + gain.difference:.2f}{interval}"

    def in_words(self, original: str) -> str:
        plain = self.seconds[original]
        gpu = self.environment.get("GPU", self.environment["CPU"]).partition(",")[0]
        return (
            f"Times of a training step are relative to Original's {1e3 * sum(plain) / len(plain):.2f} ms, "
            f"alone on a quiet {gpu}, in turns, {len(plain)} rounds ([time.json](time.json))."
        )
