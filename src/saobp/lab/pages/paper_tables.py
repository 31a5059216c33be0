"""The pages of the paper's tables."""

from __future__ import annotations

import numpy as np

from saobp.data.tasks import GLUE
from saobp.lab.experiment_plan import PretrainRun
from saobp.lab.figures import progress
from saobp.lab.methods import METHODS
from saobp.lab.pages.common import (
    BUDGET,
    PLATEAU_END,
    by_seed,
    claim_correlation,
    correlation_of,
    deepest_mean_of,
    format_correlation,
    held_out_curves,
    mean_of,
    mean_score,
    plateau_correlation,
    score_points,
)
from saobp.lab.paper import paper_table, paper_values
from saobp.lab.result_page import Page
from saobp.lab.results import Results, Values
from saobp.lab.scales import SEEDS
from saobp.lab.statistics import Spread, claim_status, paired_gain, spread
from saobp.metrics.health.head_health import CROSS_LAYER

REGULARIZED = {"high": "high", "entropy": "entropy_reg", "eigen": "eigen_reg"}
"""Rows of the paper's table of regularizers, by method."""


def pretraining(results: Results, page: Page) -> None:
    page.text(BUDGET)
    values = results.values(results.perplexity)
    page.compare("held-out perplexity", values, higher_is_better=False, digits=3)
    waiting = results.values(lambda model: results.tokens_until(model, PLATEAU_END))
    words = f"million tokens until the loss is below {PLATEAU_END:g}"
    if any(waiting.values()):
        page.text(
            "Every run first learns what needs no word order, and stays there for a while, at a perplexity "
            "of about 500, before attention begins to use word order. How long a run waits "
            f"there and where it ends after all tokens: {plateau_correlation(waiting, values)}."
        )
        never = [
            f"{METHODS[key].title}, seed {seed}"
            for key, by_seed in values.items()
            for seed in by_seed
            if seed not in waiting.get(key, {})
        ]
        if never:
            page.text(
                f"Never below {PLATEAU_END:g}, and so without a number for the wait: {'; '.join(never)}."
            )
    page.compare(words, waiting, higher_is_better=False, digits=1)
    page.compared()
    drawn = {"held-out perplexity": values, words: waiting}
    page.dots("perplexity", drawn, "Held-out masked perplexity, and the wait before it falls.")
    if any(values.values()):
        page.figure(
            "curves",
            progress(held_out_curves(results)),
            "Held-out perplexity in training, and its difference from the runs of Original.",
        )


def gtd(results: Results, page: Page) -> None:
    page.text(BUDGET)
    scale = results.plan.scale
    length = min(scale.length, scale.recipe_of("bert", "original", SEEDS[0]).length)
    page.text(
        "GTD and the others are means over all layers and heads of the pretrained models on up to "
        f"{scale.texts} validation texts of RACE-Middle, cut to {length} "
        "tokens, the length of pretraining. Accuracy is of fine-tuning, last epoch."
    )
    size = results.plan.scale.size
    if paper_values("gtd_race_middle", "clustering", size):
        page.text(
            "The paper's CC is several times ours, so it is probably computed otherwise, and only the side "
            "of its differences compares."
        )
    drawn, crosses = {}, {}
    for statistic, title, higher, digits in (
        ("gtd", "GTD", True, 3),
        ("indirect_entropy", "indirect entropy", True, 3),
        ("clustering", "CC", False, 3),
        ("betweenness", "BC", False, 2),
    ):
        values = mean_of(results, "race-middle", statistic)
        paper = paper_values("gtd_race_middle", statistic, size)
        page.compare(
            title, values, paper, higher_is_better=higher, digits=digits, claims=("high", "low", "elemmul"),
            same_size=statistic != "clustering",
        )  # fmt: skip
        drawn[title], crosses[title] = values, paper
    scores = results.scores("race-middle")
    paper = paper_values("gtd_race_middle", "race_middle_acc", size)
    partial = results.is_partial("race-middle")
    page.compare("accuracy", scores, paper, partial=partial, claims=("high", "low", "elemmul"))
    drawn["accuracy"], crosses["accuracy"] = scores, {} if partial else paper
    page.compared()
    page.dots("measures", drawn, "Table 1 of the paper, ours by seed.", crosses)


