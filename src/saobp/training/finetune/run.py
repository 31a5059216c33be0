"""Fine-tune a checkpoint on a task over several seeds, each in a run folder of its own."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, set_seed

from saobp.data.tasks import Task
from saobp.portable.code import check_portable, weights_of
from saobp.portable.run_summary import summarise_run
from saobp.portable.save import finish_folder
from saobp.refinement import Refinement
from saobp.runs.folder import RunError, RunFolder
from saobp.runs.layout import RESULT, seed_folder
from saobp.storage.json_files import write_json
from saobp.storage.model_folders import intact_folder
from saobp.training.checkpoints import (
    effective_refinement,
    load_tokenizer_of,
    load_with_head,
    model_checksum,
    model_name,
    most_positions,
)
from saobp.training.finetune.examples import Examples, encode_examples
from saobp.training.finetune.recipe import SEEDS, FinetuneRecipe, recipe_for
from saobp.training.finetune.span import encode_spans
from saobp.training.finetune.trainer import CHECKPOINT_SECONDS, TaskTrainer

SeedProgress = Callable[[int, int, int], None]
"""Called with the seed, the step and the number of steps."""


def finetune(
    model: str | Path,
    task: Task,
    folder: str | Path,
    *,
    seeds: Iterable[int] = SEEDS,
    recipe: FinetuneRecipe | None = None,
    refinement: Refinement | str | None = None,
    keep_model: bool = True,
    portable: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    notify: Callable[[str], object] = lambda _: None,
    progress: SeedProgress | None = None,
) -> dict[str, Any]:
    """Fine-tune and return what ``folder/result.json`` holds; metrics are percentages.

    model:      a folder with a model and its tokenizer; its own refinement is kept unless another is given
    folder:     gets one run folder per seed, ``seed-42``. A finished seed of the same recipe and data is
    reused, an interrupted one resumes from its last checkpoint or restarts.
    keep_model: whether the last epoch's model is kept in ``seed-42/model``
    portable:   whether it gets the code with which it loads without saobp
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "fine-tuning uses one process and one device: run other seeds or tasks on the others"
        )
    chosen = checked_seeds(seeds)
    intact_folder(model)
    folder = Path(folder)
    spec = task.spec
    settings = recipe_for(spec) if recipe is None else recipe
    if settings.task != spec.name:
        raise ValueError(f"the recipe is for {settings.task}, not for {spec.name}")
    positions = most_positions(model)
    if positions is not None and positions < settings.length:
        notify(f"{spec.name}: sequences are cut to the model's {positions} positions")
        settings = replace(settings, length=positions)
    override = None if refinement is None else Refinement.of(refinement)
    if portable:
        check_portable(load_with_head(model, spec, load_tokenizer_of(model), override))
    session = _Session(model, task, settings, override, keep_model, portable, checkpoint_seconds, notify)
    results: dict[int, dict[str, Any]] = {}
    for seed in chosen:
        results[seed] = session.one(seed_folder(folder, seed), seed, progress)
    summary = summarise(results)
    write_json(folder / RESULT, summary)
    return summary


def checked_seeds(seeds: Iterable[int]) -> list[int]:
    """Each seed once; raises on one that no random generator takes."""
    chosen = list(dict.fromkeys(seeds))
    if not chosen:
        raise ValueError("there is no seed to run: give at least one")
    for seed in chosen:
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"a seed must be a whole number from 0 to below 2**32, not {seed!r}")
    return chosen


