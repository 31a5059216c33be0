"""What each task is: its columns, labels, metrics, files and official row counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["classification", "regression", "span", "choice"]


@dataclass(frozen=True)
class TaskSpec:
    """One task. ``metrics`` names the main one first.

    texts:      the one or two columns that are read as text; for a choice the context, then (if it exists)
                the question, and the candidates are the column ``options``
    labels:     names of the classes (the options' letters where the answer is a letter); none for a span
    train:      names of the file of training rows, best first; a ``*`` stands for a partial set
    validation: the same for validation rows
    official:   official row counts by split
    identity:   columns by which a row would be recognised in another split
    """

    name: str
    kind: Kind
    folder: str
    texts: tuple[str, ...]
    metrics: tuple[str, ...]
    hub: tuple[str, str | None]
    official: Mapping[str, int]
    labels: tuple[str, ...] = ()
    label: str = "label"
    options: str = ""
    train: tuple[str, ...] = ("train", "train_subset*")
    validation: tuple[str, ...] = ("validation",)
    identity: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] = field(default_factory=dict)

    @property
    def main_metric(self) -> str:
        return self.metrics[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that must be in a file."""
        more = (self.options,) if self.options else ()
        return (*self.texts, *more, self.label)

    def files(self, split: str) -> tuple[str, ...]:
        """Names that the file of a split may have, best first."""
        return {"train": self.train, "validation": self.validation}.get(split, (split,))


def _glue(
    name: str,
    texts: tuple[str, ...],
    rows: tuple[int, int],
    labels: tuple[str, ...],
    metrics: tuple[str, ...] = ("accuracy",),
    **more: object,
) -> TaskSpec:
    return TaskSpec(
        name=name,
        kind="classification" if labels else "regression",
        folder=f"glue/{name}",
        texts=texts,
        metrics=metrics,
        hub=("nyu-mll/glue", name),
        official={"train": rows[0], "validation": rows[1]},
        labels=labels,
        identity=texts,
        **more,  # type: ignore[arg-type]
    )


_PAIR = ("sentence1", "sentence2")
_ENTAILS = ("entailment", "not_entailment")
_PARAPHRASE = ("not_equivalent", "equivalent")

GLUE: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        _glue("cola", ("sentence",), (8551, 1043), ("unacceptable", "acceptable"), ("matthews", "accuracy")),
        _glue("sst2", ("sentence",), (67349, 872), ("negative", "positive")),
        _glue("mrpc", _PAIR, (3668, 408), _PARAPHRASE, ("accuracy", "f1")),
        _glue("stsb", _PAIR, (5749, 1500), (), ("spearman", "pearson")),
        _glue(
            "qqp",
            ("question1", "question2"),
            (363846, 40430),
            ("not_duplicate", "duplicate"),
            ("accuracy", "f1"),
            validation=("validation", "wang_dev10k"),
            stand_ins={
                "wang_dev10k": "validation is the split of Wang et al. (2017), not the GLUE dev set: "
                "half of its pairs are duplicates"
            },
        ),
        _glue(
            "mnli",
            ("premise", "hypothesis"),
            (392702, 9815),
            ("entailment", "neutral", "contradiction"),
            validation=("validation_matched",),
        ),
        _glue("qnli", ("question", "sentence"), (104743, 5463), _ENTAILS),
        _glue("rte", _PAIR, (2490, 277), _ENTAILS),
        _glue("wnli", _PAIR, (635, 71), ("not_entailment", "entailment")),
    )
}

_OTHERS = (
    TaskSpec(
        name="squad",
        kind="span",
        folder="squad",
        texts=("question", "context"),
        metrics=("f1", "exact_match"),
        hub=("rajpurkar/squad", None),
        official={"train": 87599, "validation": 10570},
        label="answers",
        identity=("context",),
    ),
    TaskSpec(
        name="hellaswag",
        kind="choice",
        folder="hellaswag",
        texts=("ctx",),
        metrics=("accuracy",),
        hub=("Rowan/hellaswag", None),
        official={"train": 39905, "validation": 10042},
        labels=("0", "1", "2", "3"),
        options="endings",
        train=("train_clean",),
        validation=("validation_clean",),
        identity=("ctx", "endings"),
    ),
    TaskSpec(
        name="race-middle",
        kind="choice",
        folder="race_middle",
        texts=("article", "question"),
        metrics=("accuracy",),
        hub=("ehovy/race", "middle"),
        official={"train": 25421, "validation": 1436, "test": 1436},
        labels=("A", "B", "C", "D"),
        label="answer",
        options="options",
        identity=("article",),
    ),
    TaskSpec(
        name="boolq",
        kind="classification",
        folder="boolq",
        texts=("question", "passage"),
        metrics=("accuracy",),
        hub=("google/boolq", None),
        official={"train": 9427, "validation": 3270},
        labels=("no", "yes"),
        label="answer",
        identity=("question", "passage"),
    ),
)

TASKS: dict[str, TaskSpec] = {**GLUE, **{spec.name: spec for spec in _OTHERS}}
ALL: dict[str, TaskSpec] = {name: spec for name, spec in TASKS.items() if name != "boolq"}
"""The twelve tasks that the paper fine-tunes; BoolQ it asks without training."""


def get_task(name: str) -> TaskSpec:
    """The task of a name; ``_`` and ``-`` are the same, as are capitals."""
    plain = name.strip().lower().replace("_", "-")
    known = {key.replace("-", ""): spec for key, spec in TASKS.items()}
    spec = known.get(plain.replace("-", ""))
    if spec is None:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}, or glue, or all")
    return spec


def choose_tasks(text: str) -> list[TaskSpec]:
    """The tasks of a command line: names joined by commas, ``glue`` for nine, ``all`` for twelve."""
    chosen: dict[str, TaskSpec] = {}
    for name in text.split(","):
        group = {"glue": GLUE, "all": ALL}.get(name.strip().lower())
        for spec in [get_task(name)] if group is None else group.values():
            chosen[spec.name] = spec
    return list(chosen.values())
