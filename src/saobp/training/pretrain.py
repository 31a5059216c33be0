"""Pretraining: recipe, tokens and folder in; trained model and run record out."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments
from transformers.utils import logging as hf_logging

from saobp.data import TokenStore
from saobp.portable.code import check_portable, weights_of
from saobp.portable.run_summary import summarise_run
from saobp.portable.save import finish_folder
from saobp.runs.folder import RunFolder
from saobp.training.architectures import build_model
from saobp.training.batches import BatchShard, TokenRows
from saobp.training.compiled_step import loss_as_forward
from saobp.training.head_records import strengths_of
from saobp.training.objectives import Objective, objective_of
from saobp.training.progress import TrainingProgress
from saobp.training.recipes import PretrainRecipe
from saobp.training.sharding import fsdp_requested, gather_weights
from saobp.training.trainer import PretrainTrainer, arguments
from saobp.transformers.apply import apply


@dataclass(frozen=True)
class Result:
    """Contents of ``result.json``."""

    steps: int
    tokens: int
    parameters: int
    loss: float
    eval_loss: float | None
    eval_perplexity: float | None
    seconds: float
    tokens_per_second: float | None
    strengths: list[list[float]] | None


def pretrain(
    recipe: PretrainRecipe,
    folder: str | Path,
    *,
    train: TokenRows,
    validation: TokenRows | None,
    tokenizer: PreTrainedTokenizerFast,
    resume: bool = False,
    portable: bool = False,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    report_to: str = "none",
    notify: Callable[[str], object] = print,
) -> Result:
    """Train a new model by the recipe and write everything to ``folder``.

    train and validation: :class:`saobp.data.Blocks`. ``resume`` continues an unfinished run of the same
    recipe from its last valid checkpoint, or from step 0 if there is none. ``portable`` also writes code with
    which the model loads without saobp. ``callbacks`` are Trainer's; one that modifies the model must do so
    in place, or with an uncompiled recipe, because a compiled step is captured once on a single GPU. In a
    distributed launch every process calls this; rank 0 writes.
    """
    sharded = fsdp_requested(recipe.regularizer)
    if sharded and (recipe.optimizer == "muon" or recipe.averaged_share):
        raise ValueError(
            "optimizer=muon and averaged_share need whole matrices, which FSDP divides: leave --use_fsdp out"
        )
    stores: Mapping[str, TokenStore] = getattr(train, "stores", {})
    for store in stores.values():
        store.check_tokenizer(tokenizer)
    run = RunFolder(folder)
    # Validate the request before the folder is touched.
    args = arguments(recipe, run.path, report_to)
    BatchShard(recipe, args.process_index, args.world_size, args.device)
    objective = objective_of(recipe.family, tokenizer, recipe.masked_share)
    hf_logging.disable_progress_bar()
    model = new_model(recipe, tokenizer)
    if portable:
        check_portable(model)
    notify = notify if args.process_index == 0 else (lambda _: None)
    start = _start_run(run, recipe, args, stores, getattr(train, "held_out", None), resume, notify)
    bar = TrainingProgress()
    trainer = PretrainTrainer(
        model,
        args,
        recipe,
        run,
        train=train,
        validation=validation,
        callbacks=[*callbacks, *([bar] if progress else [])],
        notify=notify,
    )
    if sharded and not trainer.is_fsdp_enabled:
        notify(
            "Accelerate divides models on accelerators only: here every process keeps the whole model (DDP)."
        )
    try:
        with closing(bar):
            _train(trainer, model, objective, start)
        result = _result(recipe, trainer, model)
        _save_model(trainer, run, model, tokenizer, result, portable)
    except BaseException as problem:
        if args.process_index == 0:
            run.fail(trainer.clock.seconds, problem)
        raise
    if args.process_index == 0:
        run.finish(asdict(result), seconds=result.seconds)
    trainer.accelerator.wait_for_everyone()
    return result


def _start_run(
    run: RunFolder,
    recipe: PretrainRecipe,
    args: TrainingArguments,
    stores: Mapping[str, TokenStore],
    held_out: float | None,
    resume: bool,
    notify: Callable[[str], object],
) -> int | None:
    """Start or continue the run on rank 0; the step of the checkpoint to resume from, if there is one."""
    is_new = not run.has_begun
    _on_main_process(
        args,
        lambda: RunFolder.start(
            run.path,
            "pretrain",
            recipe.to_dict(),
            seed=recipe.seed,
            data={name: store.checksum for name, store in stores.items()},
            held_out=held_out,
            processes=args.world_size,
            resume=resume,
        ),
    )
    start = run.last_good_checkpoint(notify)
    _on_main_process(args, lambda: run.rewind(start or 0))
    if resume and is_new:
        notify(f"There is no run in {run.path} yet, so a new one begins.")
    elif resume and start is None:
        notify("There is no whole checkpoint, so the run begins again at step 0.")
    return start


def _train(trainer: PretrainTrainer, model: PreTrainedModel, objective: Objective, start: int | None) -> None:
    """Train from a checkpoint's step or from 0, average the last weights, and evaluate at the end."""
    recipe, args = trainer.recipe, trainer.args
    penalty = recipe.penalty()
    if penalty is not None and penalty.sums_over_texts:
        penalty.weight *= args.world_size * recipe.accumulation  # losses of parts are averaged
    with (
        tensor_core_products(args.device),
        loss_as_forward(
            model,
            objective,
            precision=recipe.precision,
            compiled=recipe.compiled,
            regularizer=penalty,
            sharded=trainer.is_fsdp_enabled,
        ),
    ):
        trainer.last_checkpoint = start
        trainer.train(None if start is None else str(trainer.run.checkpoint_path(start)))
        trainer.average.settle()
        if trainer.held_out and trainer.last_evaluation != recipe.last_step:
            trainer.evaluate()


