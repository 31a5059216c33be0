"""The folder of a run: what was asked for, what happened, and the result.

    recipe.json      kind of run and every resolved field
    record.json      status, command, commit, times, seed, data checksums, environment
    metrics.jsonl    one object a line: step, tokens, seconds, loss, ...; evaluations with step and eval_...
    health.jsonl     statistics per layer and head, and the strengths
    result.json      final numbers; it exists = the run is finished
    model/           the trained model and its tokenizer
    checkpoints/     step-000500/, each with a manifest of checksums

Files and folders are written under another name first, so that each of them is whole or absent.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.benchmarking.machine import commit, processor, version
from saobp.data.tokenizers import save_tokenizer
from saobp.runs.json_files import (
    append_line,
    flaw,
    keep_lines_up_to,
    read_json,
    read_lines,
    whole_folder,
    write_json,
)
from saobp.storage.atomic import clear_unfinished, is_unfinished, reason, take_folder

KINDS = ("pretrain", "finetune", "evaluate")
JOBS_VARIABLE = "SAOBP_JOBS"
"""Set for processes that share a machine: how many there are."""
_WHOLE_PATH = re.compile(r"(?<![^=,])[~/][^=,]*")
"""At the beginning of a word, of an option's value, or of a further part of a list."""
KEPT_CHECKPOINTS = 2
"""One to go on from and one to fall back on."""
_TAKEN: dict[Path, int] = {}
"""Folders of the runs that this process works on."""


class RunError(ValueError):
    """A run that cannot be started or continued, with the reason in one sentence."""


class FinishedRunError(RunError):
    """The run is finished already; nothing was done to it."""