@dataclass
class _Session:
    """State shared by the seeds: rows are tokenised once, and only if a seed has to run."""

    model: str | Path
    task: Task
    recipe: FinetuneRecipe
    refinement: Refinement | None
    keep_model: bool
    portable: bool
    checkpoint_seconds: float
    notify: Callable[[str], object]

    @cached_property
    def data(self) -> dict[str, str]:
        """Checksums of the rows and of the model."""
        task = self.task
        sums = {"train": task.train.checksum, "validation": task.validation.checksum}
        return {**sums, "model": model_checksum(self.model)}

    @cached_property
    def encoded(self) -> tuple[PreTrainedTokenizerFast, dict[str, Examples]]:
        tokenizer = load_tokenizer_of(self.model)
        return tokenizer, encode_task(self.task, tokenizer, self.recipe)

    def described(self) -> dict[str, Any]:
        """All settings but the seed, JSON-serialisable.

        The model is named without its path; its checksum is among the data.
        """
        return {
            **self.recipe.to_dict(),
            "model": model_name(self.model),
            "refinement": effective_refinement(self.model, self.refinement),
            "rows": self.task.describe()["rows"],
            "partial": self.task.partial,
        }

    def one(self, path: Path, seed: int, progress: SeedProgress | None) -> dict[str, Any]:
        """The result of one seed, from its folder if it is finished."""
        before = RunFolder(path)
        if before.is_finished:
            self._check_same(before)
            before.clean_up()
            self.notify(f"{self.task.spec.name}: seed {seed} is finished already and is taken over")
            return before.result
        run = RunFolder.start(path, "finetune", self.described(), seed=seed, data=self.data, resume=True)
        try:
            return self._train(run, seed, progress)
        except BaseException as problem:
            run.fail(problem=problem)
            raise

    def _check_same(self, run: RunFolder) -> None:
        settings = {"kind": "finetune", **self.described()}
        stored = run.recipe
        changed = sorted(name for name in settings if stored.get(name) != settings[name])
        data = run.record.get("data", {})
        changed += sorted(f"{name} data" for name in self.data if data.get(name) != self.data[name])
        if changed:
            raise RunError(
                f"the finished run in {run.path} differs in {', '.join(changed)}: name another folder"
            )

    def _train(self, run: RunFolder, seed: int, progress: SeedProgress | None) -> dict[str, Any]:
        spec = self.task.spec
        tokenizer, rows = self.encoded
        set_seed(seed)
        model = load_with_head(self.model, spec, tokenizer, self.refinement)
        step = run.last_good_checkpoint(self.notify)
        run.rewind(step or 0)
        if step is not None:
            self.notify(f"{spec.name}: seed {seed} goes on from step {step}")
        trainer = TaskTrainer(
            model, spec, self.recipe, rows, run, seed=seed, checkpoint_seconds=self.checkpoint_seconds,
            notify=self.notify,
            progress=None if progress is None else lambda done, total: progress(seed, done, total),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=None if step is None else str(run.checkpoint_path(step)))
        result = {
            "task": spec.name,
            "seed": seed,
            "metric": spec.main_metric,
            **outcome(trainer.state.log_history, spec.main_metric, spec.metrics),
            "truncated": rows["train"].cut,
            **self.task.describe(),
        }
        if self.keep_model:
            summary = summarise_run(run.recipe, run.record, result)
            name = f"{model_name(self.model)} {spec.name}"
            run.save_model(
                model,
                tokenizer,
                weights_of(model),
                finish=lambda folder: finish_folder(model, folder, name, summary, portable=self.portable),
            )
        run.finish(result, seconds=trainer.seconds)
        return result


def encode_task(
    task: Task, tokenizer: PreTrainedTokenizerFast, recipe: FinetuneRecipe
) -> dict[str, Examples]:
    """Training and validation rows as tokens."""
    splits = {"train": task.train, "validation": task.validation}
    if task.spec.kind == "span":
        return {name: encode_spans(split, tokenizer, recipe, recipe.length) for name, split in splits.items()}
    return {
        name: encode_examples(split, task.spec, tokenizer, recipe.length) for name, split in splits.items()
    }


def outcome(lines: Iterable[Mapping[str, Any]], main: str, metrics: Iterable[str]) -> dict[str, Any]:
    """Best and last epoch of a log; the best is selected by the main metric on the same validation rows."""
    evaluations = [line for line in lines if f"eval_{main}" in line]
    best = max(evaluations, key=lambda line: line[f"eval_{main}"])
    last = evaluations[-1]
    return {
        "best": best[f"eval_{main}"],
        "last": last[f"eval_{main}"],
        "best_epoch": round(best["epoch"]),
        "epochs": round(last["epoch"]),
        "best_metrics": {name: best[f"eval_{name}"] for name in metrics},
        "last_metrics": {name: last[f"eval_{name}"] for name in metrics},
    }


def summarise(results: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate all seeds of a task: means and standard deviations (0 for a single seed)."""
    reported = ("best", "last", "best_epoch", "best_metrics", "last_metrics")
    shared = ("partial", "rows", "official_rows", "files", "notes", "truncated")
    first = next(iter(results.values()))
    return {
        "task": first["task"],
        "metric": first["metric"],
        "seeds": {str(seed): {name: result[name] for name in reported} for seed, result in results.items()},
        "best": _spread([result["best"] for result in results.values()]),
        "last": _spread([result["last"] for result in results.values()]),
        **{name: first[name] for name in shared},
    }


def _spread(values: list[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": math.fsum(values) / len(values), "std": deviation}
