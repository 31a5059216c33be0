"""The tabulate stage: a page for each experiment, three over all of them, and an HTML page of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saobp.lab.cells import markdown_table
from saobp.lab.experiment_plan import ExperimentPlan
from saobp.lab.experiments import EXPERIMENTS, Experiment
from saobp.lab.method_style import STYLES
from saobp.lab.pages import PAGES
from saobp.lab.result_page import ANSWERS, Page
from saobp.lab.results import RESTORED, Results, recorded_runs
from saobp.lab.scales import SCALES
from saobp.lab.statistics import UNDECIDED, Status
from saobp.lab.work_queue import Notify
from saobp.report.page import write_report
from saobp.report.tables import PageTable
from saobp.sizes import FAMILY_NAMES
from saobp.storage.atomic import write_atomically
from saobp.storage.json_files import read_object

STORY = "story.md"
"""A hand-written introduction; if a results folder has one, its README is made of it."""
PRINTED = {name for name, scale in SCALES.items() if scale.recipe == "paper"}
"""Scales at the paper's printed settings."""
LISTED = 3
"""Claims without runs listed by name for a page; of more, the number is told."""
CONTENTS = (
    "## More\n\nWritten by `saobp reproduce`: [verdicts](verdicts.md) on every claim, with rules and a list "
    "of all pages; [what is undecided and what was not run](undecided.md)."
)
RULES = """\
Written by `saobp reproduce`. A claim is a difference between methods that the paper reports. Differences \
are method less base, over pairs of runs with the same seed, with a 95 % t interval.

- **Reproduces**: the interval excludes zero on the claimed side.
- **Does not reproduce**: the interval lies on the other side; or it includes zero and excludes the paper's \
difference, where sizes compare.
- **[Undecided](undecided.md)**: anything else, and whatever has fewer than three pairs.
- **Questions** whether something is better: yes is a gain, no a loss. No gain shown: the interval of three \
pairs or more includes zero.

Every verdict holds for its page's setting only: mini, small and medium are the recipe `fast`; mini-paper \
and its like are the settings that the paper prints, with batch size and sequence length (32 x 128 tokens \
unless named), which it does not print, as assumed here. Texts, token budget and fine-tuning values are \
ours, and * marks tasks of which only a part of the examples is available ([how to \
rerun](../docs/reproduce.md)). Pages that share runs repeat a claim: accuracy on the gtd pages is \
race-middle on those of tasks. There are many claims: about one interval in twenty excludes zero by chance \
alone."""
SMOKE = "**Pages of the smoke scale only show that the code runs. They say nothing about any method.**"
SECTIONS: dict[Status, str] = {
    "reproduces": "What reproduces",
    "does not reproduce": "What does not reproduce",
}


def tabulate(plan: ExperimentPlan, runs: Path, out: Path, notify: Notify = print) -> list[Path]:
    """Write the pages of the plan's experiments that have results, and those over all pages.

    An existing page with more runs is not overwritten; a sentence says so.
    """
    written = []
    for experiment in plan.experiments:
        results = Results(plan, experiment, runs)
        results.check()
        records = results.records()
        missing = _missing_behind(experiment, plan, records, runs, out)
        if missing:
            notify(missing)
        elif records:
            page = Page(experiment, plan.scale)
            PAGES[experiment.name](results, page)
            if page.has_results:
                written += page.write(out, records, results.missing())
    return [*written, *write_overview(out)]


def _missing_behind(
    experiment: Experiment, plan: ExperimentPlan, records: list[dict[str, Any]], runs: Path, out: Path
) -> str:
    """Why an existing page must not be overwritten: the runs or logs it would lose; else empty."""
    there = recorded_runs(out, plan.scale.name, experiment.name)
    absent = [name for name in there if name not in {record["run"] for record in records}]
    page = out / experiment.name / f"{plan.scale.name}.md"
    if absent:
        return (
            f"{page} stays as it is: of the {len(there)} runs behind it, {len(absent)} are not in {runs}, "
            f"{absent[0]} for one; rerun them, restore them with tools/restore_runs.py, or name another --out"
        )
    logged = {record["run"] for record in records if not record.get(RESTORED)}
    without_logs = [name for name, record in there.items() if name not in logged and not record.get(RESTORED)]
    if experiment.logs and without_logs:
        return (
            f"{page} stays as it is: it draws logs of runs, and those of {without_logs[0]} are not in {runs}"
        )
    return ""


