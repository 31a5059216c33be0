"""The runs of results/arena/plan.md and its rule of choice, as code that was written before the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from saobp.lab.arena_records import method_of
from saobp.refinement import Refinement
from saobp.training.recipes import PretrainRecipe, named_recipe, with_steps

CHOICE_SEEDS, FRESH_SEEDS = (42, 1, 2), (6, 7, 8, 9, 10)
CORPUS = "wikipedia_en,gutenberg_books,imdb_reviews"
STEPS = 3000
USUAL_RATE = named_recipe("modern", "modernbert", "mini").strength_rate
RIVALS = ("temperature", "qk-norm", "gate")
"""Parts of a form that send no messages and lower the loss by themselves."""


@dataclass(frozen=True)
class Form:
    """A refinement and how its parameters per head are trained; ``none`` is Original."""

    refinement: str
    strength_rate: float = USUAL_RATE
    strength_delay: float = 0.0

    @property
    def rival(self) -> Form | None:
        """The form without messages: its parts that are in RIVALS, None if it has none."""
        parts = [part for part in self.refinement.split("+")[1:] if part in RIVALS]
        return Form("+".join(parts)) if parts else None


LEARNED = Form("high:learned")
CANDIDATES = (
    *map(
        Form,
        (
            "high:learned+temperature+gate",
            "high:learned+qk-norm+gate",
            "high:learned+qk-norm",
            "high:learned+gate",
            "high:learned+message-gate",
        ),
    ),
    replace(LEARNED, strength_rate=4 * USUAL_RATE),
    *map(
        Form,
        ("high:learned+by-distance", "high:learned,steps=2+later-steps", "high:learned+alternating"),
    ),
    replace(LEARNED, strength_delay=0.2),
    Form("high:learned+temperature"),
    Form("high-key-bias:learned+temperature"),
)
"""In the order in which they are run; the last two had been run before the plan."""
PART_OF_ROWS = Form("high-key-bias:learned,message_stride=4")
"""A comparison of its own: the recorded bias per key with messages from every fourth row only."""


SHORT_NAMES = (
    ("high-key-bias:learned", "key-bias"),
    ("high:learned", "learned"),
    ("+", "-"),
    (",steps=2", ""),
    (",message_stride=", "-rows"),
)


@dataclass(frozen=True)
class Run:
    form: Form
    seed: int
    family: str = "modernbert"
    control: bool = False
    """Whether it repeats a run of an older commit, to compare the two; it counts in no table."""

    @property
    def name(self) -> str:
        text = "original" if self.form.refinement == "none" else self.form.refinement
        for long, short in SHORT_NAMES:
            text = text.replace(long, short)
        if self.form.strength_rate != USUAL_RATE:
            text += f"-rate{self.form.strength_rate:g}"
        if self.form.strength_delay:
            text += f"-delay{self.form.strength_delay:g}"
        return f"{self.family}-mini-{text}-{'again-' if self.control else ''}{self.seed}"

    @property
    def recipe(self) -> PretrainRecipe:
        """The recipe of the recorded runs of the arena, without evaluations during training."""
        form, usual = self.form, with_steps(named_recipe("modern", self.family, "mini"), STEPS)
        return replace(
            usual,
            evaluation_steps=STEPS,
            checkpoint_steps=STEPS,
            health_texts=0,
            refinement=None if form.refinement == "none" else Refinement.of(form.refinement),
            strength_rate=form.strength_rate,
            strength_delay=form.strength_delay,
            seed=self.seed,
            corpus=CORPUS,
        )

    @property
    def command(self) -> list[str]:
        """The words that make this run again."""
        recipe = self.recipe
        names = ("evaluation_steps", "checkpoint_steps", "health_texts", "strength_rate", "strength_delay")
        words = [*("saobp", "pretrain", "--recipe", "modern"), *("--family", self.family, "--size", "mini")]
        words += ["--steps", str(STEPS), "--refinement", self.form.refinement, "--seed", str(self.seed)]
        words += [word for name in names for word in ("--set", f"{name}={getattr(recipe, name)}")]
        return [*words, "--corpus", CORPUS, "--tokens", "tokens", "--out", f"runs/{self.name}"]


Losses = Mapping[str, Mapping[int, float]]
"""Held-out losses of the encoder by method (``saobp.lab.arena.method_of``) and seed."""


def losses_of(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """:data:`Losses` of records of runs; those of decoders and of other lengths do not count."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        recipe, loss = record["recipe"], record["result"].get("eval_loss")
        if recipe["family"] == "modernbert" and recipe["steps"] == STEPS and loss is not None:
            found.setdefault(method_of(recipe), {})[recipe["seed"]] = loss
    return found


def choose(losses: Losses) -> tuple[Form, dict[str, float], list[str]]:
    """The candidate of the lowest mean loss on the seeds of the choice, all means, and what was left out."""
    means: dict[str, float] = {}
    left_out = []
    forms = {method_of(Run(form, 42).recipe.to_dict()): form for form in CANDIDATES}
    for method in forms:
        own = losses.get(method, {})
        if all(math.isfinite(own.get(seed, math.nan)) for seed in CHOICE_SEEDS):
            means[method] = mean(own[seed] for seed in CHOICE_SEEDS)
        else:
            left_out.append(method)
    if not means:
        raise ValueError("no candidate has finite losses on all seeds of the choice")
    return forms[min(means, key=means.__getitem__)], means, left_out


def choice_runs(losses: Losses, candidates: int = len(CANDIDATES)) -> Iterator[Run]:
    """The first candidates' runs without a loss, form by form; and Original again, at their commit."""
    for number, form in enumerate(CANDIDATES[:candidates]):
        done = losses.get(method_of(Run(form, 42).recipe.to_dict()), {})
        yield from (Run(form, seed) for seed in CHOICE_SEEDS if seed not in done)
        if number == 0:
            yield Run(Form("none"), 42, control=True)


def confirming_runs(chosen: Form | None) -> Iterator[Run]:
    """Fresh seeds: Original, the chosen form and its rival, once it is known, then the two plain methods.

    After the chosen form, or while nothing is chosen yet, come the three runs of PART_OF_ROWS.
    """
    first = [Form("none"), *([] if chosen is None else [chosen])]
    yield from (Run(form, seed) for form in first for seed in FRESH_SEEDS)
    yield from (Run(PART_OF_ROWS, seed) for seed in CHOICE_SEEDS)
    rival = None if chosen is None else chosen.rival
    rest = [*([] if rival is None else [rival]), Form("temperature"), LEARNED]
    yield from (Run(form, seed) for form in dict.fromkeys(rest) for seed in FRESH_SEEDS if form not in first)


def further_runs() -> Iterator[Run]:
    """If time remains: two-by-two tables of gates and QK-norm, the decoder, rivals not trained yet."""
    alone = ("qk-norm", "gate", "query-bias")
    rivals = ("temperature+gate", "softmax-plus-one", "sigma-reparam", "sinkhorn", "sinkhorn-3")
    for name in alone:
        yield from (Run(Form(name), seed) for seed in CHOICE_SEEDS)
    for form in (Form("none"), LEARNED):
        yield from (Run(form, seed, "llama") for seed in CHOICE_SEEDS)
    for name in rivals:
        yield from (Run(Form(name), seed) for seed in CHOICE_SEEDS)
