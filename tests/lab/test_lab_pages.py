"""Pages from numbers that are planted: verdicts, partial tasks, what is missing, the overview."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from saobp.lab import EXPERIMENTS, choose_experiments, get_scale
from saobp.lab.cells import made_on, paper_digits
from saobp.lab.experiment_plan import ExperimentPlan, FinetuneRun, Measurement
from saobp.lab.pages import PAGES
from saobp.lab.pages.common import claim_correlation
from saobp.lab.result_page import Page
from saobp.lab.results import Results
from saobp.lab.scales import SCALES
from saobp.lab.tabulate import tabulate, write_overview
from saobp.testing.fake_runs import make_run, record, write_json

MINI = get_scale("mini")
unsaved = pytest.mark.usefixtures("figures_unsaved")
SHIFT = {"original": 0.0, "high": -0.05, "low": 0.1, "elemmul": 0.0}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of the paper's four factors; SQuAD is partial, Low was never fine-tuned."""
    folder = tmp_path / "runs"
    plan = ExperimentPlan(choose_experiments("gtd,tasks"), MINI, 3)
    for model in plan.pretrain_runs():
        run = make_run(model.folder(folder), seed=model.seed, layers=2, heads=3)
        write_json(run / "recipe.json", {"kind": "pretrain", **model.recipe.to_dict()})
        noise = np.random.default_rng(model.seed).normal(0, 0.3)
        result = {
            "eval_perplexity": 30 + noise + 20 * SHIFT[model.method.key],
            "tokens_per_second": 1e6,
            "seconds": 80.0,
            "strengths": None,
        }
        write_json(run / "result.json", result)
    for one in plan.finetune_runs():
        if one.model.method.key == "low":
            continue
        own = one.folder(folder)
        (own / f"seed-{one.model.seed}").mkdir(parents=True)
        score = 60 + one.model.seed - 30 * SHIFT[one.model.method.key]
        partial = one.task == "squad"
        result = {"task": one.task, "metric": "accuracy", "last": {"mean": score}, "partial": partial}
        write_json(own / "result.json", result)
        write_json(own / f"seed-{one.model.seed}" / "result.json", result)
        write_json(own / f"seed-{one.model.seed}" / "record.json", record(one.model.seed, seconds=5.0))
        write_json(own / f"seed-{one.model.seed}" / "recipe.json", {"kind": "finetune", "task": one.task})
    for measured in plan.measurements():
        path = measured.file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        gtd = 0.7 - SHIFT[measured.model.method.key] + measured.model.seed / 1000
        layers = {name: [[gtd, gtd], [gtd, gtd]] for name in ("gtd", "indirect_entropy", "clustering")}
        layers |= {
            name: [[gtd, gtd], [gtd, gtd]] for name in ("betweenness", "attention_entropy", "sparsity")
        }
        points = [{"layer": 0, "gtd": x, "clustering": x * x, "betweenness": -x} for x in (0.1, 0.4, 0.7)]
        write_json(path, {"layers": layers, "cross_layer_gtd": [gtd], "points": points, "seconds": 1.0})
    return folder


def _written(runs: Path, out: Path, target: str) -> tuple[str, dict]:  # type: ignore[type-arg]
    tabulate(ExperimentPlan(choose_experiments(target), MINI, 3), runs, out)
    folder = out / target
    return (folder / "mini.md").read_text(), json.loads((folder / "mini.json").read_text())