@contextmanager
def tensor_core_products(device: torch.device) -> Iterator[None]:
    """Context in which float32 matrix products use TF32; the global setting is restored."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_refinement(recipe: PretrainRecipe) -> None:
    """Raises if the recipe's model cannot take its refinement; makes no weights."""
    if recipe.refinement is None:
        return
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strengths of "auto" depend on the vocabulary, which is not known
        model = build_model(recipe.family, recipe.size, vocabulary=8192, length=recipe.length)
        apply(model, recipe.refinement)


def new_model(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The recipe's model with random weights from its seed, refined as it says."""
    model = build_model(
        recipe.family,
        recipe.size,
        vocabulary=len(tokenizer),
        length=recipe.length,
        dropout=recipe.dropout,
        multiple=recipe.vocabulary_multiple,
        padding=tokenizer.pad_token_id,
        seed=recipe.seed,
    )
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            setattr(model.config, name, getattr(tokenizer, name))
    if recipe.refinement is not None:
        apply(model, recipe.refinement)
    return model


def _on_main_process(args: TrainingArguments, work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0; all processes raise if it fails."""
    problem: list[Any] = [None]
    if args.process_index == 0:
        try:
            work()
        except (ValueError, OSError) as error:
            problem = [error]
    if args.world_size > 1:
        torch.distributed.broadcast_object_list(problem, device=args.device)
    if problem[0] is not None:
        raise problem[0]


def _result(recipe: PretrainRecipe, trainer: PretrainTrainer, model: PreTrainedModel) -> Result:
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    held_out = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    last = held_out[-1] if held_out else None
    if losses and not math.isfinite(losses[-1]):
        warnings.warn("the loss is not finite at the end of the run", stacklevel=3)
    rates = trainer.clock.rates
    return Result(
        steps=trainer.state.global_step,
        tokens=recipe.tokens,
        parameters=trainer.parameters,
        loss=losses[-1] if losses else math.nan,
        eval_loss=last,
        eval_perplexity=None if last is None else math.exp(min(last, 700.0)),
        seconds=round(trainer.clock.seconds, 3),
        tokens_per_second=statistics.median(rates) if rates else None,
        strengths=strengths_of(model),
    )


def _save_model(
    trainer: PretrainTrainer,
    run: RunFolder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    result: Result,
    portable: bool,
) -> None:
    """Rank 0 writes; a sharded model is gathered by all processes."""
    weights = None
    if trainer.is_fsdp_enabled:
        weights = gather_weights(trainer.accelerator, model)
    if trainer.is_world_process_zero():
        summary = summarise_run(run.recipe, run.record, asdict(result))
        run.save_model(
            model,
            tokenizer,
            weights_of(model, weights),
            finish=lambda folder: finish_folder(model, folder, run.path.name, summary, portable=portable),
        )
    trainer.accelerator.wait_for_everyone()