def tasks(results: Results, page: Page) -> None:
    page.text(f"{BUDGET} Scores are of the last epoch.")
    size = results.plan.scale.size
    whole = [task for task in results.tasks_of_all(GLUE) if not results.is_partial(task)]
    drawn, crosses = {}, {}
    average = results.values(lambda model: mean_score(results, model, whole))
    theirs = paper_average(size, whole)
    title = f"GLUE, mean of {', '.join(whole)}" if whole else "GLUE"
    page.compare(title, average, theirs, claims=("high", "low", "elemmul"))
    drawn["GLUE, complete tasks"], crosses["GLUE, complete tasks"] = average, theirs
    for task, column in (("hellaswag", "hellaswag"), ("race-middle", "race_middle"), ("squad", "squad")):
        values = results.scores(task)
        paper, partial = paper_values("tasks", column, size), results.is_partial(task)
        page.compare(task, values, paper, partial=partial, claims=("high", "low", "elemmul"))
        drawn[task], crosses[task] = values, {} if partial else paper
    page.compared()
    page.text(
        "The paper's own GLUE averages for Small in this table (54.03 for Original) differ from those of its "
        "appendix (56.63). Above, its average is taken over the same tasks as ours, from the appendix. Our "
        "SQuAD score is F1; which measure the paper's 'accuracy' on SQuAD is, it does not say."
    )
    page.dots("scores", drawn, "Scores after fine-tuning in percent, by seed.", crosses)


def glue(results: Results, page: Page) -> None:
    page.text(
        f"{BUDGET} Scores are of the last epoch: Matthews for CoLA, Spearman for STS-B, else accuracy. The "
        "paper names no measures."
    )
    size = results.plan.scale.size
    drawn, crosses = {}, {}
    for task in GLUE:
        values = results.scores(task)
        paper, partial = paper_values("glue", task, size), results.is_partial(task)
        page.compare(task, values, paper, partial=partial, claims=("high",))
        drawn[task], crosses[task] = values, {} if partial else paper
    page.compared()
    page.text(
        "The paper's column of averages is on the page of [tasks]"
        f"(../tasks/{results.plan.scale.name}.md), over tasks that are complete here."
    )
    page.dots("scores", drawn, "GLUE scores after fine-tuning in percent, by seed.", crosses)


def paper_average(size: str, names: list[str]) -> dict[str, float]:
    """The paper's mean over the same tasks, by factor."""
    rows = [row for row in paper_table("glue") if row["size"] == size] if names else []
    return {row["factor"]: float(np.mean([float(row[name]) for name in names])) for row in rows}


def baselines(results: Results, page: Page) -> None:
    page.text(f"{BUDGET} Here the base is High; the paper has BERT-Small only.")
    rows = {row["method"]: row for row in paper_table("baselines_small")}
    small = results.plan.scale.size == "small"
    drawn = {}

    def compare(title: str, values: Values, column: str, higher: bool, partial: bool = False) -> None:
        """For other sizes than the paper's only the sign of differences is claimed."""
        paper = {key: float(rows[name][column]) for key, name in REGULARIZED.items()} if column else {}
        gains = page.compare(
            title, values, paper if small else {}, base="high", higher_is_better=higher, partial=partial,
            claims=("entropy", "eigen"),
        )  # fmt: skip
        for key in ("entropy", "eigen") if column and not small else ():
            words = f"{METHODS[key].title} is worse than High, {title}{' *' if partial else ''}"
            status = claim_status(paper[key] - paper["high"], gains[key], same_size=False)
            page.claim(f"{words}: the paper has it so for Small", status, gains[key])
        drawn[title] = values

    for kind, title in (
        ("pseudo", "WikiText-2 pseudo-perplexity"),
        ("masked", "WikiText-2 masked perplexity"),
    ):
        values = results.measured_values("wikitext", lambda taken, kind=kind: taken[kind]["perplexity"])  # type: ignore[misc]
        compare(title, values, "wikitext_ppl" if kind == "pseudo" else "", higher=False)
    for task, column in (("qnli", "qnli_acc"), ("squad", "squad_acc")):
        values = results.scores(task)
        compare(task, values, column, higher=True, partial=results.is_partial(task))
    held_out = results.values(results.perplexity)
    compare("held-out perplexity", held_out, "", higher=False)
    page.compared()
    page.dots("scores", drawn, "High against the regularizers, by seed.")


