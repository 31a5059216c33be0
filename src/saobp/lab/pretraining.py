"""The stage that pretrains: one run after the other in one process, so that compiled code is shared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from saobp.lab.bundle import keep_rounded
from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.lab.estimates import Estimates
from saobp.lab.plan import Trained
from saobp.lab.sources import Sources
from saobp.training.pretrain import pretrain
from saobp.training.recipes import PretrainRecipe
from saobp.training.runs import RunError, RunFolder

Say = Callable[[str], object]


@dataclass
class StageResult:
    """What became of each piece of work of a stage, by name."""

    done: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{len(self.done)} done", f"{len(self.reused)} there already"]
        words += [f"{len(self.left)} left for want of time"] if self.left else []
        words += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(words)


def pretrain_all(
    models: Sequence[Trained],
    runs: Path,
    sources: Sources,
    *,
    deadline: Deadline | None = None,
    rounded: bool = False,
    progress: bool = False,
    say: Say = print,
) -> StageResult:
    """Train what is not finished yet, in the given order.

    A run that would not end before the deadline is passed over, so a shorter one may still be begun. One that
    was begun and outruns it is stopped; it goes on from its last checkpoint next time. One that fails is
    noted, and the others go on.
    """
    deadline = deadline or Deadline()
    estimates, result = Estimates(runs), StageResult()
    for place, model in enumerate(models, 1):
        run = RunFolder(model.folder(runs))
        if run.is_finished:
            check_same(run, model.recipe)
            result.reused.append(model.name)
            continue
        expected = estimates.seconds(model) * share_left(run, model.recipe)
        if not deadline.allows(expected):
            result.left.append(model.name)
            continue
        say(f"[{place}/{len(models)}] {model.name}: about {expected:.0f} s")
        try:
            with deadline.enforced():
                _train(model, run, sources, rounded, progress, say)
        except TimeIsUpError:
            result.left.append(model.name)
            say(f"{model.name} was stopped because the time is up; it goes on from its last checkpoint")
            break
        except (ValueError, OSError, RuntimeError) as problem:
            result.failed[model.name] = str(problem).split("\n")[0]
            say(f"{model.name} failed: {result.failed[model.name]}")
            continue
        finally:
            free_memory()
        estimates.learn(run)
        result.done.append(model.name)
        found = run.result
        say(
            f"{model.name}: held-out perplexity {found['eval_perplexity'] or float('nan'):.3f}, "
            f"{found['seconds']:.0f} s, {(found['tokens_per_second'] or 0) / 1e6:.2f} M tokens/s"
        )
    return result


def _train(model: Trained, run: RunFolder, sources: Sources, rounded: bool, progress: bool, say: Say) -> None:
    texts = sources.texts(model.recipe)
    pretrain(
        model.recipe,
        run.path,
        train=texts.train,
        validation=texts.validation,
        tokenizer=texts.tokenizer,
        resume=run.file("recipe.json").exists(),
        progress=progress,
        say=say,
    )
    if rounded:
        keep_rounded(run.model)


def check_same(run: RunFolder, recipe: PretrainRecipe) -> None:
    """Refuse a finished run of the right name whose recipe is another."""
    found = PretrainRecipe.from_dict(run.recipe)
    if found != recipe:
        was, asked = found.to_dict(), recipe.to_dict()
        changed = sorted(name for name in asked if was[name] != asked[name])
        raise RunError(f"the finished run in {run.path} had another {', '.join(changed)}: name other --runs")


def share_left(run: RunFolder, recipe: PretrainRecipe) -> float:
    """The part of an interrupted run that is still to do."""
    steps = run.checkpoint_steps()
    return 1.0 - (steps[-1] / recipe.steps if steps else 0.0)


def free_memory() -> None:
    """Let go of the last model before the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
