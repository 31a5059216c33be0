"""Runs of the arena: records of finished runs, grouped by setting, with paired differences of methods.

Runs whose recipes differ in method and seed alone are compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from saobp.lab.methods import METHODS
from saobp.lab.statistics import LEAST_PAIRS, Gain, as_percent, paired_gain, spread
from saobp.refinement import Refinement
from saobp.runs.folder import RunFolder
from saobp.runs.layout import RESULT, run_folders
from saobp.sizes import DECODERS, FAMILY_NAMES
from saobp.storage.json_files import read_json, read_object
from saobp.training.architectures import SIZES
from saobp.training.recipes import PretrainRecipe, named_recipe

ORIGINAL = "none"
PLAIN = "Plain attention"
"""Its title here; tables of the paper call it Original, as the paper does."""
WITHOUT_NUMBERS = ("gate", "sigma-reparam", "softmax-plus-one")
"""Variants that learn no number per head."""
BLIMP = "blimp"
"""Subfolder of a run with the output of ``saobp evaluate --tasks blimp``."""
GLUE = "glue"
"""Subfolder of a run with a folder of the output of ``saobp finetune`` for each task."""
GLUE_TASKS = ("mnli", "qqp", "sst2", "cola", "qnli", "stsb", "mrpc", "rte")
"""The longest first. Without WNLI, whose validation rows repeat training sentences with the other label."""
NEEDED = ("run", "kind", "command", "commit", "seed", "data", "environment", "recipe", "result")
"""Fields of a record without which nobody could tell what was run."""
CONFIRMING_PAIRS = 5
"""Pairs of fresh seeds without which there is no verdict, if their group says nothing else; elsewhere
``LEAST_PAIRS`` do."""
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


class FreshSeeds(NamedTuple):
    """Seeds that confirm a choice made on others, and pairs of them without which there is no verdict."""

    seeds: Sequence[int]
    least_pairs: int = CONFIRMING_PAIRS

    @classmethod
    def of(cls, text: str) -> FreshSeeds:
        """From ``6,7,8,9,10``, or ``6,7,8,9,10,11:6`` for verdicts from six pairs on."""
        if not re.fullmatch(r"\d+(,\d+)*(:\d+)?", text):
            raise ValueError(
                "--fresh takes seeds with commas between them, as in 6,7,8, and after a colon the pairs that "
                f"a verdict needs, if more than {CONFIRMING_PAIRS}, not {text!r}"
            )
        seeds, _, pairs = text.partition(":")
        return cls([int(seed) for seed in seeds.split(",")], max(CONFIRMING_PAIRS, int(pairs or 0)))


@dataclass
class Setting:
    """Runs that differ in method and seed alone: losses and results by method, scores by measure and method.

    fresh: the seeds that confirm a choice made on others, if it has such
    data:  checksums of its texts
    distinct: recipe fields in which other compared settings of the same model and budget differ
    """

    recipe: dict[str, Any]
    fresh: FreshSeeds | None = None
    data: Any = None
    distinct: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    scores: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def is_decoder(self) -> bool:
        return self.recipe["family"] in DECODERS

    @property
    def least_pairs(self) -> int:
        """Pairs without which there is no verdict."""
        return self.fresh.least_pairs if self.fresh else LEAST_PAIRS

    @property
    def budget(self) -> tuple[str, str, int, int]:
        """Family, size, length and tokens."""
        family, size, length = (self.recipe[name] for name in ("family", "size", "length"))
        return family, size, length, self.recipe["steps"] * self.recipe["batch_size"] * length

    @property
    def title(self) -> str:
        tokens = self.budget[-1]
        family = FAMILY_NAMES.get(self.recipe["family"], self.recipe["family"])
        size, length = self.recipe["size"], self.recipe["length"]
        recipe = "".join(f", {change}" for change in _format_fields(self.distinct))
        seeds = f", fresh seeds {_format_seeds(self.compared_seeds())}" if self.fresh else ""
        return f"{family}-{size}, length {length}, {tokens / 1e6:,.0f} M tokens{recipe}{seeds}"

    def compared_seeds(self) -> list[int]:
        """Seeds of plain attention and another method; if there is none, all of plain attention."""
        others = (losses for method, losses in self.losses.items() if method != ORIGINAL)
        original_seeds = self.losses[ORIGINAL].keys()
        return sorted(original_seeds & {seed for losses in others for seed in losses} or original_seeds)

    def gains(self) -> dict[str, Gain]:
        """Paired differences from plain attention in per cent of perplexity, ascending; lower is better."""
        methods = [method for method in self.losses if method != ORIGINAL and ORIGINAL in self.losses]
        pairs = {method: self.gain_over(method, ORIGINAL) for method in methods}
        known_gains = {method: gain for method, gain in pairs.items() if gain is not None}
        return dict(sorted(known_gains.items(), key=lambda item: item[1].difference))

    def gain_over(self, method: str, other: str) -> Gain | None:
        """The paired difference of two methods, in per cent of perplexity."""
        gain = paired_gain(
            self.losses[method],
            self.losses[other],
            higher_is_better=False,
            least_pairs=self.least_pairs,
        )
        return None if gain is None else as_percent(gain)

    def differences(self, method: str, other: str = ORIGINAL) -> dict[int, float]:
        """Differences from another method with the same seed, in per cent of perplexity."""
        base, losses = self.losses.get(other, {}), self.losses[method]
        return {seed: 100 * math.expm1(losses[seed] - base[seed]) for seed in losses if seed in base}

    def deviation(self, method: str) -> float | None:
        """Standard deviation of the paired differences, in per cent of perplexity."""
        summary = spread(self.differences(method).values())
        return None if summary is None else summary.deviation

    def median(self, method: str) -> float:
        """Median of the paired differences, which a seed that learns slowly does not draw."""
        return median(self.differences(method).values())

    def lower_in(self, method: str) -> str:
        """``5 of 5``: pairs in which the method's loss is the lower one."""
        pairs = self.differences(method).values()
        return f"{sum(difference < 0 for difference in pairs)} of {len(pairs)}"


