"""The arena's page: methods compared on the recipe modern, with tables of paired differences.

Runs come from ``saobp pretrain``, on any machine. Their records are saved with the page, so that runs may be
added later.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from saobp.lab.arena_records import (
    BLIMP,
    CONFIRMING_PAIRS,
    GLUE,
    GLUE_TASKS,
    ORIGINAL,
    FreshSeeds,
    Setting,
    combinations,
    has_loss,
    in_fields,
    joined,
    recorded,
    saved_records,
    settings_of,
    title_of,
    two_by_two,
)
from saobp.lab.cells import (
    format_gain,
    format_percent,
    format_spread,
    format_verdict,
    made_on,
    markdown_table,
)
from saobp.lab.equal_time import HEADERS as EQUAL_TIME
from saobp.lab.equal_time import equal_time_rows
from saobp.lab.figures import save_figure
from saobp.lab.forest import forest
from saobp.lab.statistics import LEAST_PAIRS, MOST_PAIRS, as_percent, paired_gain, pairs_needed, spread
from saobp.lab.step_times import StepTimes
from saobp.lab.tuning import tuning_tables
from saobp.storage.atomic import write_atomically
from saobp.storage.json_files import read_json, write_json

READING = (
    "**How to read.** Every run is paired with one of plain attention with the same recipe, texts and seed. "
    "A difference is that of held-out loss, as per cent of perplexity, so below zero is better; *lower in* "
    "counts pairs below zero. The 95 % t interval is over pairs: on the better side of zero it is a *gain*, "
    f"on the other a *loss*; fewer than {LEAST_PAIRS} pairs ({CONFIRMING_PAIRS} of fresh seeds) are "
    "*undecided*.\n"
    "*High, learned strengths* is `high:learned`, *Key bias, learned strengths* `high-key-bias:learned`, and "
    "A + B a model with both. *Fresh seeds*: nothing had been tuned or chosen on them before"
)
GLOSSARY = "docs/glossary.md"
LONGER = (
    "Does it gain over plain attention that is trained for longer? Times are equal only in lines whose "
    "method takes as much longer for a step."
)
EFFECT = 0.5
"""Effect of the power analysis, in per cent of perplexity."""
TUNING = (
    "Plain attention alone, lowest mean first. A recipe is named by what it changes in the first that was "
    "run."
)
AGAIN = "Where a seed was run again, that run counts ([again.json](again.json))."
GLUE_RULE = (
    "Each model fine-tuned once on eight tasks of GLUE, with the seed of its pretraining "
    "(recipe and rule: `benchmarks/arena_tasks.py`). The mean of their main metrics decides, single tasks do "
    "not. Accuracy, but Matthews correlation of CoLA and Spearman's of STS-B; training sets are partial, so "
    "scores do not compare with published ones."
)
COMPARED = 13
"""Methods compared with each other: the lowest, on fresh seeds if there are any. Round seven has so many."""


def write_arena(folders: Sequence[Path], out: Path, fresh: Sequence[FreshSeeds] = ()) -> list[Path]:
    """``arena/README.md`` and ``arena/runs.json`` in a results folder, and ``forest.svg`` and ``.png``.

    Times of steps come from ``arena/time*.json``, one for each recipe that was timed; ``arena/notes.md`` is
    put after the tables.
    fresh: groups of seeds that confirm a choice made on others
    """
    records_file = out / "arena" / "runs.json"
    before = saved_records(records_file) if records_file.exists() else {}
    records = joined(before, recorded(folders), records_file)
    settings = settings_of(records.values(), fresh)
    paired = [setting for setting in settings if setting.gains()]
    if not paired:
        raise ValueError(
            f"no run in {', '.join(map(str, folders))} has a finished run of plain attention "
            "(--refinement none) with the same recipe and seed to be compared with"
        )
    records_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(records_file, [records[name] for name in sorted(records)])
    page = out / "arena" / "README.md"
    times = [StepTimes.read(path) for path in sorted(page.parent.glob("time*.json"))]
    notes = page.with_name("notes.md")
    parts = [*_page(settings, times, _glossary_link(page))]
    repeated = page.with_name("again.json")
    tables = tuning_tables([*records.values(), *(read_json(repeated) if repeated.exists() else ())])
    if tables:
        words = f"{TUNING} {AGAIN}" if repeated.exists() else TUNING
        parts += ["## Which recipe is best for plain attention?", words, *tables]
    lost = [f"`{name}`" for name in sorted(records) if not has_loss(records[name])]
    if lost:
        parts.append(f"Left out, because their held-out loss is not finite: {', '.join(lost)}.")
    parts.append(made_on(list(records.values())))
    if notes.exists():
        parts.append(notes.read_text().strip())
    write_atomically(page, "\n\n".join(parts) + "\n")
    return [page, records_file, *save_figure(forest(paired), out / "forest")]


def _glossary_link(page: Path) -> str:
    """A link from the page, if it lies in this project; its text alone in a folder elsewhere."""
    for folder in page.resolve().parents:
        if (folder / GLOSSARY).exists():
            place = os.path.relpath(folder / GLOSSARY, page.resolve().parent)
            return f" ([glossary]({place}#words-of-the-results))"
    return ""


def _page(settings: Sequence[Setting], times: Sequence[StepTimes], glossary: str) -> Iterable[str]:
    yield "# Which way of attention is better?"
    yield (
        "Written by `saobp arena` from the runs in [runs.json](runs.json), which holds command, commit, "
        "seed, checksums and result of each."
    )
    yield f"{READING}{glossary}."
    yield "![Differences from plain attention with 95 % intervals](../forest.svg)"
    paired = [setting for setting in settings if setting.gains()]
    confirmed = any(setting.fresh for setting in paired)
    for setting in paired:
        yield f"## {setting.title}"
        if setting.fresh and setting.least_pairs > CONFIRMING_PAIRS:
            yield f"Verdicts are given once there are {setting.least_pairs} pairs."
        measured = next((step_times for step_times in times if step_times.fits(setting.recipe)), None)
        yield markdown_table(
            HEADERS if measured is None else (*HEADERS, "time of a step"), list(rows(setting, measured))
        )
        if measured is not None:
            yield measured.describe()
        if len(setting.gains()) > 1 and bool(setting.fresh) == confirmed:
            yield _against_each_other(setting)
        combined = list(_together(setting))
        if combined:
            yield "How much does a method gain with another, and how much alone? On the seeds that all have."
            yield markdown_table(TOGETHER, combined)
        longer = list(equal_time_rows(setting, settings))
        if longer:
            yield LONGER
            yield markdown_table(EQUAL_TIME, longer)
        if BLIMP in setting.scores:
            yield _scores(setting, BLIMP, "BLiMP, %")
        if GLUE in setting.scores:
            yield GLUE_RULE
            yield _scores(setting, GLUE, "GLUE, mean of eight")
            yield _single_tasks(setting)
        yield power(setting)
        yield _recipe(setting, paired[0])


def _recipe(setting: Setting, first: Setting) -> str:
    """All fields of the page's first recipe; of a later one what it changes in that."""
    if setting is first:
        return f"Recipe: `{json.dumps(setting.recipe)}`."
    changes = {name: value for name, value in setting.recipe.items() if first.recipe.get(name) != value}
    named = ", ".join(f"`{change}`" for change in in_fields(changes))
    return f"Recipe: the first one of this page{', but ' + named if named else ''}."


