"""Transformers' common model and generation tests with every model refined, for ten families.

Run with ``TRANSFORMERS_SOURCE=folder pytest -m slow tests/plugin/test_transformers_own.py``.
"""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers
from transformers.utils import logging
from transformers_source import SOURCE, ModelTester, mixins, refined

from saobp.testing.tiny_models import DECODERS, FAMILIES, tiny_model
from saobp.transformers.layer_refinement import named_refinements

pytestmark = pytest.mark.slow

NAMES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "albert": "Albert",
    "modernbert": "ModernBert",
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen3": "Qwen3",
}

CANNOT_APPLY = {
    "test_attention_outputs": "sets config.output_attentions, which Transformers refuses unless eager",
    "test_can_set_attention_dynamically": "asks for a model with eager attention, then with sdpa attention",
    "test_eager_matches_sdpa_inference": "compares eager with sdpa attention",
    "test_sdpa_can_dispatch": "asks for a model with sdpa attention",
}
"""Tests that ask for something that a refined model is not, by how their names begin."""


def classes_of(family: str) -> tuple[type, ...]:
    """Base model, language model and classifier of a family."""
    name = NAMES[family]
    heads = {"gpt2": "LMHeadModel"}.get(family, "ForCausalLM" if family in DECODERS else "ForMaskedLM")
    kinds = (f"{name}Model", f"{name}{heads}", f"{name}ForSequenceClassification")
    return tuple(getattr(transformers, kind) for kind in kinds)


def case_of(family: str, common: type, generation: type) -> type:
    """One of Transformers' test classes for a family."""
    bases = (common, generation) if family in DECODERS else (common,)

    class Case(*bases, unittest.TestCase):  # type: ignore[misc]
        all_model_classes: ClassVar[tuple[type, ...]] = classes_of(family)

        def setUp(self) -> None:
            super().setUp()
            for name, reason in CANNOT_APPLY.items():
                if self._testMethodName.startswith(name):
                    self.skipTest(f"cannot apply: {reason}")
            self.model_tester = ModelTester(lambda: tiny_model(family))
            logging.set_verbosity_warning()  # which some tests read
            self.addCleanup(logging.set_verbosity_error)
            context = refined(self.all_model_classes)
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)

    Case.__name__ = Case.__qualname__ = f"{NAMES[family]}Test"
    return Case


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_refined_when_they_are_built_and_loaded(family: str, tmp_path: Path) -> None:
    config = tiny_model(family).config
    with refined(classes_of(family)):
        for kind in classes_of(family):
            built = kind(config)
            built.save_pretrained(tmp_path)
            for model in (built, kind.from_pretrained(tmp_path)):
                assert model.config._attn_implementation == "saobp"
                assert all((own() == 0.5).all() for _, own in named_refinements(model))
                assert any(True for _ in named_refinements(model))


if SOURCE:
    pytest.importorskip("parameterized", reason="Transformers' tests need the package parameterized")
    _mixins: Any = mixins(SOURCE)
    for _family in FAMILIES:
        _case = case_of(_family, *_mixins)
        globals()[_case.__name__] = _case
    del _case


@pytest.mark.skipif(
    not SOURCE, reason="TRANSFORMERS_SOURCE does not name an unpacked source of Transformers with its tests"
)
def test_every_family_has_the_tests_of_transformers() -> None:
    for family in FAMILIES:
        case = globals()[f"{NAMES[family]}Test"]
        assert any(name.startswith("test_") for name in dir(case))
