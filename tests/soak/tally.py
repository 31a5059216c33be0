"""How many trials of each kind there were and how they ended."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What happened to one kind of trial."""

    what: str
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> str:
        ended = ", ".join(f"{count} {how}" for how, count in sorted(self.outcomes.items()))
        trials = sum(self.outcomes.values()) + len(self.wrong)
        return f"| {self.what} | {trials:,} | {ended} | {len(self.wrong)} | {self.seconds / 60:.1f} |"


TALLIES: list[Tally] = []


@dataclass
class Soak:
    """One test's share: how often, from which random numbers, and where its outcomes are counted."""

    seed: int
    counts: dict[str, int]
    name: str

    def random(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {self.name} {what}")

    def tally(self, what: str) -> Tally:
        TALLIES.append(Tally(what))
        return TALLIES[-1]