TOGETHER = (
    "A",
    "B",
    "A, difference from plain attention",
    "A + B, difference from B",
    "the second minus the first [95 % interval]",
    "A + B, difference from plain attention",
)
HEADERS = (
    "method",
    "perplexity (seeds)",
    "difference from plain attention [95 % interval]",
    "median of differences",
    "lower in",
    "verdict",
    "parameters",
)
"""Times come from a measurement of their own: runs may have shared their GPU with others."""


def rows(setting: Setting, times: StepTimes | None = None) -> Iterable[list[str]]:
    gains = setting.gains()
    plain = setting.results.get(ORIGINAL, [{}])[0].get("parameters", 0)
    for method in [ORIGINAL, *gains]:
        losses, results = setting.losses[method], setting.results[method]
        perplexities = spread(math.exp(loss) for loss in losses.values())
        assert perplexities is not None
        mean_text = f"{perplexities.mean:.2f} ({perplexities.seeds})"
        more = results[0].get("parameters", plain) - plain
        time = [] if times is None else [times.ratio(method)]
        if method == ORIGINAL:
            yield [title_of(method), mean_text, "", "", "", "", f"{plain:,}", *time]
        else:
            gain = gains[method]
            verdict = format_verdict(gain, perplexities)
            yield [
                title_of(method),
                mean_text,
                format_percent(gain),
                f"{setting.median(method):+.1f} %",
                setting.lower_in(method),
                verdict,
                f"+{more:,}",
                *time,
            ]


