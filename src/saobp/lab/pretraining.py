"""The stage that pretrains: what is not finished yet, run after run, so that a process compiles code once."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from saobp.lab.bundle import is_rounded, keep_rounded
from saobp.lab.clock import Deadline, TimeIsUpError
from saobp.lab.data_sources import Sources
from saobp.lab.estimates import Estimates
from saobp.lab.plan import Trained, check_same
from saobp.lab.work_queue import Piece, Say, StageResult, work_through
from saobp.runs.folder import RunFolder
from saobp.training.pretrain import pretrain
from saobp.training.recipes import PretrainRecipe


def pretrain_all(
    models: Sequence[Trained],
    runs: Path,
    sources: Sources,
    *,
    deadline: Deadline | None = None,
    rounded: bool = False,
    say: Say = print,
) -> StageResult:
    """Train what is not finished yet, in the given order, and round what is to be rounded.

    A run that the deadline stops leaves a checkpoint, from which it goes on next time.
    """
    deadline = deadline or Deadline()
    estimates = Estimates(runs)

    def piece(model: Trained) -> Piece:
        run = RunFolder(model.folder(runs))

        def is_done() -> bool:
            if run.is_finished:
                check_same(run, model.recipe)
            return run.is_finished and not (rounded and _is_exact(run.model))

        def do() -> None:
            if not run.is_finished:
                _train(model, run, sources, deadline, say)
            if rounded:
                keep_rounded(run.model)
            estimates.learn_run(run)

        def seconds() -> float:
            return 0.0 if run.is_finished else estimates.pretraining(model) * share_left(run, model.recipe)

        return Piece(model.name, is_done, do, seconds, can_continue=True)

    return work_through([piece(model) for model in models], runs, deadline, say)


def _train(model: Trained, run: RunFolder, sources: Sources, deadline: Deadline, say: Say) -> None:
    texts = sources.texts(model.recipe)
    try:
        found = pretrain(
            model.recipe,
            run.path,
            train=texts.train,
            validation=texts.validation,
            tokenizer=texts.tokenizer,
            resume=run.has_begun,
            progress=False,
            callbacks=[StopInTime(deadline)],
            say=say,
        )
    finally:
        free_memory()
    perplexity, rate = found.eval_perplexity or float("nan"), (found.tokens_per_second or 0) / 1e6
    words = (
        f"{model.name}: held-out perplexity {perplexity:.3f}, {found.seconds:.0f} s, {rate:.2f} M tokens/s"
    )
    say(words if deadline.minutes is None else f"{words}, {deadline.left:.0f} s left")


class StopInTime(TrainerCallback):
    """Shortly before the deadline has a checkpoint written, then stops the run.

    Only at steps that are logged, so that a logged loss never spans an interruption.
    """

    def __init__(self, deadline: Deadline) -> None:
        self.deadline, self.stopping = deadline, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_between = state.global_step % args.logging_steps == 0 and state.global_step < state.max_steps
        if is_between and self.deadline.is_near:
            self.stopping = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        if self.stopping:
            raise TimeIsUpError


def share_left(run: RunFolder, recipe: PretrainRecipe) -> float:
    """The part of an interrupted run that is still to do."""
    steps = run.checkpoint_steps()
    return 1.0 - (steps[-1] / recipe.steps if steps else 0.0)


def _is_exact(model: Path) -> bool:
    """Whether a model is there and was not rounded yet."""
    return model.is_dir() and not is_rounded(model)


def free_memory() -> None:
    """Let go of the last model before the next one, and of its recorded graphs, which hold gigabytes.

    Compiled code stays on the disk, where the next run of the kind finds it.
    """
    if torch.cuda.is_available():
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
