"""The scores of a model on a few sentences, for the explorer of the page, quantized to 16 bits an entry.

Softmax is invariant to a constant added to a row, so log probabilities are as good as scores. Each is stored
as the integer ``sqrt(-log p) / step``. With the usual step the error of a probability is
below 5e-5 and that of its logarithm a few parts in ten thousand, at large and small values alike; half
precision would lose four times as much near p = 0.4, and needs more code to read in a browser.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.metrics.attention_inputs import AttentionInputs
from saobp.metrics.diagnosis.diagnose import check_weights
from saobp.metrics.diagnosis.text_batches import CHARACTERS_PER_TOKEN
from saobp.metrics.observed_attention import ObservedAttention
from saobp.refinement import MAX_STRENGTH
from saobp.runs.layout import EXPLORER
from saobp.runs.tolerant_reader import number
from saobp.storage.atomic import write_atomically
from saobp.transformers.input_length import max_input_length

FORMAT = 1
MAX_TOKENS = 48
MAX_SENTENCES = 6
TEXT_CHARACTERS = 600
"""Length limit of a sentence's label; its tokens are complete."""


def explorer_data(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    max_tokens: int = MAX_TOKENS,
    subject: str = "model",
) -> dict[str, Any]:
    """Run ``model`` on each sentence and store the scores of every head before refinement.

    Sentences are cut to ``max_tokens``, noted in ``left_out``. The strengths of a refined model are stored
    too, so that the page can show its own attention. JSON-serialisable, in the format of the page.
    """
    if max_tokens < 2:
        raise ValueError(f"sentences can be cut to at least 2 tokens, not to {max_tokens}")
    check_weights(model, subject)
    limit = max_input_length(model)
    max_length = max_tokens if limit is None else min(max_tokens, limit)
    looks, left_out = [], []
    shortened: dict[int, list[str]] = {}
    for index, sentence in enumerate(sentences, 1):
        ids, tokens, cut = encode_sentence(tokenizer, sentence, max_length)
        if len(tokens) < 2:
            left_out.append(f"Sentence {index} has fewer than two tokens and is not shown.")
            continue
        if cut:
            shortened.setdefault(len(tokens), []).append(str(index))
        looks.append((sentence[:TEXT_CHARACTERS], tokens, _layers_of(model, ids)))
    for count, cut_ones in shortened.items():
        which = (
            f"s {', '.join(cut_ones)} are cut to their" if cut_ones[1:] else f" {cut_ones[0]} is cut to its"
        )
        left_out.append(f"Sentence{which} first {count} tokens.")
    if not looks:
        raise ValueError("there is no sentence of at least two tokens to look at")
    layers = looks[0][2]
    if not layers:
        raise ValueError(f"{subject} ran without any self-attention over a whole sentence to look at")
    return {
        "format": FORMAT,
        "subject": subject,
        "layers": [layer["name"] for layer in layers],
        "in_order": [layer["in_order"] for layer in layers],
        "refinement": layers[0]["refinement"],
        "strengths": [layer["strengths"] for layer in layers],
        "sentences": [
            {"text": text, "tokens": tokens, "scores": [layer["heads"] for layer in recorded]}
            for text, tokens, recorded in looks
        ],
        "left_out": left_out,
    }


def write_explorer(data: dict[str, Any], folder: Path) -> Path:
    """``explorer.json`` in a run folder, read by the report."""
    path = folder / EXPLORER
    write_atomically(path, json.dumps(data, allow_nan=False) + "\n")
    return path


def is_explorer(data: dict[str, Any]) -> bool:
    """Whether this is valid data for the page: all fields, and sizes that match the tokens."""
    try:
        layers, refinement = len(data["layers"]), data["refinement"]
        return (
            data["format"] == FORMAT
            and layers == len(data["in_order"]) == len(data["strengths"])
            and (refinement is None or {"factor", "steps", "damping"} <= set(refinement))
            and all(
                layer is None or all(number(strength) is not None for strength in layer)
                for layer in data["strengths"]
            )
            and all(isinstance(note, str) for note in data["left_out"])
            and isinstance(data["subject"], str)
            and len(data["sentences"]) > 0
            and all(_is_sentence(sentence, layers) for sentence in data["sentences"])
        )
    except (KeyError, TypeError, ValueError):
        return False


def _is_sentence(sentence: dict[str, Any], layers: int) -> bool:
    length, scores = len(sentence["tokens"]), sentence["scores"]
    size = {True: length * (length + 1), False: 2 * length * length}
    return (
        isinstance(sentence["text"], str)
        and all(isinstance(token, str) for token in sentence["tokens"])
        and len(scores) == layers
        and any(head is not None for heads in scores for head in heads)
        and all(
            head is None
            or (
                len(base64.b64decode(head["codes"], validate=True)) == size[head["triangle"]]
                and float(head["step"]) > 0
            )
            for heads in scores
            for head in heads
        )
    )