def decoders(results: Results, page: Page) -> None:
    page.text(BUDGET)
    page.text(
        "The paper's decoder receives messages from later tokens while it predicts them (see [what leaks]"
        f"(../decoder-leak/{results.plan.scale.name}.md)): its row is compared with our paper form. "
        "RACE-Middle asks every one of the test questions; prompts and windows have the "
        "length of pretraining."
    )
    size = results.plan.scale.size
    drawn, crosses = {}, {}
    for title, measure, key, column, higher in (
        ("WikiText-2 perplexity", "wikitext", "perplexity", "wikitext_ppl", False),
        ("RACE-Middle accuracy", "race-middle", "accuracy", "race_middle", True),
        ("BoolQ accuracy", "boolq", "accuracy", "boolq", True),
    ):
        values = results.measured_values(
            "zero-shot", lambda taken, measure=measure, key=key: taken[measure][key], "gpt2"  # type: ignore[misc]
        )  # fmt: skip
        paper = {
            {"high": "paper"}.get(name, name): value
            for name, value in paper_values("decoder", column, size).items()
        }
        page.compare(title, values, paper, higher_is_better=higher, claims=("paper",))
        drawn[title], crosses[title] = values, paper
    held_out = results.values(results.perplexity, "gpt2")
    page.compare("held-out perplexity", held_out, higher_is_better=False)
    drawn["held-out perplexity"] = held_out
    page.compared()
    page.dots("scores", drawn, "Decoders, by seed. Accuracies are in percent.", crosses)


def gtd_correlation(results: Results, page: Page) -> None:
    page.text(
        "Pearson correlation of GTD, within layers and across layers, with a score over checkpoints: "
        "evaluations during pretraining for perplexity, epochs of fine-tuning for the tasks. Perplexity is "
        "on held-out sequences of the pretraining texts, not on WikiText, because models are not kept at "
        "every evaluation. Points of one run follow each other in time, so p is too small: whatever rises "
        "while a model learns correlates. A run has as many points for a task as epochs, three; the paper "
        "took 10 to 20. Claims are decided over seeds, by the r within each run."
    )
    paper = {row["gtd"]: row for row in paper_table("gtd_correlation")}
    columns = {"perplexity": "wikitext_ppl", "sst2": "sst2_acc", "hellaswag": "hellaswag_acc",
               "race-middle": "race_middle_acc"}  # fmt: skip
    mini = results.plan.scale.size == "mini"
    rows = []
    for score, column in columns.items():
        by_run = {model: score_points(results, model, score) for model in results.models()}
        for key in results.experiment.bert:
            points = [
                point
                for model, run_points in by_run.items()
                if model.method.key == key
                for point in run_points
            ]
            page.is_filled = page.is_filled or bool(points)
            rows.append(
                [
                    score,
                    METHODS[key].title,
                    paper["single"][column] if mini else "",
                    format_correlation(points, "gtd") if points else "not run",
                    paper["cross"][column] if mini else "",
                    format_correlation(points, CROSS_LAYER) if points else "not run",
                ]
            )
        if mini:
            theirs = {kind: float(paper[kind][column]) for kind in ("single", "cross")}
            within, across = (
                {model: correlation_of(run_points, statistic) for model, run_points in by_run.items()}
                for statistic in ("gtd", CROSS_LAYER)
            )
            claim_correlation(page, f"GTD follows {score}", theirs["single"], within)
            _claim_single_layer_closer(page, score, theirs, within, across)
    page.table(("score", "method", "paper, single", "ours, single", "paper, across", "ours, across"), rows)


