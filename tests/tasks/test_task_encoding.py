"""Sequences equal the tokenizer's own, batches hold every row once, and windows cover every token."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saobp.data.tasks import load_task
from saobp.testing.tiny_models import tiny_tokenizer
from saobp.training.finetune.encoding import BUCKETS, Layout, bucket_length, pair_lengths
from saobp.training.finetune.examples import LengthBatches, choice_texts, encode_examples
from saobp.training.finetune.recipe import recipe_for
from saobp.training.finetune.span import best_spans, encode_spans, window_starts


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("name", ["cola", "mrpc", "race-middle"])
def test_batches_are_what_the_tokenizer_would_make(name, data_dir, tokenizer):
    task = load_task(name, data_dir)
    rows = encode_examples(task.train, task.spec, tokenizer, 128)
    batch = rows.__getitems__([3, 0, 5])
    if task.spec.kind == "choice":
        texts = choice_texts(task.train, task.spec)
        chosen = [4 * row + option for row in (3, 0, 5) for option in range(4)]
    else:
        texts = [task.train.column(column) for column in task.spec.texts]
        chosen = [3, 0, 5]
    given = [[column[row] for row in chosen] for column in texts]
    length = batch["input_ids"].shape[-1]
    assert length in BUCKETS
    expected = tokenizer(*given, padding="max_length", max_length=length, return_tensors="pt")
    for key in ("input_ids", "attention_mask", "token_type_ids"):
        torch.testing.assert_close(batch[key].view(len(chosen), length), expected[key])
    assert batch["labels"].tolist() == task.train.labels[[3, 0, 5]].tolist()
    assert rows.cut == 0


def test_a_decoders_pairs_get_its_end_of_text_between_them():
    tokenizer = tiny_tokenizer("bpe")
    layout = Layout.of(tokenizer)
    assert layout.between.tolist() == [tokenizer.eos_token_id]
    assert len(layout.before) == len(layout.after) == 0
    assert not layout.has_types


def test_long_rows_are_cut_and_counted(data_dir, tokenizer):
    task = load_task("mrpc", data_dir)
    rows = encode_examples(task.train, task.spec, tokenizer, 16)
    assert rows.lengths.max() == 16
    assert rows.cut == 1.0
    assert rows.__getitems__(list(range(24)))["input_ids"].shape == (24, 16)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(2, 60))
def test_of_a_pair_the_longer_text_gives_way(first, second, budget):
    kept = pair_lengths(np.array([first]), np.array([second]), budget)
    a, b = int(kept[0][0]), int(kept[1][0])
    assert a + b == min(first + second, budget)
    assert a <= first
    assert b <= second
    if a < first and b < second:
        assert abs(a - b) <= 1
    if a < first:
        assert a >= b - 1
    if b < second:
        assert b >= a - 1


@given(st.integers(1, 700), st.integers(16, 512))
def test_a_bucket_holds_the_batch_and_not_more_than_the_limit(longest, limit):
    length = bucket_length(min(longest, limit), limit)
    assert min(longest, limit) <= length <= limit


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 3))
def test_an_epoch_holds_every_row_once_in_an_order_of_its_own(lengths, size, epoch):
    batches = LengthBatches(np.array(lengths), size, seed=5, pool=3)
    drawn = batches.epoch(epoch)
    assert sorted(row for batch in drawn for row in batch) == list(range(len(lengths)))
    assert len(drawn) == len(batches)
    assert drawn == LengthBatches(np.array(lengths), size, seed=5, pool=3).epoch(epoch)


def test_batches_are_of_like_length_and_epochs_differ():
    lengths = np.random.default_rng(0).integers(1, 200, 1000)
    batches = LengthBatches(lengths, 10, seed=0)
    drawn = batches.epoch(0)
    spread = np.mean([np.ptp(lengths[batch]) for batch in drawn])
    assert spread < 20
    assert drawn != batches.epoch(1)
    assert drawn != LengthBatches(lengths, 10, seed=1).epoch(0)


@given(st.integers(1, 300), st.integers(4, 60), st.integers(0, 80))
def test_windows_cover_every_token_and_overlap(tokens, room, overlap):
    starts = window_starts(tokens, room, overlap)
    covered = {token for start in starts for token in range(start, min(start + room, tokens))}
    assert covered == set(range(tokens))
    assert all(start < tokens for start in starts)
    steps = {after - before for before, after in pairwise(starts)}
    assert steps <= {max(1, room - min(overlap, room - 1))}


@pytest.mark.parametrize("length", [40, 64, 128])
def test_the_labelled_tokens_of_a_window_are_the_answer(data_dir, tokenizer, length):
    task = load_task("squad", data_dir)
    rows = encode_spans(task.train, tokenizer, recipe_for("squad"), length)
    starts, ends = rows.labels["start_positions"], rows.labels["end_positions"]
    inside = np.flatnonzero(starts > 0)
    assert set(rows.example[inside]) == set(range(24)), "every question has a window with its answer"
    texts = rows.texts(inside, starts[inside], ends[inside])
    assert texts == [rows.answers[question][0] for question in rows.example[inside]]
    assert rows.lengths.max() <= length
    assert (rows.cut > 0) == (length < 128)


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 12))
def test_the_best_span_is_the_best_of_all_pairs(seed, length, longest):
    draw = torch.Generator().manual_seed(seed)
    start, end = torch.randn(3, length, generator=draw), torch.randn(3, length, generator=draw)
    allowed = torch.rand(3, length, generator=draw) < 0.7
    allowed[:, 0] = True
    score, begin, finish = best_spans(start, end, allowed, longest)
    for row in range(3):
        pairs = {
            (i, j): float(start[row, i] + end[row, j])
            for i in range(length)
            for j in range(i, min(length, i + longest))
            if allowed[row, i] and allowed[row, j]
        }
        assert float(score[row]) == pytest.approx(max(pairs.values()))
        assert pairs[int(begin[row]), int(finish[row])] == pytest.approx(float(score[row]))
