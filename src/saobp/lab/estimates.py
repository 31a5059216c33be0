"""How long a run will take: as long as its like took, else a guess."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

import torch

from saobp.lab.plan import Trained
from saobp.training.runs import RunFolder, environment

RATES = {"tiny": 12e6, "micro": 8e6, "mini": 4.2e6, "small": 2.0e6, "medium": 1.2e6}
"""Tokens a second of a large GPU with plain attention, before anything was measured."""
CPU_SHARE = 1 / 300
COMPILING = 20.0
"""Seconds of compiling on a GPU at the beginning of a run of a new kind."""
PREPARING = 5.0
"""Seconds before the clock of a run starts and after it stops."""
CAUTION = 1.05

MODEL_BYTES = {"tiny": 1e6, "micro": 2e6, "mini": 46e6, "small": 116e6, "medium": 167e6}
"""Of a saved model in float32; a run's two checkpoints hold three times as much each until it ends."""


class Estimates:
    """Seconds by the runs of a folder that were finished on this hardware."""

    def __init__(self, runs: Path) -> None:
        self.hardware = environment()["hardware"]
        self.cuda = torch.cuda.is_available()
        self._seconds: dict[tuple[str, str, str], list[float]] = {}
        for recipe in sorted(runs.glob("*/recipe.json")) if runs.is_dir() else []:
            run = RunFolder(recipe.parent)
            if run.is_finished and run.record.get("environment", {}).get("hardware") == self.hardware:
                self.learn(run)

    def learn(self, run: RunFolder) -> None:
        """Take a finished run into account."""
        recipe, record = run.recipe, run.record
        if recipe.get("kind") == "pretrain" and record.get("seconds"):
            way = run.path.name.rpartition("-seed")[0]
            tokens = recipe["steps"] * recipe["batch_size"] * recipe["length"]
            key = (recipe["family"], recipe["size"], way)
            self._seconds.setdefault(key, []).append(record["seconds"] / tokens)

    def seconds(self, model: Trained) -> float:
        """Of a pretraining run, in all."""
        recipe, way = model.recipe, model.name.rpartition("-seed")[0]
        own = self._seconds.get((recipe.family, recipe.size, way))
        if own:
            return PREPARING + CAUTION * recipe.tokens * statistics.median(own)
        plain = f"{recipe.family}-{recipe.size}-original"
        base = self._seconds.get((recipe.family, recipe.size, plain))
        cost = model.method.cost * (1.3 if recipe.family == "gpt2" and not base else 1.0)
        compiling = COMPILING if self.cuda and recipe.compiled else 0.0
        if base:
            return PREPARING + compiling + CAUTION * cost * recipe.tokens * statistics.median(base)
        rate = RATES[recipe.size] * (1.0 if self.cuda else CPU_SHARE)
        return PREPARING + compiling + cost * recipe.tokens / rate


def disk_bytes(models: Iterable[Trained]) -> float:
    """Of the runs once they are finished; while one runs, its checkpoints come on top."""
    return sum(MODEL_BYTES[model.recipe.size] for model in models)
