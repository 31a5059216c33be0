"""Run folders into page data: what is there is shown, what is missing is said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from written_page import figure, page_of, words_of

from saobp.cli import app
from saobp.lab.method_style import STYLES
from saobp.lab.tabulate import write_reproduction
from saobp.metrics.diagnosis.head_plots import heat_map
from saobp.metrics.diagnosis.loading import example_model
from saobp.metrics.health.verdicts import uniform_map, verdict
from saobp.report import PageTable, explorer_data, read_runs, write_explorer, write_report
from saobp.report.page_assets import joined_script
from saobp.report.run_view import refinement_words
from saobp.report.summaries import NONE, shown, summary
from saobp.testing.fake_runs import make_finetune, make_run, write_json
from saobp.testing.tiny_models import tiny_model

HIGH = {"factor": "high", "strength": "learned", "steps": 2, "damping": 0.0, "future": "strict"}


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", refinement=HIGH, steps=500, measured=4)
    (run,) = read_runs([folder])
    assert run.problems == []
    assert {"loss", "learning_rate", "eval_loss", "eval_perplexity"} == set(run.curves)
    (loss,) = run.curves["loss"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert loss.values == [line["loss"] for line in lines if "loss" in line]
    assert loss.axes["tokens"][0] == 10 * 256 * 128
    (told,) = run.curves["eval_loss"]
    assert told.axes["tokens"] == [step * 256 * 128 for step in told.axes["step"]]
    assert [moment.step for moment in run.health] == [0, 167, 333, 500]
    last = json.loads((folder / "health.jsonl").read_text().splitlines()[-1])
    assert run.health[-1].across == dict(enumerate(last["cross_layer_gtd"], 1))
    assert ("refinement", "high:learned,steps=2") in run.facts
    assert any(words.startswith("At step 500,") for words in summary(run))


def test_verdicts_are_those_of_the_library(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "run", family="gpt2", measured=3)])
    last = run.health[-1]
    uniform = [float(one) for one in uniform_map(torch.tensor([128]), causal=True)]
    for layer, row in enumerate(last.verdicts):
        for head, word in enumerate(row):
            gtd, entropy, sink = (
                last.statistics[name][layer][head] for name in ("gtd", "attention_entropy", "sink_mass")
            )
            assert word == verdict(
                gtd,
                entropy_share=entropy / uniform[1],
                sink_mass=sink,
                uniform_gtd=uniform[0],
                uniform_sink=uniform[2],
            )
    assert last.heads == 32
    assert f"{last.count('healthy')} of 32 heads" in " ".join(summary(run))


def test_a_fine_tuning_run_has_a_curve_for_each_seed(tmp_path: Path) -> None:
    (run,) = read_runs([make_finetune(tmp_path / "sst2")])
    assert [series.of for series in run.curves["loss"]] == ["seed 42", "seed 43", "seed 44"]
    assert any("accuracy on sst2 over 3 seeds" in words for words in summary(run))
    assert dict(run.facts)["seed"] == "42, 43, 44"
    assert (dict(run.facts)["model"], dict(run.facts)["task"]) == ("high/model", "sst2")
    assert run.problems == []


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    folder = make_finetune(tmp_path / "sst2")
    for seed in (43, 44):
        shutil.rmtree(folder / f"seed-{seed}")
    result = json.loads((folder / "result.json").read_text())
    result |= {"seeds": {"42": result["seeds"]["42"]}, "best": {"mean": 87.0, "std": 0.0}}
    write_json(folder / "result.json", result)
    (run,) = read_runs([folder])
    assert "Best accuracy on sst2, one seed: 87.00." in summary(run)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "run", steps=50) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([folders[0]] * 2)] == ["run (1)", "run (2)"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("recipe.json", None, "recipe.json is missing"),
        ("record.json", "{", "record.json cannot be read as JSON"),
        ("result.json", None, "the run has not finished (its status is finished)"),
        ("result.json", "[1]", "result.json holds no JSON object"),
        ("metrics.jsonl", None, "metrics.jsonl is missing: there are no curves"),
        ("metrics.jsonl", "", "metrics.jsonl is empty: there are no curves"),
        ("metrics.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "lo', "1 of 2 lines of metrics.jsonl"),
        ("metrics.jsonl", "\0\xff binary", "1 of 1 lines of metrics.jsonl"),
        ("health.jsonl", None, "health.jsonl is missing"),
        (
            "health.jsonl",
            '{"step": 1, "layers": ["a"], "statistics": {"gtd": [[]]}}',
            "1 of 1 lines of health",
        ),
        ("health.jsonl", '{"step": 1, "layers": ["a", "b"], "statistics": {"gtd": [[1]]}}', "1 of 1 lines"),
        ("explorer.json", "{}", None),
        ("explorer.json", '{"format": 99}', "there is nothing to explore"),
        ("explorer.json", "null", "explorer.json holds no JSON object"),
    ],
)
def test_a_partial_run_gives_a_page_and_a_sentence(
    tmp_path: Path, name: str, content: str | None, said: str | None
) -> None:
    folder = make_run(tmp_path / "run", steps=100, measured=2)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content, encoding="latin-1")
    path = write_report([folder], tmp_path / "page.html")
    data, words = page_of(path), words_of(path)
    if said is None:
        assert "Not complete" not in words
    else:
        assert said in words
    assert any(one["id"] == "curve-loss" for one in data["curves"]) or name == "metrics.jsonl"
    assert data["heads"] or name == "health.jsonl"


def test_sentences_cut_alike_are_named_in_one_note() -> None:
    tokenizer = example_model()[1]
    for sentences, note in ((2, "Sentences 1, 3 are cut to their first 4 tokens."), (1, "Sentence 1 is cut")):
        texts = ["one two three four five six", "one", "six five four three two one"][: 2 * sentences - 1]
        data = explorer_data(tiny_model("bert"), tokenizer, texts, max_tokens=4)
        assert next(left for left in data["left_out"] if "cut" in left).startswith(note)


@pytest.mark.parametrize(
    "broken",
    [
        {"strengths": [[1.0], ["x"]]},
        {"in_order": [True]},
        {"refinement": {"factor": "high"}},
        {"sentences": []},
        {"sentences": [{"text": "a b", "tokens": ["a", "b"], "scores": [[], []]}]},
        {"subject": 7},
    ],
)
def test_a_damaged_explorer_is_left_out_with_a_sentence(tmp_path: Path, broken: dict) -> None:
    run = make_run(tmp_path / "run", steps=20)
    data = explorer_data(tiny_model("bert"), example_model()[1], ["one two three"])
    write_explorer(data, run)
    assert page_of(write_report([run], tmp_path / "page.html"))["explorers"]
    write_explorer({**data, **broken}, run)
    path = write_report([run], tmp_path / "page.html")
    assert page_of(path)["explorers"] == []
    assert "nothing to explore" in words_of(path)


def test_an_empty_folder_gives_a_page_and_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = words_of(write_report([tmp_path / "empty"], tmp_path / "page.html"))
    assert words.count("<li>") == 5
    with pytest.raises(ValueError, match="there is no folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "page.html")


def test_values_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=50, measured=2)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": Infinity, "note": "x"}\n'
    )
    path = write_report([folder], tmp_path / "page.html")
    (line,) = figure(path, "curve-loss")["data"]
    assert line["y"] == [2.5, None, None]
    assert "The training loss was 2.50 and is not a number from step 2 on." in words_of(path)
    assert f"<b>{NONE}</b>" in words_of(path)
    assert "note" not in path.read_text().partition("<style>")[0] + str(
        [one["id"] for one in page_of(path)["curves"]]
    )


def test_runs_of_one_colour_are_told_apart_by_dashes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{place}", steps=20, measured=1) for place in range(9)]
    path = write_report(runs, tmp_path / "page.html")
    first, *_, last = figure(path, "curve-loss")["data"]
    assert (first["line"]["dash"], last["line"]["dash"]) == ("solid", "dash")
    marked = re.findall(r'class="swatch( dashed)?"[^>]*></span>(?:<bdi>)?(run-\d)', words_of(path))
    assert {name for dashed, name in marked if dashed} == {"run-8"}
    assert len({name for _, name in marked}) == 9


def test_a_loss_that_fails_is_told_in_words(tmp_path: Path) -> None:
    plain, seeds = make_run(tmp_path / "plain", steps=50), make_finetune(tmp_path / "seeds")
    (plain / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": NaN}\n')
    with (seeds / "seed-43" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1310, "loss": NaN}\n')
    words = words_of(write_report([plain, seeds], tmp_path / "page.html"))
    assert "no training loss in metrics.jsonl is a finite number." in words
    assert re.search(r"The training loss of seed 43 went from [\d.]+ to [\d.]+ and is not a number", words)
    assert "from step 1,310 on." in words
    assert "of seed 42" not in words


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["step", "layers", "statistics", "gtd", "strengths", "kind", "family", "length", "refinement", "data",
     "environment", "status", "format", "sentences", "tokens", "scores", "heads", "layer", "subject"]
)  # fmt: skip


@settings(max_examples=30)
@given(
    st.dictionaries(fields, json_values, max_size=6),
    st.lists(st.dictionaries(fields, json_values), max_size=3),
)
def test_no_content_stops_the_page(
    tmp_path_factory: pytest.TempPathFactory, values: dict, lines: list
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for name in ("recipe", "record", "result", "explorer"):
        (folder / f"{name}.json").write_text(json.dumps(values))
    for name in ("metrics", "health"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert folder.name in words_of(write_report([folder], folder / "page.html"))
    (folder / "diagnosis.json").write_text(json.dumps([values, *lines]))
    assert '<article class="panel card">' in words_of(write_report([folder], folder / "page.html"))
    shutil.rmtree(folder)


def test_hostile_words_cannot_leave_the_data(tmp_path: Path) -> None:
    words = "</script><script>alert(1)</script><!-- \u2028 \ud800 שלום 🙂 '\" {{ 7 * 7 }}"
    table = PageTable(words, ["a", words], [["1", words]], words)
    folder = make_run(tmp_path / "run", steps=50)
    path = write_report([folder], tmp_path / "page.html", title=words, tables=[table], sample=words)
    text = path.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 3
    assert "alert(1)</script>" not in text
    assert words_of(path).count(words.replace("\ud800", "?")) >= 6
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_the_script_is_one_module_without_imports() -> None:
    script = joined_script()
    assert "</script" not in script
    assert "import {" not in script.split("/**")[1]
    assert "\nexport " not in script
    assert script.count("function refine(") == 1
    names = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", script, re.MULTILINE)
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))


def test_refinements_in_words() -> None:
    assert refinement_words(None) == refinement_words({"factor": "none"}) == "none"
    assert refinement_words({"factor": "high", "strength": 0.2}) == "high:0.2"
    assert refinement_words({"factor": "low", "strength": [0.1, 0.2]}) == "low:0.1/0.2"
    assert refinement_words({"factor": "not-registered"}) == "{'factor': 'not-registered'}"


@pytest.mark.parametrize("form", ["svg", "pdf", "png"])
def test_figures_for_papers(tmp_path: Path, form: str) -> None:
    runs = [make_run(tmp_path / name, steps=100, layers=2, heads=2) for name in ("one", "two", "three")]
    out = tmp_path / "figures"
    shown = CliRunner().invoke(app, ["report", *map(str, runs), "--format", form, "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    figures = {"curves", "gtd", "indirect_entropy", "attention_entropy", "sink_mass", "layers"}
    assert {path.name for path in out.iterdir()} == {f"{name}.{form}" for name in figures}
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[form]
    assert all(path.read_bytes().startswith(start) for path in out.iterdir())
    if form == "svg":
        assert ">three</text>" in (out / "layers.svg").read_text()


def test_runs_of_different_depths_share_a_figure(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{depth}", steps=20, layers=depth, heads=2) for depth in (5, 2)]
    figure = heat_map([run.health[-1].diagnosis(run.name) for run in read_runs(runs)], "gtd")
    assert [panel.get_ylim() for panel in figure.axes[:2]] == [(4.5, -0.5), (1.5, -0.5)]


def test_a_folder_of_tasks_is_opened(tmp_path: Path) -> None:
    for task in ("sst2", "cola"):
        make_finetune(tmp_path / "tuned" / task)
    (tmp_path / "tuned" / "logs").mkdir()
    assert [run.name for run in read_runs([tmp_path / "tuned"])] == ["cola", "sst2"]


def test_facts_are_written_to_be_read(tmp_path: Path) -> None:
    run = make_finetune(tmp_path / "sst2")
    result = json.loads((run / "result.json").read_text())
    result.update(partial=True, notes=["only 160 examples are used"], strengths=[[0.5, 1.0], [0.25, 2.0]])
    (run / "result.json").write_text(json.dumps(result))
    words = words_of(write_report([run], tmp_path / "page.html"))
    assert "Partial data: only 160 examples are used." in words
    assert '<th scope="row">strengths</th><td>4 values, from 0.25 to 2</td>' in words
    assert re.search(r"started</th><td>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC</td>", words)


def test_the_command_writes_beside_a_single_run_and_refuses_in_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=50)
    shown = CliRunner().invoke(app, ["report", str(run), "--title", "A title"])
    assert shown.exit_code == 0, shown.output
    assert "<h1>A title</h1>" in words_of(run / "report.html")
    shown = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "report.html").is_file()
    refused = CliRunner().invoke(app, ["report", str(run), "--format", "svg", "--title", "A title"])
    assert refused.exit_code == 1
    assert "are for a page" in refused.output
    tiny_model("gpt2").save_pretrained(run / "model")
    example_model()[1].save_pretrained(run / "model")
    shown = CliRunner().invoke(
        app, ["report", str(run), "--sentence", "one two three", "--sentence", "four five", "--overwrite"]
    )
    assert shown.exit_code == 0, shown.output
    (explorer,) = page_of(run / "report.html")["explorers"]
    assert [own["tokens"] for own in explorer["sentences"]] == [["one", "two", "three"], ["four", "five"]]
    assert explorer["in_order"] == [True, True]
    shutil.rmtree(run / "model")
    refused = CliRunner().invoke(app, ["report", str(run), "--sentence", "one two", "--overwrite"])
    assert refused.exit_code == 1
    assert "holds no folder 'model'" in refused.output
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert refused.exit_code == 1
    assert "there is no folder" in refused.output
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "empty"), "--format", "svg"])
    assert refused.exit_code == 1
    assert "holds no run and no diagnosis" in refused.output


def test_sentences_are_written_to_all_runs_or_to_none(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run", steps=50), make_run(tmp_path / "other", steps=50)
    tiny_model("gpt2").save_pretrained(run / "model")
    example_model()[1].save_pretrained(run / "model")
    for second, words in ((other, "holds no folder 'model'"), (tmp_path / "none", "there is no folder")):
        out = ("--out", str(tmp_path / "page.html"))
        refused = CliRunner().invoke(app, ["report", str(run), str(second), "--sentence", "one two", *out])
        assert refused.exit_code == 1
        assert words in refused.output
        assert not (run / "explorer.json").exists()


def test_a_file_given_as_a_run_is_not_taken_for_the_page(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "notes.txt")])
    assert refused.exit_code == 1
    assert "there is no folder" in refused.output


@pytest.mark.parametrize(
    ("kind", "columns", "status"),
    [("table", ["claim", "here"], "reproduces"), ("question", ["is it so?", "answer"], "yes")],
)
def test_a_reproduction_shows_its_claims(tmp_path: Path, kind: str, columns: list[str], status: str) -> None:
    claims = [
        {"words": "A beats B", "status": "reproduces", "detail": "+1.0"},
        {"words": "C beats B", "status": "not run", "detail": ""},
    ]
    (tmp_path / "glue").mkdir()
    outcome = {"title": "GLUE", "kind": kind, "runs": 2, "missing": ["x"], "claims": claims}
    (tmp_path / "glue" / "smoke.json").write_text(json.dumps(outcome))
    methods = ["original", "high", "original", *["low"] * 6]
    runs = {make_run(tmp_path / f"run{place}", steps=20): key for place, key in enumerate(methods)}
    (tmp_path / "gtd").mkdir()
    still = [{"words": "D beats B", "status": "could not be decided", "detail": "+0.1"}]
    (tmp_path / "gtd" / "smoke.json").write_text(json.dumps(outcome | {"title": "GTD", "claims": still}))
    page = write_reproduction(runs, tmp_path, ["gtd", "glue", "nowhere"], "smoke", "bert")
    words = words_of(page)
    assert "".join(f'<th scope="col">{name}</th>' for name in columns) in words
    assert f'<th scope="row">A beats B</th><td>{status}</td><td>+1.0</td>' in words
    assert words.index("A beats B") < words.index("D beats B"), "what is decided comes first"
    assert "C beats B" not in words
    assert "1 further claims were not run" in words
    assert "its numbers say nothing" in words
    assert "the first 8 of 9 runs</h1>" in words
    dashes = [trace["line"]["dash"] for trace in page_of(page)["curves"][0]["data"]]
    assert dashes == ["solid", "solid", "dash", "solid", "dash", "dot", "dashdot", "solid"]
    own = "".join(f"--run-{place}: {STYLES[key].colour}; " for place, key in enumerate(methods[:8]))
    assert f":root {{ {own}}}" in page.read_text()


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    page.write_text("the old page")
    monkeypatch.setattr("saobp.storage.atomic.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report([run], page)
    assert page.read_text() == "the old page"


def test_cards_name_the_regularizer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "entropy")
    recipe = json.loads((run / "recipe.json").read_text())
    write_json(run / "recipe.json", {**recipe, "refinement": None, "regularizer": "entropy,weight=1e-05"})
    words = words_of(write_report([run], tmp_path / "page.html"))
    assert "refinement none, regularizer entropy,weight=1e-05</p>" in words


@pytest.mark.parametrize(
    ("value", "words"),
    [(5_992_732.1, "5,993,000"), (28.451, "28.451"), (-1234.5, "\N{MINUS SIGN}1,234"), (3.21e12, "3.21e+12")],
)
def test_large_numbers_are_short_and_plain(value: float, words: str) -> None:
    assert shown(value) == words
