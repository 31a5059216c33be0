"""What people try first gets what they meant, or one clear sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

import saobp
from saobp import Refinement
from saobp.metrics import measure
from saobp.testing.tiny_models import tiny_model
from saobp.transformers.apply import warn_of_strength


def test_every_form_of_a_refinement_is_taken() -> None:
    states = torch.randn(1, 2, 5, 8)
    rows = torch.softmax(torch.randn(1, 2, 5, 5), -1)
    expected = saobp.attention(states, states, states, Refinement("high", 0.2))
    assert torch.equal(saobp.attention(states, states, states, "high:0.2"), expected)
    assert torch.equal(saobp.refine(rows, "high:0.2"), saobp.refine(rows, Refinement("high", 0.2)))
    written, meant = (measure(states, states, refinement=r) for r in ("high:0.2", Refinement("high", 0.2)))
    assert torch.equal(written["gtd"].value, meant["gtd"].value)
    model = saobp.apply(tiny_model("bert"), {"factor": "low", "strength": 0.1})
    assert Refinement.from_dict(model.config.saobp) == Refinement("low", 0.1)
    with pytest.raises(TypeError, match=r"text such as 'high:0\.2' or a dict, not NoneType"):
        saobp.apply(model, None)  # type: ignore[arg-type]


def test_a_missing_colon_is_explained() -> None:
    with pytest.raises(ValueError, match=r"'high 0\.2'.*as in 'high:0\.2'"):
        Refinement.parse("high 0.2")


def test_auto_on_a_tiny_model_says_how_strong_it_is() -> None:
    with pytest.warns(UserWarning, match="strength 'auto' gives .* far above"):
        saobp.apply(tiny_model("bert"), "high")


@pytest.mark.parametrize(("parameters", "strength"), [(110_000_000, "0.02"), (7_000_000_000, "0.0003")])
def test_auto_on_a_large_model_says_that_it_is_all_but_nothing(parameters: int, strength: str) -> None:
    with pytest.warns(UserWarning, match=f"gives {strength} .* all but nothing: 'high:learned' trains"):
        warn_of_strength(Refinement("high").resolved(parameters), parameters)


def test_auto_is_silent_at_the_sizes_of_the_paper(recwarn: pytest.WarningsRecorder) -> None:
    for parameters in (11_200_000, 41_000_000):
        warn_of_strength(Refinement("high").resolved(parameters), parameters)
    assert not recwarn.list


def test_remove_and_load_name_what_they_take(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"saobp\.remove takes a Transformers model, not Linear"):
        saobp.remove(torch.nn.Linear(2, 2))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="takes a model class such as"):
        saobp.load(tmp_path, "AutoModel")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        saobp.load(tmp_path / "nowhere", BertModel)


@pytest.mark.parametrize("look", [saobp.probe, saobp.watch])
def test_what_is_no_model_cannot_be_looked_at(look: Any) -> None:
    with pytest.raises(TypeError, match="a Transformers model is needed, not str"), look("bert"):
        pass
