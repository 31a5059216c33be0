"""The page of one model fine-tuned with many seeds: the paper's gaps beside what chance gives."""

from __future__ import annotations

from saobp.lab.cells import format_gain, format_spread
from saobp.lab.figures import Gap, gaps_beside_chance
from saobp.lab.methods import METHODS
from saobp.lab.paper import paper_table, paper_values
from saobp.lab.result_page import PARTIAL, Page
from saobp.lab.results import EPOCH, Results, Values
from saobp.lab.statistics import Chance, Gain, chance, paired_gain, spread

BASE, METHOD = "original", "high"


def many_seeds(results: Results, page: Page) -> None:
    """For each task, chance beside the paper's gap and paired differences; then scores of every seed."""
    tasks = {task: scores(results, task) for task in results.experiment.tasks}
    tasks = {task: values for task, values in tasks.items() if any(values.values())}
    if not tasks:
        page.text("Not run: no model of this experiment has been fine-tuned yet.")
        return
    page.text(
        "One model of each method, of one seed of pretraining, fine-tuned with several seeds: they decide "
        "on the new head, the order of examples and dropout. Scores are of the last epoch, in percent."
    )
    names = {task: f"{task}{' *' if results.is_partial(task) else ''}" for task in tasks}
    gaps = {names[task]: _gap(values, task, results.plan.scale.size) for task, values in tasks.items()}
    known_gaps = {name: gap for name, gap in gaps.items() if gap is not None}
    if known_gaps:
        page.figure(
            "gaps",
            gaps_beside_chance(known_gaps),
            "High minus Original after fine-tuning, in points. Grey: where the difference of two runs of one "
            "and the same model lies in 95 % of cases, by the seed of fine-tuning alone. Dots: our pairs of "
            "one seed; bar: their mean with its 95 % interval. Cross: the difference that the paper reports, "
            "from one run each. * marks tasks of which a part of the training examples is available.",
        )
        page.table(
            (
                "task",
                "deviation over seeds [95 %]",
                "two runs of one model apart by at most (95 %)",
                "paper, High - Original",
                "beside the noise of fine-tuning",
                "ours, High - Original [95 %]",
            ),
            [_row(name, gap) for name, gap in known_gaps.items()],
        )
        page.text(
            "The deviation is pooled over both models, each about its own mean. A gap of the paper is larger "
            "than the noise of fine-tuning if it exceeds what two fine-tuning seeds of one of these models "
            "differ by in 95 % of cases. The noise of pretraining, and of fine-tuning on whole training "
            "sets, is not in it."
        )
    _scores(results, page, tasks)


def _scores(results: Results, page: Page, tasks: dict[str, Values]) -> None:
    """Scores of every seed and their range."""
    rows = []
    for task, values in tasks.items():
        for method, by_seed in values.items():
            numbers = list(by_seed.values())
            rows.append(
                [
                    f"{task}{' *' if results.is_partial(task) else ''}",
                    METHODS[method].title,
                    format_spread(spread(numbers), 2),
                    ", ".join(f"{score:.2f}" for score in by_seed.values()),
                    f"{max(numbers) - min(numbers):.2f}",
                ]
            )
    seeds = ", ".join(map(str, next(by_seed for values in tasks.values() for by_seed in values.values())))
    page.table(("task", "model", "mean ± deviation (seeds)", f"scores of seeds {seeds}", "range"), rows)
    if any(results.is_partial(task) for task in tasks):
        page.text(PARTIAL)
    page.text(
        "Pairs share the seed of fine-tuning, and all of them are of the same two models: an interval here "
        "says whether these two models differ, not whether the methods do, which takes models of several "
        "seeds of pretraining."
    )
    caption = "Scores of one model of each method in percent, by seed of fine-tuning; scales differ."
    page.dots("scores", tasks, caption)


def scores(results: Results, task: str) -> Values:
    """By method and seed of fine-tuning; of the first model of each method."""
    by_method: Values = {}
    for model in results.models():
        result = results.finetuned(model, task)
        if result is not None and model.method.key not in by_method:
            with results.reading(model):
                by_seed = {
                    int(seed): float(seed_result[EPOCH]) for seed, seed_result in result["seeds"].items()
                }
            by_method[model.method.key] = by_seed
    return by_method


def _gap(values: Values, task: str, size: str) -> Gap | None:
    """High less Original by seed, its mean, the paper's difference and chance; None without pairs."""
    method_scores, base_scores, printed = values.get(METHOD, {}), values.get(BASE, {}), _paper(task, size)
    apart: Chance | None = chance(method_values.values() for method_values in values.values())
    gain: Gain | None = paired_gain(method_scores, base_scores)
    if apart is None or gain is None:
        return None
    pairs = [method_scores[seed] - base_scores[seed] for seed in method_scores if seed in base_scores]
    paper = printed[METHOD] - printed[BASE] if {METHOD, BASE} <= printed.keys() else None
    return Gap(apart, pairs, gain, paper)


def _row(name: str, gap: Gap) -> list[str]:
    chance, paper = gap.chance, gap.paper
    return [
        name,
        f"{chance.deviation:.2f} [{chance.low:.2f}, {chance.high:.2f}]",
        f"{chance.apart:.1f}",
        "" if paper is None else f"{paper:+.2f}",
        "" if paper is None else "within" if abs(paper) <= chance.apart else "larger",
        format_gain(gap.gain, 2),
    ]


def _paper(task: str, size: str) -> dict[str, float]:
    """The paper's scores by method, from the table that has the task."""
    column = task.replace("-", "_")
    table = next(name for name in ("glue", "tasks") if column in paper_table(name)[0])
    return paper_values(table, column, size)
