"""One seed of fine-tuning on the Transformers Trainer, with little overhead per step."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from saobp.data.tasks import TaskSpec
from saobp.runs.folder import RunFolder
from saobp.storage.atomic import reason
from saobp.training.fast_gradients import FastGradientTrainer, FastZeroGrad
from saobp.training.fast_layers import no_masks_for_full_rows, temporary_class
from saobp.training.finetune.examples import Batch, EpochBatches, Examples, LengthBatches
from saobp.training.finetune.predict import evaluate_rows, measure_attention, uses_bfloat16
from saobp.training.finetune.recipe import FinetuneRecipe
from saobp.training.graphed_step import Capture, GraphedStep, capture_on_gpu
from saobp.training.head_records import MEASURED, health_line, strengths_of
from saobp.transformers.strength_rates import separate_strengths

CHECKPOINT_SECONDS = 60.0
"""Minimum time between checkpoints, written at the end of epochs; short runs restart instead."""
LOGS_PER_EPOCH = 10

Progress = Callable[[int, int], None]


class TaskTrainer(FastGradientTrainer):
    """Trains on batches of similar length, scores every epoch, and writes to a run folder."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: TaskSpec,
        recipe: FinetuneRecipe,
        rows: Mapping[str, Examples],
        run: RunFolder,
        *,
        seed: int,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        notify: Callable[[str], object] = warnings.warn,
        progress: Progress | None = None,
    ) -> None:
        self.notify = notify
        self.spec, self.recipe, self.rows, self.run = spec, recipe, rows, run
        self.batches = LengthBatches(rows["train"].lengths, recipe.batch, seed)
        earlier = run.metrics()
        self.checkpoint_seconds, self.earlier = (
            checkpoint_seconds,
            earlier[-1].get("seconds", 0.0) if earlier else 0.0,
        )
        self.began = self.last_checkpoint = time.monotonic()
        self._graphed: GraphedStep | None = None
        super().__init__(
            model=model,
            args=training_arguments(recipe, run.path, len(self.batches), seed),
            train_dataset=rows["train"],
            eval_dataset=rows["validation"],
            callbacks=[_EpochLog(), *([] if progress is None else [_ProgressCallback(progress)])],
        )
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    @property
    def seconds(self) -> float:
        """Time spent on this seed, over all sessions."""
        return self.earlier + time.monotonic() - self.began

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = DataLoader(
            self.rows["train"],
            batch_sampler=EpochBatches(self.batches),
            collate_fn=without_full_mask,
            pin_memory=self.args.device.type == "cuda",
        )
        return self.accelerator.prepare(loader)

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """The Trainer's parameter groups, and one more for learned strengths."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*arguments)
        if is_new:
            assert isinstance(self.model, PreTrainedModel)
            separate_strengths(optimizer, self.model, self.recipe.rate * self.recipe.strength_rate)
        return optimizer

    def train(self, *arguments: Any, **options: Any) -> Any:
        model = self.model
        assert isinstance(model, PreTrainedModel)
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if (capture := capture_for(self.args, model)) is not None:
            self._graphed = GraphedStep(
                self._launched, self.trainable, self.notify, capture, eager=self._launched
            )
        try:
            with no_masks_for_full_rows(), temporary_class(model, FastZeroGrad, trainable=self.trainable):
                return super().train(*arguments, **options)
        finally:
            self._graphed = None  # and free the memory of its graphs

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Trainer's step; whole batches on a single GPU are captured as CUDA graphs, one for each length."""
        is_whole = len(next(iter(inputs.values()))) == self.recipe.batch
        if self._graphed is None or not is_whole:
            return super().training_step(model, inputs, num_items_in_batch)
        return self._graphed(inputs)

    def _launched(self, batch: Batch) -> Tensor:
        return super().training_step(self.model_wrapped, batch)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score the validation rows and measure attention health; the log line carries the epoch."""
        assert isinstance(self.model, PreTrainedModel)
        found = evaluate_rows(self.model, self.rows["validation"], self.spec, self.recipe)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.log(dict(metrics))
        if self.recipe.health_texts:
            self.run.log_health(self.health())
        return metrics

    def health(self) -> dict[str, Any]:
        """GTD and entropies of every head on the first validation sequences, and the strengths."""
        assert isinstance(self.model, PreTrainedModel)
        rows = self.rows["validation"]
        count = min(len(rows), max(1, self.recipe.health_texts // rows.group))
        measured = measure_attention(self.model, rows, range(count), MEASURED)
        return health_line(self.state.global_step, measured, strengths_of(self.model))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "train_runtime" not in logs:
            head = {"step": self.state.global_step, "seconds": round(self.seconds, 3)}
            self.run.log_metrics({**head, **logs})

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """Not counted: it would iterate over all parameters at each step."""
        del inputs
        return 0

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write a checkpoint atomically if it is due; training continues if that fails."""
        del model, trial
        if time.monotonic() - self.last_checkpoint < self.checkpoint_seconds:
            return
        step = self.state.global_step
        try:
            with self.run.checkpoint(step) as folder:
                self.save_model(str(folder), _internal_call=True)
                self._save_optimizer_and_scheduler(str(folder))
                self._save_rng_state(str(folder))
                self.state.save_to_json(str(folder / "trainer_state.json"))
        except (OSError, RuntimeError, SafetensorError) as problem:
            why = reason(problem)
            self.notify(f"The checkpoint of step {step} could not be written ({why}); the run goes on.")
            gc.collect()
        self.last_checkpoint = time.monotonic()


def without_full_mask(batch: Any) -> Batch:
    """A batch without its attention mask if no row is padded, which models else find out on the GPU.

    They have other kernels for such batches, and a captured step cannot choose: it gets a graph of its own.
    """
    if not bool(batch["attention_mask"].all()):
        return batch
    return {name: values for name, values in batch.items() if name != "attention_mask"}


def capture_for(arguments: TrainingArguments, model: PreTrainedModel) -> Capture | None:
    """How steps of a model are captured: on one GPU, unless Python draws the layers that a step skips."""
    settings = model.config.to_dict()
    skips = any(value for name, value in settings.items() if name.endswith("layerdrop"))
    if skips or arguments.device.type != "cuda" or arguments.world_size > 1:
        return None
    return partial(capture_on_gpu, pool=torch.cuda.graph_pool_handle())


class _EpochLog(TrainerCallback):
    """Logs the mean loss before a checkpoint, so that no mean spans two sessions of a run."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state
        control.should_log = True


class _ProgressCallback(TrainerCallback):
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self.progress(state.global_step, state.max_steps)


def training_arguments(
    recipe: FinetuneRecipe, folder: Path, steps_per_epoch: int, seed: int
) -> TrainingArguments:
    """The Trainer's settings: bfloat16 on a GPU, float32 on a CPU, no synchronisation between logs."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.rate,
        lr_scheduler_type="linear",
        warmup_steps=round(recipe.warmup * recipe.epochs * steps_per_epoch),
        weight_decay=recipe.decay,
        max_grad_norm=recipe.clip,
        bf16=uses_bfloat16(),
        use_cpu=not torch.cuda.is_available(),
        optim="adamw_torch_fused",
        accelerator_config={"non_blocking": True},
        torch_compile=recipe.compiled,
        seed=seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=max(1, steps_per_epoch // LOGS_PER_EPOCH),
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments
