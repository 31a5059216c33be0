"""One model fine-tuned with several seeds: its page from planted scores, and the stage asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saobp.lab import choose_experiments, get_scale, stages
from saobp.lab.experiment_plan import ExperimentPlan, FinetuneRun
from saobp.lab.tabulate import tabulate
from saobp.testing.fake_runs import make_run, record, write_json

PLAN = ExperimentPlan(choose_experiments("one-model-many-seeds"), get_scale("mini", "paper"))


def plant(one: FinetuneRun, runs: Path) -> None:
    folder, shift = one.folder(runs), 1.0 if one.model.method.key == "high" else 0.0
    found = {seed: 60.0 + 2 * place + shift for place, seed in enumerate(one.seeds)}
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
    assert "| mnli * | Original | 64.00 ± 3.16 (5) | 60.00 to 68.00 | 8.00 | +9.85 |" in page
    assert "| squad | High | 65.00 ± 3.16 (5) | 61.00 to 69.00 | 8.00 | +4.85 |" in page
    assert "| qqp" not in page
    outcome = json.loads((out / "one-model-many-seeds" / "mini-paper.json").read_text())
    assert outcome["runs"] == 2 + 2 * 3 * 5
    assert [name.split("seed42-")[1] for name in outcome["missing"]] == ["qqp-5-seeds", "qqp-5-seeds"]


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
