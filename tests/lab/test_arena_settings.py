"""Which runs of the arena are compared: methods, recipes, seeds, and the order of the groups."""

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
from saobp.lab.arena_records import FreshSeeds, combinations, method_of, recorded, settings_of, title_of
from saobp.lab.forest import forest
from saobp.training.recipes import named_recipe


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


def test_a_lower_rate_of_all_leaves_numbers_per_head_the_same_method(tmp_path: Path) -> None:
    for method in ("none", "high:learned"):
        made_up_run(tmp_path, "modernbert", method, 42, 3.0, learning_rate=3e-3, strength_rate=0.01 / 3e-3)
    (setting,) = settings_of(recorded([tmp_path]).values())
    assert set(setting.losses) == {"none", "high:learned"}


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
        (
            {
                **named_recipe("modern", "modernbert", "mini").to_dict(),
                **{"refinement": "none+gate", "strength_rate": 10.0, "regularizer": "eigen,weight=0.01"},
            },
            "gate with eigen,weight=0.01",
            "Gated heads with Eigen-Reg, weight 0.01",
        ),
        ({"regularizer": "entropy,weight=0.001"}, "entropy,weight=0.001", "Entropy-Reg, weight 0.001"),
    ],
)
def test_methods_are_named_by_what_their_recipes_say(recipe: dict[str, Any], method: str, title: str) -> None:
    assert method_of(recipe) == method
    assert title_of(method) == title


def test_a_sum_of_three_is_divided_at_either_plus_sign() -> None:
    names = ("none", "a", "b+c", "a+b", "c", "a+b+c", "x+y")
    found = list(combinations({name: {42: 3.0} for name in names}))
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
