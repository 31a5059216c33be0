"""The page of one model fine-tuned with several seeds: how far its scores vary, beside the paper's gaps."""

from __future__ import annotations

from saobp.lab.methods import METHODS
from saobp.lab.paper import paper_table, paper_values
from saobp.lab.result_page import Page, in_words
from saobp.lab.results import EPOCH, Results, Values
from saobp.lab.statistics import spread


def many_seeds(results: Results, page: Page) -> None:
    """A row for each task and method, and the paired differences from Original."""
    page.text(
        "One model of each method, of one seed of pretraining, fine-tuned with several seeds: they decide "
        "on the new head, the order of rows and dropout. The range is from the lowest score to the "
        "highest: no more than chance. Scores are of the last epoch, in percent."
    )
    rows, drawn = [], {}
    for task in results.experiment.tasks:
        values, partial = scores(results, task), results.is_partial(task)
        if not any(values.values()):
            continue
        theirs = {} if partial else _paper(task, results.plan.scale.size)
        gap = _gap(_paper(task, results.plan.scale.size))
        for method, own in values.items():
            found = list(own.values())
            rows.append(
                [
                    f"{task}{' *' if partial else ''}",
                    METHODS[method].title,
                    in_words(spread(found), 2),
                    f"{min(found):.2f} to {max(found):.2f}",
                    f"{max(found) - min(found):.2f}",
                    gap,
                ]
            )
        page.compare(task, values, theirs, partial=partial)
        drawn[task] = values
    if not rows:
        page.text("Not run: no model of this experiment has been fine-tuned yet.")
        return
    page.table(
        ("task", "model", "mean ± deviation (seeds)", "from, to", "range", "paper, High - Original"), rows
    )
    page.compared()
    page.text(
        "Pairs share the seed of fine-tuning, and all of them are of the same two models: an interval here "
        "says whether these two models differ, not whether the methods do, which takes models of several "
        "seeds of pretraining."
    )
    page.dots("scores", drawn, "Scores of one model of each method, by seed of fine-tuning.")


def scores(results: Results, task: str) -> Values:
    """By method and seed of fine-tuning; of the first model of each method."""
    found: Values = {}
    for model in results.models():
        tuned = results.tuned(model, task)
        if tuned is not None and model.method.key not in found:
            found[model.method.key] = {int(seed): own[EPOCH] for seed, own in tuned["seeds"].items()}
    return found


def _paper(task: str, size: str) -> dict[str, float]:
    """The paper's scores by method, from the table that has the task."""
    column = task.replace("-", "_")
    table = next(name for name in ("glue", "tasks") if column in paper_table(name)[0])
    return paper_values(table, column, size)


def _gap(paper: dict[str, float]) -> str:
    """The paper's High less its Original, empty where one of them is not printed."""
    return f"{paper['high'] - paper['original']:+.2f}" if {"high", "original"} <= paper.keys() else ""
