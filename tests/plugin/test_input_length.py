"""How many tokens a model takes, and what says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from saobp.testing.tiny_models import tiny_model
from saobp.training.checkpoints import most_positions
from saobp.training.evaluation.zero_shot import positions_of
from saobp.transformers.input_length import max_input_length


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama", "modernbert"])
def test_a_model_takes_its_longest_input(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    longest = max_input_length(model)
    assert longest is not None
    assert model(torch.full((1, longest), 5)).logits.isfinite().all()
    assert positions_of(model) == longest
    model.save_pretrained(tmp_path)
    assert most_positions(tmp_path) == longest
    if family == "roberta":  # the padding token and those before it have positions of their own
        assert longest < model.config.max_position_embeddings
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5))