def test_paper_ours_and_difference_stand_side_by_side(runs: Path, tmp_path: Path) -> None:
    page, outcome = _written(runs, tmp_path / "results", "gtd")
    line = next(line for line in page.splitlines() if line.startswith("| GTD ↑ | High |"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:6] == ["0.78", "0.765 ± 0.023 (3)", "-0.015", "+0.03"]
    assert cells[6].startswith("+0.050 [")
    assert cells[7] == "gain"
    said = {claim["words"].split(":")[0]: claim["status"] for claim in outcome["claims"]}
    assert said["High against Original, GTD"] == "reproduces"
    assert said["Low against Original, GTD"] == "does not reproduce"
    assert said["Low against Original, accuracy"] == "not run"
    for name in ("mini-measures.svg", "mini-measures.png", "mini-runs.json"):
        assert (tmp_path / "results" / "gtd" / name).stat().st_size > 0


def test_claims_say_how_many_pairs_they_rest_on() -> None:
    """An interval of two pairs may leave zero out and still decides nothing: a reader sees why."""
    page = Page(EXPERIMENTS["gtd"], MINI)
    values = {"original": {42: 1.0, 1: 2.0}, "high": {42: 1.5, 1: 2.51}, "low": {42: 1.0}}
    page.compare("GTD", values, {"original": 0.75, "high": 0.78, "low": 0.78}, claims=("high", "low"))
    high, low = page.claims
    assert (high.status, low.status) == ("could not be decided", "could not be decided")
    assert high.detail.endswith("] (2 pairs)")
    assert low.detail == "+0.00 (1 pair)"


def test_the_size_of_a_difference_counts_only_where_measures_are_the_same() -> None:
    """Sparsity's threshold is not the paper's: only the side of a difference compares."""
    values = {"original": {42: 0.9, 1: 0.9, 2: 0.9}, "high": {42: 0.901, 1: 0.899, 2: 0.9}}
    statuses = []
    for same in (True, False):
        page = Page(EXPERIMENTS["sparsity"], MINI)
        paper = {"original": 0.906, "high": 0.895}
        page.compare("last layer", values, paper, digits=3, claims=("high",), same_size=same)
        statuses.append(page.claims[0].status)
    assert statuses == ["does not reproduce", "could not be decided"]


@unsaved
def test_the_size_of_clustering_is_not_compared(runs: Path, tmp_path: Path) -> None:
    """The paper's is several times ours: a fall of 0.09 from 0.035 cannot be seen."""
    change = {42: 0.001, 1: -0.001, 2: 0.0005}
    for one in ExperimentPlan(choose_experiments("gtd"), MINI, 3).measurements():
        taken = json.loads(one.file(runs).read_text())
        own = 0.0 if one.model.method.key == "original" else change[one.model.seed]
        taken["layers"]["clustering"] = [[0.035 + own]]
        write_json(one.file(runs), taken)
    _, outcome = _written(runs, tmp_path / "results", "gtd")
    said = {claim["words"].split(":")[0]: claim["status"] for claim in outcome["claims"]}
    assert said["High against Original, CC"] == "could not be decided"


@unsaved
def test_columns_of_the_paper_are_left_out_where_it_has_no_numbers(runs: Path, tmp_path: Path) -> None:
    page, _ = _written(runs, tmp_path / "results", "strengths")
    header = next(line for line in page.splitlines() if line.startswith("| measure |"))
    assert header == "| measure | method | ours | ours, method - base [95 % interval] | verdict |"
    assert "| held-out perplexity ↓ | High, λ = 0.2 |" in page


@pytest.mark.parametrize(
    ("values", "digits", "expected"),
    [([0.75, 0.78], 3, 2), ([0.906, 0.895], 3, 3), ([38.0175], 2, 2), ([2.2, 1.4], 3, 2), ([], 3, 2)],
)
def test_the_paper_s_numbers_have_its_own_decimals(values: list[float], digits: int, expected: int) -> None:
    assert paper_digits(values, digits) == expected


def test_measurements_have_records_too(runs: Path) -> None:
    results = Results(ExperimentPlan(choose_experiments("gtd"), MINI, 3), EXPERIMENTS["gtd"], runs)
    measured = [record for record in results.records() if record["kind"] == "measure"]
    assert {record["seed"] for record in measured} == {42, 1, 2}


def test_an_interval_of_a_correlation_stays_within_one(runs: Path) -> None:
    results = Results(
        ExperimentPlan(choose_experiments("gtd-graph"), MINI, 3), EXPERIMENTS["gtd-graph"], runs
    )
    page = Page(EXPERIMENTS["gtd-graph"], MINI)
    found = dict(zip(results.models(), (0.99, 0.9, 0.7, 0.99, 0.9, 0.7), strict=False))
    claim_correlation(page, "GTD against clustering", 0.7, found)
    assert page.claims[0].status == "reproduces"
    assert page.claims[0].detail.endswith("+1.00] (3 seeds)")


@unsaved
def test_runs_that_never_leave_the_plateau_are_named(runs: Path, tmp_path: Path) -> None:
    page, _ = _written(runs, tmp_path / "results", "pretraining")
    assert "without a number for the wait" not in page
    path = runs / "bert-mini-low-0.2-seed1" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "loss": 6.0}) + "\n" for line in lines))
    page, _ = _written(runs, tmp_path / "results", "pretraining")
    assert "Never below 5.5, and so without a number for the wait: Low, seed 1." in page


