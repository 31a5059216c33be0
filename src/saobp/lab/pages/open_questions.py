"""The pages of the open questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from saobp.data.tasks import ALL
from saobp.lab.arena import HEADERS, power, rows
from saobp.lab.arena_records import settings_of
from saobp.lab.cells import format_means
from saobp.lab.figures import head_grid
from saobp.lab.forest import forest
from saobp.lab.methods import METHODS
from saobp.lab.pages.common import BUDGET, mean_of, mean_score
from saobp.lab.paper import paper_values
from saobp.lab.result_page import Page
from saobp.lab.results import Results
from saobp.lab.statistics import UNDECIDED, Status

MOVED = "first half moved by the second"


def decoder_leak(results: Results, page: Page) -> None:
    held_out = results.values(results.perplexity, "gpt2")
    moved = results.measured_values("leak", lambda taken: taken["moved"], "gpt2")
    text = results.measured_values("zero-shot", lambda taken: taken["wikitext"]["perplexity"], "gpt2")
    drawn = {"WikiText-2 perplexity": text, "held-out perplexity": held_out, MOVED: moved}
    page.text(f"In short, means over seeds. {format_means(drawn)}.")
    page.text(
        f"'{MOVED}' is how far the states of the first half of a text move, relative to their size, "
        "when its second half is replaced: 0 for a causal model. A model whose states move has seen what it "
        "has to predict, and its perplexity measures something else."
    )
    page.text(BUDGET)
    page.compare("WikiText-2 perplexity", text, higher_is_better=False)
    gains = page.compare("held-out perplexity", held_out, higher_is_better=False)
    page.compare(MOVED, moved, higher_is_better=False, digits=3)
    page.compared()
    page.answer(
        "The paper form, which leaks, has a lower held-out perplexity than Original", gains.get("paper")
    )
    page.answer(
        "The strict form, which leaks nothing, has a lower held-out perplexity than Original",
        gains.get("strict"),
    )
    page.dots("leak", drawn, "Perplexity, and how far the second half of a text moves states of the first.")


def printed_forms(results: Results, page: Page) -> None:
    page.text(BUDGET)
    size, methods = results.plan.scale.size, results.experiment.bert
    forms = {"high-listing": "high", "low-listing": "low", "elemmul-prior": "elemmul"}
    drawn = {}
    held_out = results.values(results.perplexity)
    page.compare("held-out perplexity", held_out, higher_is_better=False, digits=3)
    drawn["held-out perplexity"] = held_out
    for title, values, column, digits in (
        ("GTD", mean_of(results, "race-middle", "gtd"), "gtd", 3),
        ("indirect entropy", mean_of(results, "race-middle", "indirect_entropy"), "indirect_entropy", 3),
        ("RACE-Middle accuracy", results.scores("race-middle"), "race_middle_acc", 2),
    ):
        paper = paper_values("gtd_race_middle", column, size)
        paper |= {listed: paper[printed] for listed, printed in forms.items() if printed in paper}
        partial = "accuracy" in title and results.is_partial("race-middle")
        page.compare(title, values, paper, digits=digits, partial=partial, claims=methods[1:])
        drawn[title] = values
    page.compared()
    if page.claims:
        _tally(page, methods[1:])
    page.text(
        "The equation multiplies messages over nodes (High, Low); the listing multiplies over the labels of "
        "one row, which cancels ('as listed'). The printed ElemMul has no prior. Each form is set beside the "
        "paper's row of that name; which one the authors ran is not known."
    )
    page.dots("forms", drawn, "The printed forms, by seed.")


def strengths(results: Results, page: Page) -> None:
    page.text(BUDGET)
    values = results.values(results.perplexity)
    methods = results.experiment.bert
    gains = page.compare("held-out perplexity", values, higher_is_better=False, digits=3)
    page.compared()
    for key in methods[1:]:
        page.answer(f"{METHODS[key].title}: a lower perplexity than Original", gains.get(key), digits=3)
    page.dots("perplexity", {"held-out perplexity": values}, "Matched tokens, by seed.")


def learned(results: Results, page: Page) -> None:
    page.text(
        f"{BUDGET} Strengths start at 0, one per head, and may take either sign; negative ones attract."
    )
    drawn = {}
    for family, corpus, words in (
        ("bert", None, "held-out perplexity"),
        *(("bert", corpus, f"held-out perplexity, {corpus} alone") for corpus in results.experiment.corpora),
        ("gpt2", None, "held-out perplexity, strict causal"),
    ):
        values = results.values(results.perplexity, family, corpus)
        gains = page.compare(
            words, values, higher_is_better=False, digits=3, methods=getattr(results.experiment, family)
        )
        page.answer(f"Learned strengths lower {words}", gains.get("learned"), digits=3)
        if any(values.values()):
            drawn[words] = values
    done = results.tasks_done(ALL)
    average = results.values(lambda model: mean_score(results, model, done))
    partial = [task for task in done if results.is_partial(task)]
    gains = page.compare(f"mean of {len(done) or 'the'} tasks", average, partial=bool(partial))
    mark = " *" if partial else ""
    page.answer(f"Learned strengths raise the mean score{mark} after fine-tuning", gains.get("learned"))
    for task in ALL:
        scores = results.scores(task)
        gains = page.compare(task, scores, partial=task in partial)
        mark = " *" if task in partial else ""
        page.answer(f"Learned strengths raise {task}{mark} after fine-tuning", gains.get("learned"))
    page.compared()
    page.dots("perplexity", drawn, "Original against learned strengths, by seed.")
    for family in ("bert", "gpt2"):
        grids = {
            f"seed {model.seed}": np.array(results.result(model)["strengths"])
            for model in results.models(family)
            if model.method.key == "learned" and results.result(model).get("strengths")
        }
        if grids:
            signs = np.concatenate([grid.flatten() for grid in grids.values()])
            page.text(
                f"{family}: {int((signs > 0).sum())} of {signs.size} heads ended on repulsion (above 0), "
                f"{int((signs < 0).sum())} on attraction."
            )
            page.figure(
                f"strengths-{family}",
                head_grid(grids, "strength, above 0 repels"),
                f"Learned strengths, {family}.",
            )


def steps(results: Results, page: Page) -> None:
    page.text(BUDGET)
    values = results.values(results.perplexity)
    page.compare("held-out perplexity", values, higher_is_better=False, digits=3)
    more = page.compare(
        "held-out perplexity, against one step", values, base="high", higher_is_better=False, digits=3,
        methods=("high", "two-steps", "three-steps"),
    )  # fmt: skip
    page.compared()
    for key in ("two-steps", "three-steps"):
        page.answer(f"{METHODS[key].title}: a lower perplexity than one step", more.get(key), digits=3)
    page.dots("perplexity", {"held-out perplexity": values}, "Steps, by seed.")


def _tally(page: Page, methods: Sequence[str]) -> None:
    """How many of the paper's differences each method reproduces."""
    columns: dict[Status, str] = {
        "reproduces": "as the paper reports",
        "does not reproduce": "otherwise",
        UNDECIDED: UNDECIDED,
        "not run": "not run",
    }
    rows = []
    for title in (METHODS[key].title for key in methods):
        counts = Counter(claim.status for claim in page.claims if claim.words.startswith(f"{title} against "))
        rows.append([title, *(str(counts[status]) for status in columns)])
    page.table(("form", *columns.values()), rows)


def arena(results: Results, page: Page) -> None:
    settings = [setting for setting in settings_of(results.records()) if setting.gains()]
    if not settings:
        return
    page.figure(
        "forest", forest(settings), "Paired differences from plain attention with their 95 % intervals."
    )
    for setting in settings:
        page.text(f"## {setting.title}")
        page.table(HEADERS, list(rows(setting)))
        page.text(power(setting))
