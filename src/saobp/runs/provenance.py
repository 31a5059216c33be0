"""Provenance of a run: command line, environment, hardware."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from saobp.runs.machine import processor, version
from saobp.runs.worker_processes import JOBS_VARIABLE

_ABSOLUTE_PATH = re.compile(r"(?<![^=,])[~/][^=,]*")
"""At the start of a word, of an option's value, or of a list entry."""


def environment(processes: int = 1) -> dict[str, Any]:
    """Hardware and versions; ``jobs`` is how many runs shared the machine, which makes timings unreliable."""
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
    """The command line, with program and folders reduced to their names."""
    program = Path(sys.argv[0]).name
    return without_folders(["saobp" if program == "__main__.py" else program, *sys.argv[1:]])


def without_folders(words: Iterable[str]) -> str:
    """A command line with absolute paths reduced to their last part."""
    return shlex.join(re.sub(_ABSOLUTE_PATH, lambda path: Path(path[0]).name, word) for word in words)
