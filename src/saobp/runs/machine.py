"""Hardware, versions and commit of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from saobp.runs.worker_processes import JOBS_VARIABLE

COMMIT_VARIABLE = "SAOBP_COMMIT"


def machine(device: str) -> dict[str, str]:
    """Hardware, driver, versions, commit and date of a measurement on ``cuda`` or ``cpu``."""
    facts = {"CPU": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used"}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts["GPU"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
        facts["driver"] = f"{driver()}, CUDA {torch.version.cuda}"
    for name in ("torch", "triton", "transformers"):
        facts[name] = version(name)
    facts["Python"] = platform.python_version()
    facts["commit"] = commit()
    facts["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return facts


def processor() -> str:
    """The name of the processor, as reported by the system."""
    details = Path("/proc/cpuinfo")
    if details.exists():
        for line in details.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def driver() -> str:
    return _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown driver"


def commit() -> str:
    """The commit of the source tree, marked where files differ from it; the version of an installed copy.

    ``SAOBP_COMMIT`` overrides it, for a copy of the tree without its repository.
    """
    override = os.environ.get(COMMIT_VARIABLE, "").strip()
    if override:
        return override
    here = Path(__file__)
    # Without locks: the repository may be in use elsewhere.
    git = ("git", "--no-optional-locks", "-C", str(here.parent))
    is_known = _output_of(*git, "ls-files", here.name)  # not where it is installed inside another repository
    name = _output_of(*git, "rev-parse", "--short", "HEAD") if is_known else ""
    if not name:
        return f"saobp {version('saobp')}"
    changed = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{name} with uncommitted changes" if changed else name


def version(package: str) -> str:
    """The version of a package; this one's from its source tree where that is what runs."""
    if package == "saobp":
        project = Path(__file__).parents[3] / "pyproject.toml"
        if project.exists():
            return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output_of(*command: str) -> str:
    """First line that a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0]


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
