"""Writes down each test as it ends, so that a stopped run is a record too: ``-p outcomes --outcomes FILE``.

A line has outcome, seconds and name; the message of a failure follows, and is printed at once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file for a line about each test as it ends")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # reports of workers come to their controller
        config.pluginmanager.register(Outcomes(path, config))


class Outcomes:
    def __init__(self, path: Path, config: pytest.Config) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.config = path.open("w", buffering=1), config
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        self.counts[outcome] += 1
        self.file.write(f"{outcome} {report.duration:.1f} {report.nodeid}\n")
        if report.failed:
            self.file.write(report.longreprtext + "\n")
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}")

    def pytest_sessionfinish(self) -> None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())
        self.file.write(f"ended: {counts}\n")
        self.file.close()