@unsaved
def test_runs_that_all_wait_alike_say_nothing_of_the_wait(runs: Path, tmp_path: Path) -> None:
    """A constant has no rank correlation: the page says so instead of nan."""
    for model in ExperimentPlan(choose_experiments("pretraining"), MINI, 3).pretrain_runs():
        if (model.folder(runs) / "result.json").exists():
            line = {"step": 10, "tokens": 1000, "loss": 3.0}
            (model.folder(runs) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page, _ = _written(runs, tmp_path / "results", "pretraining")
    assert "12 runs that do not differ in both say nothing" in page
    assert "nan" not in page


@unsaved
def test_records_name_no_place_of_the_machine(runs: Path, tmp_path: Path) -> None:
    name = "bert-mini-original-seed42"
    written = json.loads((runs / name / "record.json").read_text())
    command = "saobp reproduce gtd --runs /some/where/runs --tokens=/else/where/tokens --minutes 9"
    write_json(runs / name / "record.json", {**written, "command": command})
    _written(runs, tmp_path / "results", "gtd")
    records = json.loads((tmp_path / "results" / "gtd" / "mini-runs.json").read_text())
    own = next(record for record in records if record["run"] == name)
    assert own["command"] == "saobp reproduce gtd --runs runs --tokens=tokens --minutes 9"
    assert {"commit", "seed", "data", "environment", "seconds", "result"} <= set(own)


@unsaved
def test_scores_of_partial_tasks_never_stand_beside_the_paper_s(runs: Path, tmp_path: Path) -> None:
    page, _ = _written(runs, tmp_path / "results", "tasks")
    squad = [line for line in page.splitlines() if line.startswith("| squad * ↑ |")]
    assert len(squad) == 4
    assert not any("24.07" in line or "19.22" in line for line in squad)
    assert any("28.06" in line for line in page.splitlines() if line.startswith("| hellaswag ↑ |"))
    assert "Only a part of the training examples" in page


def test_answers_mark_tasks_of_which_a_part_is_there(runs: Path) -> None:
    experiment = EXPERIMENTS["learned"]
    page = Page(experiment, MINI)
    PAGES["learned"](Results(ExperimentPlan([experiment], MINI, 3), experiment, runs), page)
    said = [claim.words for claim in page.claims]
    assert "Learned strengths raise squad * after fine-tuning" in said
    assert "Learned strengths raise cola after fine-tuning" in said
    assert "Learned strengths raise the mean score * after fine-tuning" in said


@unsaved
def test_correlations_are_decided_over_runs(runs: Path, tmp_path: Path) -> None:
    """In the made-up runs GTD falls while perplexity falls: the opposite of the paper's sign."""
    page, outcome = _written(runs, tmp_path / "results", "gtd-correlation")
    said = {claim["words"]: claim["status"] for claim in outcome["claims"]}
    assert said["GTD follows perplexity: the paper has r = -0.97"] == "does not reproduce"
    assert said["GTD follows sst2: the paper has r = +0.92"] == "not run"
    assert any(words.startswith("GTD within layers against GTD across") for words in said)
    assert "| perplexity | Original | -0.97 | +" in page


@unsaved
def test_only_the_side_of_a_partial_task_is_compared(runs: Path, tmp_path: Path) -> None:
    page, outcome = _written(runs, tmp_path / "results", "tasks")
    said = {claim["words"].split(":")[0]: claim["status"] for claim in outcome["claims"]}
    assert said["High against Original, squad *"] == "reproduces"
    assert "| GLUE, mean of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli ↑ | High | 54.66 |" in page


@unsaved
def test_a_mean_over_tasks_leaves_no_method_out(runs: Path, tmp_path: Path) -> None:
    """As while fine-tuning goes on: of a task that one method lacks so far, there is a row but no share."""
    for folder in (runs / "tasks").glob("bert-mini-elemmul-seed*/sst2"):
        shutil.rmtree(folder)
    page, _ = _written(runs, tmp_path / "results", "tasks")
    assert "| GLUE, mean of cola, mrpc, stsb, qqp, mnli, qnli, rte, wnli ↑ | ElemMul |" in page
    detail, _ = _written(runs, tmp_path / "results", "glue")
    assert "| sst2 ↑ | High |" in detail


def test_times_of_runs_beside_others_are_no_cost(runs: Path) -> None:
    results = Results(ExperimentPlan(choose_experiments("cost"), MINI, 3), EXPERIMENTS["cost"], runs)
    name = "bert-mini-high-0.2-seed42"
    written = json.loads((runs / name / "record.json").read_text())
    beside = {**written, "environment": {**written["environment"], "jobs": 2}}
    write_json(runs / name / "record.json", beside)
    assert set(results.values(results.speed)["high"]) == {1, 2}
    assert set(results.values(results.speed)["original"]) == {42, 1, 2}


def test_pages_say_where_runs_were_made_and_whether_texts_differ(runs: Path) -> None:
    results = Results(ExperimentPlan(choose_experiments("gtd"), MINI, 3), EXPERIMENTS["gtd"], runs)
    same = results.records()
    assert made_on(same).startswith(f"Made on {same[0]['environment']['hardware']} (")
    assert "not all trained on the same texts" not in made_on(same)
    other = {**same[0], "data": dict.fromkeys(same[0]["data"], "another")}
    assert "**Runs were not all trained on the same texts: bert, " in made_on([other, *same[1:]])
    named = [{**same[0], "commit": commit} for commit in ("c850a56" + 33 * "0", "c850a56", "saobp 0.1.0")]
    assert made_on(named).endswith("at commit c850a56 (2), saobp 0.1.0 (1).")


@unsaved
def test_runs_of_another_recipe_are_not_tabulated(runs: Path, tmp_path: Path) -> None:
    path = runs / "bert-mini-original-seed42" / "recipe.json"
    recipe = json.loads(path.read_text())
    plan = ExperimentPlan(choose_experiments("gtd"), MINI, 3)
    write_json(path, {**recipe, "checkpoint_steps": 1000})
    Results(plan, EXPERIMENTS["gtd"], runs).check()
    write_json(path, {**recipe, "corpus": "another"})
    with pytest.raises(ValueError, match="differs in corpus"):
        tabulate(plan, runs, tmp_path / "results")


@unsaved
def test_what_was_not_run_is_listed(runs: Path, tmp_path: Path) -> None:
    page, outcome = _written(runs, tmp_path / "results", "tasks")
    assert any(line.startswith("| hellaswag ↑ | Low |") and "not run" in line for line in page.splitlines())
    assert "bert-mini-low-0.2-seed42-cola" in outcome["missing"]
    assert "Without a finished record: " in page


@unsaved
def test_the_overview_is_made_from_what_exists(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    _, verdicts, undecided = (path.read_text() for path in write_overview(out))
    assert "- mini, small, medium, mini-paper" in undecided
    assert "Nothing so far." in verdicts
    tabulate(ExperimentPlan(choose_experiments("gtd,glue"), MINI, 3), runs, out)
    (out / "story.md").write_text("Once upon a time.\n")
    (out / "arena").mkdir()
    (out / "arena" / "README.md").write_text("Written by another command.\n")
    first, verdicts, undecided = (path.read_text() for path in write_overview(out))
    assert first.startswith("# Results\n\nOnce upon a time.\n\n")
    assert {"](verdicts.md)", "](undecided.md)"} <= set(re.findall(r"\]\([^)]*\)", first))
    reproduced = verdicts[verdicts.index("## What reproduces") : verdicts.index("## What does not")]
    assert "High against Original, GTD: the paper has +0.03" in reproduced
    left_out = undecided[undecided.index("## Pages without results") :]
    assert "- small, medium, mini-paper" in left_out
    assert "decoders" in left_out
    assert not {"gtd", "arena"} & set(left_out.split("- mini: ")[1].split("\n")[0].split(", "))
    assert "- arena: [see its page](arena/README.md)" in left_out


@unsaved
def test_what_two_pages_leave_undecided_is_told_once_on_a_page_of_its_own(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    written = tabulate(ExperimentPlan(choose_experiments("gtd,printed-forms"), MINI, 2), runs, out)
    assert [path.name for path in written[-3:]] == ["README.md", "verdicts.md", "undecided.md"]
    claim = "| High against Original, GTD: the paper has +0.03 |"
    assert [path.read_text().count(claim) for path in written[-3:]] == [0, 0, 1]


@unsaved
def test_pages_of_nothing_are_not_written(tmp_path: Path) -> None:
    tabulate(ExperimentPlan(choose_experiments("all"), MINI), tmp_path / "none", tmp_path / "results")
    assert not [path for path in (tmp_path / "results").iterdir() if path.is_dir()]


def test_the_committed_overview_is_what_the_records_give(tmp_path: Path) -> None:
    """Nobody edits a generated page: the story and the records of the repository make all three."""
    kept = Path(__file__).parents[2] / "results"
    outcomes = [path for path in kept.glob("*/*.json") if path.stem in SCALES]
    for path in [kept / "story.md", kept / "arena" / "README.md", *outcomes]:
        copy = tmp_path / path.relative_to(kept)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    for path in write_overview(tmp_path):
        assert path.read_text() == (kept / path.name).read_text(), path.name


def test_every_page_copes_with_runs_alone(runs: Path, tmp_path: Path) -> None:
    """Pretraining is there, the rest mostly not: pages say so, and one without any answer is not written."""
    written = tabulate(ExperimentPlan(choose_experiments("all"), MINI, 3), runs, tmp_path / "results")
    names = {path.parent.name for path in written[:-3]}
    assert names >= {"gtd", "cost", "strengths", "layers", "gtd-graph"}
    assert not names & {"learned", "steps", "decoders"}
    forms = (tmp_path / "results" / "printed-forms" / "mini.md").read_text()
    assert "| High | 3 | 0 | 0 | 0 |" in forms
    assert "| High, as listed | 0 | 0 | 0 | 3 |" in forms


def test_smoke_pages_say_that_they_mean_nothing(tmp_path: Path) -> None:
    page = Page(EXPERIMENTS["gtd"], get_scale("smoke"))
    page.write(tmp_path, [], [])
    assert "say nothing about any method" in (tmp_path / "gtd" / "smoke.md").read_text()


def test_folders_of_work_are_named(tmp_path: Path) -> None:
    model = ExperimentPlan([], MINI).model("bert", "high", 42)
    assert FinetuneRun(model, "cola").folder(tmp_path) == tmp_path / "tasks" / model.name / "cola"
    assert Measurement(model, "maps").file(tmp_path) == tmp_path / "measured" / model.name / "maps.json"


@unsaved
def test_the_page_of_the_leak_opens_with_its_numbers(tmp_path: Path) -> None:
    """Two pairs decide nothing by rule, so the numbers themselves come first."""
    plan = ExperimentPlan(choose_experiments("decoder-leak"), MINI, 2)
    found = {"original": (300.0, 0.0), "paper": (45.0, 0.156), "strict": (303.0, 0.0)}
    for model in plan.pretrain_runs():
        run = make_run(model.folder(tmp_path), seed=model.seed, layers=2, heads=3)
        write_json(run / "recipe.json", {"kind": "pretrain", **model.recipe.to_dict()})
        perplexity, moved = found[model.method.key]
        write_json(run / "result.json", {"eval_perplexity": perplexity + model.seed, "seconds": 1.0})
        measured = {"zero-shot": {"wikitext": {"perplexity": perplexity}}, "leak": {"moved": moved}}
        for name, values in measured.items():
            path = Measurement(model, name).file(tmp_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**values, "seconds": 1.0})
    page, outcome = _written(tmp_path, tmp_path / "results", "decoder-leak")
    assert (
        "WikiText-2 perplexity: 300 (Original), 45.0 (High, paper form (leaks)), 303 (High, strict);" in page
    )
    assert "first half moved by the second: 0 (Original), 0.156 (High, paper form (leaks)), 0 (High" in page
    assert page.index("In short") < page.index("Our texts and fine-tuning")
    assert {claim["status"] for claim in outcome["claims"]} == {"could not be decided"}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("bert-mini-high-0.2-seed42/result.json", "{}", "result.json has no 'eval_perplexity'"),
        ("bert-mini-high-0.2-seed42/result.json", "[1]", "result.json holds no JSON object"),
        ("measured/bert-mini-high-0.2-seed42/race-middle.json", "{}", "race-middle.json has no 'layers'"),
        ("measured/bert-mini-high-0.2-seed42/race-middle.json", '{"layers": {}}', "has no 'gtd'"),
        ("measured/bert-mini-high-0.2-seed42/race-middle.json", '{"layers": 3}', "expected form"),
        ("tasks/bert-mini-high-0.2-seed42/race-middle/result.json", "{}", "result.json has no 'last'"),
    ],
)
@unsaved
def test_damaged_results_are_named(runs: Path, tmp_path: Path, file: str, content: str, words: str) -> None:
    (runs / file).write_text(content)
    with pytest.raises(ValueError, match=words):
        tabulate(ExperimentPlan(choose_experiments("gtd,strengths"), MINI, 3), runs, tmp_path / "results")


@pytest.mark.parametrize(
    ("name", "content"),
    [("mini-runs.json", "3"), ("mini-runs.json", '["a"]'), ("mini.json", '{"target": 1}')],
)
@unsaved
def test_damaged_pages_are_named(runs: Path, tmp_path: Path, name: str, content: str) -> None:
    plan = ExperimentPlan(choose_experiments("strengths"), MINI, 3)
    tabulate(plan, runs, tmp_path)
    (tmp_path / "strengths" / name).write_text(content)
    with pytest.raises(ValueError, match=f"strengths/{name} is no"):
        tabulate(plan, runs, tmp_path) if name == "mini-runs.json" else write_overview(tmp_path)
