"""Random kills, damaged files, calls and generations: a seed, a count of each, and one table at the end.

make soak
pytest -m slow tests/soak --soak-seed 7 --kills 50 --files 50 --calls 500 --generations 20
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tally import TALLIES, Soak

COUNTS = {"kills": 12, "files": 12, "calls": 200, "generations": 12}
"""Without options: a minute or two."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak-seed", type=int, default=0, help="Everything random follows from it.")
    group.addoption("--soak-table", type=Path, help="Write the table to this file.")
    for name, count in COUNTS.items():
        group.addoption(f"--{name}", type=int, default=count, help=f"How many {name}.")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Soak:
    option = request.config.getoption
    counts = {name: option(name, count) for name, count in COUNTS.items()}
    return Soak(option("soak_seed", 0), counts, request.node.name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    began, before = time.monotonic(), len(TALLIES)
    yield
    for tally in TALLIES[before:]:
        tally.seconds = tally.seconds or (time.monotonic() - began) / (len(TALLIES) - before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not TALLIES:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [
        "| what | trials | how they ended | wrong | minutes |",
        "|---|---|---|---|---|",
        *(tally.row() for tally in TALLIES),
        "",
        f"Seed {config.getoption('soak_seed', 0)}, commit {commit}, {machine}, PyTorch {torch.__version__}.",
        *(f"- {tally.what}: {one}" for tally in TALLIES for one in tally.wrong[:20]),
    ]
    terminalreporter.write_line("\n".join(["", *lines]))
    path = config.getoption("soak_table", None)
    if path is not None:
        path.write_text("# Random kills, damaged files, calls and generations\n\n" + "\n".join(lines) + "\n")
