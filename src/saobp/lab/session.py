"""One invocation of ``saobp reproduce``: plan, folders, time, and the stages in one process or several.

With several, the same command runs again in each of them. A variable tells them which stage to work on;
they share its work by claiming pieces of it, and the first process waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from saobp.lab.clock import Deadline
from saobp.lab.data_sources import Sources, make_up
from saobp.lab.measurements import UNDISTURBED
from saobp.lab.plan import Measured, Plan
from saobp.lab.pretraining import pretrain_all
from saobp.lab.restore import RESTORED
from saobp.lab.scales import Scale
from saobp.lab.stages import finetune_all, is_measured, is_tuned, measure_all
from saobp.lab.work_queue import Say, StageResult
from saobp.runs.folder import RunFolder
from saobp.runs.worker_processes import run_jobs

STAGES = ("tokens", "pretrain", "finetune", "measure", "tabulate")
SHARED = ("pretrain", "finetune", "measure")
"""Stages that several processes may work on."""
STAGE_VARIABLE = "SAOBP_STAGE"
"""Set for a process that shares a stage: its name, and when the clock of the first process began."""


@dataclass(frozen=True)
class Places:
    """The folders of an invocation."""

    runs: Path
    tokens: Path
    out: Path
    data_dir: Path | None
    invents: bool

    @classmethod
    def of(
        cls, scale: Scale, data_dir: Path | None, tokens: Path | None, runs: Path | None, out: Path | None
    ) -> Places:
        """Those that were named, else the usual ones; the smoke scale keeps to its folder of runs."""
        smoke = scale.name == "smoke"
        runs = runs or Path("runs/smoke" if smoke else "runs/lab")
        return cls(
            runs,
            tokens or (runs / "tokens" if smoke else Path("tokens")),
            out or (runs / "results" if smoke else Path("results")),
            data_dir,
            smoke and data_dir is None,
        )

    def sources(self, scale: Scale) -> Sources:
        data = make_up(self.runs / "data") if self.invents else self.data_dir
        return Sources(scale, self.tokens, data)


def shared_stage() -> tuple[str, float] | None:
    """The stage that this process was started to share, and when the clock began; None for the first one."""
    told = os.environ.get(STAGE_VARIABLE)
    if not told:
        return None
    stage, _, began = told.partition(":")
    return stage, float(began)


class Session:
    """Does stages of a plan."""

    def __init__(
        self, plan: Plan, places: Places, deadline: Deadline, *, rounded: bool = False, say: Say = print
    ) -> None:
        self.plan, self.places, self.deadline, self.rounded, self.say = plan, places, deadline, rounded, say
        self.sources = places.sources(plan.scale)
        self.has_failed = False
        """Whether any piece of work failed; the others are done all the same."""

    def do(self, stage: str, jobs: int = 1) -> None:
        if jobs > 1 and stage in SHARED and self.count_missing(stage):
            self._side_by_side(stage, jobs)
            if stage == "measure":
                self._report("measure alone", self._measure(lambda one: one.measure in UNDISTURBED))
            return
        if stage == "tokens":
            self._tokens()
        elif stage == "tabulate":
            self._tabulate()
        else:
            self.share(stage)

    def share(self, stage: str) -> None:
        """Work on a stage in this process, and say what became of it; beside others, nothing is timed."""
        self._report(stage, self._shared(stage))

    def _shared(self, stage: str) -> StageResult:
        runs, sources, say = self.places.runs, self.sources, self.say
        if stage == "pretrain":
            return pretrain_all(
                self.plan.trained(), runs, sources, deadline=self.deadline, rounded=self.rounded, say=say
            )
        if stage == "finetune":
            return finetune_all(self.plan.tuned(), runs, sources, deadline=self.deadline, say=say)
        alone = shared_stage() is None
        return self._measure(lambda one: alone or one.measure not in UNDISTURBED)

    def _measure(self, wanted: Callable[[Measured], bool]) -> StageResult:
        work = [one for one in self.plan.measured() if wanted(one)]
        return measure_all(work, self.places.runs, self.sources, deadline=self.deadline, say=self.say)

    def _report(self, stage: str, result: StageResult) -> None:
        self.has_failed |= bool(result.failed)
        self.say(f"{stage}: {result}")

    def _side_by_side(self, stage: str, jobs: int) -> None:
        """The same command in several processes, which share one stage."""
        logs = self.places.runs / "logs"
        self.say(f"{stage}: {jobs} processes, whose words are in {logs}")
        command = [sys.executable, "-m", "saobp", *sys.argv[1:]]
        codes = run_jobs(
            {f"{stage}-{number}": command for number in range(1, jobs + 1)},
            jobs,
            logs,
            variables={STAGE_VARIABLE: f"{stage}:{self.deadline.began}", "PYTHONUNBUFFERED": "1"},
        )
        for name in codes:
            self.say((logs / f"{name}.log").read_text(errors="replace").strip())
        for name in (name for name, code in codes.items() if code):
            self.has_failed = True
            self.say(f"{name} failed; its last words are in {logs / name}.log")
        self.say(f"{stage}: {self.count_missing(stage)} left to do")

    def count_missing(self, stage: str) -> int:
        """Pieces of work of a stage that are not done."""
        runs, plan = self.places.runs, self.plan
        if stage == "pretrain":
            return sum(not RunFolder(one.folder(runs)).is_finished for one in plan.trained())
        if stage == "finetune":
            return sum(not is_tuned(one, runs) for one in plan.tuned())
        return sum(not is_measured(one, runs) for one in plan.measured())

    def _tokens(self) -> None:
        for recipe in {(m.recipe.family, m.recipe.corpus): m.recipe for m in self.plan.trained()}.values():
            found = self.sources.texts(recipe)
            self.say(f"{recipe.family}: {', '.join(found.train.stores)} in {self.places.tokens}")

    def _tabulate(self) -> None:
        from saobp.lab.tabulate import tabulate

        for path in tabulate(self.plan, self.places.runs, self.places.out, self.say):
            self.say(f"wrote {path}")
        self.write_page()

    def write_page(self) -> None:
        """A page to look at for each family: the claims, and curves and heads of runs that have some."""
        from saobp.report.plotly_bundle import MissingPlotlyError
        from saobp.report.reproduction import write_reproduction

        runs, scale = self.places.runs, self.plan.scale.name
        known = [(model, RunFolder(model.folder(runs))) for model in self.plan.trained()]
        finished = [model for model, run in known if run.is_finished and not run.record.get(RESTORED)]
        for family in dict.fromkeys(model.family for model in finished):
            targets = [one.name for one in self.plan.experiments if getattr(one, family)]
            own = {model.folder(runs): model.method.key for model in finished if model.family == family}
            try:
                page = write_reproduction(own, self.places.out, targets, scale, family)
            except MissingPlotlyError as problem:
                self.say(str(problem))
                return
            self.say(f"the page: {page}")