def method_of(recipe: Mapping[str, Any]) -> str:
    """The method of a run, as the text form of its refinement and regularizer."""
    refinement = recipe.get("refinement")
    given = None if refinement is None else Refinement.of(refinement)
    text = ORIGINAL if given is None else str(given) + (_own_rate(recipe) if _learns_per_head(given) else "")
    penalty = recipe.get("regularizer")
    if penalty is None:
        return text
    return penalty if text == ORIGINAL else f"{text} with {penalty}"


def _learns_per_head(refinement: Refinement) -> bool:
    """Whether it has numbers per head, which have a learning rate of their own."""
    return refinement.strength == "learned" or any(
        name not in WITHOUT_NUMBERS for name in refinement.variants
    )


def _own_rate(recipe: Mapping[str, Any]) -> str:
    """How the numbers per head are trained, where their learning rate is not the named recipe's."""
    text = ""
    if "strength_rate" in recipe:
        named = named_recipe(recipe["name"], recipe["family"], recipe["size"])
        rate = recipe["strength_rate"] * recipe["learning_rate"]
        factor = rate / (named.strength_rate * named.learning_rate)
        text = "" if math.isclose(factor, 1) else f", rate times {factor:.3g}"
    delay = recipe.get("strength_delay", 0.0)
    return f"{text}, after {delay:.0%} of the steps" if delay else text


def title_of(method: str) -> str:
    """Title of a method in tables; combined parts are joined by plus signs."""
    titles = {entry.refinement or entry.regularizer or ORIGINAL: entry.title for entry in METHODS.values()}
    titles[ORIGINAL] = PLAIN
    method, with_penalty, penalty = method.partition(" with ")
    if with_penalty:
        return f"{title_of(method)} with {title_of(penalty)}"
    text, *trained = re.split("(?=, (?:rate|after) )", method, maxsplit=1)
    parts = titles.get(text) or " + ".join(
        _title_of_part(part, titles).removesuffix(" per head") for part in text.split("+")
    )
    return "".join([parts, *trained])


