"""Comparison of methods on the recipe modern: paired differences, a page and a forest plot.

Runs come from ``saobp pretrain``, on any machine. Runs whose recipes differ in method and seed alone are
compared; their records are saved with the page, so that runs may be added later.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from saobp.lab import two_by_two
from saobp.lab.figures import panels, save_figure
from saobp.lab.methods import METHODS
from saobp.lab.result_page import gain_in_words, in_words, made_on, markdown_table, verdict_in_words
from saobp.lab.statistics import LEAST_PAIRS, Gain, paired_gain, pairs_needed, spread
from saobp.lab.step_times import StepTimes
from saobp.refinement import Refinement
from saobp.runs.folder import RunFolder
from saobp.runs.layout import RESULT, run_folders
from saobp.sizes import DECODERS, FAMILY_NAMES
from saobp.storage.atomic import write_atomically
from saobp.storage.json_files import read_json, read_object, write_json
from saobp.training.recipes import PretrainRecipe, named_recipe

ORIGINAL = "none"
BLIMP = "blimp"
"""Subfolder of a run with the output of ``saobp evaluate --tasks blimp``."""
EFFECT = 0.5
"""Effect of the power analysis, in per cent of perplexity."""
MARKERS = "osD^vP"
COMPARED = 8
"""Methods compared with each other: the lowest."""
FREE = (
    "refinement",
    "regularizer",
    "strength_rate",
    "strength_delay",
    "seed",
    "checkpoint_steps",
    "evaluation_steps",
    "log_steps",
    "health_texts",
)
"""Recipe fields that may differ between runs of one setting: method, seed, logging and checkpoints."""


@dataclass
class Setting:
    """Runs that differ in method and seed alone: loss, BLiMP's accuracy and results by method.

    fresh: the seeds, if they confirm a choice that was made on others
    """

    recipe: dict[str, Any]
    fresh: tuple[int, ...] = ()
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    blimp: dict[str, dict[int, float]] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def is_decoder(self) -> bool:
        return self.recipe["family"] in DECODERS

    @property
    def title(self) -> str:
        tokens = self.recipe["steps"] * self.recipe["batch_size"] * self.recipe["length"]
        family = FAMILY_NAMES.get(self.recipe["family"], self.recipe["family"])
        size, length = self.recipe["size"], self.recipe["length"]
        seeds = f", fresh seeds {', '.join(map(str, self.fresh))}" if self.fresh else ""
        return f"{family}-{size}, length {length}, {tokens / 1e6:,.0f} M tokens{seeds}"

    def gains(self) -> dict[str, Gain]:
        """Paired differences from Original in per cent of perplexity, ascending; lower is better."""
        base = self.losses.get(ORIGINAL, {})
        pairs = {
            method: paired_gain(own, base, higher_is_better=False)
            for method, own in self.losses.items()
            if method != ORIGINAL
        }
        found = {method: in_per_cent(gain) for method, gain in pairs.items() if gain is not None}
        return dict(sorted(found.items(), key=lambda one: one[1].difference))

    def differences(self, method: str) -> dict[int, float]:
        """Differences from Original of the same seed, in per cent of perplexity."""
        base, own = self.losses.get(ORIGINAL, {}), self.losses[method]
        return {seed: 100 * math.expm1(own[seed] - base[seed]) for seed in own if seed in base}

    def deviation(self, method: str) -> float | None:
        """Standard deviation of the paired differences, in per cent of perplexity."""
        found = spread(self.differences(method).values())
        return None if found is None else found.deviation

    def lower_in(self, method: str) -> str:
        """``5 of 5``: pairs in which the method's loss is the lower one."""
        pairs = self.differences(method).values()
        return f"{sum(difference < 0 for difference in pairs)} of {len(pairs)}"


def in_per_cent(gain: Gain) -> Gain:
    """Differences of losses in nats as per cent of perplexity."""
    low, high = (None if end is None else 100 * math.expm1(end) for end in (gain.low, gain.high))
    return Gain(100 * math.expm1(gain.difference), low, high, gain.pairs, gain.verdict)


def method_of(recipe: Mapping[str, Any]) -> str:
    """The method of a run, as the text form of its refinement and regularizer."""
    refinement = recipe.get("refinement")
    text = ORIGINAL if refinement is None else str(Refinement.of(refinement)) + _own_rate(recipe)
    penalty = recipe.get("regularizer")
    if penalty is None:
        return text
    return penalty if text == ORIGINAL else f"{text} with {penalty}"


def _own_rate(recipe: Mapping[str, Any]) -> str:
    """How the numbers per head are trained, where that is not the named recipe's way."""
    found = ""
    if "strength_rate" in recipe:
        usual = named_recipe(recipe["name"], recipe["family"], recipe["size"])
        times = recipe["strength_rate"] / usual.strength_rate
        found = "" if times == 1 else f", rate times {times:g}"
    delay = recipe.get("strength_delay", 0.0)
    return f"{found}, after {delay:.0%} of the steps" if delay else found


def title_of(method: str) -> str:
    """Title of a method in tables; combined parts are joined by plus signs."""
    titles = {one.refinement or one.regularizer or ORIGINAL: one.title for one in METHODS.values()}
    text, *trained = re.split("(?=, (?:rate|after) )", method, maxsplit=1)
    parts = titles.get(text) or " + ".join(
        _title_of_part(part, titles).removesuffix(" per head") for part in text.split("+")
    )
    return "".join([parts, *trained])


def _title_of_part(part: str, titles: Mapping[str, str]) -> str:
    plain, stride, rows = part.partition(",message_stride=")
    return titles.get(plain, plain) + (f" (1 row in {rows})" if stride else "")


def recorded(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The records of finished pretraining runs, by the names of their folders."""
    found = {}
    for folder in folders:
        for path in run_folders(folder):
            run = RunFolder(path)
            if run.is_finished and run.recipe.get("kind") == "pretrain":
                found[path.name] = {
                    "run": path.name,
                    "kind": "pretrain",
                    **run.record,
                    "recipe": run.recipe,
                    "result": run.result,
                }
                if (path / BLIMP / RESULT).exists():
                    found[path.name][BLIMP] = read_object(path / BLIMP / RESULT)[BLIMP]
    return found


def settings_of(records: Iterable[Mapping[str, Any]], fresh: Sequence[int] = ()) -> list[Setting]:
    """Runs grouped by setting, largest group first; a repeated seed counts once.

    Runs of ``fresh`` seeds are a group of their own: a choice made on the others is confirmed on them alone.
    """
    found: dict[str, Setting] = {}
    for record in records:
        recipe, result = record["recipe"], record["result"]
        shared = {name: value for name, value in {**recipe, **_absent(recipe)}.items() if name not in FREE}
        own = tuple(fresh) if recipe["seed"] in fresh else ()
        key = json.dumps([shared, record.get("data"), own], sort_keys=True)
        setting = found.setdefault(key, Setting(shared, own))
        method = method_of(recipe)
        if result.get("eval_loss") is not None:
            setting.losses.setdefault(method, {})[recipe["seed"]] = result["eval_loss"]
            setting.results.setdefault(method, []).append(result)
        if BLIMP in record:
            setting.blimp.setdefault(method, {})[recipe["seed"]] = record[BLIMP]["accuracy"]
    return sorted(
        found.values(), key=lambda one: (one.is_decoder, not one.fresh, -sum(map(len, one.losses.values())))
    )


def _absent(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of fields that are newer than the record of a run."""
    return {
        one.name: one.default
        for one in fields(PretrainRecipe)
        if one.name not in recipe and one.default is not MISSING
    }


def write_arena(folders: Sequence[Path], out: Path, fresh: Sequence[int] = ()) -> list[Path]:
    """``arena/README.md`` and ``arena/runs.json`` in a results folder, and ``forest.svg`` and ``.png``.

    Times of steps come from ``arena/time.json``, if there is one; ``arena/notes.md`` is put after the tables.
    """
    kept = out / "arena" / "runs.json"
    before = {record["run"]: record for record in read_json(kept)} if kept.exists() else {}
    records = {**before, **recorded(folders)}
    settings = settings_of(records.values(), fresh)
    paired = [setting for setting in settings if setting.gains()]
    if not paired:
        raise ValueError(
            f"no run in {', '.join(map(str, folders))} has a finished run of Original (--refinement none) "
            "with the same recipe and seed to be compared with"
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, [records[name] for name in sorted(records)])
    page = out / "arena" / "README.md"
    times = StepTimes.read(page.with_name("time.json"))
    notes = page.with_name("notes.md")
    parts = [*_page(paired, list(records.values()), times)]
    if notes.exists():
        parts.append(notes.read_text().strip())
    write_atomically(page, "\n\n".join(parts) + "\n")
    return [page, kept, *save_figure(forest(paired), out / "forest")]


def _page(
    settings: Sequence[Setting], records: Sequence[Mapping[str, Any]], times: StepTimes | None
) -> Iterable[str]:
    yield "# Which way of attention is better?"
    yield (
        "Written by `saobp arena` from the runs in [runs.json](runs.json), which holds command, commit, "
        "seed, checksums and result of each. A run is compared with Original of the same recipe, texts and "
        "seed. The difference is that of held-out loss, as per cent of perplexity (less is better), with a "
        "95 % t interval over pairs."
    )
    yield "![Paired differences from Original with intervals](../forest.svg)"
    for setting in settings:
        yield f"## {setting.title}"
        measured = times if times is not None and times.fits(setting.recipe) else None
        yield markdown_table(
            HEADERS if measured is None else (*HEADERS, "time of a step"), list(rows(setting, measured))
        )
        if measured is not None:
            yield measured.in_words(ORIGINAL)
        if len(setting.gains()) > 1:
            yield _against_each_other(setting)
        both = list(_together(setting))
        if both:
            yield "Does a method still gain beside another?"
            yield markdown_table(two_by_two.HEADERS, both)
        if setting.blimp:
            yield _blimp(setting)
        yield power(setting)
        yield f"Recipe: `{json.dumps(setting.recipe)}`."
    yield made_on(records)


HEADERS = (
    "method",
    "perplexity",
    "difference [95 % interval]",
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
        own = f"{perplexities.mean:.2f} ({perplexities.seeds})"
        more = results[0].get("parameters", plain) - plain
        time = [] if times is None else [times.ratio(method, ORIGINAL)]
        if method == ORIGINAL:
            yield [title_of(method), own, "", "", "", f"{plain:,}", *time]
        else:
            gain = gains[method]
            verdict = verdict_in_words(gain, perplexities)
            yield [
                title_of(method),
                own,
                per_cent(gain),
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
        own = setting.losses[method]
        found = [paired_gain(own, setting.losses[other], higher_is_better=False) for other in methods[1:]]
        after = methods.index(method)
        cells = [
            "" if n < after or gain is None else per_cent(in_per_cent(gain)) for n, gain in enumerate(found)
        ]
        lines.append([title_of(method), *cells])
    return markdown_table(("less the column's", *map(title_of, methods[1:])), lines)


def _together(setting: Setting) -> Iterable[list[str]]:
    """Each method of a combination alone and beside the other, on the seeds that all have."""
    for first, second, both in two_by_two.combinations(setting.losses, ORIGINAL):
        for one, other in ((first, second), (second, first)):
            gains = two_by_two.two_by_two(setting.losses, ORIGINAL, (one, other, both))
            cells = ["" if gain is None else per_cent(in_per_cent(gain)) for gain in gains]
            yield [title_of(one), title_of(other), *cells]


def _blimp(setting: Setting) -> str:
    """Accuracies on BLiMP and their paired differences from Original, in points of a hundred."""
    lines = []
    for method in [method for method in (ORIGINAL, *setting.gains()) if method in setting.blimp]:
        own = spread(setting.blimp[method].values())
        base = setting.blimp.get(ORIGINAL, {})
        gain = None if method == ORIGINAL else paired_gain(setting.blimp[method], base)
        verdict = "" if gain is None else verdict_in_words(gain, own)
        lines.append([title_of(method), in_words(own, 2), gain_in_words(gain, 2), verdict])
    return markdown_table(("method", "BLiMP, %", "difference [95 % interval]", "verdict"), lines)


def per_cent(gain: Gain) -> str:
    """``-1.4 % [-2.3, -0.5]``"""
    interval = "" if gain.low is None or gain.high is None else f" [{gain.low:+.1f}, {gain.high:+.1f}]"
    return f"{gain.difference:+.1f} %{interval}"


def power(setting: Setting) -> str:
    """Power analysis: pairs needed for an effect, from the spread of the available pairs."""
    found = [setting.deviation(method) for method in setting.gains()]
    known = [deviation for deviation in found if deviation]
    if not known:
        return "How many seeds an effect needs is not known before some method has two pairs."
    typical = float(np.median(known))
    needed = pairs_needed(typical, EFFECT)
    return (
        f"Paired differences have a standard deviation of {typical:.2f} % (median of the methods), so an "
        f"effect of {EFFECT} % needs {needed} pairs to be seen with a probability of 80 %."
    )


def forest(settings: Sequence[Setting]) -> Figure:
    """Methods by rows, encoders and decoders side by side: paired differences with their intervals."""
    sides = [
        [one for one in settings if one.is_decoder == is_decoder and one.gains()]
        for is_decoder in (False, True)
    ]
    titles = [title for title, side in zip(("encoder", "decoder"), sides, strict=True) if side]
    sides = [side for side in sides if side]
    order = Counter(method for side in sides for one in side for method in one.gains())
    methods = sorted(order, key=lambda method: _mean_gain(settings, method))
    figure, axes = panels(len(sides), 2, size=(6.6 if len(sides) == 1 else 4.8, 0.36 * len(methods) + 1.6))
    for place, (axis, side) in enumerate(zip(axes, sides, strict=True)):
        axis.axvline(0, color="#888888", lw=1)
        for number, setting in enumerate(side):
            shift = 0.22 * (number - (len(side) - 1) / 2)
            for method, gain in setting.gains().items():
                row = methods.index(method) + shift
                colour = {"gain": "#009e73", "loss": "#d55e00"}.get(gain.verdict, "#444444")
                if gain.low is not None and gain.high is not None:
                    axis.plot([gain.low, gain.high], [row, row], color=colour, lw=1.8, solid_capstyle="butt")
                pairs = list(setting.differences(method).values())
                axis.plot(pairs, [row] * len(pairs), "|", color=colour, ms=6, mew=0.8)
                axis.plot(gain.difference, row, MARKERS[number % len(MARKERS)], color=colour, ms=5)
        if len(side) > 1:
            handles = [
                Line2D(
                    [], [], marker=MARKERS[n % len(MARKERS)], color="#444444", lw=0, label=_with_seeds(one)
                )
                for n, one in enumerate(side)
            ]
            figure.legend(
                handles=handles,
                fontsize=7,
                frameon=False,
                loc="outside upper right" if place else "outside upper left",
            )
        axis.set_yticks(range(len(methods)), [title_of(method) for method in methods], fontsize=8)
        if place:
            axis.tick_params(axis="y", labelleft=False)
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.set_xlim(*_reach(side))
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(f"{titles[place]}: {side[0].title}" if len(side) == 1 else titles[place], fontsize=9)
        axis.grid(axis="x", lw=0.4, alpha=0.5)
    figure.supxlabel(
        "difference of held-out perplexity from Original with the same seed, %\n"
        "mean, 95 % interval and single pairs (ticks); in colour where the interval leaves zero out",
        fontsize=8,
    )
    return figure


def _with_seeds(setting: Setting) -> str:
    """A setting's title with all its seeds."""
    seeds = sorted(setting.losses[ORIGINAL])
    return setting.title if setting.fresh else f"{setting.title}, seeds {', '.join(map(str, seeds))}"


def _reach(settings: Sequence[Setting]) -> tuple[float, float]:
    """Axis limits: all pairs, and the intervals of three or more."""
    gains = [gain for setting in settings for gain in setting.gains().values()]
    pairs = [setting.differences(method).values() for setting in settings for method in setting.gains()]
    ends = [0.0, *chain.from_iterable(pairs)]
    ends += [end for gain in gains if gain.pairs >= LEAST_PAIRS for end in (gain.low, gain.high) if end]
    room = 0.08 * (max(ends) - min(ends)) or 1.0
    return min(ends) - room, max(ends) + room


def _mean_gain(settings: Sequence[Setting], method: str) -> float:
    return float(np.mean([one.gains()[method].difference for one in settings if method in one.gains()]))
