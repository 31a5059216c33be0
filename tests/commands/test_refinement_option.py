"""``--refinement``: fields that would do nothing are refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.commands.refinement_option import parse_refinement_option
from saobp.refinement import Refinement


class Unweighted(saobp.Factor):
    has_strength = False

    def log_messages(self, beliefs: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return -beliefs


saobp.register_factor("unweighted", Unweighted())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("none:0.7", "'none' takes no strength in 'none:0.7', since it is plain attention: leave it out"),
        ("none:0.7+temperature", "'none' takes no strength"),
        ("elemmul:0.2", "'elemmul' takes no strength in 'elemmul:0.2', since it is not weighted"),
        ("sinkhorn,strength=learned", "'sinkhorn' takes no strength"),
        ("unweighted:1", "'unweighted' takes no strength"),
        ("none,steps=2", "'none' takes no steps, damping or future in 'none,steps=2': name a factor"),
        ("none,damping=0.2", "'none' takes no steps, damping or future"),
        ("none,future=paper", "'none' takes no steps, damping or future"),
        ("high,damping=0.2", "damping has no effect on the single step of 'high,damping=0.2': add steps=2"),
    ],
)
def test_fields_without_effect(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_refinement_option(text)


@pytest.mark.parametrize(
    "text",
    ["none", "none+temperature", "temperature", "high", "low:learned,steps=2,damping=0.3", "elemmul,steps=2"],
)
def test_fields_with_effect(text: str) -> None:
    assert parse_refinement_option(text) == Refinement.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "pretrain --dry-run --refinement {}",
        "finetune --model {folder} --task rte --refinement {}",
        "evaluate {folder} --refinement {}",
        "export {folder} --out {folder}/new --refinement {}",
        "explore --example --no-browser --refinement {}",
        "diagnose --example --out {folder}/diagnosis --compare {}",
        "quickstart --out {folder}/quickstart --refinement {}",
    ],
    ids=lambda line: line.split()[0],
)
def test_every_command_refuses_them(line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = CliRunner().invoke(app, line.format("elemmul:0.7", folder=tmp_path).split())
    assert said.exit_code == 1, said.output
    assert said.stderr.startswith("'elemmul' takes no strength in 'elemmul:0.7'"), said.stderr
