"""One invocation of ``saobp reproduce``: its plan, its folders, and the stages in one process or several.

With several, the same command runs again in each worker. An environment variable names the stage to work on;
workers share its items by locking them, and the parent waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from saobp.lab.experiment_plan import ExperimentPlan, Measurement
from saobp.lab.measurements import TIMED_ALONE
from saobp.lab.results import RESTORED
from saobp.lab.scales import Scale
from saobp.lab.stages import DataSources, finetune_all, measure_all, pretrain_all
from saobp.lab.synthetic_tasks import write_synthetic_data
from saobp.lab.work_queue import Notify, StageResult
from saobp.runs.folder import RunFolder
from saobp.runs.worker_processes import run_jobs

STAGES = ("tokens", "pretrain", "finetune", "measure", "tabulate")
STAGE_VARIABLE = "SAOBP_STAGE"
"""Names the stage that a worker process was started for."""
PROGRESS, WARNING = "- ", "Note: "
"""How lines of progress and warnings begin in the log of a worker."""


@dataclass(frozen=True)
class LabFolders:
    """Where an invocation reads and writes; ``is_synthetic`` if texts and tasks are generated."""

    runs: Path
    tokens: Path
    out: Path
    data_dir: Path | None
    is_synthetic: bool

    @classmethod
    def of(
        cls, scale: Scale, data_dir: Path | None, tokens: Path | None, runs: Path | None, out: Path | None
    ) -> LabFolders:
        """The given ones, else the defaults; the smoke scale writes everything below its runs folder."""
        smoke = scale.name == "smoke"
        runs = runs or Path("runs/smoke" if smoke else "runs/lab")
        return cls(
            runs,
            tokens or (runs / "tokens" if smoke else Path("tokens")),
            out or (runs / "results" if smoke else Path("results")),
            data_dir,
            smoke and data_dir is None,
        )

    def sources(self, scale: Scale) -> DataSources:
        data = write_synthetic_data(self.runs / "data") if self.is_synthetic else self.data_dir
        return DataSources(scale, self.tokens, data)


def worker_stage() -> str | None:
    """The stage that this process was started for as a worker; None in the parent."""
    return os.environ.get(STAGE_VARIABLE) or None


def _mark(sentence: str) -> None:
    print(f"{PROGRESS}{sentence}")


class Session:
    """Runs the stages of a plan; ``progress`` is called for every item, ``notify`` with results."""

    def __init__(
        self, plan: ExperimentPlan, folders: LabFolders, notify: Notify = print, progress: Notify = print
    ) -> None:
        self.plan, self.folders, self.notify = plan, folders, notify
        self.progress = _mark if worker_stage() else progress
        self.sources = folders.sources(plan.scale)
        self.has_failed = False
        """Whether any item failed; the others still run."""

    def run(self, stage: str, jobs: int = 1) -> None:
        if stage == "tokens":
            self._tokenize()
        elif stage == "tabulate":
            self._tabulate()
        elif jobs > 1 and self.count_missing(stage):
            self._run_workers(stage, jobs)
            if stage == "measure":
                self._report("measure alone", self._measure(lambda one: one.measure in TIMED_ALONE))
        else:
            self.work_on(stage)

    def work_on(self, stage: str) -> None:
        """Run a stage in this process; workers take no timings, which others would disturb."""
        runs, sources, say = self.folders.runs, self.sources, (self.notify, self.progress)
        if stage == "pretrain":
            result = pretrain_all(self.plan.pretrain_runs(), runs, sources, *say)
        elif stage == "finetune":
            result = finetune_all(self.plan.finetune_runs(), runs, sources, *say)
        else:
            alone = worker_stage() is None
            result = self._measure(lambda one: alone or one.measure not in TIMED_ALONE)
        self._report(stage, result)

    def _measure(self, is_wanted: Callable[[Measurement], bool]) -> StageResult:
        work = [measurement for measurement in self.plan.measurements() if is_wanted(measurement)]
        return measure_all(work, self.folders.runs, self.sources, self.notify, self.progress)

    def _report(self, stage: str, result: StageResult) -> None:
        self.has_failed |= bool(result.failed)
        self.notify(f"{stage}: {result}")

    def _run_workers(self, stage: str, jobs: int) -> None:
        logs = self.folders.runs / "logs"
        self.notify(f"{stage}: {jobs} processes, which log to {logs}")
        command = [sys.executable, "-m", "saobp", *sys.argv[1:]]
        codes = run_jobs(
            {f"{stage}-{number}": command for number in range(1, jobs + 1)},
            jobs,
            logs,
            variables={STAGE_VARIABLE: stage, "PYTHONUNBUFFERED": "1"},
            each_minute=lambda: self.progress(f"{stage}: {self.count_missing(stage)} left to do"),
        )
        for name in codes:
            self._repeat((logs / f"{name}.log").read_text(errors="replace"))
        for name in (name for name, code in codes.items() if code):
            self.has_failed = True
            self.notify(f"{name} failed; see {logs / name}.log")
        self.notify(f"{stage}: {self.count_missing(stage)} left to do")

    def _repeat(self, log: str) -> None:
        """What a worker said, without its progress; warnings one by one, which several workers may share."""
        lines = [line for line in log.strip().splitlines() if not line.startswith(PROGRESS)]
        for line in (line for line in lines if line.startswith(WARNING)):
            self.notify(line)
        if rest := [line for line in lines if not line.startswith(WARNING)]:
            self.notify("\n".join(rest))

    def count_missing(self, stage: str) -> int:
        """Items of a stage that are not done."""
        return sum(not item.is_done(self.folders.runs) for item in self.plan.work_of(stage))

    def _tokenize(self) -> None:
        models = self.plan.pretrain_runs()
        for recipe in {(model.recipe.family, model.recipe.corpus): model.recipe for model in models}.values():
            texts = self.sources.texts(recipe)
            self.notify(f"{recipe.family}: {', '.join(texts.train.stores)} in {self.folders.tokens}")

    def _tabulate(self) -> None:
        from saobp.lab.tabulate import tabulate

        for path in tabulate(self.plan, self.folders.runs, self.folders.out, self.notify):
            self.notify(f"wrote {path}")
        self._write_html()

    def _write_html(self) -> None:
        """An HTML page for each family: the claims, and curves and heads of runs that have logs."""
        from saobp.lab.tabulate import write_reproduction
        from saobp.report.page_assets import MissingPlotlyError

        runs, scale = self.folders.runs, self.plan.scale.name
        folders = [(model, RunFolder(model.folder(runs))) for model in self.plan.pretrain_runs()]
        finished = [model for model, run in folders if run.is_finished and not run.record.get(RESTORED)]
        for family in dict.fromkeys(model.family for model in finished):
            targets = [experiment.name for experiment in self.plan.experiments if getattr(experiment, family)]
            methods = {model.folder(runs): model.method.key for model in finished if model.family == family}
            try:
                page = write_reproduction(methods, self.folders.out, targets, scale, family)
            except MissingPlotlyError as problem:
                self.notify(str(problem))
                return
            self.notify(f"the page: {page}")
