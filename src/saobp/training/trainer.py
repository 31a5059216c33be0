"""Transformers' Trainer without device syncs in a step, and with run folders."""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from saobp.metrics.health.health_log import HealthLog
from saobp.metrics.health.recorder import Recorder
from saobp.runs.folder import RunError, RunFolder
from saobp.storage.atomic import reason, unfinished
from saobp.storage.json_files import read_json, write_json
from saobp.storage.manifest import seal
from saobp.training.averaging import WeightAverage
from saobp.training.batches import (
    Batch,
    BatchShard,
    TokenRows,
    TrainingStream,
    health_batch,
    held_out_batches,
)
from saobp.training.fast_gradients import FastGradientTrainer
from saobp.training.graphed_step import GraphedStep
from saobp.training.head_records import MEASURED, health_line, strengths_of
from saobp.training.muon import MuonWithAdamW, hidden_matrices
from saobp.training.recipes import PretrainRecipe
from saobp.training.sharding import shard_by_layers
from saobp.training.trackers import trackers
from saobp.transformers.strength_rates import delay_strengths, separate_strengths

CLOCK = "clock.json"
"""In a checkpoint: seconds of training so far, and whether the run has fallen back to eager."""


def arguments(recipe: PretrainRecipe, folder: Path, report_to: str) -> TrainingArguments:
    """Arguments of Trainer; data, loss and checkpoints are handled here."""
    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule if recipe.schedule != "constant" else "constant_with_warmup",
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_epsilon=recipe.epsilon,
        max_grad_norm=recipe.clip,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if recipe.evaluation_rows else "no",
        eval_steps=recipe.evaluation_steps,
        save_strategy="steps" if recipe.checkpoint_steps < recipe.last_step else "no",
        save_steps=recipe.checkpoint_steps,
        ignore_data_skip=True,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        seed=recipe.seed,
        report_to=trackers(report_to) or "none",
        disable_tqdm=True,
        use_cpu=not cuda,
    )
    if args.n_gpu > 1:
        # One process drives one GPU; more come by `accelerate launch`.
        args._n_gpu = 1
    return args