def write_overview(out: Path) -> list[Path]:
    """``README.md``, ``verdicts.md`` and ``undecided.md`` of a results folder, from the outcomes in it."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes = [_outcome(path) for path in sorted(out.glob("*/*.json")) if path.stem in SCALES]
    outcomes.sort(
        key=lambda outcome: (list(EXPERIMENTS).index(outcome["target"]), list(SCALES).index(outcome["scale"]))
    )
    story = out / STORY
    introduction = [story.read_text(encoding="utf-8").strip()] if story.exists() else []
    smoke = [SMOKE] if any(outcome["scale"] == "smoke" for outcome in outcomes) else []
    serious = [outcome for outcome in outcomes if outcome["scale"] != "smoke"] or outcomes
    with_page = [
        path.parent.name for path in sorted(out.glob("*/README.md")) if path.parent.name in EXPERIMENTS
    ]
    pages = {
        "README.md": ["# Results", *introduction, *smoke, CONTENTS],
        "verdicts.md": ["# Verdicts", *smoke, RULES, *_verdicts(serious), *_pages(outcomes)],
        "undecided.md": [
            "# Undecided, and not run",
            *smoke,
            *_undecided(serious),
            *_not_run(outcomes, with_page),
        ],
    }
    for name, parts in pages.items():
        write_atomically(out / name, "\n\n".join(parts) + "\n")
    return [out / name for name in pages]


def _outcome(path: Path) -> dict[str, Any]:
    content = read_object(path)
    is_known = content.get("target") in EXPERIMENTS and content.get("scale") in SCALES
    if not is_known or not {"kind", "title", "runs", "missing", "claims"} <= set(content):
        raise ValueError(f"{path} is no outcome of an experiment: tabulate it again, or remove it")
    return content


def _verdicts(outcomes: list[dict[str, Any]]) -> Iterable[str]:
    for status, title in SECTIONS.items():
        yield f"## {title}"
        yield _claims(outcomes, status) or "Nothing so far."
    answers = [
        [claim["words"], ANSWERS.get(claim["status"], claim["status"]), claim["detail"], _link(outcome)]
        for outcome in outcomes
        for claim in outcome["claims"]
        if outcome["kind"] == "question" and claim["status"] not in ("not run", UNDECIDED)
    ]
    yield "## Questions of ours"
    header = ("is it so?", "answer", "our difference", "page")
    yield markdown_table(header, answers) if answers else "None answered so far."


def _pages(outcomes: list[dict[str, Any]]) -> Iterable[str]:
    yield "## Pages"
    rows = [
        [
            outcome["title"],
            _link(outcome),
            outcome["kind"],
            str(outcome["runs"]),
            str(len(outcome["missing"])),
        ]
        for outcome in outcomes
    ]
    header = ("what", "page", "kind", "runs behind it", "runs missing")
    yield markdown_table(header, rows) if rows else "None so far."


def _undecided(outcomes: list[dict[str, Any]]) -> Iterable[str]:
    yield "## Undecided"
    yield "What the [rules](verdicts.md) decide neither way, mostly for want of three pairs."
    yield _claims(outcomes, UNDECIDED, questions=True) or "Nothing."


def _claims(outcomes: list[dict[str, Any]], status: Status, *, questions: bool = False) -> str:
    """A table of claims of one status; duplicates are listed with their first page."""
    rows: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for claim in outcome["claims"]:
            if claim["status"] == status and (questions or outcome["kind"] != "question"):
                key = (claim["words"], claim["detail"])
                rows.setdefault(key, [*key, _link(outcome)])
    return markdown_table(("claim", "our difference", "page"), list(rows.values())) if rows else ""


def _not_run(outcomes: list[dict[str, Any]], own: Sequence[str]) -> Iterable[str]:
    """own: experiments with a page of their own, as the arena's, which says what of them was not run"""
    yield "## Pages without results"
    there = {(outcome["target"], outcome["scale"]) for outcome in outcomes}
    lines, nothing_of = [], []
    for scale in (name for name in SCALES if name != "smoke"):
        expected = [
            name
            for name, experiment in EXPERIMENTS.items()
            if (scale in PRINTED or not experiment.batches) and name not in own
        ]
        absent = [name for name in expected if (name, scale) not in there]
        if len(absent) == len(expected):
            nothing_of.append(scale)
        elif absent:
            lines.append(f"- {scale}: {', '.join(absent)}")
    if nothing_of:
        lines.append(f"- {', '.join(nothing_of)}: everything")
    lines += [f"- {name}: [see its page]({name}/README.md)" for name in own]
    for outcome in outcomes:
        skipped = [claim["words"] for claim in outcome["claims"] if claim["status"] == "not run"]
        if skipped and outcome["scale"] != "smoke":
            words = "; ".join(skipped) if len(skipped) <= LISTED else f"{len(skipped)} claims of the page"
            lines.append(f"- {_link(outcome)}: {words}")
    yield "\n".join(lines) if lines else "Nothing was left out."


