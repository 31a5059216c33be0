"""One model fine-tuned with several seeds: its page from planted scores, and the stage asks for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from saobp.lab import choose_experiments, get_scale, stages
from saobp.lab.experiment_plan import ExperimentPlan, FinetuneRun
from saobp.lab.figures import Gap, gaps_beside_chance
from saobp.lab.statistics import Chance, Gain
from saobp.lab.tabulate import tabulate
from saobp.testing.fake_runs import make_run, record, write_json

PLAN = ExperimentPlan(choose_experiments("one-model-many-seeds"), get_scale("mini", "paper"))


def plant(one: FinetuneRun, runs: Path) -> None:
    folder, shift = one.folder(runs), 1.0 if one.model.method.key == "high" else 0.0
    step = 0.5 if one.task == "squad" else 2.0
    found = {seed: 60.0 + step * place + shift for place, seed in enumerate(one.seeds)}
    for seed in one.seeds:
        own = folder / f"seed-{seed}"
        own.mkdir(parents=True)
        write_json(own / "result.json", {"task": one.task, "last": found[seed]})
        write_json(own / "record.json", record(seed, seconds=5.0))
        write_json(own / "recipe.json", {"kind": "finetune", "task": one.task})
    result = {"task": one.task, "metric": "accuracy", "partial": one.task == "mnli"}
    result["seeds"] = {str(seed): {"last": score} for seed, score in found.items()}
    write_json(folder / "result.json", {**result, "last": {"mean": 64.0}})


@pytest.mark.usefixtures("figures_unsaved")
def test_ranges_of_one_model_stand_beside_the_papers_gaps(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for model in PLAN.pretrain_runs():
        made = make_run(model.folder(runs), seed=model.seed, layers=2, heads=3)
        write_json(made / "recipe.json", {"kind": "pretrain", **model.recipe.to_dict()})
    work = PLAN.finetune_runs()
    assert [one.task for one in work] == [
        t for t in ("mnli", "squad", "qqp", "race-middle") for _ in range(2)
    ]
    for one in work:
        if one.task != "qqp":
            plant(one, runs)
    tabulate(PLAN, runs, out)
    page = (out / "one-model-many-seeds" / "mini-paper.md").read_text()
    reach = 2.306 * math.sqrt(2 * 10)  # of two runs at a deviation of sqrt(10), 8 degrees of freedom
    row = f"| mnli * | 3.16 [2.14, 6.06] | {reach:.1f} | +9.85 | within | +1.00 "
    assert row in page
    assert "| squad | 0.79 [0.53, 1.51] | 2.6 | +4.85 | larger | +1.00 " in page
    assert "| mnli * | Original | 64.00 ± 3.16 (5) | 60.00, 62.00, 64.00, 66.00, 68.00 | 8.00 |" in page
    assert "| scores of seeds 42, 1, 2, 3, 4 |" in page
    assert "| qqp" not in page
    outcome = json.loads((out / "one-model-many-seeds" / "mini-paper.json").read_text())
    assert outcome["runs"] == 2 + 2 * 3 * 5
    assert [name.split("seed42-")[1] for name in outcome["missing"]] == ["qqp-5-seeds", "qqp-5-seeds"]


@pytest.mark.usefixtures("figures_unsaved")
def test_one_method_alone_has_scores_and_no_gap(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    for one in PLAN.finetune_runs():
        if one.model.method.key == "original":
            if one.task == "mnli":
                made = make_run(one.model.folder(runs), seed=one.model.seed, layers=2, heads=3)
                write_json(made / "recipe.json", {"kind": "pretrain", **one.model.recipe.to_dict()})
            plant(one, runs)
    (out / "one-model-many-seeds").mkdir(parents=True)
    (out / "one-model-many-seeds" / "mini-paper-notes.md").write_text("Written by hand.\n")
    tabulate(PLAN, runs, out)
    page = (out / "one-model-many-seeds" / "mini-paper.md").read_text()
    assert "| larger |" not in page
    assert "| qqp | Original | 64.00 ± 3.16 (5) |" in page
    assert "\n\nWritten by hand.\n\nWithout a finished record: " in page, "notes stand after the results"


def test_a_row_of_the_figure_has_chance_pairs_and_the_papers_difference() -> None:
    apart, gain = Chance(1.0, 0.7, 1.9, 3.2), Gain(0.5, -0.5, 1.5, 3, "no gain")
    figure = gaps_beside_chance(
        {"mnli": Gap(apart, [0.0, 0.5, 1.0], gain, 9.85), "wsc": Gap(apart, [0.0], gain, None)}
    )
    (axis,) = figure.axes
    assert [(band.get_x(), band.get_width()) for band in axis.patches] == [(-3.2, 6.4)] * 2
    assert [list(line.get_xdata()) for line in axis.lines if line.get_marker() == "x"] == [[9.85]]
    assert len(figure.legends[0].get_texts()) == 4


def test_the_stage_fine_tunes_with_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, list[int]]] = []

    def finetune(_model: Path, _task: Any, folder: Path, *, seeds: Any, **_: Any) -> dict[str, Any]:
        asked.append((folder, list(seeds)))
        return {"metric": "accuracy", "last": {"mean": 1.0}}

    monkeypatch.setattr(stages, "finetune", finetune)
    monkeypatch.setattr(stages, "_task", lambda *_: None)
    monkeypatch.setattr(stages, "missing_model", lambda *_: "")
    one = PLAN.finetune_runs()[0]
    sources = type("Sources", (), {"data_dir": None, "scale": PLAN.scale})
    stages.finetune_all([one, FinetuneRun(one.model, one.task)], tmp_path, sources)  # type: ignore[arg-type]
    (several, seeds), (single, own) = asked
    assert (seeds, own) == ([42, 1, 2, 3, 4], [42])
    assert several != single