def _title_of_part(part: str, titles: Mapping[str, str]) -> str:
    plain, stride, rows = part.partition(",message_stride=")
    penalty, weighted, weight = plain.partition(",weight=")
    if weighted:
        return f"{titles.get(penalty, penalty)}, weight {weight}"
    return titles.get(plain, plain) + (f" (1 row in {rows})" if stride else "")


def recorded(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The records of finished pretraining runs, by the names of their folders."""
    records: dict[str, dict[str, Any]] = {}
    for folder in folders:
        found = {}
        for path in run_folders(folder):
            run = RunFolder(path)
            if run.is_finished and run.recipe.get("kind") == "pretrain":
                record = {"run": path.name, "kind": "pretrain", **run.record}
                found[path.name] = checked({**record, "recipe": run.recipe, "result": run.result}, path)
                if (path / BLIMP / RESULT).exists():
                    found[path.name][BLIMP] = read_object(path / BLIMP / RESULT)[BLIMP]
                result_files = {task: path / GLUE / task / RESULT for task in GLUE_TASKS}
                if any(result_file.exists() for result_file in result_files.values()):
                    found[path.name][GLUE] = {
                        task: read_object(result_file)["last"]["mean"]
                        for task, result_file in result_files.items()
                        if result_file.exists()
                    }
        records = joined(records, found, "an earlier folder")
    return records


def joined(
    before: Mapping[str, dict[str, Any]], later: Mapping[str, dict[str, Any]], source: object
) -> dict[str, dict[str, Any]]:
    """Earlier and later records; of a run that is in both, the scores of both.

    Raises if a name stands for two runs; source: where the earlier records are.
    """
    both = dict(before)
    for name, record in later.items():
        old = before.get(name, record)
        if any(old.get(time) != record.get(time) for time in ("started", "finished")):
            raise ValueError(
                f"{source} has another run named {name}, of {old.get('started')}: rename the folder of the "
                "new one, or leave it out"
            )
        glue = {**old.get(GLUE, {}), **record.get(GLUE, {})}
        both[name] = {**old, **record, **({GLUE: glue} if glue else {})}
    return both


def saved_records(file: Path) -> dict[str, dict[str, Any]]:
    """The records in a file such as ``runs.json``, by the names of their runs."""
    content = read_json(file)
    if not isinstance(content, list):
        raise ValueError(f"{file} is no list of records, as saobp arena writes it")
    return {checked(record, file)["run"]: record for record in content}


def checked(record: Any, source: Path) -> dict[str, Any]:
    """The record of a finished run; raises a ValueError if it lacks a field."""
    if not isinstance(record, dict):
        raise ValueError(f"{source} holds something that is no record: {json.dumps(record)[:40]}")
    missing = [name for name in NEEDED if name not in record]
    if missing:
        raise ValueError(f"a record in {source} ({record.get('run', 'no name')}) has no {', '.join(missing)}")
    return record


def has_loss(record: Mapping[str, Any]) -> bool:
    """Whether a run was evaluated, and its loss is finite."""
    loss = record["result"].get("eval_loss")
    return loss is not None and math.isfinite(loss)


def scores_of(record: Mapping[str, Any]) -> dict[str, float]:
    """BLiMP's accuracy, and the eight scores of GLUE with their mean where none is missing."""
    scores = {BLIMP: record[BLIMP]["accuracy"]} if BLIMP in record else {}
    glue = record.get(GLUE, {})
    if set(glue) == set(GLUE_TASKS):
        scores |= {**glue, GLUE: fmean(glue.values())}
    return scores


def settings_of(records: Iterable[Mapping[str, Any]], fresh: Sequence[FreshSeeds] = ()) -> list[Setting]:
    """Runs grouped by setting: encoders and small models first, then verdicts, fresh seeds, large groups.

    A repeated seed counts once, a run without a finite loss not at all. Each entry of ``fresh`` makes
    groups of its own: a choice made on others is confirmed on them alone.
    """
    by_key: dict[str, Setting] = {}
    for record in records:
        recipe, result = record["recipe"], record["result"]
        shared = {name: value for name, value in {**recipe, **_absent(recipe)}.items() if name not in FREE}
        group = next((one for one in fresh if recipe["seed"] in one.seeds), None)
        key = json.dumps([shared, record.get("data"), group and list(group.seeds)], sort_keys=True)
        setting = by_key.setdefault(key, Setting(shared, group, record.get("data")))
        method = method_of(recipe)
        if has_loss(record):
            setting.losses.setdefault(method, {})[recipe["seed"]] = result["eval_loss"]
            setting.results.setdefault(method, []).append(result)
        for measure, score in scores_of(record).items():
            setting.scores.setdefault(measure, {}).setdefault(method, {})[recipe["seed"]] = score
    settings = sorted(
        by_key.values(),
        key=lambda candidate: (
            candidate.is_decoder,
            list(SIZES).index(candidate.recipe["size"]),
            all(gain.verdict == "undecided" for gain in candidate.gains().values()),
            not candidate.fresh,
            -sum(map(len, candidate.losses.values())),
        ),
    )
    for setting in settings:
        comparable = [
            candidate.recipe
            for candidate in settings
            if candidate.budget == setting.budget and candidate.gains()
        ]
        setting.distinct = {
            name: setting.recipe[name]
            for name in setting.recipe
            if any(other.get(name) != setting.recipe[name] for other in comparable)
        }
    return settings


def _format_fields(values: Mapping[str, Any]) -> list[str]:
    """As ``in_fields``, with masked shares as ``30 to 15 % masked`` and corpora as ``3 corpora``."""
    changes = []
    if "masked_share" in values:
        first, end = values["masked_share"], values.get("masked_share_end")
        shares = f"{100 * first:g}" if end is None else f"{100 * first:g} to {100 * end:g}"
        changes.append(f"{shares} % masked")
    if "corpus" in values:
        corpora = values["corpus"].split(",")
        changes.append(f"{len(corpora)} corpora" if len(corpora) > 1 else f"{corpora[0]} alone")
    described = ("masked_share", "masked_share_end", "corpus")
    return changes + in_fields({name: value for name, value in values.items() if name not in described})


def _format_seeds(seeds: Sequence[int]) -> str:
    """``11 to 18`` or ``6, 8, 9``."""
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def in_fields(values: Mapping[str, Any]) -> list[str]:
    """Fields of a recipe as ``--set`` takes them."""
    return [f"{name}={'none' if value is None else value}" for name, value in values.items()]


def _absent(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of fields that are newer than the record of a run."""
    return {
        recipe_field.name: recipe_field.default
        for recipe_field in fields(PretrainRecipe)
        if recipe_field.name not in recipe and recipe_field.default is not MISSING
    }


Losses = Mapping[str, Mapping[int, float]]


def combinations(losses: Losses) -> Iterator[tuple[str, str, str]]:
    """``(first, second, both)``: methods trained alone and together, as in ``a``, ``b``, ``a+b``.

    A sum of three is divided at either plus sign.
    """
    for both in losses:
        parts = both.split("+")
        for count in range(1, len(parts)):
            first, second = "+".join(parts[:count]), "+".join(parts[count:])
            if first in losses and second in losses and ORIGINAL in losses:
                yield first, second, both


def two_by_two(
    losses: Losses, names: tuple[str, str, str]
) -> tuple[Gain | None, Gain | None, Gain | None, Gain | None]:
    """Gains of the first method alone and beside the second, their difference, and that of both together.

    Only seeds that all four methods have, so that the four numbers fit together.
    """
    groups = [losses[name] for name in (*names, ORIGINAL)]
    seeds = [seed for seed in groups[2] if all(seed in group for group in groups)]
    first, second, both, plain = ({seed: group[seed] for seed in seeds} for group in groups)
    alone = {seed: first[seed] - plain[seed] for seed in seeds}
    beside = {seed: both[seed] - second[seed] for seed in seeds}
    gain = partial(paired_gain, higher_is_better=False)
    return gain(first, plain), gain(both, second), gain(beside, alone), gain(both, plain)