def encode_sentence(
    tokenizer: PreTrainedTokenizerBase, sentence: str, max_length: int
) -> tuple[Tensor, list[str], bool]:
    """Ids ``[1, length]``, readable tokens, and whether the sentence was truncated."""
    short = sentence[: CHARACTERS_PER_TOKEN * (max_length + 1)]
    whole = tokenizer(short, truncation=True, max_length=max_length + 1)["input_ids"]
    cut = len(whole) > max_length or len(short) < len(sentence)
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(short, truncation=True, max_length=max_length, return_offsets_mapping=fast)
    ids = list(encoded["input_ids"])
    indices = encoded["offset_mapping"] if fast else [(0, 0)] * len(ids)
    names = tokenizer.convert_ids_to_tokens(ids)
    tokens = [
        _readable(str(name), short[start:end]) for name, (start, end) in zip(names, indices, strict=True)
    ]
    return torch.tensor([ids]), tokens, cut


def _readable(name: str, written: str) -> str:
    """The text of a token; its name if it has none, as [CLS]."""
    part = written.strip()
    if not part:
        return name if not written else "␣"
    return f"##{part}" if name.startswith("##") and not part.startswith("##") else part


def _layers_of(model: PreTrainedModel, ids: Tensor) -> list[dict[str, Any]]:
    """Attention inputs of each self-attention layer on one sentence, in order of execution."""
    layers: list[dict[str, Any]] = []

    def keep(name: str, stack: str, heads: AttentionInputs) -> None:
        del stack
        if heads.query.shape[-2] != ids.shape[1]:
            return
        count = heads.query.shape[1]
        scores, graph = heads.select(slice(0, 1), slice(0, count)).scores()
        rows = torch.log_softmax(graph.mask_scores(scores.double()), -1)[0].cpu().numpy()
        refined = heads.refinement.factor != "none"
        strengths = heads.strength.double().clamp(-MAX_STRENGTH, MAX_STRENGTH).tolist()
        if heads.refinement.factor.startswith("low"):
            strengths = [-strength for strength in strengths]
        layers.append(
            {
                "name": name,
                "in_order": heads.has_causal_messages(),
                "refinement": _plain(heads.refinement.to_dict()) if refined else None,
                "strengths": [round(strength, 6) for strength in strengths] if refined else None,
                "heads": [encode_head(head_rows) for head_rows in rows],
            }
        )

    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad(), ObservedAttention(model, keep).observing():
        model(input_ids=ids.to(device), attention_mask=torch.ones_like(ids).to(device))
    return layers


def _plain(refinement: dict[str, Any]) -> dict[str, Any]:
    """Without the strength, which is stored per head."""
    return {name: value for name, value in refinement.items() if name != "strength"}


USUAL_STEP = 1e-4
HIDDEN = 65535
"""The code of a masked key."""


def encode_head(log_rows: NDArray[numpy.float64]) -> dict[str, Any]:
    """Log probabilities ``[length, length]``, minus infinity at masked keys, to JSON.

    A head whose range exceeds the usual step's gets a larger step. Of a causal head only the lower triangle
    is stored, row-major.
    """
    seen = numpy.isfinite(log_rows)
    roots = numpy.sqrt(numpy.maximum(-numpy.where(seen, log_rows, 0.0), 0.0))
    step = max(USUAL_STEP, float(roots.max(initial=0.0)) / (HIDDEN - 1))
    codes = numpy.where(seen, numpy.rint(roots / step), HIDDEN).astype("<u2")
    triangle = bool((codes[~numpy.tri(len(codes), dtype=bool)] == HIDDEN).all()) and len(codes) > 1
    if triangle:
        codes = codes[numpy.tri(len(codes), dtype=bool)]
    return {"step": step, "triangle": triangle, "codes": base64.b64encode(codes.tobytes()).decode()}


def decode_head(head: dict[str, Any], length: int) -> NDArray[numpy.float64]:
    """Decoded log probabilities, as the page has them, ``[length, length]``."""
    codes = numpy.frombuffer(base64.b64decode(head["codes"]), "<u2")
    values = numpy.where(codes == HIDDEN, -numpy.inf, -((codes * head["step"]) ** 2))
    if not head["triangle"]:
        return values.reshape(length, length)
    rows = numpy.full((length, length), -numpy.inf)
    rows[numpy.tri(length, dtype=bool)] = values
    return rows
