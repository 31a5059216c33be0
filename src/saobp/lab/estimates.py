"""How long a piece of work will take: as long as its like took on this hardware, else a guess."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from saobp.lab.plan import Measured, Trained, Tuned
from saobp.runs.folder import RunFolder
from saobp.runs.json_files import read_json
from saobp.runs.layout import RESULT, SEED
from saobp.runs.provenance import environment
from saobp.runs.worker_processes import JOBS_VARIABLE
from saobp.storage.atomic import is_unfinished

RATES = {"tiny": 12e6, "micro": 8e6, "mini": 4.2e6, "small": 2.0e6, "medium": 1.2e6}
"""Tokens a second of a large GPU with plain attention, before anything was measured."""
CPU_SHARE = 1 / 300
COMPILING = 15.0
"""Seconds of compiling on a GPU at the beginning of a run of a new kind."""
PREPARING = 2.0
"""Seconds before the clock of a run starts and after it stops."""
CAUTION = 1.05
CROWDING = {"cuda": 0.5, "cpu": 1.0}
"""How much longer everything takes for each further process beside it."""
TASK_STEPS = {
    "sst2": 6300, "hellaswag": 5600, "race-middle": 4800, "mnli": 2800, "qqp": 2100, "squad": 1500,
    "cola": 1300, "qnli": 1200, "stsb": 900, "mrpc": 600, "rte": 400, "wnli": 100,
}  # fmt: skip
"""Steps of a fine-tuning run, weighted by their length."""
STEP_SECONDS = {"mini": 0.015, "small": 0.017, "medium": 0.03}
"""Of one such step on a large GPU."""
MEASURE_SECONDS = 10.0

MODEL_BYTES = {"tiny": 1e6, "micro": 2e6, "mini": 46e6, "small": 116e6, "medium": 167e6}
"""Of a saved model in float32; a run's two checkpoints hold three times as much each until it ends."""

Key = tuple[str, ...]


class Estimates:
    """Seconds by what was finished in a folder of runs on this hardware, for ``jobs`` processes at a time."""

    def __init__(self, runs: Path, jobs: int | None = None) -> None:
        self.hardware = environment()["hardware"]
        self.cuda = torch.cuda.is_available()
        self.jobs = int(os.environ.get(JOBS_VARIABLE, "1")) if jobs is None else jobs
        self._seconds: dict[Key, list[float]] = {}
        for path in runs.glob("*/result.json"):
            self.learn_run(RunFolder(path.parent))
        for path in runs.glob(f"tasks/*/*/{SEED}*/{RESULT}"):
            name, task = path.parts[-4], path.parts[-3]
            self._learn(("finetune", *_family_and_size(name), task), RunFolder(path.parent).record)
        for path in runs.glob("measured/*/*.json"):
            if is_unfinished(path):  # another process is writing it
                continue
            self._learn(("measure", *_family_and_size(path.parent.name), path.stem), read_json(path))

    def learn_run(self, run: RunFolder) -> None:
        """Take a finished pretraining run into account, by its time for a token."""
        recipe = run.recipe
        tokens = recipe["steps"] * recipe["batch_size"] * recipe["length"]
        self._learn(("pretrain", _way(run.path.name)), run.record, 1 / tokens)

    def learn(self, work: Tuned | Measured, seconds: float) -> None:
        """Take a piece of work into account that this process has done."""
        self._seconds.setdefault(_key(work), []).append(seconds / self._slowdown(self.jobs))

    def _learn(self, key: Key, record: dict[str, Any], share: float = 1.0) -> None:
        made_on = record.get("environment", {})
        if record.get("seconds") and made_on.get("hardware") == self.hardware:
            alone = record["seconds"] / self._slowdown(made_on.get("jobs", 1))
            self._seconds.setdefault(key, []).append(alone * share)

    def _slowdown(self, jobs: int) -> float:
        return 1 + CROWDING["cuda" if self.cuda else "cpu"] * (jobs - 1)

    def _known(self, key: Key) -> float | None:
        found = self._seconds.get(key)
        return CAUTION * statistics.median(found) if found else None

    def pretraining(self, model: Trained) -> float:
        """Of a whole run."""
        recipe = model.recipe
        own = self._known(("pretrain", _way(model.name)))
        plain = self._known(("pretrain", f"{recipe.family}-{recipe.size}-original"))
        if own is not None:
            training = own * recipe.tokens
        elif plain is not None:
            training = plain * recipe.tokens * model.method.cost
        else:
            rate = RATES[recipe.size] * (1.0 if self.cuda else CPU_SHARE)
            family = 1.3 if recipe.family == "gpt2" else 1.0
            compiling = COMPILING if self.cuda and recipe.compiled else 0.0
            training = compiling + family * model.method.cost * recipe.tokens / rate
        return self._slowdown(self.jobs) * (PREPARING + training)

    def later(self, work: Tuned | Measured) -> float:
        """Of fine-tuning or a measurement; on a CPU unknown, which is 0, until one was done."""
        known = self._known(_key(work))
        if known is None and self.cuda:
            known = MEASURE_SECONDS
            if isinstance(work, Tuned):
                known = STEP_SECONDS[work.model.recipe.size] * TASK_STEPS.get(work.task, 1000)
        return self._slowdown(self.jobs) * (known or 0.0)


def disk_bytes(models: Iterable[Trained]) -> float:
    """Of the runs once they are finished; while one runs, its checkpoints come on top."""
    return sum(MODEL_BYTES[model.recipe.size] for model in models)


def _key(work: Tuned | Measured) -> Key:
    kind = ("finetune", work.task) if isinstance(work, Tuned) else ("measure", work.measure)
    return kind[0], *_family_and_size(work.model.name), kind[1]


def _family_and_size(name: str) -> tuple[str, str]:
    family, size, *_ = name.split("-")
    return family, size


def _way(name: str) -> str:
    """The name of a run without its seed."""
    return name.rpartition("-seed")[0]
