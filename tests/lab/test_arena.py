"""The arena's page and its plot, from made-up runs: what they show, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arena_folders import made_up_run
from scipy import stats
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena import write_arena
from saobp.lab.arena_records import GLUE_TASKS, FreshSeeds, recorded, settings_of
from saobp.lab.experiment_plan import ExperimentPlan
from saobp.lab.experiments import choose_experiments
from saobp.lab.forest import forest
from saobp.lab.scales import get_scale
from saobp.lab.step_times import SHARED
from saobp.lab.tabulate import tabulate
from saobp.training.recipes import named_recipe


def made_up_arena(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    effects = {"none": 0.0, "high:learned": -0.014, "high-key-bias:learned": -0.02, "temperature": -0.004}
    effects |= {"sink": 0.001, "gate": -0.009, "high:learned+gate": -0.02, "qk-norm": 0.01, "entropy": 0.03}
    for family, base in (("modernbert", 3.2), ("llama", 3.5)):
        for seed in (42, 1, 2, 3, 4):
            own = base + drawn.normal() * 0.02
            for method, effect in effects.items():
                made_up_run(folder, family, method, seed, own + effect + drawn.normal() * 0.004)


def test_methods_are_compared_with_plain_attention_that_is_trained_for_longer(tmp_path: Path) -> None:
    steps = named_recipe("modern", "modernbert", "mini").steps
    for seed in (42, 1, 2):
        shift = 0.001 * seed
        made_up_run(tmp_path / "runs", "modernbert", "none", seed, 3.0 + shift)
        made_up_run(tmp_path / "runs", "modernbert", "high:learned", seed, 2.99 + shift)
        for times, loss, data in ((1.04, 2.98, "sum"), (1.02, 2.97, "other texts"), (2, 2.5, "sum")):
            folder = tmp_path / "longer" / f"{times}"
            made_up_run(folder, "modernbert", "none", seed, loss + shift, steps=round(steps * times))
            for record in folder.rglob("record.json"):
                record.write_text(record.read_text().replace("sum", data))
            for run in list(folder.iterdir()):
                run.rename(tmp_path / "runs" / f"{run.name}-{times}")
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    table = page.split("Times are equal only in lines whose method takes as much longer for a step.")[1]
    table = table.split("\n\n")[1].splitlines()
    assert table[2:] == [
        "| Plain attention | 4 % more steps | +2.0 % [+2.0, +2.0] | 0 of 3 | loss |",
        "| High, learned strengths | 4 % more steps | +1.0 % [+1.0, +1.0] | 0 of 3 | loss |",
    ]


def test_a_run_whose_loss_is_not_finite_is_named_and_its_pair_left_out(tmp_path: Path) -> None:
    for seed, loss in {42: 2.98, 1: 2.99, 2: 6.0, 3: math.nan}.items():  # 2 did not learn
        made_up_run(tmp_path / "runs", "modernbert", "none", seed, 3.0)
        made_up_run(tmp_path / "runs", "modernbert", "high:learned", seed, loss)
    write_arena([tmp_path / "runs"], tmp_path)
    (setting,) = settings_of(json.loads((tmp_path / "arena" / "runs.json").read_text()))
    assert setting.differences("high:learned").keys() == {42, 1, 2}
    page = (tmp_path / "arena" / "README.md").read_text()
    assert "glossary" not in page  # which is not there
    assert "Left out, because their held-out loss is not finite: `modernbert-high-learned-3`." in page
    assert "nan" not in page
    assert "needs more than 10,000 pairs to be seen" in page


def test_the_command_writes_page_records_and_forest(tmp_path: Path) -> None:
    made_up_arena(tmp_path / "runs")
    done = CliRunner().invoke(app, ["arena", str(tmp_path / "runs"), "--out", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "results" / "arena" / "README.md").read_text()
    assert page.count("## ") == 2
    assert "High, learned strengths + Gated heads" in page
    assert "needs" in page
    assert "pairs to be seen with a probability of 80 %" in page
    assert len(json.loads((tmp_path / "results" / "arena" / "runs.json").read_text())) == 90
    for name in ("forest.svg", "forest.png"):
        assert (tmp_path / "results" / name).stat().st_size > 5000


def test_a_gain_that_two_methods_share_is_not_there_beside_the_other(tmp_path: Path) -> None:
    losses = {"none": 3.0, "high:learned": 2.98, "gate": 2.97, "high:learned+gate": 2.97}
    for seed in (42, 1, 2):
        for method, loss in losses.items():
            made_up_run(tmp_path / "runs", "modernbert", method, seed, loss + 0.001 * (seed % 3))
    made_up_run(tmp_path / "runs", "modernbert", "gate", 7, 9.0)  # not part of any square
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    alone, beside, between, both = (
        "-2.0 % [-2.0, -2.0]",
        "+0.00 % [",  # a digit more, where an end would be printed as zero
        "+2.0 % [+2.0, +2.0]",
        "-3.0 % [-3.0, -3.0]",
    )
    (line,) = [
        line for line in page.splitlines() if line.startswith("| High, learned strengths | Gated heads |")
    ]
    cells = [cell.strip() for cell in line.split("|")[3:7]]
    assert cells[0] == alone
    assert cells[1].replace("-", "+").startswith(beside)
    assert cells[2:] == [between, both]


def test_all_methods_of_the_plan_are_compared_with_each_other(tmp_path: Path) -> None:
    others = ("gate", "sinkhorn", "sinkhorn-3", "sink", "softmax-plus-one", "sigma-reparam")
    forms = (*others, "qk-norm", "high:learned+qk-norm", "high-key-bias:learned+qk-norm")
    losses = {"none": 3.0, **dict.fromkeys(forms, 2.9), "high-key-bias:learned": 2.95, "high:learned": 2.98}
    for seed in (42, 1, 2):
        for method, loss in losses.items():
            made_up_run(tmp_path / "runs", "modernbert", method, seed, loss)
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    table = page.split("| difference from the column's method |")[1].split("\n\n")[0]
    assert table.splitlines()[-1].startswith("| Key bias, learned strengths | ")
    assert table.splitlines()[-1].endswith(" | -3.0 % [-3.0, -3.0] |")


def test_the_forest_begins_with_what_is_decided_and_sets_parts_beside_each_other(tmp_path: Path) -> None:
    for seed, chance in ((11, 0.0), (12, 0.2), (13, 0.5), (14, 0.0), (15, 0.9)):
        fixed = {"masked_share": 0.15, "masked_share_end": None}
        losses = {"none": 3.0, "high:learned": 2.99, "gate": 2.9 - chance, "high:learned+gate": 2.88 - chance}
        for method, loss in losses.items():
            made_up_run(tmp_path / "runs", "modernbert", method, seed, loss + 0.001 * (seed % 3))
            if method != "gate":
                made_up_run(tmp_path / "other", "modernbert", method, seed, loss, **fixed)
    records = [*recorded([tmp_path / "runs"]).values(), *recorded([tmp_path / "other"]).values()]
    plot = forest(settings_of(records, [FreshSeeds(range(11, 16))]))
    first, second = plot.axes
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "High, learned strengths added to Gated heads",
        "High, learned strengths",
        "High, learned strengths + Gated heads",
        "Gated heads",
    ]
    assert first.texts[-1].get_text().endswith("30 to 15 % masked, fresh seeds 11 to 15")
    assert second.texts[-1].get_text().endswith(", 15 % masked, fresh seeds 11 to 15")
    plot.draw_without_rendering()
    for axis in plot.axes:  # nothing is written over the edge, and labels do not meet the numbers
        assert all(text.get_window_extent().x1 <= plot.bbox.x1 for text in axis.texts)
        labels = [label.get_window_extent() for label in axis.get_yticklabels()]
        assert all(plot.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x0 for box in labels)


def test_measured_times_stand_beside_gains_and_notes_below(tmp_path: Path) -> None:
    for method, loss in (("none", 3.0), ("gate", 2.99)):
        made_up_run(tmp_path / "runs", "modernbert", method, 42, loss)
        made_up_run(tmp_path / "runs", "modernbert", method, 1, loss, size="small")
    recipe = named_recipe("modern", "modernbert", "mini")
    times = {name: getattr(recipe, name) for name in (*SHARED, "masked_share")}
    times |= {"command": "python ...", "environment": {"GPU": "A GPU, 80 GiB", "CPU": "a CPU"}}
    times["seconds"] = {"none": [0.010, 0.011, 0.012], "gate": [0.0102, 0.01122, 0.01224]}
    (tmp_path / "arena").mkdir()
    (tmp_path / "arena" / "time-first.json").write_text(json.dumps(times | {"masked_share": 0.4}))
    (tmp_path / "arena" / "time.json").write_text(json.dumps(times))
    (tmp_path / "arena" / "notes.md").write_text("## Not run\n")
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    assert "| +0 | 1.02 [1.02, 1.02] |" in page
    assert "11.00 ms, alone on a quiet A GPU, in turns, 3 rounds ([time.json](time.json))." in page
    assert page.count("time of a step |") == 1  # the other size was not measured
    assert page.endswith("\n\n## Not run\n")


@pytest.mark.parametrize("missing", ["commit", "command", "data", "environment"])
def test_a_record_that_lacks_a_field_is_refused_in_a_sentence(missing: str, tmp_path: Path) -> None:
    for method in ("none", "gate"):
        made_up_run(tmp_path / "runs", "modernbert", method, 42, 3.0)
    file = tmp_path / "runs" / "modernbert-gate-42" / "record.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name != missing}
    file.write_text(json.dumps(kept))
    options = ["arena", str(tmp_path / "runs"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 1
    assert f"(modernbert-gate-42) has no {missing}" in done.output.replace("\n", " ")
    (tmp_path / "arena").mkdir()
    (tmp_path / "arena" / "runs.json").write_text(json.dumps([{**kept, "run": "older"}]))
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 1
    assert "runs.json (older) has no kind" in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "has no family, size, batch_size, length, seconds, environment"),
        ({"seconds": {"gate": [0.1]}}, "has no times of plain attention"),
    ],
)
def test_a_file_of_times_that_cannot_be_used_is_refused(
    content: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for method in ("none", "gate"):
        made_up_run(tmp_path / "runs", "modernbert", method, 42, 3.0)
    (tmp_path / "arena").mkdir()
    usual = {**dict.fromkeys(SHARED, 1), "environment": {}} if content else {}
    (tmp_path / "arena" / "time.json").write_text(json.dumps(usual | content))
    with pytest.raises(ValueError, match=words):
        write_arena([tmp_path / "runs"], tmp_path)


def test_later_runs_join_those_that_are_recorded(tmp_path: Path) -> None:
    for method, loss in (("none", 3.0), ("gate", 2.99)):
        made_up_run(tmp_path / "first", "modernbert", method, 42, loss)
        made_up_run(tmp_path / "second", "modernbert", method, 1, loss)
    write_arena([tmp_path / "first"], tmp_path)
    page = write_arena([tmp_path / "second"], tmp_path)[0].read_text()
    assert "2 of 2" in page


def test_a_run_that_was_made_again_does_not_replace_the_recorded_one(tmp_path: Path) -> None:
    for method, loss in (("none", 3.0), ("gate", 2.99)):
        made_up_run(tmp_path / "first", "modernbert", method, 42, loss)
    made_up_run(tmp_path / "second", "modernbert", "none", 42, 3.1, warmup_steps=3)  # of the same name
    _, records, *_ = write_arena([tmp_path / "first"], tmp_path)
    before = records.read_text()
    with pytest.raises(ValueError, match="has another run named modernbert-none-42, of before"):
        write_arena([tmp_path / "second"], tmp_path)
    write_arena([tmp_path / "first"], tmp_path)  # the same run is no other
    assert records.read_text() == before
    with pytest.raises(ValueError, match="an earlier folder has another run named modernbert-none-42"):
        write_arena([tmp_path / "first", tmp_path / "second"], tmp_path / "other")


def test_scores_that_came_in_pieces_are_joined(tmp_path: Path) -> None:
    for piece, measure, score in (
        ("one", "blimp", {"blimp": {"accuracy": 60.0}}),
        ("two", "glue/rte", {"last": {"mean": 55.0}}),
        ("three", "glue/cola", {"last": {"mean": 10.0}}),
        ("four", "none", {}),
    ):
        for method, loss in (("none", 3.0), ("gate", 2.99)):
            made_up_run(tmp_path / piece, "modernbert", method, 42, loss)
            folder = tmp_path / piece / f"modernbert-{method}-42" / measure
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(json.dumps(score))
    for pieces in (["one"], ["two", "three"], ["four"]):
        records = write_arena([tmp_path / piece for piece in pieces], tmp_path)[1]
    for record in json.loads(records.read_text()):
        assert record["blimp"] == {"accuracy": 60.0}
        assert record["glue"] == {"rte": 55.0, "cola": 10.0}


def test_blimp_beside_the_runs_is_compared_in_pairs(tmp_path: Path) -> None:
    for seed in (42, 1, 2):
        for method, loss, accuracy in (("none", 3.0, 60.0 + seed % 4), ("gate", 2.99, 61.5 + seed % 4)):
            made_up_run(tmp_path / "runs", "modernbert", method, seed, loss)
            folder = tmp_path / "runs" / f"modernbert-{method}-{seed}" / "blimp"
            folder.mkdir()
            (folder / "result.json").write_text(json.dumps({"blimp": {"accuracy": accuracy}}))
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    assert "| Gated heads | 63.17 ± 0.58 (3) | +1.50 [+1.50, +1.50] | gain |" in page


def test_the_mean_of_glue_decides_where_all_tasks_are_there(tmp_path: Path) -> None:
    for seed in (42, 1, 2, 3):
        for method, more in (("none", 0.0), ("gate", 0.5 + 0.1 * (seed % 3))):
            made_up_run(tmp_path / "runs", "modernbert", method, seed, 3.0 - more / 100)
            for number, task in enumerate(GLUE_TASKS):
                if (seed, method, task) == (3, "gate", "rte"):
                    continue  # not yet fine-tuned: the pair does not count
                folder = tmp_path / "runs" / f"modernbert-{method}-{seed}" / "glue" / task
                folder.mkdir(parents=True)
                score = 60.0 + number + seed % 4 + more * (-1 if task == "rte" else 1)
                (folder / "result.json").write_text(json.dumps({"last": {"mean": score, "std": 0.0}}))
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    records = json.loads((tmp_path / "arena" / "runs.json").read_text())
    kept = {record["run"]: record["glue"] for record in records}
    assert set(kept["modernbert-none-3"]) == set(GLUE_TASKS)
    assert len(kept["modernbert-gate-3"]) == 7
    assert kept["modernbert-gate-42"]["rte"] == pytest.approx(60 + 7 + 2 - 0.5)
    (setting,) = settings_of(records)
    scores = setting.scores["glue"]
    differences = [0.75 * (0.5 + 0.1 * (seed % 3)) for seed in (42, 1, 2)]
    assert [scores["gate"][seed] - scores["none"][seed] for seed in (42, 1, 2)] == pytest.approx(differences)
    reach = stats.t.ppf(0.975, 2) * np.std(differences, ddof=1) / math.sqrt(3)
    low, middle, high = (np.mean(differences) + reach * side for side in (-1, 0, 1))
    own = list(scores["gate"].values())
    mean = f"{np.mean(own):.2f} ± {np.std(own, ddof=1):.2f} (3)"
    assert f"| Gated heads | {mean} | {middle:+.2f} [{low:+.2f}, {high:+.2f}] | gain |" in page
    assert f"| mean over seeds | {' | '.join(GLUE_TASKS)} |" in page
    assert "| Plain attention | 62.00 | 63.00 |" in page


def test_reproduce_writes_the_page_of_the_arena(tmp_path: Path) -> None:
    plan = ExperimentPlan(choose_experiments("arena"), get_scale("mini"), seeds=3)
    for run in plan.pretrain_runs():
        loss = 3.0 + 0.01 * run.seed % 3 - (0.02 if run.method.key == "learned" else 0.0)
        folder = run.folder(tmp_path / "runs")
        folder.mkdir(parents=True)
        result = {
            "eval_loss": loss,
            "eval_perplexity": math.exp(loss),
            "parameters": 11,
            "tokens_per_second": 1.0,
        }
        for name, content in (
            ("recipe", {"kind": "pretrain", **run.recipe.to_dict()}),
            ("record", {"status": "finished", "commit": "abc"}),
            ("result", result),
        ):
            (folder / f"{name}.json").write_text(json.dumps(content))
    tabulate(plan, tmp_path / "runs", tmp_path / "results")
    page = (tmp_path / "results" / "arena" / "mini.md").read_text()
    assert "-2.0 %" in page
    assert "The question: Every other method" in page
    assert (tmp_path / "results" / "arena" / "mini-forest.svg").exists()


def test_nothing_to_compare_is_said_in_a_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["arena", str(tmp_path), "--out", str(tmp_path / "results")])
    assert done.exit_code == 1
    assert "finished run of plain attention" in done.output.replace("\n", " ")
