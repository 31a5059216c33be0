"""Summary of a run in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saobp.metrics.diagnosis.head_kinds import KIND_FROM, Kind
from saobp.metrics.health.verdicts import COLLAPSED_BELOW, HEALTHY_FROM, HEALTHY_TO, LOCALISED_BELOW, Verdict
from saobp.report.curves import Curve
from saobp.report.run_view import Run
from saobp.report.snapshots import Snapshot
from saobp.runs.tolerant_reader import number

MEANINGS: dict[Verdict, str] = {
    "localised": (
        f"each token stays with itself or a few fixed others, by a GTD below {LOCALISED_BELOW} "
        f"or an entropy below {100 * COLLAPSED_BELOW:g} % of the largest"
    ),
    "sink": "at least half of all attention goes to one token, beyond what uniform rows would send there",
    "diffuse": "attention is spread so evenly that it hardly tells tokens apart",
    "healthy": "direct and indirect paths are in balance",
    "borderline": "between healthy and one of the others, or many paths that meet in a few tokens",
    "undefined": "a statistic is missing or not a number",
}
PLACES_NAMED, LAYERS_NAMED = 12, 4
NONE = "\N{EN DASH}"
"""Placeholder for a missing number in tables."""


def summary(run: Run) -> list[str]:
    """A few sentences on how the run ended and how its heads are."""
    return [*_training_words(run), *(_head_words(run.health[-1]) if run.health else [])]


def _training_words(run: Run) -> list[str]:
    words = []
    for name, title in (("loss", "training loss"), ("eval_loss", "validation loss")):
        curves = [series for series in run.curves.get(name, []) if len(series.values) > 1]
        if len(curves) == 1:
            words.append(f"The {title} {_trend(curves[0])}.")
        else:
            words += [
                f"The {title} of {curve.of} {_trend(curve)}." for curve in curves if curve.values[-1] is None
            ]
    numbers = dict(run.result)
    perplexity = number(numbers.get("eval_perplexity", numbers.get("perplexity")))
    if perplexity is not None:
        words.append(f"It ended at a validation perplexity of {perplexity:.4g}.")
    if "best.mean" in numbers and "task" in numbers:
        mean, spread = number(numbers["best.mean"]), number(numbers.get("best.std"))
        seeds = len({name.split(".")[1] for name in numbers if name.startswith("seeds.")})
        if mean is not None and spread is not None:
            several = f" over {seeds} seeds: {mean:.2f} ± {spread:.2f}."
            score = several if seeds > 1 else f", one seed: {mean:.2f}."
            words.append(f"Best {numbers.get('metric', 'score')} on {numbers['task']}{score}")
    if numbers.get("partial") is True:
        notes = numbers.get("notes")
        caveats = [str(note) for note in notes] if isinstance(notes, list) else []
        words.append("Partial data" + (f": {'; '.join(caveats)}." if caveats else "."))
    return words


def _trend(series: Curve) -> str:
    """How a curve with at least one number developed; one that ends without numbers has failed."""
    there = [index for index, value in enumerate(series.values) if value is not None]
    first, last = (series.values[index] for index in (there[0], there[-1]))
    words = f"went from {first:.2f} to {last:.2f}" if len(there) > 1 else f"was {first:.2f}"
    if there[-1] == len(series.values) - 1:
        return words
    step = series.axes["step"][there[-1] + 1]
    return f"{words} and is not a number from step {step:,.0f} on"


def _head_words(last: Snapshot) -> list[str]:
    when = "" if last.step is None else f"At step {last.step:,}, "
    healthy = last.count("healthy")
    opening = f"{when}{healthy} of {last.heads} heads {'is' if healthy == 1 else 'are'} healthy."
    words = [opening[0].upper() + opening[1:]]
    for kind in ("localised", "sink", "diffuse", "borderline", "undefined"):
        indices = [
            (layer, head)
            for layer, row in enumerate(last.verdicts)
            for head, word in enumerate(row)
            if word == kind
        ]
        if indices:
            words.append(f"{len(indices)} {kind} ({_named(indices)}): {MEANINGS[kind]}.")
    return words


def _named(indices: Sequence[tuple[int, int]]) -> str:
    """``layer 0 heads 1, 2; layer 3 head 0``; for many heads, the layers with most of them."""
    layers: dict[int, list[int]] = {}
    for layer, head in indices:
        layers.setdefault(layer, []).append(head)
    if len(indices) > PLACES_NAMED:
        fullest = sorted(sorted(layers), key=lambda layer: -len(layers[layer]))[:LAYERS_NAMED]
        return "most in " + ", ".join(f"layer {layer} ({len(layers[layer])})" for layer in fullest)
    return "; ".join(
        f"layer {layer} head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
        for layer, heads in layers.items()
    )


def shown(value: float | None, digits: int = 3) -> str:
    """A number in a table: fixed digits near one, few significant digits for others, a dash for none."""
    if value is None:
        return NONE
    size = abs(value)
    if value and size < 10**-digits:
        return f"{value:.1e}"
    few = float(f"{value:.4g}")
    text = f"{few:.3g}" if size >= 1e9 else f"{few:,.0f}" if size >= 1000 else f"{value:.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def fact_text(value: Any) -> str:
    """A fact as the text of a table cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"
    text = str(value) if not isinstance(value, list) else _list_text(value)
    return text if len(text) <= 400 else f"{text[:399]}…"


