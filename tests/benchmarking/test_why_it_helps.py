"""Where a trained model gains: classes of tokens, heads switched off, pictures of what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import saobp
from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_models import VOCABULARY, tiny_model
from saobp.training.objectives import MaskedLM, row_seeds
from saobp.transformers.layer_refinement import named_refinements, named_strengths

why = load_script("benchmarks/why_it_helps.py")
OBJECTIVE = MaskedLM(VOCABULARY, 4, (0, 1, 2, 3, 4))


def batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(5, VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "seeds": torch.from_numpy(row_seeds(0, 0, range(4)))}]


def strong_model() -> Any:
    model = saobp.apply(tiny_model("modernbert"), "high:learned+temperature")
    for _, own in named_refinements(model):
        own.strength_bias.data += torch.arange(len(own.strength_bias)) + 1.0
    return model


def test_losses_of_tokens_have_the_mean_of_the_objective() -> None:
    model, (batch,) = strong_model(), batches()
    with torch.no_grad():
        expected = OBJECTIVE(model, batch["input_ids"], batch["seeds"], "fp32")
    torch.testing.assert_close(why.token_losses(model, OBJECTIVE, [batch]).mean(), expected)


def test_classes_of_tokens_have_their_own_means_and_errors() -> None:
    difference = torch.tensor([[1.0, 3.0], [2.0, 0.0], [3.0, 5.0]])
    chosen = torch.tensor([[True, False], [True, False], [True, False]])
    nothing = torch.zeros_like(chosen)
    found = why.by_class(difference, difference + 1, {"first": chosen, "none": nothing})
    assert set(found) == {"first"}
    assert found["first"]["difference"] == pytest.approx(2.0)
    assert found["first"]["base"] == pytest.approx(3.0)
    assert found["first"]["error"] == pytest.approx(2**0.5 / 3)


def test_numbers_per_head_are_set_to_zero_and_restored() -> None:
    model = strong_model()
    before = {name: value.detach().clone() for name, value in named_strengths(model).items()}
    found = why.set_to_zero(model, OBJECTIVE, batches())
    plain = saobp.remove(strong_model())
    losses = [why.token_losses(one, OBJECTIVE, batches()).mean().item() for one in (plain, model)]
    assert found["all"] == pytest.approx(losses[0] - losses[1], abs=1e-5)
    assert found["kinds"] == {
        "strength_bias": pytest.approx(found["all"], abs=1e-6),  # temperatures are still at their start
        "variants.temperature.head_bias": pytest.approx(0.0, abs=1e-6),
    }
    assert len(found["heads"]) == len(found["layers"]) == len(list(named_refinements(model)))
    assert any(abs(rise) > 1e-6 for heads in found["heads"] for rise in heads)
    for name, value in named_strengths(model).items():
        assert torch.equal(value, before[name])


def test_what_was_found_becomes_a_page_and_a_picture(tmp_path: Path) -> None:
    draw = load_script("benchmarks/draw_why.py")
    model, (batch,) = strong_model(), batches()
    losses = why.token_losses(model, OBJECTIVE, [batch])
    kinds = {"position": {"all": torch.ones_like(losses, dtype=torch.bool)}}
    one = {
        "loss": losses.mean().item(),
        "numbers": {name: values.tolist() for name, values in named_strengths(model).items()},
        "by_kind": {name: why.by_class(losses - losses, losses, kind) for name, kind in kinds.items()},
        "set_to_zero": why.set_to_zero(model, OBJECTIVE, [batch]),
        "statistics": why.statistics(model, [batch], OBJECTIVE),
    }
    base = {**one, "set_to_zero": {}}
    page = "\n".join(draw.page([base], {"High": [one]}))
    assert "| position: all | 12 |" in page
    assert "High, set to 0" in page
    assert "strengths +" in page or "strengths -" in page
    lines = [{"step": step, "0.strength_bias": [0.0, step]} for step in (0, 50)]
    draw.save_figure(draw.picture({"High": [one, one]}, lines), tmp_path / "why")
    assert (tmp_path / "why.svg").stat().st_size > 5000


def test_differences_of_several_pairs_have_an_interval_over_them() -> None:
    draw = load_script("benchmarks/draw_why.py")
    seeds = [{"by_kind": {"k": {"all": {"difference": d, "error": 0.01}}}} for d in (-0.01, -0.02, -0.03)]
    mean, low, high = draw.interval(seeds, "k", "all")
    assert mean == pytest.approx(-1.98, abs=0.01)
    assert low < -4 < 0 < high  # t of two degrees of freedom: 0.02 +- 0.025
    _, low, high = draw.interval(seeds[:1], "k", "all")
    assert (low, high) == pytest.approx((-2.92, 0.964), abs=0.01)


def test_the_picture_of_strengths_is_that_of_its_numbers(tmp_path: Path) -> None:
    draw = load_script("benchmarks/draw_strengths.py")
    found = json.loads((ROOT / "results" / "arena" / "strengths.json").read_text())
    draw.save_figure(draw.picture(found), tmp_path / "strengths")
    assert (tmp_path / "strengths.svg").stat().st_size > 5000
    assert len(found["final"]) == 6
    courses = json.loads((ROOT / "results" / "arena" / "courses.json").read_text())
    draw.save_figure(draw.side_by_side(courses), tmp_path / "courses")
    assert (tmp_path / "courses.svg").stat().st_size > 5000


def test_strengths_of_two_methods_are_compared_head_by_head() -> None:
    compare = load_script("benchmarks/compare_strengths.py")

    def record(method: str, seed: int, strengths: list[list[float]]) -> dict[str, Any]:
        recipe = {"refinement": method, "seed": seed}
        return {"recipe": recipe, "result": {"strengths": strengths}}

    up, down = [[1.0, 2.0], [3.0, 4.0]], [[4.0, 3.0], [2.0, 1.0]]
    records = [record("high:learned", 42, up), record("high:learned", 1, down)]
    records += [record("high-key-bias:learned", 42, [[0.1, 0.2], [0.3, 0.4]])]
    records += [record("high-key-bias:learned", 1, down), record("temperature", 42, [[0.0, 0.0]])]
    (row,) = compare.rows(compare.strengths_of(records))
    assert row[1:] == ["2", "2.50 and 1.38", "1.00 to 1.00", "-1.00"]
