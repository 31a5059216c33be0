"""A plain ``pip install saobp`` is enough for operation, plug-in and probe; commands name the rest."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from saobp.extras import EXTRA_OF

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "lm_eval": "lm-eval", "yaml": "pyyaml"}
"""Import names that differ from the names that pip takes."""
ELSEWHERE = {"triton", "peft", "setuptools", "playwright", "networkx", "packaging", "pytest"}
"""Imported where they are found, or by testing tools alone: Triton comes with the GPU builds of torch."""


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def test_plain_dependencies_are_what_torch_and_transformers_ask_for_themselves() -> None:
    given, waiting = {"torch", "transformers"}, ["torch", "transformers"]
    while waiting:
        for line in requires(waiting.pop()) or ():
            needed = Requirement(line)
            name = canonicalize_name(needed.name)
            if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and name not in given:
                given.add(name)
                waiting.append(name)
    assert names(PROJECT["dependencies"]) <= given


def test_every_extra_brings_the_packages_that_sentences_promise() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRA_OF.items():
        assert canonicalize_name(DISTRIBUTIONS.get(package, package)) in names(extras[extra]), package


def test_every_import_is_a_dependency_or_of_an_extra() -> None:
    found = set()
    for path in (ROOT / "src/saobp").rglob("*.py"):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    third_party = found - set(sys.stdlib_module_names) - {"saobp"} - ELSEWHERE
    plain = names(PROJECT["dependencies"])
    unnamed = {name for name in third_party if canonicalize_name(DISTRIBUTIONS.get(name, name)) not in plain}
    assert unnamed <= set(EXTRA_OF), unnamed - set(EXTRA_OF)


PLAIN = """
import json, sys
from pathlib import Path
for name in sys.argv[1].split(","):
    sys.modules[name] = None
import torch
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner
import saobp
from saobp.cli import app
shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = saobp.apply(BertForMaskedLM(BertConfig(vocab_size=20, **shape)), "high:0.2")
with saobp.probe(model) as health:
    model(torch.arange(8)[None])
assert len(health.heads()) == 2
states = torch.randn(3, 1, 2, 8, 8)
assert saobp.attention(*states, "high:0.2").shape == (1, 2, 8, 8)
assert saobp.metrics.gtd(states[0].softmax(-1)).shape == (1, 2)
for line in json.loads(sys.argv[2]):
    said = CliRunner().invoke(app, line)
    print(json.dumps([said.exit_code, said.stdout, said.stderr, Path("new").exists()]))
"""
COMMANDS = [
    ("quickstart --out new", "lab"),
    ("tokenize text.txt --out new", "train"),
    ("pretrain --recipe tiny --corpus text.txt --out new", "train"),
    ("finetune --model . --task rte --out new", "train"),
    ("evaluate .", "train"),
    ("export . --out new", "export"),
    ("report . --out new", "report"),
    ("report . --format svg --out new", "report"),
    ("explore --example --no-browser", "report"),
    ("reproduce gtd --scale smoke --out new", "lab"),
    ("arena . --out new", "lab"),
    ("diagnose --example --out diagnosis", "report"),
]


def test_without_extras_the_core_works_and_commands_say_what_they_need(tmp_path: Path) -> None:
    """In a process in which no optional package can be imported."""
    (tmp_path / "text.txt").write_text("A few words.")
    for name in ("config.json", "recipe.json"):
        (tmp_path / name).write_text("{}")
    blocked = ",".join([*EXTRA_OF, "triton", "peft", "pandas"])
    lines = json.dumps([line.split() for line, _ in COMMANDS])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN, blocked, lines],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *refused, diagnosis = zip(COMMANDS, map(json.loads, done.stdout.splitlines()), strict=True)
    for (line, extra), (code, out, sentence, has_written) in refused:
        assert f"which is not installed here: pip install 'saobp[{extra}]'" in sentence, (line, sentence)
        assert (code, out, len(sentence.splitlines()), has_written) == (1, "", 1, False), line
    code, _, notes, _ = diagnosis[1]
    assert code == 0
    assert "drawing heads needs matplotlib" in notes
    assert {path.name for path in (tmp_path / "diagnosis").iterdir()} == {
        "diagnosis.json",
        "explorer.json",
        "heads.csv",
    }