def _list_text(entries: list[Any]) -> str:
    """Comma-separated entries; numbers by layer and head as count and range."""
    numbers = [number(value) for row in entries if isinstance(row, list) for value in row]
    values = [value for value in numbers if value is not None]
    is_grid = all(isinstance(row, list) for row in entries) and 0 < len(values) == len(numbers)
    if not is_grid:
        return ", ".join("[…]" if isinstance(entry, list) else fact_text(entry) for entry in entries)
    low, high = min(values), max(values)
    spread = f"all {low:.4g}" if low == high else f"from {low:.4g} to {high:.4g}"
    return f"{len(values)} values, {spread}"


KIND_MEANINGS: dict[Kind, str] = {
    "first token": "It looks at the first token of the text.",
    "previous token": "It looks at the token before.",
    "next token": "It looks at the token after.",
    "self": "Each token looks at itself.",
    "delimiter": "It looks at punctuation, line ends and special tokens other than the first.",
    "duplicate token": "It looks at the earlier copy of the same token, found on random tokens that repeat.",
    "induction": "It looks at the token after the earlier copy of the same token, found on random tokens "
    "that repeat.",
}
TERMS: dict[str, str] = {
    "GTD": "Global token dependency: of all that a head passes on, the share that takes indirect paths of "
    f"two to four hops. From {HEALTHY_FROM} to {HEALTHY_TO} counts as healthy.",
    "indirect entropy": "How evenly the indirect paths of a head spread over tokens, in nats: 0 if all end "
    "at one token.",
    "attention entropy": "How evenly a row spreads its weight over keys, in nats, mean over rows: 0 if each "
    "row looks at one key.",
    "sink mass": "The largest share of all attention that goes to a single token.",
    "GTD across layers": "GTD of paths through consecutive layers, heads averaged, instead of one layer "
    "again and again.",
    "head": "One of several attention maps of a layer, with weights of its own.",
    "row": "The attention of one token: its weights over all keys, which sum to one.",
    "key": "A token that others look at.",
    "softmax": "The attention of the model before any refinement.",
    "refined": "The same attention after belief propagation: each row times the messages of the others.",
    "λ": "Strength of the refinement. Above 0 (high) rows that chose the same key repel each other, below 0 "
    "(low) they attract; at 0 nothing changes.",
    "strength": "λ, how strongly rows influence each other. Learned strengths are trained, one per head; "
    "fixed ones were given.",
    "factor": "Which messages rows send about each key: high and low are the paper's equation, the listing "
    "its printed program; a key bias counts a row's own message too, elemmul compares whole rows.",
    "steps": "How often rows exchange messages and choose again.",
    "damping": "Share of the old choice that is kept at each of several steps.",
    "two-hop paths": "Ways from one token to another by a third in between: the product of both weights.",
    "arcs": "An arc joins a token to one that it looks at; the wider, the more.",
    "perplexity": "Among how many tokens the model is unsure, as if it guessed: lower is better.",
    "seed": "The random start of a run. Runs that differ in the seed alone show how much is chance.",
    "kind": f"What a head looks at, if that takes at least {KIND_FROM} of its attention beyond what uniform "
    "rows would give. It is no verdict.",
    **{str(name): meaning for name, meaning in KIND_MEANINGS.items()},
    **{str(name): f"{meaning[0].upper()}{meaning[1:]}." for name, meaning in MEANINGS.items()},
}
"""By the words that the page shows."""
