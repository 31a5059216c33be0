"""The runs of round seven of results/arena/plan.md in their order, written before the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from saobp.lab.step_times import StepTimes
from saobp.refinement import Refinement
from saobp.training.recipes import PretrainRecipe, named_recipe, with_steps

ORIGINAL = "none"
LEARNED = "high:learned"
KEY_BIAS = "high-key-bias:learned"
STEPS, ROWS, LENGTH = 3000, 256, 128
MIXTURE = "wikipedia_en,gutenberg_books,imdb_reviews"
BOOKS = "gutenberg_books"
STRENGTHS_RATE = 0.01
"""Learning rate of numbers per head, whatever the rate of other parameters."""
RECORDED = "masked-30-to-15"
"""The setting of rounds two to six, whose runs of the tuning seeds are recorded."""
SETTINGS: dict[str, dict[str, Any]] = {
    RECORDED: {},
    "muon-falling-128-rows": {"optimizer": "muon", "batch_size": 128, "steps": 6000, "warmup_steps": 300},
    "muon-falling": {"optimizer": "muon"},
    "muon-falling-half": {"optimizer": "muon", "muon_rate": 0.5},
    "muon-falling-averaged": {"optimizer": "muon", "averaged_share": 0.1},
}
"""What settings change in the recipe ``modern``, whose masked share falls; the longest runs come first."""
SETTING_SEEDS = (42, 9, 16)
SMALL_RATES = (2.8e-3, 2e-3, 1.4e-3, 1e-3)
"""Learning rates that are tried for ModernBERT-small; the first is that of the recipe ``modern``."""
RATE_SEEDS = (42, 9)
MEDIUM_RATE = 5 / 7
"""Medium's rate over small's, as in the recipe ``modern``."""
MANY_SEEDS = tuple(range(51, 59))
COMPARED = (ORIGINAL, LEARNED, KEY_BIAS)
BESIDE_QK_NORM = ("qk-norm", f"{LEARNED}+qk-norm")
AT_EQUAL_TIME = (KEY_BIAS, LEARNED)
"""Forms that are also compared with Original trained for as long as their usual steps take."""
PAIR_SEEDS = (31, 32, 33, 34, 35)
"""For Original and learned strengths of small, and of mini on books alone."""
MEDIUM_SEEDS = PAIR_SEEDS[:2]
RIVALS = ("sinkhorn-3", "sinkhorn", "gate", "softmax-plus-one", "sink", "sigma-reparam")
"""Methods that have not been trained at a tuned recipe, in the order of results/tiny."""
RIVAL_SEEDS = MANY_SEEDS[:5]
PENALTIES = {
    "entropy": ("entropy,weight=0.0001", "entropy,weight=0.001", "entropy,weight=0.01"),
    "eigen": ("eigen,weight=0.001", "eigen,weight=0.01", "eigen,weight=0.1"),
}
"""The two regularizers, at the weights that are tried."""
LATER, FASTER = "later", "faster"
TRAINED: dict[str, dict[str, Any]] = {LATER: {"strength_delay": 0.2}, FASTER: {"strength_rate": 4.0}}
"""Ways of training strengths; the rate is a multiple of STRENGTHS_RATE here."""
LEARNED_FORMS: tuple[tuple[str, str], ...] = (
    (LEARNED, FASTER),
    (f"{LEARNED}+alternating", ""),
    (f"{LEARNED},steps=2+later-steps", ""),
    (f"{LEARNED}+by-distance", ""),
    (f"{LEARNED}+message-gate", ""),
    (LEARNED, LATER),
)
"""What else may learn: forms, and how their strengths are trained, in the order of results/tiny."""
FORM_SEEDS = (42, 1, 2)
CONFIRMING_SEEDS = tuple(range(61, 69))
"""For the best of these forms."""


@dataclass(frozen=True)
class Run:
    """A method and a seed.

    setting: one of SETTINGS
    rate:    learning rate of small and medium; that of mini is the recipe's
    longer:  per cent of further steps
    penalty: a regularizer with its weight, as ``saobp pretrain`` takes it
    trained: one of TRAINED, if strengths are trained otherwise than usual
    """

    form: str
    seed: int
    setting: str
    size: str = "mini"
    rate: float | None = None
    corpus: str = MIXTURE
    longer: int = 0
    penalty: str = ""
    trained: str = ""

    @property
    def name(self) -> str:
        form = "original" if self.form == ORIGINAL else self.form.removeprefix("high:")
        rate = "" if self.rate is None else f"rate-{self.rate:.2g}"
        corpus = {MIXTURE: "", BOOKS: "books"}[self.corpus]
        method = _as_words(self.penalty or form)
        longer = f"{self.longer}-percent-longer" if self.longer else ""
        parts = ["modernbert", self.size, self.setting, rate, corpus, method, self.trained, longer]
        parts.append(str(self.seed))
        return "-".join(part for part in parts if part)

    @property
    def recipe(self) -> PretrainRecipe:
        """The recipe ``modern`` for 98 million tokens or a few per cent more, evaluated at its end alone."""
        usual = with_steps(named_recipe("modern", "modernbert", self.size), STEPS)
        changes = {"batch_size": ROWS, "length": LENGTH, "steps": STEPS, **SETTINGS[self.setting]}
        changes["steps"] += changes["steps"] * self.longer // 100
        own = {"strength_rate": 1.0, **TRAINED.get(self.trained, {})}
        rate = usual.learning_rate if self.rate is None else self.rate
        return replace(
            usual,
            **changes,
            learning_rate=rate,
            corpus=self.corpus,
            log_steps=12 if self.longer else usual.log_steps,  # a divisor of the next two
            evaluation_steps=changes["steps"],
            checkpoint_steps=changes["steps"] // 5,
            health_texts=0,
            refinement=None if self.form == ORIGINAL else Refinement.of(self.form),
            regularizer=self.penalty or None,
            strength_rate=own.pop("strength_rate") * STRENGTHS_RATE / rate,
            **own,
            seed=self.seed,
        )

    @property
    def command(self) -> list[str]:
        """The words that make this run again, whatever the recipe ``modern`` is by then."""
        recipe = self.recipe
        words = ["saobp", "pretrain", "--recipe", "modern", "--family", "modernbert", "--size", self.size]
        words += ["--steps", str(recipe.steps), "--refinement", self.form, "--seed", str(self.seed)]
        words += ["--regularizer", self.penalty] if self.penalty else []
        for name in (
            *("batch_size", "length", "learning_rate", "warmup_steps", "masked_share", "masked_share_end"),
            *("optimizer", "muon_rate", "averaged_share", "strength_rate", "strength_delay"),
            *("log_steps", "evaluation_steps", "checkpoint_steps", "health_texts"),
        ):
            value = getattr(recipe, name)
            words += ["--set", f"{name}={'none' if value is None else value}"]
        return [*words, "--corpus", recipe.corpus, "--tokens", "tokens", "--out", f"runs/{self.name}"]


Losses = Mapping[Run, float | None]
"""Held-out losses of runs that have ended; None of one that failed."""


def planned_runs(losses: Losses, times: StepTimes | None = None) -> Iterator[Run]:
    """All runs whose settings are known, in their order: tuning, the comparison, then what is left.

    Everything waits for the choice of the setting; pairs of small and medium for that of small's rate, those
    of a penalty for that of its weight, the confirmation of a form for its choice. Runs at equal time need
    the times of steps at the chosen setting.
    """
    yield from setting_runs()
    setting = chosen_setting(losses)
    if setting is None:
        return
    further = further_steps(setting, times)
    yield from (run for seed in MANY_SEEDS for run in compared_runs(seed, setting, further))
    yield from (Run(form, seed, setting) for seed in MANY_SEEDS for form in BESIDE_QK_NORM)
    yield from rate_runs(setting)
    rate = chosen_rate(setting, losses)
    if rate is not None:
        yield from _pairs(PAIR_SEEDS, setting, "small", rate)
    yield from _pairs(PAIR_SEEDS, setting, corpus=BOOKS)
    if rate is not None:
        yield from _pairs(MEDIUM_SEEDS, setting, "medium", MEDIUM_RATE * rate)
    yield from (Run(rival, seed, setting) for seed in RIVAL_SEEDS for rival in RIVALS)
    yield from penalty_runs(setting)
    weights = chosen_weights(setting, losses)
    yield from (Run(ORIGINAL, seed, setting, penalty=one) for seed in RIVAL_SEEDS for one in weights)
    yield from form_runs(setting)
    best = chosen_form(setting, losses)
    if best is not None:
        yield from (run for seed in CONFIRMING_SEEDS for run in confirming_runs(best, seed))


def penalty_runs(setting: str) -> Iterator[Run]:
    """Both regularizers at every weight, on one seed."""
    seed = SETTING_SEEDS[0]
    return (Run(ORIGINAL, seed, setting, penalty=one) for weights in PENALTIES.values() for one in weights)


def chosen_weights(setting: str, losses: Losses) -> list[str]:
    """Of each regularizer the weight with the lowest loss; none while a run is missing."""
    best = (
        _best_group((run for run in penalty_runs(setting) if run.penalty in weights), losses)
        for weights in PENALTIES.values()
    )
    found = [run.penalty for run in best if run is not None]
    return found if len(found) == len(PENALTIES) else []


def form_runs(setting: str) -> Iterator[Run]:
    """``high:learned`` and all further forms of learned strengths, one after the other."""
    forms = ((LEARNED, ""), *LEARNED_FORMS)
    return (Run(form, seed, setting, trained=trained) for form, trained in forms for seed in FORM_SEEDS)


def chosen_form(setting: str, losses: Losses) -> Run | None:
    """The form with the lowest mean, if that is not ``high:learned`` itself; None while a run is missing."""
    best = _best_group(form_runs(setting), losses)
    return None if best is None or (best.form, best.trained) == (LEARNED, "") else best


def confirming_runs(best: Run, seed: int) -> Iterator[Run]:
    """Plain attention, ``high:learned`` and the chosen form, on a seed that no choice has seen."""
    yield from (Run(form, seed, best.setting) for form in (ORIGINAL, LEARNED))
    yield replace(best, seed=seed)


def compared_runs(seed: int, setting: str, further: Iterable[int] = ()) -> Iterator[Run]:
    """The compared forms of a seed, then Original for longer."""
    yield from (Run(form, seed, setting) for form in COMPARED)
    yield from (Run(ORIGINAL, seed, setting, longer=longer) for longer in further)


def further_steps(setting: str, times: StepTimes | None) -> list[int]:
    """Per cent of further steps that Original has in the time of a form's usual steps, rounded up.

    None for a form whose step takes no longer; none at all without times of this setting.
    """
    if times is None or not fits(times, setting):
        return []
    found = set()
    for form in AT_EQUAL_TIME:
        pairs = zip(times.seconds[form], times.seconds[ORIGINAL], strict=False)
        more = median(100 * (seconds / plain - 1) for seconds, plain in pairs)
        found.add(math.ceil(round(more, 6)))
    return sorted(percent for percent in found if percent > 0)


def fits(times: StepTimes, setting: str) -> bool:
    """Whether times are of the recipe of this setting."""
    return times.fits(Run(ORIGINAL, MANY_SEEDS[0], setting).recipe.to_dict())


def tuning_runs() -> Iterator[Run]:
    """All runs on which a choice may depend."""
    yield from setting_runs()
    for setting in SETTINGS:
        yield from rate_runs(setting)
        yield from penalty_runs(setting)
        yield from form_runs(setting)


def is_tuned(losses: Losses) -> bool:
    """Whether all choices are made, so that ``planned_runs`` gives every run."""
    setting = chosen_setting(losses)
    if setting is None:
        return all(run in losses for run in setting_runs())
    choices = (*rate_runs(setting), *penalty_runs(setting), *form_runs(setting))
    return all(run in losses for run in choices)


def setting_runs() -> Iterator[Run]:
    """Original of mini at every setting."""
    return (Run(ORIGINAL, seed, setting) for setting in SETTINGS for seed in SETTING_SEEDS)


def rate_runs(setting: str) -> Iterator[Run]:
    """Original of small at every rate, one seed after the other."""
    return (Run(ORIGINAL, seed, setting, "small", rate) for seed in RATE_SEEDS for rate in SMALL_RATES)


def chosen_setting(losses: Losses) -> str | None:
    """The setting with the lowest mean loss of Original; None while one of its runs is missing."""
    best = _best_group(setting_runs(), losses)
    return None if best is None else best.setting


def chosen_rate(setting: str, losses: Losses) -> float | None:
    """The same for small's rate."""
    best = _best_group(rate_runs(setting), losses)
    return None if best is None else best.rate


def _best_group(runs: Iterable[Run], losses: Losses) -> Run | None:
    """The runs that differ in the seed alone and have the lowest mean, by one of them with seed 0.

    A group with a failed run, or a loss that is not finite, is left out. None while a run is missing.
    """
    groups: dict[Run, list[float | None]] = {}
    for run in runs:
        if run not in losses:
            return None
        groups.setdefault(replace(run, seed=0), []).append(losses[run])
    means = {}
    for group, own in groups.items():
        finite = [loss for loss in own if loss is not None and math.isfinite(loss)]
        if len(finite) == len(own):
            means[group] = mean(finite)
    return min(means, key=means.__getitem__, default=None)


def _pairs(
    seeds: Iterable[int], setting: str, size: str = "mini", rate: float | None = None, corpus: str = MIXTURE
) -> Iterator[Run]:
    return (Run(form, seed, setting, size, rate, corpus) for seed in seeds for form in (ORIGINAL, LEARNED))


def _as_words(text: str) -> str:
    for character in ":,+=":
        text = text.replace(character, "-")
    return text
