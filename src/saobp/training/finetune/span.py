"""Extractive question answering: overlapping windows over a long context, best span of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from saobp.data.tasks import Split
from saobp.training.finetune.encoding import Layout, Sequences, TokenTable
from saobp.training.finetune.examples import Examples
from saobp.training.finetune.recipe import FinetuneRecipe


@dataclass(frozen=True)
class SpanExamples(Examples):
    """Windows: ``example`` is the question of each, ``contexts`` the text of each question."""

    example: np.ndarray = None  # type: ignore[assignment]
    contexts: Sequence[str] = ()
    answers: Sequence[Sequence[str]] = ()

    def texts(self, windows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[str]:
        """The characters from token ``starts`` to token ``ends`` (positions in the sequence) of windows."""
        sequences = self.sequences
        characters = sequences.table.characters
        assert sequences.second is not None
        assert characters is not None
        shift = sequences.second_starts[windows] - sequences.second_offset[windows]
        base = sequences.table.starts[sequences.second[windows]] + shift
        return [
            self.contexts[self.example[window]][characters[begin, 0] : characters[end, 1]]
            for window, begin, end in zip(windows, base + starts, base + ends, strict=True)
        ]


def encode_spans(
    split: Split, tokenizer: PreTrainedTokenizerFast, recipe: FinetuneRecipe, length: int
) -> SpanExamples:
    """Windows of a split; neighbours share a third of their length, and a question is cut to its limit.

    Labels are the positions of the first answer's tokens, or 0 in a window without it.
    """
    questions, contexts = split.column("question"), split.column("context")
    answers = split.column("answers")
    table = TokenTable(tokenizer, [*questions, *contexts], characters=True)
    layout = Layout.of(tokenizer)
    question_rows, context_rows = table.rows(questions), table.rows(contexts)
    question_lengths = np.minimum(table.lengths[question_rows], min(recipe.question, length // 2))
    rooms = length - layout.specials(True) - question_lengths
    example, starts, sizes = [], [], []
    for row, (tokens, room) in enumerate(zip(table.lengths[context_rows], rooms, strict=True)):
        for begin in window_starts(int(tokens), int(room), length // 3):
            example.append(row)
            starts.append(begin)
            sizes.append(min(int(room), int(tokens) - begin))
    chosen = np.array(example, dtype=np.int64)
    sequences = Sequences(
        table, layout, question_rows[chosen], question_lengths[chosen], context_rows[chosen],
        np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64),
    )  # fmt: skip
    first, last = _answer_tokens(table, context_rows, answers)
    labels = _positions(sequences, first[chosen], last[chosen])
    cut = float((np.bincount(chosen, minlength=len(questions)) > 1).mean())
    accepted = [answer["text"] for answer in answers]
    return SpanExamples(sequences, labels, length, 1, cut, chosen, contexts, accepted)


def window_starts(tokens: int, room: int, overlap: int) -> list[int]:
    """Starts of windows of ``room`` tokens that cover ``tokens`` and overlap."""
    step = max(1, room - min(overlap, room - 1))
    return [0, *range(step, max(tokens - room, 0) + step, step)] if tokens > room else [0]


def _answer_tokens(
    table: TokenTable, contexts: np.ndarray, answers: Sequence[dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of each question's first answer, counted in its context."""
    assert table.characters is not None
    first, last = np.empty(len(contexts), np.int64), np.empty(len(contexts), np.int64)
    for row, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
        spans = table.characters[table.starts[context] : table.starts[context + 1]]
        begin = answer["answer_start"][0]
        end = begin + len(answer["text"][0])
        first[row] = np.searchsorted(spans[:, 1], begin, side="right")
        last[row] = np.searchsorted(spans[:, 0], end, side="left") - 1
    return first, last


def _positions(sequences: Sequences, first: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
    begin, end = first - sequences.second_starts, last - sequences.second_starts
    inside = (begin >= 0) & (end < sequences.second_lengths) & (begin <= end)
    offset = sequences.second_offset
    return {
        "start_positions": np.where(inside, begin + offset, 0),
        "end_positions": np.where(inside, end + offset, 0),
    }


def best_spans(start: Tensor, end: Tensor, allowed: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best span of each window: score, start and end, ``[windows]``.

    start, end: logits ``[windows, length]``; allowed: True at context tokens.
    Searches all pairs with start <= end < start + ``longest``, one distance at a time.
    """
    start = start.float().masked_fill(~allowed, -torch.inf)
    end = end.float().masked_fill(~allowed, -torch.inf)
    length = start.shape[1]
    by_distance = []
    for distance in range(min(longest, length)):
        sums = start[:, : length - distance] + end[:, distance:]
        by_distance.append(sums.max(1))
    scores = torch.stack([best.values for best in by_distance], 1)
    positions = torch.stack([best.indices for best in by_distance], 1)
    score, apart = scores.max(1)
    begin = positions.gather(1, apart[:, None])[:, 0]
    return score, begin, begin + apart
