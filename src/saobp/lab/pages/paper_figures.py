"""The pages of the paper's figures."""

from __future__ import annotations

from saobp.lab.experiment_plan import PretrainRun
from saobp.lab.figures import correlations, curves, map_grid, scatter_with_margins
from saobp.lab.measurements import unpacked
from saobp.lab.methods import METHODS
from saobp.lab.pages.common import (
    SPREAD,
    by_layer,
    claim_correlation,
    correlation_of,
    deepest_mean_of,
    format_correlation,
    last_layer_by_head,
    score_points,
)
from saobp.lab.result_page import Page
from saobp.lab.results import Results
from saobp.lab.scales import SEEDS
from saobp.lab.statistics import claim_status, paired_gain

AXES = "Rows are tokens that attend, columns tokens attended to."
LAST_HEADS = "entropy of last-layer heads (nats)"
NOTHING = "Not run: no model of this experiment has been measured yet."


def attention_maps(results: Results, page: Page) -> None:
    rows = {}
    for model in _shown(results):
        measured = results.measured(model, "maps")
        if measured is None:
            continue
        with results.reading(model):
            if model.recipe.refinement is None:
                rows[model.method.title] = unpacked(measured["after"])
            else:
                rows[f"{model.method.title}\nbefore"] = unpacked(measured["before"])
                rows[f"{model.method.title}\nafter"] = unpacked(measured["after"])
    if not rows:
        page.text(NOTHING)
        return
    page.text(
        "The last layer of the seed-42 models on one SQuAD text. 'before' is the softmax of the scores that "
        "the trained model computes, 'after' the rows that it uses; both are of the same model."
    )
    page.figure(
        "maps",
        map_grid(rows),
        f"Attention of the last layer by method and head. {AXES} Colours are logarithmic.",
    )


def _shown(results: Results) -> list[PretrainRun]:
    """Models of the first seed: figures show one per method."""
    return [model for model in results.models() if model.seed == SEEDS[0]]


def sparsity_maps(results: Results, page: Page) -> None:
    rows, shares = {}, []
    for model in _shown(results):
        measured = results.measured(model, "maps")
        if measured is not None:
            with results.reading(model):
                maps = unpacked(measured["after"])
            sparse = maps < 1 / maps.shape[-1]
            rows[model.method.title] = 1.0 - sparse
            shares.append([model.name, f"{sparse.mean():.3f}", *(f"{head.mean():.3f}" for head in sparse)])
    if not rows:
        page.text(NOTHING)
        return
    heads = max(len(row) for row in shares) - 2
    page.table(("run", "sparsity", *(f"head {head}" for head in range(heads))), shares)
    page.text(
        f"{AXES} Entries of at least 1/length are white, the others black. One text: an illustration, no "
        "evidence."
    )
    page.figure(
        "maps",
        map_grid(rows, binary=True),
        "Entries of at least 1/length in the last layer on one SQuAD text, by method and head.",
    )


def gtd_graph(results: Results, page: Page) -> None:
    series: dict[str, dict[str, list[tuple[float, float]]]] = {"clustering": {}, "betweenness": {}}
    rows, notes = [], {}
    for measure, theirs in (("clustering", "+0.70"), ("betweenness", "-0.43")):
        everything: list[dict[str, float]] = []
        by_run: dict[PretrainRun, float | None] = {}
        for model in results.models():
            measured = results.measured(model, "race-middle")
            if measured is None:
                continue
            with results.reading(model):
                points = [
                    {"gtd": float(point["gtd"]), "score": float(point[measure])}
                    for point in measured["points"]
                ]
            pairs = [(point["gtd"], point["score"]) for point in points]
            series[measure].setdefault(model.method.key, []).extend(pairs)
            everything += points
            rows.append([measure, model.name, theirs, format_correlation(points, "gtd")])
            by_run[model] = correlation_of(points, "gtd")
        if by_run:
            claim_correlation(page, f"GTD against {measure}", float(theirs), by_run)
        notes[measure] = f"r = {format_correlation(everything, 'gtd')}; the paper: {theirs}"
    if not rows:
        page.text(NOTHING)
        return
    page.table(("measure", "run", "paper, r", "ours, r"), rows)
    page.text(
        "A point is a pair of a RACE-Middle text and a head, up to 1,500 of them a model, drawn evenly. "
        "Graphs: an edge where the symmetrised weight exceeds 1e-4, on 40 tokens drawn from the text. "
        "Models are pretrained only; the paper's other figure of the kind, of a fine-tuned model, has no "
        "page."
    )
    page.figure(
        "points",
        scatter_with_margins(series, "GTD", notes),
        "GTD against clustering (CC) and betweenness (BC), a point per text and head, with histograms.",
    )


def gtd_performance(results: Results, page: Page) -> None:
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    notes, rows = {}, []
    for score in ("held-out perplexity", *results.experiment.tasks):
        everything = []
        for model in results.models():
            points = score_points(results, model, score)
            pairs = [(point["gtd"], point["score"]) for point in points]
            series.setdefault(score, {}).setdefault(model.method.key, []).extend(pairs)
            everything += points
            if points:
                rows.append([score, model.name, format_correlation(points, "gtd")])
        notes[score] = f"r = {format_correlation(everything, 'gtd')}" if everything else "not run"
    series = {score: methods for score, methods in series.items() if any(methods.values())}
    if not series:
        page.text(NOTHING)
        return
    page.text(
        "A dot is a checkpoint: an evaluation during pretraining for perplexity, an epoch of fine-tuning for "
        "a task. Dots of one run follow each other in time, so r says that both change while a model learns, "
        "no more."
    )
    page.figure(
        "checkpoints",
        correlations(series, "GTD", notes),
        "GTD against performance; scores of tasks are in percent.",
    )
    page.table(("score", "run", "r of GTD and score"), rows)


def profile(results: Results, page: Page, measure: str) -> None:
    """GTD, indirect and attention entropy by layer, and the last layer's entropy by head."""
    drawn = {
        "GTD": by_layer(results, measure, "gtd"),
        "indirect entropy (nats)": by_layer(results, measure, "indirect_entropy"),
        "positional entropy (nats)": by_layer(results, measure, "attention_entropy"),
        LAST_HEADS: last_layer_by_head(results, measure, "attention_entropy"),
    }
    if not drawn["GTD"]:
        page.text(NOTHING)
        return
    page.text(
        "Pretrained models, means over seeds with their range. Positional entropy is the row entropy of "
        f"attention, averaged over positions, texts and heads. {SPREAD}"
    )
    words = f"GTD and entropies on {measure} by layer, and by head of the last layer: a line per method."
    page.figure("layers", curves(drawn, {LAST_HEADS: "head"}), words)
    for statistic, title in (("gtd", "GTD"), ("attention_entropy", "entropy")):
        values = deepest_mean_of(results, measure, statistic)
        page.compare(f"{title}, last layer", values, digits=3)
        if statistic == "attention_entropy":
            gain = paired_gain(values.get("high", {}), values.get("original", {}))
            words = f"{METHODS['high'].title} keeps the last layer's entropy above Original's on {measure}"
            page.claim(words, claim_status(1.0, gain, same_size=False), gain, 3)
    page.compared()
