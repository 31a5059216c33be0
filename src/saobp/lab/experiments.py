"""All experiments: what is trained, measured and tabulated.

``saobp.lab.experiment_plan`` turns a selection of them into runs, which they share; ``saobp.lab.pages`` has
one function for each that writes its page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from saobp.data.tasks import ALL, GLUE
from saobp.lab.scales import PAPER_BATCHES

FACTORS = ("original", "high", "low", "elemmul")
"""The four rows of the paper's tables."""
FORMS = (*FACTORS, "high-listing", "low-listing", "elemmul-prior")
LAMBDAS = ("original", "high@0.02", "high@0.05", "high@0.1", "high@0.2", "learned")
EVERY = (
    *("original", "high", "learned", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior"),
    *("high@0.02", "high@0.05", "high@0.1", "two-steps", "three-steps", "entropy", "eigen"),
)
DECODERS = ("original", "paper", "strict")
CAUSAL_RIVALS = (
    *("original", "learned", "key-bias", "temperature", "sink", "softmax-plus-one", "gate", "qk-norm"),
    *("sigma-reparam", "query-bias", "learned-gate", "learned-qk-norm", "learned-temperature"),
    *("key-bias-temperature", "by-distance", "message-gate", "alternating", "later-steps"),
)
RIVALS = (*CAUSAL_RIVALS, "sinkhorn", "sinkhorn-3", "entropy", "eigen")


@dataclass(frozen=True)
class Experiment:
    """One table, figure or question.

    asks: the paper's claim, or the question
    bert, gpt2, modernbert, llama: methods that are trained in each family
    measures:  taken of every trained model (see ``saobp.lab.measurements``)
    tasks:     that the BERT models are fine-tuned on
    task_seeds: seeds of fine-tuning for each model; 0 for the one that it was pretrained with
    seeds:     how many, unless the command says otherwise
    corpora: single corpora on which all of this is repeated, in addition to the mixture
    batches: batch sizes at which all of this is repeated with the recipe ``paper``, which does not print one
    logs: whether its page also plots training logs; with ``batches``, also those of runs that did not finish
    """

    name: str
    kind: Literal["table", "figure", "question", "arena"]
    title: str
    asks: str
    bert: tuple[str, ...] = ()
    gpt2: tuple[str, ...] = ()
    modernbert: tuple[str, ...] = ()
    llama: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    task_seeds: int = 0
    seeds: int = 3
    corpora: tuple[str, ...] = field(default=())
    batches: tuple[int, ...] = ()
    logs: bool = False


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "pretraining",
            "table",
            "Held-out perplexity of every method",
            "No such table. Here are all methods at the same tokens, in pairs of the same seed.",
            bert=EVERY,
            logs=True,
        ),
        Experiment(
            "gtd",
            "table",
            "GTD, indirect entropy, accuracy, CC and BC on RACE-Middle",
            "Models that are more accurate have higher GTD and indirect entropy and lower BC.",
            bert=FACTORS,
            measures=("race-middle",),
            tasks=("race-middle",),
        ),
        Experiment(
            "tasks",
            "table",
            "GLUE, HellaSwag, RACE-Middle and SQuAD",
            "High is better than Original on all of them, except on SQuAD in the small size.",
            bert=FACTORS,
            tasks=tuple(ALL),
        ),
        Experiment(
            "glue",
            "table",
            "GLUE in detail",
            "High gives moderate improvements on the majority of GLUE.",
            bert=FACTORS,
            tasks=tuple(GLUE),
        ),
        Experiment(
            "baselines",
            "table",
            "Regularizer baselines",
            "High has a lower perplexity and higher accuracy than Entropy-Reg and Eigen-Reg.",
            bert=("original", "high", "entropy", "eigen"),
            measures=("wikitext",),
            tasks=("qnli", "squad"),
        ),
        Experiment(
            "decoders",
            "table",
            "Decoders",
            "High has a much lower perplexity than Original and answers zero-shot questions better.",
            gpt2=DECODERS,
            measures=("zero-shot",),
        ),
        Experiment(
            "gtd-correlation",
            "table",
            "Single-layer against cross-layer GTD",
            "GTD within a layer follows perplexity and accuracy at least as closely as GTD across layers.",
            bert=("original", "high"),
            tasks=("sst2", "hellaswag", "race-middle"),
            logs=True,
        ),
        Experiment(
            "sparsity",
            "table",
            "Sparsity of attention",
            "High makes attention less sparse in every size.",
            bert=("original", "high"),
            measures=("squad",),
        ),
        Experiment(
            "cost",
            "table",
            "Computational cost",
            "A refined step is slower: 33 % for High at the mini scale.",
            bert=FACTORS,
            measures=("cost",),
            seeds=1,
        ),
        Experiment(
            "attention-maps",
            "figure",
            "Attention before and after",
            "Refinement spreads attention that had collapsed onto a few tokens.",
            bert=("original", "high", "learned"),
            measures=("maps",),
            seeds=1,
        ),
        Experiment(
            "gtd-graph",
            "figure",
            "GTD against clustering and betweenness",
            "GTD rises with CC (r = 0.70) and falls with BC (r = -0.43).",
            bert=("original", "high"),
            measures=("race-middle",),
        ),
        Experiment(
            "gtd-performance",
            "figure",
            "GTD against performance over checkpoints",
            "GTD follows accuracy (|r| > 0.5) and falls with perplexity.",
            bert=("original", "high"),
            tasks=("sst2", "hellaswag", "race-middle"),
            logs=True,
        ),
        Experiment(
            "layers",
            "figure",
            "GTD and entropies by layer on RACE-Middle",
            "High keeps GTD and entropy up in deep layers, where the original collapses.",
            bert=(*FORMS, "learned"),
            measures=("race-middle",),
        ),
        Experiment(
            "sparsity-maps",
            "figure",
            "Sparsity maps",
            "Deep layers of High attend more densely.",
            bert=("original", "high"),
            measures=("maps",),
            seeds=1,
        ),
        Experiment(
            "squad-profile",
            "figure",
            "GTD and entropies by layer on SQuAD",
            "High keeps entropy up in deep layers, and the best variant on SQuAD has a lower GTD.",
            bert=FACTORS,
            measures=("squad",),
        ),
        Experiment(
            "sst2-profile",
            "figure",
            "GTD and entropies by layer on SST-2",
            "High keeps entropy up in deep layers, and on SST-2 a higher GTD goes with better accuracy.",
            bert=FACTORS,
            measures=("sst2",),
        ),
        Experiment(
            "decoder-leak",
            "question",
            "Does the decoder's gain survive when the future is not leaked?",
            "Original, the paper's form and the strict form, at the same tokens and seeds.",
            gpt2=DECODERS,
            measures=("leak", "zero-shot"),
        ),
        Experiment(
            "printed-forms",
            "question",
            "Which printed form behaves as the paper reports?",
            "Equation or listing for High and Low; ElemMul with or without a prior.",
            bert=FORMS,
            measures=("race-middle",),
            tasks=("race-middle",),
        ),
        Experiment(
            "strengths",
            "question",
            "Does High help at matched tokens?",
            "λ = 0.02, 0.05, 0.1 and 0.2 against Original in pairs of the same seed.",
            bert=LAMBDAS,
        ),
        Experiment(
            "learned",
            "question",
            "Do learned strengths hold up?",
            "Five paired seeds, another text, after fine-tuning, and strict causal.",
            bert=("original", "learned"),
            gpt2=("original", "learned"),
            tasks=tuple(ALL),
            seeds=5,
            corpora=("gutenberg_books",),
        ),
        Experiment(
            "steps",
            "question",
            "Do two or three steps help?",
            "One, two and three steps of belief propagation at the same strength.",
            bert=("original", "high", "two-steps", "three-steps"),
        ),
        Experiment(
            "plateau",
            "question",
            "When does attention come to be of use?",
            "At the paper's printed rate and steps, by batch size, which it does not print: where do models "
            "leave the plateau at which the order of words is of no use, and does High leave it sooner?",
            bert=("original", "high"),
            batches=PAPER_BATCHES,
            logs=True,
        ),
        Experiment(
            "one-model-many-seeds",
            "question",
            "How far do scores of one and the same model vary?",
            "One model of each method is fine-tuned with five seeds: could gaps as large as the paper's come "
            "from fine-tuning alone?",
            bert=("original", "high"),
            tasks=("mnli", "squad", "qqp", "race-middle"),
            task_seeds=5,
            seeds=1,
        ),
        Experiment(
            "arena",
            "arena",
            "Which way of attention is better?",
            "Every other method against plain attention on the recipe modern, encoder and strict decoder.",
            modernbert=RIVALS,
            llama=CAUSAL_RIVALS,
            seeds=8,
        ),
    )
}


def choose_experiments(names: str) -> list[Experiment]:
    """Targets joined by commas; ``all``, ``tables``, ``figures`` or ``questions`` for groups of them.

    The arena, which has as many runs as all others together, is in no group.
    """
    groups = {
        "all": [name for name, one in EXPERIMENTS.items() if one.kind != "arena"],
        "tables": [name for name, one in EXPERIMENTS.items() if one.kind == "table"],
        "figures": [name for name, one in EXPERIMENTS.items() if one.kind == "figure"],
        "questions": [name for name, one in EXPERIMENTS.items() if one.kind == "question"],
    }
    chosen: dict[str, Experiment] = {}
    for name in (part.strip() for part in names.split(",")):
        for one in groups.get(name, [name]):
            if one not in EXPERIMENTS:
                raise ValueError(
                    f"unknown target {one!r}: choose from {', '.join(EXPERIMENTS)}, or {', '.join(groups)}"
                )
            chosen[one] = EXPERIMENTS[one]
    return list(chosen.values())
