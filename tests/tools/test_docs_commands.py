"""Commands of the documentation: all options exist, and each command runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from saobp.cli import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from run_docs import adapted, commands_of  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [one for page in PAGES for one in commands_of(page)]


def test_commands_are_found_in_blocks_and_between_backquotes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text with `saobp diagnose --example` and `saobp`.\n\n"
        "    saobp report RUN \\\n      --out a  # there\n\n"
        "```python\nimport saobp\n```\n\n```\nsaobp explore FOLDER\nnot a command\n```\n"
        "```shell\npip install saobp\n```\n"
    )
    assert [(one.line, one.text) for one in commands_of(page)] == [
        (1, "saobp diagnose --example"),
        (4, "saobp report RUN --out a"),
        (11, "saobp explore FOLDER"),
        (15, "pip install saobp"),
    ]


def test_every_option_on_a_page_exists() -> None:
    for command in COMMANDS:
        node: Any = typer.main.get_command(app)
        called = re.search(r"(?:^|-m |timeout .*?)\bsaobp (.+)", command.text)
        words = shlex.split(called[1]) if called else []
        while words and hasattr(node, "commands"):
            name = words.pop(0)
            assert name in node.commands, f"{command.page}:{command.line}: saobp has no command {name}"
            node = node.commands[name]
        known = {option for one in node.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
        assert not unknown, f"{command.page}:{command.line}: {command.text}"


def test_what_runs_is_small() -> None:
    for number, command in enumerate(COMMANDS):
        small = adapted(command, number).small
        assert "..." not in small
        assert "--recipe paper" not in small
        if "saobp pretrain" in small:
            assert "--steps 4" in small
        if "saobp reproduce" in small and "--list" not in small:
            assert "--scale smoke" in small


@pytest.mark.slow
def test_every_command_on_every_page_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_docs.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
