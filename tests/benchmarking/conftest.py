"""The arena's queue in miniature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planned_runs import plan
from typer.testing import CliRunner

from saobp.cli import app
from saobp.testing.tiny_training import prose, small_recipe


@pytest.fixture
def miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Tokens and output folder of a queue whose runs take a second: small models, few seeds."""
    text = tmp_path / "text.txt"
    text.write_text(prose(400))
    tokens = tmp_path / "tokens"
    options = ["--tokenizer", "train:60", "--out", str(tokens), "--processes", "1"]
    assert CliRunner().invoke(app, ["tokenize", str(text), *options]).exit_code == 0
    (tokens / "tokenizer-bert-60").rename(tokens / "tokenizer-bert")
    full = plan.Run.recipe.fget

    def small(run: Any) -> Any:
        made = full(run)
        names = ("learning_rate", "optimizer", "refinement", "regularizer", "strength_delay", "seed")
        shared = {name: getattr(made, name) for name in names}
        return small_recipe(**shared, family="modernbert", health_texts=0, steps=4, corpus=str(text))

    monkeypatch.setattr(plan.Run, "recipe", property(small))
    for name, value in {
        "SETTINGS": {"adamw": {}, "muon": {"optimizer": "muon"}},
        "SETTING_SEEDS": (42,),
        "SMALL_RATES": (2e-3, 1e-3),
        "RATE_SEEDS": (42,),
        "MANY_SEEDS": (51,),
        "COMPARED": ("none",),
        "BESIDE_QK_NORM": ("high:learned+qk-norm",),
        "PAIR_SEEDS": (31,),
        "MEDIUM_SEEDS": (),
        "RIVALS": ("gate", "sinkhorn-3"),
        "RIVAL_SEEDS": (51,),
        "PENALTIES": {"entropy": ("entropy,weight=1",)},
        "LEARNED_FORMS": (("high:learned", plan.LATER),),
        "FORM_SEEDS": (42,),
        "CONFIRMING_SEEDS": (61,),
    }.items():
        monkeypatch.setattr(plan, name, value)
    return tokens, tmp_path / "out"
