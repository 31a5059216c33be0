"""BLiMP: of two sentences that differ in one point of grammar, the right one should be the likelier.

Decoders are scored by log-likelihood, encoders by pseudo-log-likelihood: each token masked alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from saobp.data.tasks import Split
from saobp.data.tasks.checks import WrongRowsError
from saobp.data.tasks.load import read_table, table_checksum
from saobp.data.tokenizers import tokenizer_text
from saobp.data.word_encoder import CachedEncoder
from saobp.storage.atomic import first_line, write_atomically
from saobp.storage.manifest import file_checksum
from saobp.training.evaluation.perplexity import Advance, masked_losses, tokens_at_a_time
from saobp.training.evaluation.zero_shot import log_likelihoods
from saobp.training.finetune.encoding import Layout

HUB = "nyu-mll/blimp"
ROWS = 67_000
COLUMNS = ("sentence_good", "sentence_bad", "field", "UID", "pairID")
ITEMS = "blimp.csv"
"""In the folder of an evaluation: log-likelihoods of both sentences of every pair."""


def read_blimp(data_dir: str | Path | None) -> Split:
    """All minimal pairs, from ``data_dir/blimp/test.parquet`` or from the hub."""
    if data_dir is None:
        table, source = _from_hub(), HUB
        checksum = table_checksum(table)
    else:
        path = Path(data_dir, "blimp", "test.parquet")
        if not path.exists():
            raise FileNotFoundError(f"blimp needs test.parquet in {str(path.parent)!r}, and there is none")
        table, source, checksum = read_table(path), str(path), file_checksum(path)
    absent = [name for name in COLUMNS if name not in table.column_names]
    if absent:
        raise WrongRowsError(f"{source} has no column {absent[0]!r}: it has {', '.join(table.column_names)}")
    labels = np.zeros(table.num_rows, dtype=np.int64)
    whole = table.num_rows == ROWS
    return Split("test", source, checksum, table, labels, table.num_rows, ROWS, whole)


def _from_hub() -> pa.Table:
    import datasets

    try:
        names = datasets.get_dataset_config_names(HUB)
        parts = [datasets.load_dataset(HUB, name, split="train").data.table for name in names]
    except Exception as problem:
        raise FileNotFoundError(
            f"the hub could not give blimp ({first_line(problem)}): give a data folder by --data-dir"
        ) from problem
    return pa.concat_tables(part.select(COLUMNS) for part in parts)


def judge_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    split: Split,
    *,
    is_decoder: bool,
    advance: Advance | None = None,
) -> pa.Table:
    """Each pair with the log-likelihoods of its sentences in nats: UID, field, pairID, good, bad."""
    sentences = [*split.column("sentence_good"), *split.column("sentence_bad")]
    if is_decoder:
        scores = log_likelihoods(
            model, tokenizer, [("", f" {sentence}") for sentence in sentences], advance=advance
        )
    else:
        scores = pseudo_log_likelihoods(model, tokenizer, sentences, advance=advance)
    columns = {name: split.table[name] for name in ("UID", "pairID")}
    columns["field"] = [field.replace("/", "_") for field in split.column("field")]  # it has both spellings
    return pa.table({**columns, "good": scores[: len(split)], "bad": scores[len(split) :]})


def accuracies(items: pa.Table) -> dict[str, Any]:
    """Accuracy in percent: overall, by field, by phenomenon."""
    right = points(items)
    count, share = len(right), float(right.mean())
    error = float(right.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    groups = {}
    for column in ("field", "UID"):
        names = np.array(items[column].to_pylist())
        groups[column] = {
            str(name): {
                "accuracy": 100 * float(right[names == name].mean()),
                "questions": int((names == name).sum()),
            }
            for name in np.unique(names)
        }
    return {
        "accuracy": 100 * share,
        "error": 100 * error,
        "questions": count,
        "ties": int((right == 0.5).sum()),
        "fields": groups["field"],
        "phenomena": groups["UID"],
    }


def points(items: pa.Table) -> np.ndarray:
    """1 for every correct pair, 0.5 for a tie. ``[pairs]``"""
    margin = items["good"].to_numpy() - items["bad"].to_numpy()
    return (np.sign(margin) + 1) / 2


def difference(items: pa.Table, base: pa.Table) -> dict[str, float]:
    """Difference of accuracy from another model in percent, over common pairs, with its standard error."""
    keys = [
        list(zip(results["UID"].to_pylist(), results["pairID"].to_pylist(), strict=True))
        for results in (items, base)
    ]
    theirs = dict(zip(keys[1], points(base), strict=True))
    apart = np.array(
        [score - theirs[key] for key, score in zip(keys[0], points(items), strict=True) if key in theirs]
    )
    if len(apart) < 2:
        raise ValueError("the two evaluations have no pairs of sentences in common")
    error = float(apart.std(ddof=1)) / math.sqrt(len(apart))
    return {"difference": 100 * float(apart.mean()), "error": 100 * error, "pairs": len(apart)}


def save_items(items: pa.Table, folder: Path) -> None:
    buffer = BytesIO()
    csv.write_csv(items, buffer)
    write_atomically(folder / ITEMS, buffer.getvalue().decode())


def read_items(folder: str | Path) -> pa.Table:
    path = Path(folder, ITEMS)
    if not path.exists():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no {ITEMS}: evaluate --task blimp with --out {folder}"
        )
    return csv.read_csv(path)


@torch.no_grad()
def pseudo_log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    *,
    advance: Advance | None = None,
) -> np.ndarray:
    """Sum over a text's tokens of the log-likelihood of each, masked alone, in nats. ``[texts]``

    Batches have texts of one length, so nothing is padded, and the device is waited for once per length.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("pseudo-log-likelihood needs a tokenizer with a mask token")
    model.eval()
    tokens, sizes = CachedEncoder(tokenizer_text(tokenizer)).encode(texts)
    starts = np.cumsum(sizes) - sizes
    layout = Layout.of(tokenizer)
    special = torch.tensor(tokenizer.all_special_ids, device=model.device)
    totals, done = np.zeros(len(texts)), 0
    for size in np.unique(sizes):
        group = np.flatnonzero(sizes == size)
        inner = tokens[starts[group, None] + np.arange(size)].astype(np.int64)
        before, after = (np.tile(part, (len(group), 1)) for part in (layout.before, layout.after))
        table = torch.from_numpy(np.hstack([before, inner, after])).to(model.device)
        owners, positions = torch.isin(table, special, invert=True).nonzero(as_tuple=True)
        rows = max(1, tokens_at_a_time(model) // max(table.shape[1], 1))
        losses = [
            masked_losses(model, table[owner], position, tokenizer.mask_token_id)
            for owner, position in zip(owners.split(rows), positions.split(rows), strict=True)
            if len(owner)
        ]
        if losses:
            values = torch.cat(losses).double().cpu().numpy()
            totals[group] = -np.bincount(owners.cpu().numpy(), values, len(group))
        done += len(group)
        if advance is not None:
            advance(done, len(texts))
    return totals