class RunFolder:
    """One run on disk. ``start`` makes or continues one; the constructor only looks at it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def start(
        cls,
        path: str | Path,
        kind: str,
        recipe: Mapping[str, Any],
        *,
        seed: int,
        data: Mapping[str, str] | None = None,
        held_out: float | None = None,
        processes: int = 1,
        resume: bool = False,
    ) -> RunFolder:
        """A new run, or with ``resume`` an unfinished one of the same recipe.

        recipe: every resolved field, ready for JSON; data: name to sha256; held_out: the share of the data
        that is not trained on. Refuses with one sentence a finished run, an unfinished one without
        ``resume``, one that another process works on, a changed recipe or changed data. A folder that was
        never a run, or does not exist, starts afresh, also with ``resume``.
        """
        if kind not in KINDS:
            raise ValueError(f"a run is one of {', '.join(KINDS)}, not {kind!r}")
        run = cls(path)
        asked = {"kind": kind, **recipe}
        data = dict(data or {})
        run.check_free(resume)
        if run.file("recipe.json").exists():
            run.check_recipe(kind, recipe)
            run._check_data(data, held_out)
        run.path.mkdir(parents=True, exist_ok=True)
        run._take()
        clear_unfinished(run.path)
        clear_unfinished(run.checkpoints)
        write_json(run.file("recipe.json"), asked)
        started = run.record.get("started", _now())
        run._write_record(
            status="running",
            command=command_line(),
            commit=commit(),
            started=started,
            finished=None,
            seconds=run.record.get("seconds", 0.0),
            seed=seed,
            data=data,
            **({} if held_out is None else {"held_out": held_out}),
            environment=environment(processes),
        )
        return run

    def check_free(self, resume: bool = False) -> None:
        """Refuse a folder in which no run can begin, or with ``resume`` go on; nothing is changed."""
        if self.is_finished:
            raise FinishedRunError(
                f"the run in {self.path} is finished; its result is in {self.file('result.json')}: "
                "name another folder to run again"
            )
        if self.file("recipe.json").exists():
            if not resume:
                raise RunError(f"{self.path} holds an unfinished run: add --resume, or name another folder")
        elif self.path.is_file():
            raise RunError(f"{self.path} is a file: name a folder for the run")
        elif self.path.exists() and not all(map(is_unfinished, self.path.iterdir())):
            raise RunError(f"{self.path} is not empty and holds no run: name another folder")

    def _take(self) -> None:
        """Keep other processes out until the run has ended, or this process has."""
        key = self.path.resolve()
        if key in _TAKEN:
            return
        taken = take_folder(self.path)
        if taken is None:
            raise RunError(
                f"another process is at work on the run in {self.path}: wait for it, or name another folder"
            )
        _TAKEN[key] = taken

    def _let_go(self) -> None:
        taken = _TAKEN.pop(self.path.resolve(), None)
        if taken is not None:
            os.close(taken)

    def check_recipe(self, kind: str, recipe: Mapping[str, Any]) -> None:
        """Refuse another recipe than the one that the run in this folder was started with."""
        before = self.recipe
        plain = _as_json({"kind": kind, **recipe})
        changed = sorted(name for name in {*before, *plain} if before.get(name) != plain.get(name))
        if changed:
            raise RunError(
                f"the run in {self.path} was started with another {', '.join(changed)}: give what its "
                "recipe.json says, or name another folder"
            )

    def _check_data(self, data: Mapping[str, str], held_out: float | None) -> None:
        known = self.record.get("data", {})
        other = sorted(name for name in {*known, *data} if known.get(name) != data.get(name))
        if known and other:
            raise RunError(
                f"the data {', '.join(other)} is not what the run in {self.path} was started with: restore "
                "it, or name another folder"
            )
        share = self.record.get("held_out", held_out)
        if share != held_out:
            raise RunError(
                f"the run in {self.path} was started with a held-out share of {share}, not {held_out}: give "
                f"--held-out {share}, or name another folder"
            )

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def is_finished(self) -> bool:
        return self.file("result.json").exists()

    @property
    def recipe(self) -> dict[str, Any]:
        return read_json(self.file("recipe.json"))

    @property
    def record(self) -> dict[str, Any]:
        path = self.file("record.json")
        return read_json(path) if path.exists() else {}

    @property
    def result(self) -> dict[str, Any]:
        return read_json(self.file("result.json"))

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.file("metrics.jsonl"))

    def health(self) -> list[dict[str, Any]]:
        return read_lines(self.file("health.jsonl"))

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        append_line(self.file("metrics.jsonl"), line)

    def log_health(self, line: Mapping[str, Any]) -> None:
        append_line(self.file("health.jsonl"), line)

    def rewind(self, step: int) -> None:
        """Forget what was logged after a step: training goes on from there."""
        for name in ("metrics.jsonl", "health.jsonl"):
            keep_lines_up_to(self.file(name), step)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to fill with the state at a step; older checkpoints but one then go."""
        with whole_folder(self.checkpoint_path(step)) as folder:
            yield folder
        self.drop_old_checkpoints()

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint, whole or not, in order."""
        names = self.checkpoints.glob("step-*") if self.checkpoints.is_dir() else []
        return sorted(int(path.name.removeprefix("step-")) for path in names)

    def drop_old_checkpoints(self) -> None:
        for step in self.checkpoint_steps()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(self.checkpoint_path(step), ignore_errors=True)

    def last_good_checkpoint(self, say: Callable[[str], object] = warnings.warn) -> int | None:
        """The latest step with a whole checkpoint, or None; ``say`` gets a sentence for each that is not."""
        for step in reversed(self.checkpoint_steps()):
            problem = flaw(self.checkpoint_path(step))
            if problem is None:
                return step
            say(f"The checkpoint of step {step} is left out, because {problem}.")
        return None

    def save_model(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """The model and its tokenizer; ``weights`` are given where the model's own are sharded."""
        try:
            with whole_folder(self.model) as folder:
                model.save_pretrained(folder, state_dict=weights)
                if tokenizer is not None:
                    save_tokenizer(tokenizer, folder)
        except (OSError, SafetensorError) as problem:
            raise RunError(
                f"the model could not be written to {self.model}, because {reason(problem)}: mend that, then "
                "go on with the run"
            ) from None

    def finish(self, result: Mapping[str, Any], *, seconds: float) -> None:
        """Write the result, last of all, and drop the checkpoints that it makes superfluous."""
        self._update_record(status="finished", finished=_now(), seconds=seconds)
        write_json(self.file("result.json"), result)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self._let_go()

    def fail(self, seconds: float | None = None) -> None:
        """Note that the run stopped before its end; it can be resumed."""
        known = {} if seconds is None else {"seconds": seconds}
        self._update_record(status="failed", finished=_now(), **known)
        self._let_go()

    def _update_record(self, **changes: Any) -> None:
        self._write_record(**{**self.record, **changes})

    def _write_record(self, **fields: Any) -> None:
        write_json(self.file("record.json"), fields)


def environment(processes: int = 1) -> dict[str, Any]:
    """What a run was made on; ``jobs`` is how many runs shared the machine, whose times then say little."""
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "saobp": version("saobp"),
        "hardware": torch.cuda.get_device_name(0) if cuda else processor(),
        "processes": processes,
        "jobs": int(os.environ.get(JOBS_VARIABLE, "1")),
    }


def command_line() -> str:
    """The command line, with the program and all folders by their last part alone."""
    program = Path(sys.argv[0]).name
    return without_folders(["saobp" if program == "__main__.py" else program, *sys.argv[1:]])


def without_folders(words: Iterable[str]) -> str:
    """A command line that names no place of the machine: of every whole path only the last part."""
    return shlex.join(re.sub(_WHOLE_PATH, lambda path: Path(path[0]).name, word) for word in words)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it would be read back: tuples are lists, keys are text."""
    return json.loads(json.dumps(content))