def _link(outcome: dict[str, Any]) -> str:
    return f"[{outcome['target']}, {outcome['scale']}]({outcome['target']}/{outcome['scale']}.md)"


MOST_RUNS = 8
"""Most runs that colours can distinguish on one page."""


def write_reproduction(
    runs: Mapping[Path, str], results: Path, targets: Sequence[str], scale: str, family: str
) -> Path:
    """``report-SCALE-FAMILY.html`` in the results folder: outcomes of some targets, first runs of a family.

    Inconclusive targets come last. Each family has a page, since masked and causal perplexities do not
    compare.
    runs: folders with their methods, whose colours are those of the lab's figures
    """
    decided: list[PageTable] = []
    undecided: list[PageTable] = []
    for target in targets:
        file = results / target / f"{scale}.json"
        if not file.exists():
            continue
        outcome = read_object(file)
        claims = [claim for claim in outcome["claims"] if claim["status"] != "not run"]
        left_out = len(outcome["claims"]) - len(claims)
        notes = [f"{outcome['runs']} runs behind it, {len(outcome['missing'])} missing."]
        if left_out:
            notes.append(f"{left_out} further claims were not run.")
        is_question = outcome["kind"] == "question"
        answers = ANSWERS if is_question else {}
        rows = [
            [claim["words"], answers.get(claim["status"], claim["status"]), claim["detail"]]
            for claim in claims
        ]
        if scale == "smoke":
            notes.append("A smoke run only shows that the code runs; its numbers say nothing.")
        if rows:
            first = ("is it so?", "answer") if is_question else ("claim", "here")
            columns = (*first, "our difference [95 % interval]")
            is_open = all(claim["status"] == UNDECIDED for claim in claims)
            tables = undecided if is_open else decided
            tables.append(PageTable(outcome["title"], columns, rows, " ".join(notes)))
    drawn = list(runs)[:MOST_RUNS]
    title = f"Reproduction, {scale} scale, {FAMILY_NAMES[family]}"
    if len(runs) > MOST_RUNS:
        title += f": the first {MOST_RUNS} of {len(runs)} runs"
    styles = _styles([runs[run] for run in drawn])
    page = results / f"report-{scale}-{family}.html"
    return write_report(drawn, page, title=title, tables=[*decided, *undecided], styles=styles)


def _styles(methods: Sequence[str]) -> list[tuple[str, str, int]]:
    """Colours of each method; further runs of one, as of another seed, are dashed."""
    return [
        (STYLES[key].colour, STYLES[key].on_dark, methods[:index].count(key))
        for index, key in enumerate(methods)
    ]
