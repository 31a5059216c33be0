"""The arena: paired differences in per cent of perplexity, its page and its plot, from made-up runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena import SHARED, write_arena
from saobp.lab.arena_records import (
    GLUE_TASKS,
    FreshSeeds,
    combinations,
    method_of,
    recorded,
    settings_of,
    title_of,
)
from saobp.lab.experiment_plan import FAMILIES, ExperimentPlan
from saobp.lab.experiments import choose_experiments
from saobp.lab.forest import forest
from saobp.lab.scales import get_scale
from saobp.lab.statistics import pairs_needed
from saobp.lab.tabulate import tabulate
from saobp.sizes import FAMILY_NAMES
from saobp.training.recipes import named_recipe


def made_up_run(folder: Path, family: str, method: str, seed: int, loss: float, **changes: Any) -> None:
    recipe = named_recipe("modern", family, "mini").to_dict()
    key = "regularizer" if method == "entropy" else "refinement"
    recipe |= {"kind": "pretrain", "seed": seed, key: None if method == "none" else method, **changes}
    result = {"eval_loss": loss, "parameters": 11_000_000, "tokens_per_second": 1e6}
    record = {"status": "finished", "seed": seed, "commit": "abc", "data": {"text": "sum"}}
    record |= {"command": "saobp pretrain", "environment": {}}
    record["started"] = "later" if changes else "before"
    folder /= f"{family}-{method.replace(':', '-')}-{seed}"
    folder.mkdir(parents=True)
    for name, content in (("recipe", recipe), ("record", record), ("result", result)):
        (folder / f"{name}.json").write_text(json.dumps(content))


def made_up_arena(folder: Path) -> None:
    drawn = np.random.default_rng(0)
    effects = {"none": 0.0, "high:learned": -0.014, "high-key-bias:learned": -0.02, "temperature": -0.004}
    effects |= {"sink": 0.001, "gate": -0.009, "high:learned+gate": -0.02, "qk-norm": 0.01, "entropy": 0.03}
    for family, base in (("modernbert", 3.2), ("llama", 3.5)):
        for seed in (42, 1, 2, 3, 4):
            own = base + drawn.normal() * 0.02
            for method, effect in effects.items():
                made_up_run(folder, family, method, seed, own + effect + drawn.normal() * 0.004)


def test_differences_are_paired_and_in_per_cent_of_perplexity(tmp_path: Path) -> None:
    for seed, (plain, refined) in {42: (3.0, 2.99), 1: (3.4, 3.38), 2: (3.2, 3.19)}.items():
        made_up_run(tmp_path / "runs", "modernbert", "none", seed, plain)
        made_up_run(tmp_path / "runs", "modernbert", "high:learned", seed, refined)
    made_up_run(tmp_path / "runs", "modernbert", "none", 7, 9.0)  # without a pair
    write_arena([tmp_path / "runs"], tmp_path)
    (setting,) = settings_of(json.loads((tmp_path / "arena" / "runs.json").read_text()))
    gain = setting.gains()["high:learned"]
    differences = [-0.01, -0.02, -0.01]
    reach = stats.t.ppf(0.975, 2) * np.std(differences, ddof=1) / math.sqrt(3)
    assert gain.pairs == 3
    assert gain.difference == pytest.approx(100 * math.expm1(np.mean(differences)))
    assert gain.low == pytest.approx(100 * math.expm1(np.mean(differences) - reach))
    assert setting.median("high:learned") == pytest.approx(100 * math.expm1(-0.01))
    assert setting.lower_in("high:learned") == "3 of 3"


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
    assert "Left out, because their held-out loss is not finite: `modernbert-high-learned-3`." in page
    assert "nan" not in page
    assert "needs more than 10,000 pairs to be seen" in page


def test_runs_of_other_recipes_are_not_compared(tmp_path: Path) -> None:
    made_up_run(tmp_path / "runs", "modernbert", "none", 42, 3.0)
    made_up_run(tmp_path / "runs", "modernbert", "high:learned", 42, 2.9, learning_rate=9e-4)
    with pytest.raises(ValueError, match="finished run of plain attention"):
        write_arena([tmp_path / "runs"], tmp_path)


def test_when_things_are_written_does_not_make_another_recipe(tmp_path: Path) -> None:
    made_up_run(tmp_path / "runs", "modernbert", "none", 42, 3.0)
    made_up_run(tmp_path / "runs", "modernbert", "gate", 42, 2.9, health_texts=0, checkpoint_steps=8000)
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    assert "| Gated heads |" in page


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


def test_runs_of_another_rate_of_strengths_are_a_method_of_their_own(tmp_path: Path) -> None:
    made_up_run(tmp_path / "runs", "modernbert", "none", 42, 3.0)
    made_up_run(tmp_path / "runs", "modernbert", "high:learned", 42, 2.99)
    made_up_run(tmp_path / "runs", "modernbert", "temperature", 42, 2.98, strength_rate=10.0)
    before = json.loads((tmp_path / "runs" / "modernbert-none-42" / "recipe.json").read_text())
    del before["strength_delay"]  # a record older than the field
    (tmp_path / "runs" / "modernbert-none-42" / "recipe.json").write_text(json.dumps(before))
    page = write_arena([tmp_path / "runs"], tmp_path)[0].read_text()
    assert "| Temperature per head, rate times 4 | 19.69 (1) | -2.0 % |" in page
    assert "| High, learned strengths | 19.89 (1) | -1.0 % |" in page


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


def test_a_sum_of_three_is_divided_at_either_plus_sign() -> None:
    names = ("none", "a", "b+c", "a+b", "c", "a+b+c", "x+y")
    found = list(combinations({name: {42: 3.0} for name in names}, "none"))
    assert found == [("a", "b+c", "a+b+c"), ("a+b", "c", "a+b+c")]


def test_fresh_seeds_are_compared_apart_and_come_first(tmp_path: Path) -> None:
    for seed in (42, 1, 2, *range(6, 11)):
        effect = -0.01 if 6 <= seed <= 10 else -0.03
        made_up_run(tmp_path / "runs", "modernbert", "none", seed, 3.0)
        made_up_run(tmp_path / "runs", "modernbert", "gate", seed, 3.0 + effect)
    options = ["arena", str(tmp_path / "runs"), "--out", str(tmp_path), "--fresh"]
    assert CliRunner().invoke(app, [*options, "6,7,8,9,10"]).exit_code == 0
    page = (tmp_path / "arena" / "README.md").read_text()
    settings = settings_of(
        json.loads((tmp_path / "arena" / "runs.json").read_text()), [FreshSeeds(range(6, 11))]
    )
    (axis,) = forest(settings).axes  # of the fresh seeds alone
    numbers, title = (text.get_text() for text in axis.texts)
    assert numbers == "-1.0 % [-1.0, -1.0], 5 of 5"
    assert title.endswith("fresh seeds 6 to 10")
    first, second = page.split("\n## ")[1:]
    assert first.splitlines()[0].endswith("fresh seeds 6 to 10")
    assert "| -1.0 % [-1.0, -1.0] | -1.0 % | 5 of 5 |" in first
    assert "| -3.0 % [-3.0, -3.0] | -3.0 % | 3 of 3 |" in second
    wrong = CliRunner().invoke(app, [*options, "six"])
    assert wrong.exit_code == 1
    assert "seeds with commas between them" in wrong.output


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


def test_fewer_than_five_fresh_pairs_decide_nothing(tmp_path: Path) -> None:
    for seed, effect in {6: -0.01, 7: -0.02, 8: -0.01, 9: -0.02, 10: -0.01}.items():
        for method, loss in (("none", 3.0), ("gate", 3.0 + effect)):
            made_up_run(tmp_path / "runs", "modernbert", method, seed, loss)
    for seeds, verdict in (
        *(("6,7,8,9", "undecided"), ("6,7,8,9,10", "gain")),
        *(("6,7,8,9,10,11:6", "undecided"), ("6,7,8,9,10:5", "gain"), ("6,7,8,9:4", "undecided")),
    ):
        fresh, *_ = settings_of(recorded([tmp_path / "runs"]).values(), [FreshSeeds.of(seeds)])
        assert fresh.gains()["gate"].verdict == verdict
    page = write_arena([tmp_path / "runs"], tmp_path, [FreshSeeds.of("6,7,8,9,10,11:6")])[0].read_text()
    assert "Verdicts are given once there are 6 pairs." in page
    assert "| undecided (5 pairs) |" in page


def test_small_models_come_first_and_titles_name_seeds_with_pairs(tmp_path: Path) -> None:
    for size, seeds in (("small", (21, 22)), ("mini", (11,))):
        for seed in seeds:
            for method in ("none", "sink"):
                made_up_run(tmp_path / size, "modernbert", method, seed, 3.0 + seed / 100, size=size)
        made_up_run(tmp_path / size, "modernbert", "none", 23, 3.0, size=size)
    write_arena([tmp_path / "small", tmp_path / "mini"], tmp_path, [FreshSeeds([11, 21, 22, 23])])
    page = (tmp_path / "arena" / "README.md").read_text()
    titles = [part.splitlines()[0] for part in page.split("\n## ")[1:3]]
    assert titles == [
        "ModernBERT-mini, length 128, 262 M tokens, fresh seeds 11",
        "ModernBERT-small, length 128, 262 M tokens, fresh seeds 21, 22",
    ]


def test_titles_name_corpora_and_the_setting_with_most_runs_comes_first(tmp_path: Path) -> None:
    for corpus, seeds in (
        ("wikipedia_en", (31, 32, 33, 34, 36)),
        ("wikipedia_en,gutenberg_books", range(11, 17)),
    ):
        for seed in seeds:
            for method, loss in (("none", 3.0), ("sink", 2.99 + seed / 1e4)):
                made_up_run(tmp_path / corpus, "modernbert", method, seed, loss, corpus=corpus)
    records = [record for folder in tmp_path.iterdir() for record in recorded([folder]).values()]
    settings = settings_of(records, [FreshSeeds(range(11, 17)), FreshSeeds((31, 32, 33, 34, 36))])
    base = "ModernBERT-mini, length 128, 262 M tokens"
    assert [setting.title for setting in settings] == [
        f"{base}, 2 corpora, fresh seeds 11 to 16",
        f"{base}, wikipedia_en alone, fresh seeds 31, 32, 33, 34, 36",
    ]


def test_another_recipe_is_compared_apart_and_confirmed_seeds_come_first(tmp_path: Path) -> None:
    muon = {"optimizer": "muon", "muon_rate": 2.0}
    for seed in (42, 1, 9):
        for method, loss in (("none", 3.0), ("sink", 2.9), ("gate", 2.98)):
            made_up_run(tmp_path / "runs", "modernbert", method, seed, loss)
    for seed, loss in ((42, 2.8), (9, 2.9)):
        made_up_run(tmp_path / "tuning", "modernbert", "none", seed, loss, **muon)
    made_up_run(tmp_path / "warm", "modernbert", "none", 42, 2.9, warmup_steps=600)
    made_up_run(tmp_path / "books", "modernbert", "none", 42, 2.5, corpus="books")  # other texts
    again = json.loads((tmp_path / "runs" / "modernbert-none-42" / "recipe.json").read_text())
    again = {"run": "again", "recipe": again, "result": {"eval_loss": 3.1}}
    (tmp_path / "arena").mkdir()
    (tmp_path / "arena" / "again.json").write_text(json.dumps([{**again, "data": {"text": "sum"}}]))
    for seed in (11, 12, 13):
        for method, loss in (("none", 2.85), ("gate", 2.84), ("temperature", 2.80)):
            made_up_run(tmp_path / "fresh", "modernbert", method, seed, loss, **muon)
    for folder in ("tuning", "warm", "books"):
        for run in list((tmp_path / folder).iterdir()):
            run.rename(tmp_path / "fresh" / f"{folder}-{run.name}")
    folders = [str(tmp_path / name) for name in ("runs", "fresh")]
    options = ["--out", str(tmp_path), "--fresh", "9", "--fresh", "11,12,13,14"]
    done = CliRunner().invoke(app, ["arena", *folders, *options])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "arena" / "README.md").read_text()
    titles = [part.splitlines()[0] for part in page.split("\n## ")[1:]]
    base = "ModernBERT-mini, length 128, 262 M tokens, optimizer="
    assert titles == [
        f"{base}muon, muon_rate=2.0, fresh seeds 11 to 13",
        f"{base}adamw, muon_rate=1.0, fresh seeds 9",
        f"{base}adamw, muon_rate=1.0",
        "Which recipe is best for plain attention?",
    ]
    assert "| Temperature per head | 16.44 (3) | -4.9 % [-4.9, -4.9] | -4.9 % | 3 of 3 |" in page
    both, usual = (part.split("\n\n")[0].splitlines()[1:] for part in page.split("mean loss |\n")[1:])
    assert both == [
        "| `optimizer=muon`, `muon_rate=2.0` | 16.44 | 18.17 | 2.8500 |",
        "| as it was | 22.20 | 20.09 | 3.0500 |",  # the run that was made again counts
    ]
    assert usual == [
        "| `optimizer=muon`, `muon_rate=2.0` | 16.44 | 2.8000 |",
        "| `warmup_steps=600` | 18.17 | 2.9000 |",
        "| as it was | 22.20 | 3.1000 |",
    ]
    assert "that run counts ([again.json](again.json))" in page
    (tmp_path / "arena" / "again.json").unlink()
    CliRunner().invoke(app, ["arena", *folders, *options])
    page = (tmp_path / "arena" / "README.md").read_text()
    assert "Which recipe is best for plain attention?" in page
    assert "again.json" not in page
    records = json.loads((tmp_path / "arena" / "runs.json").read_text())
    plot = forest(settings_of(records, [FreshSeeds((9,)), FreshSeeds((11, 12, 13, 14))]))
    assert len(plot.axes) == 2
    rows = [[label.get_text() for label in axis.get_yticklabels()] for axis in plot.axes]
    assert rows == [["Temperature per head", "Gated heads"], ["Learned sink", "Gated heads"]]


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


def test_a_lower_rate_of_all_leaves_numbers_per_head_the_same_method(tmp_path: Path) -> None:
    for method in ("none", "high:learned"):
        made_up_run(tmp_path, "modernbert", method, 42, 3.0, learning_rate=3e-3, strength_rate=0.01 / 3e-3)
    (setting,) = settings_of(recorded([tmp_path]).values())
    assert set(setting.losses) == {"none", "high:learned"}


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


def test_reproduce_plans_the_arena_on_the_recipe_modern() -> None:
    plan = ExperimentPlan(choose_experiments("arena"), get_scale("mini"))
    runs = {run.name: run.recipe for run in plan.pretrain_runs()}
    assert len(runs) == 8 * (22 + 18)
    assert {recipe.name for recipe in runs.values()} == {"modern"}
    assert "llama-mini-high-key-bias-learned-seed7" in runs
    assert "modernbert-mini-high-learned+gate-seed42" in runs
    assert "arena" not in {experiment.name for experiment in choose_experiments("all")}


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


def test_every_family_that_is_trained_has_a_name() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)


def test_nothing_to_compare_is_said_in_a_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["arena", str(tmp_path), "--out", str(tmp_path / "results")])
    assert done.exit_code == 1
    assert "finished run of plain attention" in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("recipe", "method", "title"),
    [
        ({}, "none", "Plain attention"),
        (
            {"refinement": {"factor": "high", "strength": "learned"}},
            "high:learned",
            "High, learned strengths",
        ),
        ({"refinement": "gate+qk-norm"}, "qk-norm+gate", "QK-norm + Gated heads"),
        (
            {"refinement": "high:learned+gate+temperature"},
            "high:learned+temperature+gate",
            "High, learned strengths + Temperature + Gated heads",
        ),
        ({"regularizer": "entropy"}, "entropy", "Entropy-Reg"),
        ({"refinement": "high:0.3"}, "high:0.3", "high:0.3"),
        (
            {"refinement": "high:learned,steps=2+later-steps+gate"},
            "high:learned,steps=2+gate+later-steps",
            "high:learned,steps=2 + Gated heads + later-steps",
        ),
        (
            {"refinement": "high-key-bias:learned,message_stride=4+temperature"},
            "high-key-bias:learned,message_stride=4+temperature",
            "Key bias, learned strengths (1 row in 4) + Temperature",
        ),
        (
            {
                **named_recipe("modern", "modernbert", "mini").to_dict(),
                **{"refinement": "high:learned", "strength_rate": 10.0, "strength_delay": 0.2},
            },
            "high:learned, rate times 4, after 20% of the steps",
            "High, learned strengths, rate times 4, after 20% of the steps",
        ),
    ],
)
def test_methods_are_named_by_what_their_recipes_say(recipe: dict[str, Any], method: str, title: str) -> None:
    assert method_of(recipe) == method
    assert title_of(method) == title


def test_three_pairs_are_needed_at_least_however_small_the_spread() -> None:
    assert pairs_needed(1e-16, 0.5) == 3


@pytest.mark.parametrize(("deviation", "effect"), [(0.5, 0.5), (0.8, 0.5), (0.3, 0.4)])
def test_so_many_pairs_find_the_effect_four_times_in_five(deviation: float, effect: float) -> None:
    pairs = pairs_needed(deviation, effect)
    assert pairs is not None
    drawn = np.random.default_rng(0).normal(effect, deviation, (20_000, pairs))
    found = stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert 0.79 < found.mean() < 0.93
    fewer = stats.ttest_1samp(drawn[:, : pairs - 1], 0, axis=1).pvalue < 0.05
    assert fewer.mean() < 0.81
