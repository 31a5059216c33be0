"""From experiments to runs: a run is named after its recipe and shared by all experiments that need it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from saobp.lab.experiments import Experiment
from saobp.lab.methods import METHODS, Method, method_name
from saobp.lab.scales import PAPER_BATCHES, SEEDS, Scale, first_seeds
from saobp.runs.folder import RunError, RunFolder
from saobp.training.recipes import PretrainRecipe

FAMILIES = ("bert", "gpt2", "modernbert", "llama")
Work = TypeVar("Work", "PretrainRun", "FinetuneRun", "Measurement")
SMOKE_SEEDS = 2
"""Default number of seeds at the smoke scale."""


def matching_pattern(name: str, patterns: str) -> int | None:
    """Index of the first matching pattern of a comma-separated list, or None."""
    matches = (index for index, pattern in enumerate(patterns.split(",")) if fnmatch(name, pattern.strip()))
    return next(matches, None)


def matches(name: str, patterns: str) -> bool:
    """Whether a pattern of a comma-separated list matches: ``"*-seed42,*-high-*"``."""
    return matching_pattern(name, patterns) is not None


@dataclass(frozen=True)
class PretrainRun:
    """A model to pretrain. ``other_corpus`` names a corpus other than the scale's."""

    family: str
    method: Method = field(compare=False)
    seed: int
    recipe: PretrainRecipe
    other_corpus: str | None = None

    @property
    def name(self) -> str:
        recipe = self.recipe
        method = method_name(recipe.refinement, recipe.regularizer)
        corpus = "" if self.other_corpus is None else f"-on-{self.other_corpus}"
        printed = f"-paper-{recipe.batch_size}" if recipe.name == "paper" else ""
        return f"{recipe.family}-{recipe.size}{printed}-{method}{corpus}-seed{recipe.seed}"

    def folder(self, runs: Path) -> Path:
        return runs / self.name

    def is_done(self, runs: Path) -> bool:
        return RunFolder(self.folder(runs)).is_finished


@dataclass(frozen=True)
class FinetuneRun:
    """A pretrained model to fine-tune on a task: with its pretraining seed, or with so many seeds."""

    model: PretrainRun
    task: str
    several: int = 0

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.task}" + (f"-{self.several}-seeds" if self.several else "")

    @property
    def seeds(self) -> tuple[int, ...]:
        return first_seeds(self.several) if self.several else (self.model.seed,)

    def record_name(self, seed: int) -> str:
        """Name of the record of one seed on a page."""
        return f"{self.name}-{seed}" if self.several else self.name

    def folder(self, runs: Path) -> Path:
        """Of several seeds apart from that of one, which is finished sooner."""
        tasks = f"tasks-{self.several}-seeds" if self.several else "tasks"
        return runs / tasks / self.model.name / self.task

    def is_done(self, runs: Path) -> bool:
        return RunFolder(self.folder(runs)).is_finished


@dataclass(frozen=True)
class Measurement:
    """A measurement to take of a pretrained model."""

    model: PretrainRun
    measure: str

    @property
    def name(self) -> str:
        return f"{self.model.name}-measured-{self.measure}"

    def file(self, runs: Path) -> Path:
        return runs / "measured" / self.model.name / f"{self.measure}.json"

    def is_done(self, runs: Path) -> bool:
        return self.file(runs).exists()


