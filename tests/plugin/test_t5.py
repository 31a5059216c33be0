"""Encoders of the T5 family: scores are not scaled, and a learned bias of positions is added to them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MT5Config,
    MT5EncoderModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForTokenClassification,
    UMT5Config,
    UMT5EncoderModel,
)

import saobp
from saobp.testing.tiny_models import tiny_batch
from saobp.transformers.apply import attention_modules
from saobp.transformers.capture import record_attention
from saobp.transformers.layer_refinement import strength_parameters
from saobp.transformers.projections import HeadParts

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
}  # fmt: skip
ENCODERS = {
    "t5": (T5EncoderModel, T5Config),
    "mt5": (MT5EncoderModel, MT5Config),
    "umt5": (UMT5EncoderModel, UMT5Config),
}


def encoder(family: str = "t5", model: Any = None, **options: Any) -> Any:
    """With biases of positions large enough to matter."""
    own, config = ENCODERS[family]
    torch.manual_seed(0)
    made = (model or own)(config(**SHAPE, **options)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(0, 1.5)
    return made


def states(model: Any, batch: dict[str, Tensor] | None = None) -> Tensor:
    with torch.no_grad():
        return model(**(batch or tiny_batch())).last_hidden_state


def real() -> Tensor:
    return tiny_batch()["attention_mask"].bool()


def bias_of(model: Any) -> torch.nn.Parameter:
    return next(one for name, one in model.named_parameters() if "relative_attention_bias" in name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ENCODERS)
def test_strength_zero_is_eager_attention(family: str, side: str) -> None:
    model, batch = encoder(family, attn_implementation="eager"), tiny_batch(side=side)
    seen = batch["attention_mask"].bool()
    expected = states(model, batch)
    refined = states(saobp.apply(model, "high:0"), batch)
    torch.testing.assert_close(refined[seen], expected[seen], atol=2e-6, rtol=2e-5)
    without = {"input_ids": batch["input_ids"]}
    refined = states(model, without)
    torch.testing.assert_close(refined, states(saobp.remove(model), without), atol=2e-6, rtol=2e-5)


def first_rows(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**tiny_batch(), output_attentions=True).attentions[0]


@pytest.mark.parametrize("refinement", ["high:0.7", "low:0.4,steps=2", "elemmul"])
@pytest.mark.parametrize("family", ENCODERS)
def test_rows_are_those_of_the_operation(family: str, refinement: str) -> None:
    model = encoder(family, attn_implementation="eager")
    plain = first_rows(model)
    refined = first_rows(saobp.apply(model, refinement))
    expected = saobp.refine(plain, refinement, padding_mask=real())
    assert (expected - plain).abs().max() > 1e-3
    for text, row in zip(real(), range(2), strict=True):
        torch.testing.assert_close(refined[row][:, text], expected[row][:, text], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ENCODERS)
def test_padding_changes_nothing(family: str) -> None:
    model = saobp.apply(encoder(family), "high:0.7")
    alone = {name: one[1:, :-3] for name, one in tiny_batch().items()}
    torch.testing.assert_close(states(model)[1:, :-3], states(model, alone), atol=1e-5, rtol=1e-4)


def loss(model: Any) -> Tensor:
    return model(**tiny_batch()).last_hidden_state[real()].pow(3).sum()


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    loss(model).backward()
    return [one.grad for name, one in model.named_parameters() if "relative_attention_bias" in name]


@pytest.mark.parametrize("family", ENCODERS)
def test_at_strength_zero_the_bias_has_the_gradient_of_eager_attention(family: str) -> None:
    model = encoder(family, attn_implementation="eager").train()
    expected = gradients(model)
    assert all(one.abs().max() > 1e-3 for one in expected)
    for refined, own in zip(gradients(saobp.apply(model, "high:0")), expected, strict=True):
        torch.testing.assert_close(refined, own, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_the_bias_is_that_of_finite_differences() -> None:
    model = saobp.apply(encoder().double(), "high:0.7").train()
    (found,) = gradients(model)
    bias, step, values = bias_of(model), 0.01, []  # T5's norms are in single precision
    with torch.no_grad():
        for change in (step, -step):
            bias[1, 2] += change
            values.append(float(loss(model)))
            bias[1, 2] -= change
    assert float(found[1, 2]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-2)


def test_strengths_learn_and_are_saved(tmp_path: Path) -> None:
    model = saobp.apply(encoder(), "high:learned").train()
    gradients(model)
    assert all(one.grad is not None and one.grad.abs().max() > 0 for one in strength_parameters(model))
    with torch.no_grad():
        for one in strength_parameters(model):
            one.fill_(0.6)
    model.eval().save_pretrained(tmp_path)
    loaded = saobp.load(tmp_path, T5EncoderModel)
    torch.testing.assert_close(states(loaded), states(model))
    assert float((states(loaded) - states(saobp.remove(copy.deepcopy(model)))).abs().max()) > 1e-4


def test_gradient_checkpointing_changes_nothing() -> None:
    model = saobp.apply(encoder(), "high:learned").train()
    (expected,) = gradients(model)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(model)[0], expected)


def test_heads_of_token_classification() -> None:
    model = saobp.apply(encoder(model=T5ForTokenClassification), "high:0.7")
    with torch.no_grad():
        assert model(**tiny_batch()).logits.shape == (2, 9, 2)


def test_the_encoder_of_a_whole_model() -> None:
    whole = encoder(model=T5ForConditionalGeneration)
    with pytest.raises(ValueError, match="cross-attention"):
        saobp.apply(whole, "high:0.7")
    inputs = {**tiny_batch(), "decoder_input_ids": tiny_batch()["input_ids"]}
    with torch.no_grad():
        plain = whole(**inputs).logits
        saobp.apply(whole.get_encoder(), "high:0.7")
        assert (whole(**inputs).logits - plain).abs().max() > 1e-4


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_recorded_rows_are_those_that_eager_attention_returns(implementation: str) -> None:
    """Also in the decoder, whose causal mask sdpa gets in no mask at all."""
    model = encoder(model=T5ForConditionalGeneration, attn_implementation="eager")
    ids = tiny_batch(padding=0)["input_ids"]
    with torch.no_grad():
        found = model(input_ids=ids, decoder_input_ids=ids, output_attentions=True)
        model.set_attn_implementation(implementation)
        with record_attention(model) as recorded:
            model(input_ids=ids, decoder_input_ids=ids)
    own = [rows[0] for name, rows in recorded.items() if name.endswith("SelfAttention")]
    for rows, expected in zip(own, [*found.encoder_attentions, *found.decoder_attentions], strict=True):
        torch.testing.assert_close(rows, expected)


def test_what_adds_a_bias_to_its_logits_cannot_be_clipped() -> None:
    (_, module), *_ = attention_modules(encoder())
    with pytest.raises(ValueError, match="adds a bias of positions to its logits"):
        HeadParts(module)


def test_a_bias_of_causal_attention_is_refused() -> None:
    model = saobp.apply(encoder(), "high:0.7")
    for _, module in attention_modules(model):
        module.is_causal = True
    with pytest.raises(ValueError, match="'position_bias'"):
        states(model)
