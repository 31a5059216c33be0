"""Results of runs, fine-tuning and measurements, by method and seed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from saobp.lab.experiment_plan import (
    FAMILIES,
    ExperimentPlan,
    FinetuneRun,
    Measurement,
    PretrainRun,
    check_same,
)
from saobp.lab.experiments import Experiment
from saobp.runs.folder import RunFolder
from saobp.runs.layout import RESULT, seed_folder
from saobp.runs.machine import without_folders
from saobp.storage.json_files import read_json, read_object

Values = dict[str, dict[int, float]]
"""By method, then by seed."""
EPOCH = "last"
"""Scores are of the last epoch: the best one would be selected on the rows it is scored on."""

RESTORED = "restored"
"""Marks a record that was rebuilt from a page and has no logs (``tools/restore_runs.py``)."""
RECORDED = ("command", "commit", "model", "environment", "seconds", "data", "texts", "length")
"""Fields of a measurement that its record keeps."""


class Fields(dict[str, Any]):
    """A JSON object whose errors name its file."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        super().__init__(
            {
                name: Fields(path, value) if isinstance(value, dict) else value
                for name, value in fields.items()
            }
        )
        self.path = path

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(f"{self.path} has no {name!r}: run or measure it again")


@dataclass(frozen=True)
class Results:
    """Available results of an experiment; runs nothing and skips what is missing."""

    plan: ExperimentPlan
    experiment: Experiment
    runs: Path

    def models(self, family: str = "bert", other_corpus: str | None = None) -> list[PretrainRun]:
        """Models of the experiment whose runs are finished, or have losses where it looks at curves only."""
        return [
            model
            for model in self.plan.models_of(self.experiment)
            if model.family == family and model.other_corpus == other_corpus and self.is_there(model)
        ]

    def is_there(self, model: PretrainRun) -> bool:
        run = self.run(model)
        return run.is_finished or (bool(self.experiment.batches) and run.has_begun and bool(run.metrics()))

    def check(self) -> None:
        """Raise if a run has another recipe than its name implies."""
        for model in self.plan.models_of(self.experiment):
            if self.is_there(model):
                check_same(self.run(model), model.recipe, whole=not self.experiment.batches)

    def run(self, model: PretrainRun) -> RunFolder:
        return RunFolder(model.folder(self.runs))

    @contextmanager
    def reading(self, model: PretrainRun) -> Iterator[None]:
        """Context for reading a model's records; an error of an unexpected form names the model."""
        try:
            yield
        except (KeyError, TypeError, IndexError, AttributeError) as problem:
            raise ValueError(
                f"a result, log or measurement of {model.name} in {self.runs} does not have the expected "
                f"form ({type(problem).__name__}: {problem}): run or measure it again"
            ) from problem

    def result(self, model: PretrainRun) -> dict[str, Any]:
        run = self.run(model)
        return Fields(run.file(RESULT), run.result)

    def values(
        self, of: Callable[[PretrainRun], float | None], family: str = "bert", other_corpus: str | None = None
    ) -> Values:
        """One number per model, where available; methods in the order of the experiment."""
        by_method: Values = {}
        for model in self.models(family, other_corpus):
            with self.reading(model):
                value = of(model)
                if not isinstance(value, int | float | None):
                    raise TypeError(f"{value!r} is no number")
            if value is not None:
                by_method.setdefault(model.method.key, {})[model.seed] = value
        return by_method

    def perplexity(self, model: PretrainRun) -> float | None:
        """On held-out rows at the end of pretraining."""
        return self.result(model)["eval_perplexity"]

    def tokens_until(self, model: PretrainRun, loss: float) -> float | None:
        """Millions of tokens until the training loss first fell below a value; None if it never did."""
        reached = (line["tokens"] for line in self.run(model).metrics() if line.get("loss", loss) < loss)
        tokens = next(reached, None)
        return None if tokens is None else tokens / 1e6

    def speed(self, model: PretrainRun) -> float | None:
        """Training tokens per second, of a run that did not share the machine."""
        alone = self.run(model).record.get("environment", {}).get("jobs", 1) == 1
        return self.result(model)["tokens_per_second"] if alone else None

    def measured(self, model: PretrainRun, measure: str) -> dict[str, Any] | None:
        path = Measurement(model, measure).file(self.runs)
        return Fields(path, read_object(path)) if path.exists() else None

    def measured_values(
        self, measure: str, of: Callable[[dict[str, Any]], float | None], family: str = "bert"
    ) -> Values:
        """One number of each measurement that was taken."""

        def value(model: PretrainRun) -> float | None:
            measurement = self.measured(model, measure)
            return None if measurement is None else of(measurement)

        return self.values(value, family)

    def finetuned(self, model: PretrainRun, task: str) -> dict[str, Any] | None:
        """The result of fine-tuning a model on a task, if it is finished."""
        run = RunFolder(self.finetune_run(model, task).folder(self.runs))
        return Fields(run.file(RESULT), run.result) if run.is_finished else None

    def finetune_run(self, model: PretrainRun, task: str) -> FinetuneRun:
        return FinetuneRun(model, task, self.plan.task_seeds_of(self.experiment))

    def score(self, model: PretrainRun, task: str) -> float | None:
        """Of the last epoch, in percent."""
        result = self.finetuned(model, task)
        return None if result is None else result[EPOCH]["mean"]

    def scores(self, task: str) -> Values:
        """Of the last epoch of each model, in percent."""
        return self.values(lambda model: self.score(model, task))

    def tasks_done(self, tasks: Iterable[str]) -> list[str]:
        """Tasks on which any model was fine-tuned."""
        return [task for task in tasks if any(self.finetuned(model, task) for model in self.models())]

    def tasks_of_all(self, tasks: Iterable[str]) -> list[str]:
        """Tasks on which all fine-tuned methods have results, so that means compare."""
        done = self.tasks_done(tasks)
        by_method = {
            task: {model.method.key for model in self.models() if self.finetuned(model, task)}
            for task in done
        }
        everyone = set().union(*by_method.values())
        return [task for task in done if by_method[task] == everyone]

    def is_partial(self, task: str) -> bool:
        """Whether any model was fine-tuned on a partial or replaced task."""
        results = (self.finetuned(model, task) for model in self.models())
        return any(result["partial"] for result in results if result is not None)

    def epochs(self, model: PretrainRun, task: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Metrics and health of each epoch of a fine-tuning run."""
        run = RunFolder(seed_folder(self.finetune_run(model, task).folder(self.runs), model.seed))
        health = {line["step"]: line for line in run.health()}
        for line in run.metrics():
            if line["step"] in health and any(name.startswith("eval_") for name in line):
                yield line, health[line["step"]]

    def records(self) -> list[dict[str, Any]]:
        """The record of every run behind the experiment's page."""
        records = []
        for family in FAMILIES:
            for other_corpus in (None, *self.experiment.corpora):
                for model in self.models(family, other_corpus):
                    run = self.run(model)
                    records.append(_recorded(model.name, "pretrain", run))
                    records += self._later_records(model)
        return records

    def _later_records(self, model: PretrainRun) -> list[dict[str, Any]]:
        records = []
        for task in self.experiment.tasks if model.other_corpus is None else ():
            finetuning = self.finetune_run(model, task)
            for seed in finetuning.seeds:
                run = RunFolder(seed_folder(finetuning.folder(self.runs), seed))
                if run.is_finished:
                    records.append(_recorded(finetuning.record_name(seed), "finetune", run))
        for measure in self.experiment.measures if model.other_corpus is None else ():
            measurement = self.measured(model, measure)
            if measurement is not None:
                provenance = {name: measurement[name] for name in RECORDED if name in measurement}
                record = {"run": Measurement(model, measure).name, "kind": "measure", "seed": model.seed}
                records.append({**record, **provenance})
        return records

    def missing(self) -> list[str]:
        """Names of the missing runs and measurements."""
        plan = ExperimentPlan([self.experiment], self.plan.scale, self.plan.seeds)
        names = [model.name for model in plan.pretrain_runs() if not self.is_there(model)]
        later: list[FinetuneRun | Measurement] = [*plan.finetune_runs(), *plan.measurements()]
        return names + [item.name for item in later if not item.is_done(self.runs)]


def recorded_runs(out: Path, scale: str, target: str = "*") -> dict[str, dict[str, Any]]:
    """By name, the records behind the pages of a scale, or behind one of them."""
    found = {}
    for path in sorted(out.glob(f"{target}/{scale}-runs.json")):
        records = read_json(path)
        if not isinstance(records, list) or not all(
            isinstance(one, dict) and "run" in one for one in records
        ):
            raise ValueError(f"{path} is no list of records of runs: restore or remove it")
        found.update({record["run"]: record for record in records})
    return found


def _recorded(name: str, kind: str, run: RunFolder) -> dict[str, Any]:
    """Record and result of a run; older records have full paths in their command."""
    record = run.record
    command = without_folders(shlex.split(record.get("command", "")))
    return {
        "run": name,
        "kind": kind,
        **record,
        "command": command,
        "recipe": run.recipe,
        "result": run.result if run.is_finished else None,
    }
