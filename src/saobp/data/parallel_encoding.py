"""Tokenise documents in several processes, in order, with bounded memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from saobp.data import word_encoder

CHARACTERS_AT_ONCE = 2**20
WORTH_A_PROCESS = 8 * 2**20
"""Bytes of text per process below which another one does not pay off."""


@dataclass(frozen=True)
class EncodedGroup:
    """A group of documents: token ids without separators, lengths, and characters of text."""

    tokens: NDArray[np.uint32]
    counts: NDArray[np.int64]
    size: int


def processes_for(size: int, requested: int | None) -> int:
    """Processes to tokenise ``size`` bytes: as asked, else by cores and size."""
    if requested is not None:
        if requested < 1:
            raise ValueError(f"at least 1 process must tokenise, not {requested}")
        return requested
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, size // WORTH_A_PROCESS))


def encode_in_parallel(
    documents: Iterable[str], tokenizer_json: str, processes: int
) -> Iterator[EncodedGroup]:
    """The tokens of the documents, group by group, in order."""
    groups = _groups(documents)
    if processes == 1:
        encoder = word_encoder.CachedEncoder(tokenizer_json)
        for group in groups:
            yield EncodedGroup(*encoder.encode(group), sum(map(len, group)))
        return
    with _WorkerPool(processes, tokenizer_json) as pool:
        waiting: deque[Future[EncodedGroup]] = deque()
        for group in groups:
            waiting.append(pool.submit(group))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _WorkerPool:
    """Processes that run ``word_encoder.py``, each fed by a thread of this one."""

    def __init__(self, processes: int, tokenizer_json: str) -> None:
        self.workers: list[subprocess.Popen[bytes]] = []
        self.free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self.threads = ThreadPoolExecutor(processes)
        program = [sys.executable, "-P", str(Path(word_encoder.__file__))]
        try:
            for _ in range(processes):
                worker = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self.workers.append(worker)
                _send(worker, tokenizer_json)
                self.free.put(worker)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        self.threads.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    def submit(self, texts: list[str]) -> Future[EncodedGroup]:
        return self.threads.submit(self._encode, texts)

    def _encode(self, texts: list[str]) -> EncodedGroup:
        worker = self.free.get()
        assert worker.stdout is not None
        try:
            _send(worker, texts)
            answer = pickle.load(worker.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as problem:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(1)
            raise ChildProcessError(
                f"a tokenising process ended early (exit code {worker.poll()}): it may have run out of memory"
            ) from problem
        finally:
            self.free.put(worker)
        if isinstance(answer, str):
            raise ChildProcessError(f"a tokenising process failed: {answer}")
        tokens, counts = answer
        return EncodedGroup(tokens, counts, sum(map(len, texts)))


def _send(worker: subprocess.Popen[bytes], what: object) -> None:
    assert worker.stdin is not None
    pickle.dump(what, worker.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    worker.stdin.flush()


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in groups of about a million characters."""
    group: list[str] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document)
        if characters >= CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group