def _against_each_other(setting: Setting) -> str:
    """Paired differences of the row's method from the column's, in per cent of perplexity."""
    methods = list(setting.gains())[:COMPARED]
    lines = []
    for method in methods[:-1]:
        gains = [setting.gain_over(method, other) for other in methods[1:]]
        after = methods.index(method)
        cells = ["" if n < after or gain is None else format_percent(gain) for n, gain in enumerate(gains)]
        lines.append([title_of(method), *cells])
    return markdown_table(("difference from the column's method", *map(title_of, methods[1:])), lines)


def _together(setting: Setting) -> Iterable[list[str]]:
    """Each method of a combination alone and with the other, on the seeds that all have."""
    for first, second, both in combinations(setting.losses):
        for one, other in ((first, second), (second, first)):
            gains = two_by_two(setting.losses, (one, other, both))
            cells = ["" if gain is None else format_percent(as_percent(gain)) for gain in gains]
            yield [title_of(one), title_of(other), *cells]


def _scores(setting: Setting, measure: str, title: str) -> str:
    """Scores of a measure and their paired differences from plain attention, in points of a hundred."""
    scores = setting.scores[measure]
    lines = []
    for method in [method for method in (ORIGINAL, *setting.gains()) if method in scores]:
        summary = spread(scores[method].values())
        gain = (
            None
            if method == ORIGINAL
            else paired_gain(scores[method], scores.get(ORIGINAL, {}), least_pairs=setting.least_pairs)
        )
        verdict = "" if gain is None else format_verdict(gain, summary)
        lines.append([title_of(method), format_spread(summary, 2), format_gain(gain, 2), verdict])
    return markdown_table(
        ("method", title, "difference from plain attention [95 % interval]", "verdict"), lines
    )


def _single_tasks(setting: Setting) -> str:
    """Means over seeds of every task of GLUE."""
    lines = [
        [title_of(method), *(f"{fmean(setting.scores[task][method].values()):.2f}" for task in GLUE_TASKS)]
        for method in (ORIGINAL, *setting.gains())
        if method in setting.scores[GLUE]
    ]
    return markdown_table(("mean over seeds", *GLUE_TASKS), lines)


def power(setting: Setting) -> str:
    """Power analysis: pairs needed for an effect, from the spread of the available pairs."""
    enough = [method for method in setting.gains() if len(setting.differences(method)) >= LEAST_PAIRS]
    deviations = [deviation for deviation in map(setting.deviation, enough) if deviation]
    if not deviations:
        return f"How many seeds an effect needs is not known before some method has {LEAST_PAIRS} pairs."
    typical = float(np.median(deviations))
    needed = pairs_needed(typical, EFFECT) or f"more than {MOST_PAIRS:,}"
    return (
        f"Paired differences have a standard deviation of {typical:.2f} % (median of the methods), so an "
        f"effect of {EFFECT} % needs {needed} pairs to be seen with a probability of 80 %."
    )
