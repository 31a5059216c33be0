"""Verdicts and kinds of trained models. SAOBP_MODELS_DIR names the folder that holds theirs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from saobp.metrics.diagnosis.diagnose import Diagnosis, diagnose
from saobp.metrics.diagnosis.loading import load_model

pytestmark = pytest.mark.slow

TEXTS = [
    "The bridge was built in 1874, after two earlier ones had been carried away by floods. It has five "
    "arches of stone; the longest spans 32 metres. In 1931 it was widened for motor traffic, and since "
    "1998 only people on foot may cross it. The town paid for the repairs, which took three years.",
    "Honey bees tell each other where flowers are. A bee that has found a rich field returns to the hive "
    "and dances on the comb: the angle of the dance shows the direction, its length shows the distance. "
    "Other bees follow the dancer, then fly out and find the field, even if it lies kilometres away.",
]


def diagnosed(name: str) -> Diagnosis:
    folder = Path(os.environ.get("SAOBP_MODELS_DIR", "")) / name
    if "SAOBP_MODELS_DIR" not in os.environ or not (folder / "config.json").exists():
        pytest.skip(f"SAOBP_MODELS_DIR names no folder that holds the model {name!r}")
    model, tokenizer = load_model(str(folder))
    return diagnose(
        model, tokenizer, TEXTS, subject=name, statistics=["gtd", "attention_entropy", "sink_mass"]
    )


def test_most_heads_of_a_good_decoder_are_not_diffuse() -> None:
    found = diagnosed("smollm2")
    assert len(found.heads) == 270
    assert found.count("diffuse") < 27
    assert found.count("healthy") > 60
    assert found.count("sink") > 60
    kinds = Counter(head.kind for head in found.heads)
    assert kinds["induction"] >= 4
    assert kinds["previous token"] >= 2
    assert kinds["first token"] > 60
    assert kinds["next token"] == 0


def test_kinds_of_an_encoder() -> None:
    found = diagnosed("minilm")
    assert len(found.heads) == 72
    kinds = Counter(head.kind for head in found.heads)
    assert kinds["previous token"] >= 1
    assert kinds["next token"] >= 1
    assert kinds["induction"] == 0
    assert found.count("diffuse") < 36


def test_an_encoder_with_a_position_bias() -> None:
    found = diagnosed("mpnet")
    assert len(found.heads) == 144
    assert sum(head.kind == "delimiter" for head in found.heads) > 14
    assert found.count("undefined") == 0


def test_a_tiny_decoder_has_no_induction() -> None:
    found = diagnosed("stories260K")
    assert len(found.heads) == 40
    assert all(head.kind != "induction" for head in found.heads)
