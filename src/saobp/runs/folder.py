"""The folder of a run: its reader and writer. Files are replaced atomically; ``layout`` has their names."""

from __future__ import annotations

import datetime
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.data.tokenizers import save_tokenizer
from saobp.runs.layout import CHECKPOINTS, HEALTH, LOCK, METRICS, MODEL, RECIPE, RECORD, RESULT
from saobp.runs.machine import command_line, commit, environment
from saobp.storage.atomic import clear_unfinished, fsync, is_unfinished, reason
from saobp.storage.json_files import append_line, keep_lines_up_to, read_lines, read_object, write_json
from saobp.storage.locks import BaseFileLock, try_lock
from saobp.storage.manifest import damage, folder_with_manifest
from saobp.storage.places import check_can_write

KINDS = ("pretrain", "finetune", "evaluate")
KEPT_CHECKPOINTS = 2
"""The latest one and a fallback."""
_LOCKS: dict[Path, BaseFileLock] = {}
"""Locks that this process holds, by run folder."""


class RunError(ValueError):
    """A run that cannot be started or continued, with the reason in one sentence."""


class FinishedRunError(RunError):
    """The run is finished already; nothing was done to it."""


class RunFolder:
    """One run on disk. ``start`` creates or continues one; the constructor only opens it."""

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
        that is not trained on. Raises on a finished run, an unfinished one without ``resume``, one locked by
        another process, a changed recipe or changed data. A folder that is not a run, or does not exist,
        starts a new one, also with ``resume``.
        """
        if kind not in KINDS:
            raise ValueError(f"a run is one of {', '.join(KINDS)}, not {kind!r}")
        run = cls(path)
        if run.is_finished:
            run.clean_up()
        data = dict(data or {})
        run.check_free(resume)  # before the folder is touched
        run.path.mkdir(parents=True, exist_ok=True)
        newly_locked = run._lock()
        try:
            run.check_free(resume)  # another process may have been at work until the lock
            if run.has_begun:
                run.check_recipe(kind, recipe)
                run._check_data(data, held_out)
        except BaseException:
            if newly_locked:
                run._unlock()
            raise
        clear_unfinished(run.path)
        clear_unfinished(run.checkpoints)
        write_json(run.file(RECIPE), {"kind": kind, **recipe})
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
        """Raise if no run can start here, or with ``resume`` continue; changes nothing."""
        if self.is_finished:
            raise FinishedRunError(
                f"the run in {self.path} is finished; its result is in {self.file(RESULT)}: "
                "name another folder to run again"
            )
        try:
            check_can_write(self.path, "name another folder for the run")
        except ValueError as problem:
            raise RunError(str(problem)) from None
        if self.has_begun:
            if not resume:
                raise RunError(f"{self.path} holds an unfinished run: add --resume, or name another folder")
        elif self.path.exists() and any(map(_is_foreign, self.path.iterdir())):
            raise RunError(f"{self.path} is not empty and holds no run: name another folder")

    def _lock(self) -> bool:
        """Lock the run until it, or this process, has ended; False if this process had locked it before."""
        key = self.path.resolve()
        if key in _LOCKS:
            return False
        lock = try_lock(self.file(LOCK))
        if lock is None:
            raise RunError(
                f"another process is at work on the run in {self.path}: wait for it, or name another folder"
            )
        _LOCKS[key] = lock
        return True

    def _unlock(self) -> None:
        lock = _LOCKS.pop(self.path.resolve(), None)
        if lock is not None:
            lock.release()

    def check_recipe(self, kind: str, recipe: Mapping[str, Any]) -> None:
        """Raise if the recipe differs from the one that the run was started with."""
        before = self.recipe
        plain = json.loads(json.dumps({"kind": kind, **recipe}))  # as it is read back: tuples are lists
        changed = sorted(name for name in {*before, *plain} if before.get(name) != plain.get(name))
        if changed:
            raise RunError(
                f"the run in {self.path} was started with another {', '.join(changed)}: give what its "
                "recipe.json says, or name another folder"
            )

    def _check_data(self, data: Mapping[str, str], held_out: float | None) -> None:
        recorded = self.record.get("data", {})
        changed = sorted(name for name in {*recorded, *data} if recorded.get(name) != data.get(name))
        if recorded and changed:
            raise RunError(
                f"the data {', '.join(changed)} is not what the run in {self.path} was started with: restore "
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
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def has_begun(self) -> bool:
        return self.file(RECIPE).exists()

    @property
    def is_finished(self) -> bool:
        return self.file(RESULT).exists()

    @property
    def recipe(self) -> dict[str, Any]:
        return read_object(self.file(RECIPE))

    @property
    def record(self) -> dict[str, Any]:
        path = self.file(RECORD)
        return read_object(path) if path.exists() else {}

    @property
    def result(self) -> dict[str, Any]:
        return read_object(self.file(RESULT))

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.file(METRICS))

    def health(self) -> list[dict[str, Any]]:
        return read_lines(self.file(HEALTH))

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        append_line(self.file(METRICS), line)

    def log_health(self, line: Mapping[str, Any]) -> None:
        append_line(self.file(HEALTH), line)

    def flush_logs(self) -> None:
        """fsync the logs, so that a checkpoint never exists without the lines before it."""
        for path in (self.file(METRICS), self.file(HEALTH)):
            if path.exists():
                fsync(path)

    def rewind(self, step: int) -> None:
        """Drop log lines after a step, from which training resumes."""
        for name in (METRICS, HEALTH):
            keep_lines_up_to(self.file(name), step)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """Context with a folder for the state at a step; removes all but the two latest checkpoints."""
        with folder_with_manifest(self.checkpoint_path(step)) as folder:
            yield folder
            self.flush_logs()
        self.drop_old_checkpoints()

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint, valid or not, in order."""
        names = self.checkpoints.glob("step-*") if self.checkpoints.is_dir() else []
        return sorted(int(path.name.removeprefix("step-")) for path in names)

    def drop_old_checkpoints(self) -> None:
        for step in self.checkpoint_steps()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(self.checkpoint_path(step), ignore_errors=True)

    def last_good_checkpoint(self, notify: Callable[[str], object] = warnings.warn) -> int | None:
        """The latest step with a valid checkpoint, or None; ``notify`` gets one sentence per damaged one."""
        for step in reversed(self.checkpoint_steps()):
            problem = damage(self.checkpoint_path(step))
            if problem is None:
                return step
            notify(f"The checkpoint of step {step} is left out, because {problem}.")
        return None

    def save_model(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        weights: dict[str, Tensor] | None = None,
        finish: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """The model and its tokenizer; ``weights`` are given where the model's own are sharded.

        ``finish`` gets the folder before it is put in place, to add files to it.
        """
        try:
            with folder_with_manifest(self.model) as folder:
                model.save_pretrained(folder, state_dict=weights)
                if tokenizer is not None:
                    save_tokenizer(tokenizer, folder)
                finish(folder)
        except (OSError, SafetensorError) as problem:
            raise RunError(
                f"the model could not be written to {self.model}, because {reason(problem)}: mend that, then "
                "go on with the run"
            ) from None

    def finish(self, result: Mapping[str, Any], *, seconds: float) -> None:
        """Write the result, last of all, and remove the checkpoints."""
        self._update_record(status="finished", finished=_now(), seconds=seconds)
        self.flush_logs()
        write_json(self.file(RESULT), result)
        self._unlock()
        self.clean_up()

    def clean_up(self) -> None:
        """Remove what a finished run no longer needs, if it was killed before it did so."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        clear_unfinished(self.path)
        with suppress(OSError):
            self.file(LOCK).unlink()

    def fail(self, seconds: float | None = None, problem: BaseException | None = None) -> None:
        """Record that the run stopped early, and whether by Ctrl-C; it can be resumed."""
        status = "interrupted" if isinstance(problem, KeyboardInterrupt) else "failed"
        known = {} if seconds is None else {"seconds": seconds}
        try:
            self._update_record(status=status, finished=_now(), **known)
        except OSError:
            self._overwrite_status()
        self._unlock()

    def _overwrite_status(self) -> None:
        """Mark the run as failed by overwriting in place: a full disk has no room for a new file."""
        running, failed = b'"status": "running"', b'"status": "failed" '
        with suppress(OSError), self.file(RECORD).open("r+b") as file:
            offset = file.read().find(running)
            if offset >= 0:
                file.seek(offset)
                file.write(failed)

    def _update_record(self, **changes: Any) -> None:
        self._write_record(**{**self.record, **changes})

    def _write_record(self, **fields: Any) -> None:
        write_json(self.file(RECORD), fields)


def _is_foreign(path: Path) -> bool:
    """Whether a file is neither a lock nor an unfinished file of a run."""
    return path.name != LOCK and not is_unfinished(path)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