def _claim_single_layer_closer(
    page: Page,
    score: str,
    paper: dict[str, float],
    within: dict[PretrainRun, float | None],
    across: dict[PretrainRun, float | None],
) -> None:
    """Whether |r| within layers is above |r| across layers, paired by seed."""
    sizes = [
        by_seed({model: None if r is None else abs(r) for model, r in family.items()})
        for family in (within, across)
    ]
    gain, theirs = paired_gain(*sizes), abs(paper["single"]) - abs(paper["cross"])
    words = f"GTD within layers against GTD across layers, |r| with {score}: the paper has {theirs:+.2f}"
    page.claim(words, claim_status(theirs, gain), gain)


def sparsity(results: Results, page: Page) -> None:
    page.text(BUDGET)
    page.text(
        "Share of entries below 1/length, on SQuAD texts. The paper names neither its threshold nor its "
        "layers, so only the direction compares. 'last layer' is the deepest one, 'all layers' the mean over "
        "all."
    )
    size = results.plan.scale.size
    row = next((row for row in paper_table("sparsity") if row["size"] == size), None)
    paper = {} if row is None else {name: float(row[name]) for name in ("original", "high")}
    last, every = deepest_mean_of(results, "squad", "sparsity"), mean_of(results, "squad", "sparsity")
    page.compare(
        "last layer", last, paper, higher_is_better=False, digits=3, claims=("high",),
        same_size=False,
    )  # fmt: skip
    page.compare("all layers", every, higher_is_better=False, digits=3)
    page.compared()
    drawn = {"last layer": last, "all layers": every}
    page.dots("sparsity", drawn, "Share of entries below 1/length, by seed.", {"last layer": paper})


def cost(results: Results, page: Page) -> None:
    page.text(
        "The paper's times are of another machine and batch (its training numbers fit 32 x 128 tokens a "
        "step), so only ratios to Original compare. Training: tokens a second in the pretraining runs "
        "themselves, evaluations left out, of runs that had the machine to themselves. Inference: a forward "
        "pass of 32 x 128 tokens, in bfloat16 on a "
        "GPU, with the launches of the Python program ('forward') and without ('graph'); the paper's column "
        "is its latency, and its throughput is the inverse of that. FLOPs, of which the paper counts a few "
        "percent more for refined training, are not counted: fused kernels hide them from counters. With one "
        "run of a method, a few percent between methods mean nothing. "
        "[Performance](../../docs/performance.md) measures kernels and steps by themselves."
    )
    size = results.plan.scale.size
    theirs = {row["factor"]: row for row in paper_table("cost") if row["size"] == size}
    rates = results.values(results.speed)
    forward, graph = (
        results.measured_values("cost", lambda taken, name=name: taken.get(name))  # type: ignore[misc]
        for name in ("milliseconds", "graph_milliseconds")
    )
    rows = []
    for key in results.experiment.bert:
        rate, base = _mean(rates, key), _mean(rates, "original")
        paper, plain = theirs.get(key), theirs.get("original")
        rows.append(
            [
                METHODS[key].title,
                "not timed" if rate is None else f"{rate / 1e6:.2f}",
                _ratio(base, rate),
                _ratio(_cell(paper, "train_ms_per_step"), _cell(plain, "train_ms_per_step")),
                _number(_mean(forward, key)),
                _number(_mean(graph, key)),
                _ratio(_mean(forward, key), _mean(forward, "original")),
                _ratio(_mean(graph, key), _mean(graph, "original")),
                _ratio(_cell(paper, "infer_ms_per_batch"), _cell(plain, "infer_ms_per_batch")),
            ]
        )
    headers = ("method", "training, M tokens/s", "time / Original", "paper's, training", "forward, ms")
    page.table((*headers, "graph, ms", "forward / Original", "graph / Original", "paper's, inference"), rows)
    millions = {key: {seed: rate / 1e6 for seed, rate in by_seed.items()} for key, by_seed in rates.items()}
    drawn = {"training, M tokens/s": millions, "forward, ms": forward}
    page.dots("cost", drawn, "Speed on the machine of the runs.")


def _mean(values: Values, key: str) -> float | None:
    mean: Spread | None = spread(values.get(key, {}).values())
    return None if mean is None else mean.mean


def _ratio(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.2f}" if part and whole else ""


def _cell(row: dict[str, str] | None, column: str) -> float | None:
    return None if row is None else float(row[column])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
