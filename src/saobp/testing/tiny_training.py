"""Fixtures for tests of training: token rows, a small tokenizer, a recipe of seconds, child processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from saobp.data import train_vocabulary
from saobp.sizes import DECODERS, Size
from saobp.training import architectures as models
from saobp.training.pretrain import Result, pretrain
from saobp.training.recipes import PretrainRecipe, tiny

WORDS = "the cat dog house river stone walks runs sleeps over under near with a blue green old young and then"


def prose(paragraphs: int = 40, seed: int = 0) -> str:
    """Random text in paragraphs."""
    drawn = random.Random(seed)
    return "\n\n".join(" ".join(drawn.choices(WORDS.split(), k=60)) + "." for _ in range(paragraphs))


def small_tokenizer(family: str = "bert") -> PreTrainedTokenizerFast:
    """Trained on :func:`prose`."""
    size, kind = (300, "bpe") if family in DECODERS else (60, "wordpiece")
    return train_vocabulary([prose()], size, kind)


class RandomRows:
    """Learnable token rows: each token is likely followed by its successor."""

    def __init__(self, rows: int, length: int, vocabulary: int, seed: int = 0) -> None:
        drawn = np.random.default_rng(seed)
        jumps = np.where(drawn.random((rows, length)) < 0.8, 1, drawn.integers(1, vocabulary, (rows, length)))
        self.tokens = 5 + np.cumsum(jumps, 1) % (vocabulary - 5)

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, numbers: np.ndarray) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.tokens[np.asarray(numbers) % len(self.tokens)])}


def small_recipe(**changes: Any) -> PretrainRecipe:
    """A model of one layer, 16 wide, in a run of a dozen steps; keyword arguments override."""
    models.SIZES["test"] = Size(1, 16, 2, 32)
    fields: dict[str, Any] = {
        "steps": 12,
        "batch_size": 4,
        "length": 16,
        "warmup_steps": 2,
        "log_steps": 1,
        "evaluation_steps": 4,
        "checkpoint_steps": 2,
        "evaluation_rows": 8,
        "health_texts": 2,
        **changes,
    }
    return replace(tiny(fields.pop("family", "bert"), "test"), **fields)


def train_small(recipe: PretrainRecipe, folder: Path, **options: Any) -> Result:
    """Pretrain on random rows, quietly."""
    tokenizer = small_tokenizer(recipe.family)
    train, validation = (RandomRows(rows, recipe.length, len(tokenizer), rows) for rows in (40, 20))
    fields: dict[str, Any] = {"progress": False, "notify": lambda _: None, **options}
    return pretrain(recipe, folder, train=train, validation=validation, tokenizer=tokenizer, **fields)


def forked(work: Callable[[], object]) -> BaseProcess:
    """Run ``work`` in a forked process, which tests may kill."""

    def run() -> None:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def in_processes(
    count: int, work: Callable[[], object], *, sharded: str | None = None, seconds: float = 120.0
) -> None:
    """Run ``work`` in so many processes as in a distributed launch on CPUs.

    sharded: state dict type of FSDP 2, which then shards the model. Raises on a timeout or an error.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def member(rank: int) -> Callable[[], None]:
        def run() -> None:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "ACCELERATE_USE_CPU": "true",
            }
            if sharded is not None:
                os.environ |= {
                    "ACCELERATE_USE_FSDP": "true",
                    "FSDP_VERSION": "2",
                    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                    "FSDP_STATE_DICT_TYPE": sharded,
                }
                take_cpus_for_accelerators()
            work()

        return run

    processes = [forked(member(rank)) for rank in range(count)]
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    if any(code != 0 for code in codes):
        raise RuntimeError(f"the processes ended with {codes}")


def take_cpus_for_accelerators() -> None:
    """Let Accelerate use FSDP on CPUs in this process, over gloo; by default it requires accelerators."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    made = PartialState.__init__

    def make(self: PartialState, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = make
