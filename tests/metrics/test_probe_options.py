"""Registry calls with a bias of positions, bounded scores or sinks; models partly outside the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from returned_families import SHAPE, mean_over_texts
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5ForConditionalGeneration,
)

import saobp
from saobp import metrics
from saobp.testing.tiny_models import tiny_batch
from saobp.transformers import attention_modules

DECODER: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5, "attn_implementation": "eager",
}  # fmt: skip


def gemma2() -> Any:
    """Its bound is low enough to matter; the first layer's window hides keys."""
    torch.manual_seed(0)
    config = Gemma2Config(**DECODER, attn_logit_softcapping=1.5, query_pre_attn_scalar=2, sliding_window=5)
    return Gemma2ForCausalLM(config).eval()


def gpt_oss() -> Any:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**DECODER, num_local_experts=2, num_experts_per_tok=1)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def t5(implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0, attn_implementation=implementation,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def returned(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found = model(**batch, output_attentions=True)
    if "attentions" in found:
        return list(found.attentions)
    return [*found.encoder_attentions, *found.decoder_attentions]


def measured(model: Any, batch: dict[str, Tensor], method: Any = "exact") -> list[Tensor]:
    """Entropies ``[layers, heads]`` and GTD."""
    with torch.no_grad(), saobp.probe(model, method=method) as health:
        model(**batch)
    assert health.measured_from == "queries and keys"
    return [torch.stack(list(health.values(name).values())).float() for name in ("gtd", "attention_entropy")]


def expected(rows: list[Tensor], mask: Tensor) -> list[Tensor]:
    statistics = (metrics.gtd, metrics.attention_entropy)
    return [torch.stack([mean_over_texts(one, own, mask) for own in rows]) for one in statistics]


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_bounded_scores_and_sinks(make: Any) -> None:
    """Of rows with a sink the share of the tokens counts, as for the variants of this package."""
    model, batch = make(), tiny_batch(side="left")
    rows = returned(model, batch)
    shares = [own.sum(-1, keepdim=True) for own in rows]
    real = batch["attention_mask"].bool()
    is_one = all(torch.allclose(own.transpose(1, 2)[real], torch.ones(1)) for own in shares)
    assert is_one == (make is gemma2)
    rows = [own / share for own, share in zip(rows, shares, strict=True)]
    for found, right in zip(measured(model, batch), expected(rows, batch["attention_mask"]), strict=True):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_the_sampled_method_sees_them_too(make: Any) -> None:
    model, batch = make(), tiny_batch(padding=0, length=40)
    exact, sampled = measured(model, batch), measured(model, batch, "sampled")
    torch.testing.assert_close(sampled[1], exact[1], atol=1e-4, rtol=1e-3)  # so few rows are all taken
    torch.testing.assert_close(sampled[0], exact[0], atol=0.05, rtol=0)


def test_a_bound_changes_the_numbers() -> None:
    model, batch = gemma2(), tiny_batch(padding=0)
    bounded = measured(model, batch)[1]
    for _, module in attention_modules(model):
        module.attn_logit_softcapping = None
    assert (measured(model, batch)[1] - bounded).abs().max() > 0.1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_bias_of_positions(implementation: str) -> None:
    batch = tiny_batch()
    batch |= {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    right = expected(returned(t5(), batch), batch["attention_mask"])
    for found, own in zip(measured(t5(implementation), batch), right, strict=True):
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-4)


def test_the_fast_tier_sees_a_bias_and_sinks_but_no_bound() -> None:
    batch = tiny_batch()
    for model, inputs in ((gpt_oss(), batch), (t5(), {**batch, "decoder_input_ids": batch["input_ids"]})):
        with torch.no_grad(), saobp.watch(model) as heads, saobp.probe(model) as health:
            model(**inputs)
        entropies = [head.values["attention_entropy"] for head in heads.heads()]
        thorough = [head.values["attention_entropy"] for head in health.heads()]
        assert entropies == pytest.approx(thorough, abs=1e-4)
    model = gemma2()
    with pytest.raises(ValueError, match="'softcap'"), torch.no_grad(), saobp.watch(model):
        model(**batch)


def test_attention_outside_the_registry_is_left_out_with_a_warning() -> None:
    """SigLIP's pooling head, while its layers use the registry."""
    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8,
        patch_size=4,
    )  # fmt: skip
    model = SiglipVisionModel(config).eval()
    images = {"pixel_values": torch.rand(2, 3, 8, 8)}
    for observer in (saobp.probe, saobp.watch):
        with pytest.warns(UserWarning, match="SiglipMultiheadAttentionPoolingHead.*left out"):
            block = observer(model)
        with torch.no_grad(), block as health:
            model(**images)
        assert len(health.heads()) == 8
        assert "head" in " ".join(health.skipped)
    with pytest.raises(ValueError, match="computes part of its attention"):
        saobp.apply(model, "high:0.2")