@dataclass(frozen=True)
class ExperimentPlan:
    """Experiments at a scale; ``seeds`` overrides each one's own number.

    ``only`` filters work by name and orders it by its patterns.
    """

    experiments: Sequence[Experiment]
    scale: Scale
    seeds: int | None = None
    only: str = "*"

    def models_of(self, experiment: Experiment) -> list[PretrainRun]:
        """Models of one experiment, in the order of its tables."""
        most = SMOKE_SEEDS if self.scale.name == "smoke" else len(SEEDS)
        seeds = first_seeds(self.seeds or min(experiment.seeds, most))
        models = [
            self.model(family, key, seed, batch=batch)
            for batch in self.batches_of(experiment)
            for family in FAMILIES
            for key in getattr(experiment, family)
            for seed in seeds
        ]
        if self.scale.name != "smoke":
            models += [
                self.model("bert", key, seed, corpus)
                for corpus in experiment.corpora
                for key in experiment.bert
                for seed in seeds
            ]
        return models

    def batches_of(self, experiment: Experiment) -> tuple[int | None, ...]:
        """Batch sizes of an experiment: its own for the recipe ``paper`` at the default, else the scale's."""
        scale = self.scale
        own = scale.recipe == "paper" and scale.batch == PAPER_BATCHES[0] and experiment.batches
        return own or (scale.batch,)

    def task_seeds_of(self, experiment: Experiment) -> int:
        """Seeds of fine-tuning for each model, fewer at the smoke scale; 0 for the model's own."""
        return min(experiment.task_seeds, SMOKE_SEEDS if self.scale.name == "smoke" else len(SEEDS))

    def model(
        self,
        family: str,
        method: str,
        seed: int,
        other_corpus: str | None = None,
        batch: int | None = None,
    ) -> PretrainRun:
        scale = self.scale if batch is None else replace(self.scale, batch=batch)
        recipe = scale.recipe_of(family, method, seed, other_corpus)
        return PretrainRun(family, METHODS[method], seed, recipe, other_corpus)

    def pretrain_runs(self) -> list[PretrainRun]:
        """All models, ordered by seed, then by tier of the method."""
        models = (model for experiment in self.experiments for model in self.models_of(experiment))
        return self._by_pattern(sorted(self._kept(models), key=self._order))

    def finetune_runs(self) -> list[FinetuneRun]:
        """All fine-tuning, seed after seed; of each seed all methods on one task, then on the next."""
        runs = self._kept(
            FinetuneRun(model, task, self.task_seeds_of(experiment))
            for experiment in self.experiments
            for model in self.models_of(experiment)
            if model.family == "bert" and model.other_corpus is None
            for task in experiment.tasks
        )
        tasks = list(dict.fromkeys(run.task for run in runs))

        def order(run: FinetuneRun) -> tuple[int, int, int]:
            seed, tier = self._order(run.model)
            return seed, tasks.index(run.task), tier

        return self._by_pattern(sorted(runs, key=order))

    def measurements(self) -> list[Measurement]:
        """All measurements."""
        measurements = self._kept(
            Measurement(model, measure)
            for experiment in self.experiments
            for model in self.models_of(experiment)
            if model.other_corpus is None
            for measure in experiment.measures
        )
        return self._by_pattern(sorted(measurements, key=lambda measurement: self._order(measurement.model)))

    def work_of(self, stage: str) -> Sequence[PretrainRun | FinetuneRun | Measurement]:
        """All items of the stage ``pretrain``, ``finetune`` or ``measure``."""
        if stage == "pretrain":
            return self.pretrain_runs()
        return self.finetune_runs() if stage == "finetune" else self.measurements()

    def _by_pattern(self, work: list[Work]) -> list[Work]:
        return sorted(work, key=lambda item: matching_pattern(item.name, self.only) or 0)

    def _kept(self, work: Iterable[Work]) -> list[Work]:
        """Items that ``only`` lets through, each name once."""
        named: dict[str, Work] = {}
        for item in work:
            if matches(item.name, self.only):
                named.setdefault(item.name, item)
        return list(named.values())

    @staticmethod
    def _order(model: PretrainRun) -> tuple[int, int]:
        """Sort key: all methods of one seed before the next seed, other corpora last."""
        return SEEDS.index(model.seed), model.method.tier + (len(METHODS) if model.other_corpus else 0)


def check_same(run: RunFolder, recipe: PretrainRecipe, *, whole: bool = True) -> None:
    """Raise if a run of this name has another recipe; checkpoint intervals may differ.

    whole: whether a run that stopped early counts as another one
    """
    stored = PretrainRecipe.from_dict(run.recipe)
    if not whole:
        stored = replace(stored, stop_after=recipe.stop_after)
    if replace(stored, checkpoint_steps=recipe.checkpoint_steps) != recipe:
        actual, expected = stored.to_dict(), recipe.to_dict()
        changed = sorted(name for name in expected if actual[name] != expected[name])
        raise RunError(f"the run in {run.path} differs in {', '.join(changed)}: name other --runs")
