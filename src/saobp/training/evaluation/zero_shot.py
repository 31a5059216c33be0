"""Questions with a few candidate answers, asked of a decoder without training.

The prompts are those of lm-evaluation-harness's ``race`` and ``boolq``, and so is the rule: the candidate
with the highest log-likelihood (a sum over its tokens, not divided by its length) after prompt and blank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.data.tasks import Split
from saobp.training.evaluation.perplexity import Advance, token_losses, tokens_at_a_time
from saobp.transformers.input_length import max_input_length

GAP = "  _  ."
"""How a cloze question of RACE ends."""


@dataclass(frozen=True)
class Question:
    prompt: str
    candidates: tuple[str, ...]
    answer: int


def race_questions(split: Split, *, every: bool = False) -> list[Question]:
    """RACE as the harness asks it: of each article the last question, after the others with their answers.

    ``every`` asks every question by itself instead, each as if its article had no other.
    """
    letters = "ABCD"
    questions = []
    for problems in articles_of(split, every=every):
        *solved, last = problems
        earlier = "".join(_solved(row, letters.index(row["answer"])) for row in solved)
        prompt = f"Article: {last['article']}\n\n{earlier}{last['question']}"
        questions.append(Question(prompt, tuple(last["options"]), letters.index(last["answer"])))
    return questions


def boolq_questions(split: Split) -> list[Question]:
    """BoolQ as the harness asks it."""
    return [
        Question(f"{passage}\nQuestion: {question}?\nAnswer:", ("no", "yes"), int(answer))
        for passage, question, answer in zip(
            split.column("passage"), split.column("question"), split.labels, strict=True
        )
    ]


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Share of questions whose right candidate is the likeliest, in percent, with its standard error."""
    pairs = [
        (question.prompt, f" {candidate}") for question in questions for candidate in question.candidates
    ]
    scores = log_likelihoods(model, tokenizer, pairs, advance=advance)
    right, at = 0, 0
    for question in questions:
        question_scores = scores[at : at + len(question.candidates)]
        at += len(question.candidates)
        right += int(np.argmax(question_scores)) == question.answer
    share, count = right / len(questions), len(questions)
    error = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0
    return {"accuracy": 100 * share, "error": 100 * error, "questions": count}


@torch.no_grad()
def log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    *,
    advance: Advance | None = None,
) -> np.ndarray:
    """Log-likelihood in nats of each continuation after its context, ``[pairs]``.

    Inputs are truncated from the left to the model's positions.
    """
    model.eval()
    encoded = encode_pairs(tokenizer, pairs)
    max_length = positions_of(model)
    totals = np.zeros(len(pairs))
    order = sorted(range(len(pairs)), key=lambda pair: -len(encoded[pair][0]) - len(encoded[pair][1]))
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    budget = tokens_at_a_time(model)
    at = 0
    while at < len(order):
        longest = min(max_length, sum(map(len, encoded[order[at]])) - 1)
        batch = order[at : at + max(1, budget // longest)]
        at += len(batch)
        rows = torch.full((len(batch), longest), padding or 0)
        mask = torch.zeros_like(rows)
        where, targets = torch.zeros_like(rows, dtype=torch.bool), []
        for row, pair in enumerate(batch):
            context, continuation = encoded[pair]
            if len(continuation) > max_length:
                raise ValueError(
                    f"a candidate of {len(continuation)} tokens does not fit into {max_length} positions"
                )
            tokens = (context + continuation)[-(max_length + 1) : -1]
            rows[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
            where[row, len(tokens) - len(continuation) : len(tokens)] = True
            targets += continuation
        states = model.base_model(
            input_ids=rows.to(model.device), attention_mask=mask.to(model.device), use_cache=False
        ).last_hidden_state
        losses = token_losses(
            model, states[where.to(model.device)], torch.tensor(targets, device=model.device)
        )
        sizes = [len(encoded[pair][1]) for pair in batch]
        totals[batch] = [-float(part.sum()) for part in losses.cpu().double().split(sizes)]
        if advance is not None:
            advance(at, len(order))
    return totals


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]
) -> list[tuple[list[int], list[int]]]:
    """Tokens of context and continuation, encoded together and split after the context's tokens.

    White space at the end of a context belongs to the continuation. An empty context is the token that
    begins texts, or else the one that ends them, as in lm-evaluation-harness.
    """
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    contexts = [context.rstrip() for context, _ in pairs]
    wholes = [context + continuation for context, continuation in pairs]
    distinct = list(dict.fromkeys(contexts))
    encoded = dict(zip(distinct, _ids(tokenizer, distinct), strict=True))
    return [
        (encoded[context] or [start], ids[len(encoded[context]) :])
        for context, ids in zip(contexts, _ids(tokenizer, wholes), strict=True)
    ]


def positions_of(model: PreTrainedModel) -> int:
    return max_input_length(model) or 1024


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]


def articles_of(split: Split, *, every: bool = False) -> list[list[dict[str, Any]]]:
    """RACE's rows by article, in order; ``every`` makes each row an article of its own."""
    rows = split.table.to_pylist()
    if every:
        return [[row] for row in rows]
    return [list(own) for _, own in groupby(rows, key=lambda row: row["article"])]


def _solved(row: dict[str, Any], answer: int) -> str:
    """An earlier question of an article with its answer."""
    question, option = row["question"], row["options"][answer]
    if question.endswith(GAP):
        return f"{question[: -len(GAP) + 1]}{option}\n"
    return f"Question: {question}\nAnswer: {option}\n"