class PretrainTrainer(FastGradientTrainer):
    """Trains a model whose forward is its loss (``loss_as_forward``) and writes all to a run folder."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        recipe: PretrainRecipe,
        run: RunFolder,
        *,
        train: TokenRows,
        validation: TokenRows | None,
        callbacks: list[TrainerCallback],
        notify: Callable[[str], object],
    ) -> None:
        self.recipe, self.run, self.notify = recipe, run, notify
        self.rows = train
        self.shard = BatchShard(recipe, args.process_index, args.world_size, args.device)
        self.held_out: list[Batch] = [] if validation is None else held_out_batches(validation, self.shard)
        self.health_texts: Batch | None = None
        if validation is not None and self.held_out and recipe.health_texts:
            self.health_texts = health_batch(validation, self.shard)
        args.per_device_train_batch_size = self.shard.rows
        if not self.held_out:
            args.eval_strategy = "no"
        super().__init__(model, args, train_dataset=train, eval_dataset=validation, callbacks=callbacks)
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled:
            shard_by_layers(self.accelerator, model)
        self.parameters = model.num_parameters()
        self.health_log = HealthLog(lambda logs, _: self.log(logs), untrained=True)
        self.clock = Clock()
        self.last_evaluation: int | None = None
        self.last_checkpoint: int | None = None
        self._graphed: GraphedStep | None = None
        first = recipe.last_step - round(recipe.averaged_share * recipe.last_step) + 1
        self.average = WeightAverage([p for p in model.parameters() if p.requires_grad], first)
        if recipe.averaged_share:
            self.add_callback(AfterSteps(self.average.add))
        if recipe.stop_after is not None:
            self.add_callback(AfterSteps(self._stop_after))

    def get_train_dataloader(self) -> Any:
        return TrainingStream(self.rows, self.shard, lambda: self.state.global_step)

    def _stop_after(self, step: int) -> None:
        """End training after the last step, with its log, evaluation and model."""
        if step >= self.recipe.last_step:
            self.control.should_log = self.control.should_training_stop = True

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """Trainer's parameter groups (weight decay for matrices only), and one more for learned strengths."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*arguments)
        if is_new:
            assert isinstance(self.model, PreTrainedModel)
            rate = self.args.learning_rate
            separate_strengths(optimizer, self.model, rate * self.recipe.strength_rate)
            if self.recipe.optimizer == "muon":
                matrices = hidden_matrices(self.model)
                optimizer = self.optimizer = MuonWithAdamW(optimizer, matrices, rate * self.recipe.muon_rate)
        return optimizer

    def create_scheduler(self, *arguments: Any, **options: Any) -> Any:
        """Trainer's schedule; learned strengths have a rate of 0 until they may begin to learn."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(*arguments, **options)
        if is_new and self.recipe.strength_delay:
            assert isinstance(self.model, PreTrainedModel)
            first = round(self.recipe.strength_delay * self.recipe.steps)
            delay_strengths(scheduler, self.model, first)
        return scheduler

    def training_step(
        self,
        model: nn.Module,
        inputs: Batch,
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Tensor:
        if not model.training:
            model.train()
        return self._loss(model, inputs) if self._graphed is None else self._graphed(inputs)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Forward and backward of a batch; accumulates gradients."""
        loss = self.compute_loss(model, batch)
        if self.recipe.accumulation > 1:
            loss = loss / self.recipe.accumulation
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,  # noqa: ARG002
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Tensor:
        return model(**inputs)

    def floating_point_ops(self, inputs: Batch) -> int:
        return 6 * self.parameters * inputs["input_ids"].numel()

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Loss and perplexity on held-out rows, with the same masks every time, and attention health."""
        with self.clock.paused(), self.average.in_place():
            model = self.model_wrapped
            model.eval()
            total = torch.zeros((), device=self.args.device)
            for batch in self.held_out:
                total += model(**batch)
            loss = self.accelerator.reduce(total / len(self.held_out), "mean").item()
            metrics = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            if self.health_texts is not None:
                self.measure_health(self.health_texts)
        self.last_evaluation = self.state.global_step
        return metrics

    def measure_health(self, texts: Batch) -> None:
        """GTD and entropies of every head on the first held-out texts, always the same."""
        assert self.model is not None
        recorder = Recorder(self.model, MEASURED)
        with recorder.measuring():
            self.model_wrapped(**texts)
        line = health_line(self.state.global_step, recorder.health.reduced(), strengths_of(self.model))
        if self.is_world_process_zero():
            self.run.log_health(line)
        self.health_log(recorder.health, self.state.global_step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Also to ``metrics.jsonl``: losses and evaluations."""
        step = self.state.global_step
        if "loss" in logs:
            tokens = step * self.recipe.tokens_per_step
            logs = {"tokens": tokens, "seconds": round(self.clock.seconds, 3), **logs}
            rate = self.clock.rate(tokens)
            if rate is not None:
                logs["tokens_per_second"] = rate
        super().log(logs, start_time)
        if self.is_world_process_zero() and ("loss" in logs or "eval_loss" in logs):
            self.run.log_metrics({"step": step, **{k: v for k, v in logs.items() if k != "epoch"}})

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        before: dict[str, Any] = {"seconds": 0.0}
        if resume_from_checkpoint is not None:
            before = read_json(Path(resume_from_checkpoint, CLOCK))
            self.average.load(Path(resume_from_checkpoint))
        self.clock = Clock(before["seconds"])
        if not self.is_fsdp_enabled:
            self._prepare_step()
        if self._graphed is not None and before.get("uncompiled"):
            self._graphed.use_eager()
        if self.args.process_index:  # same initial weights on all processes, but different dropout masks
            torch.manual_seed(self.recipe.seed + self.args.process_index)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._graphed = None  # and free the memory of a step

    def _prepare_step(self) -> None:
        """Capture compiled steps as a CUDA graph on a single GPU without accumulation."""
        model = self.model
        assert model is not None
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        alone = self.args.world_size == self.recipe.accumulation == 1
        if alone and self.recipe.compiled and self.args.device.type == "cuda":

            def uncompiled(batch: Batch) -> Tensor:
                with torch.compiler.set_stance("force_eager"):
                    return self._loss(model, batch)

            self._graphed = GraphedStep(
                lambda batch: self._loss(model, batch),
                self.trainable,
                self.notify,
                eager=None if self.recipe.dropout else uncompiled,
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:  # noqa: ARG002
        """Write a checkpoint atomically; if that fails, training continues.

        None at the last step, after which the model itself is saved.
        """
        if self.state.global_step >= self.recipe.last_step:
            return
        with self.clock.paused():
            step = self.state.global_step
            final = self.run.checkpoint_path(step)
            folder = unfinished(final)
            problem = self._written(folder)
            main = self.is_world_process_zero()
            if problem is None and main:
                try:
                    self.run.flush_logs()
                    seal(folder, final)
                    self.run.drop_old_checkpoints()
                except OSError as error:
                    problem = error
            if problem is not None and main:
                shutil.rmtree(folder, ignore_errors=True)
                why, problem = reason(problem), None
                gc.collect()  # an open, half-written file still takes disk space
                good = self.last_checkpoint
                last = "there is none before it" if good is None else f"the last good one is of step {good}"
                self.notify(
                    f"The checkpoint of step {step} could not be written ({why}); {last}, and the run "
                    "goes on."
                )
            elif problem is None:
                self.last_checkpoint = step
            self.accelerator.wait_for_everyone()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Weights that are tied are saved once; any other that is missing makes the checkpoint useless."""
        tied = getattr(self.model, "_tied_weights_keys", None) or {}
        wrong = [*(set(load_result.missing_keys) - set(tied)), *load_result.unexpected_keys]
        if wrong:
            raise RunError(f"the checkpoint does not fit the model: {', '.join(sorted(wrong)[:3])} ...")

    def _written(self, folder: Path) -> BaseException | None:
        """Write the state of all processes to a folder; returns the error of any of them.

        Gathering a sharded model is collective: a process that fails in it cannot rejoin, so it exits, and
        with it the run.
        """
        problem: BaseException | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.save_model(str(folder), _internal_call=True)
            self._save_optimizer_and_scheduler(str(folder))
            self._save_rng_state(str(folder))
            if self.is_world_process_zero():
                self.state.save_to_json(str(folder / "trainer_state.json"))
                self.average.save(folder)
                uncompiled = self._graphed is not None and self._graphed.uses_eager
                write_json(folder / CLOCK, {"seconds": self.clock.seconds, "uncompiled": uncompiled})
        except CheckpointException as error:  # raised on all processes
            problem = next(iter(error.failures.values()))[0]
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.is_fsdp_enabled:
                raise RunError(
                    f"the checkpoint of step {self.state.global_step} could not be written "
                    f"({reason(error)}), which ends a run that divides its model: mend that, "
                    "then go on by --resume"
                ) from None
            problem = error
        if self.args.world_size == 1:
            return problem
        failed = torch.tensor(float(problem is not None), device=self.args.device)
        if self.accelerator.reduce(failed, "sum").item() and problem is None:
            problem = RuntimeError("another process could not write its part")
        return problem


class AfterSteps(TrainerCallback):
    """Calls a function with the number of each finished step."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.call(state.global_step)


class Clock:
    """Seconds of a run over all sessions, and tokens per second excluding evaluations and checkpoints."""

    def __init__(self, earlier: float = 0.0) -> None:
        self._began = time.monotonic() - earlier
        self._mark = time.monotonic()
        self._tokens: int | None = None
        self.rates: list[float] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def rate(self, tokens: int) -> float | None:
        """Tokens per second since the last call; None for the first, which includes compilation."""
        now, before = time.monotonic(), self._tokens
        spent, self._mark, self._tokens = now - self._mark, now, tokens
        if before is None or spent <= 0:
            return None
        self.rates.append((tokens - before) / spent)
        return self.rates[-1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time is not counted as training."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._mark += time.monotonic() - start
