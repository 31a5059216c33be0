"""Models that cannot be refined get one clear sentence, never a silent plain softmax."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import attention_modules
from saobp.transformers.layer_refinement import named_refinements

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
DECODER = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}


def deberta():
    return DebertaV2ForMaskedLM(DebertaV2Config(**SHAPE))


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


def gpt_neo():
    types = [[["global"], 2]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=types)
    )


@pytest.mark.parametrize("make", [deberta, bloom, gpt_neo])
def test_models_without_the_registry(make):
    with pytest.raises(ValueError, match="without Transformers' attention registry"):
        saobp.apply(make(), "high:0.5")


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**DECODER)), "softcap"


def gpt_oss():
    return GptOssForCausalLM(GptOssConfig(**DECODER, num_local_experts=2, num_experts_per_tok=1)), "s_aux"


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_arguments_of_models_that_cannot_be_honoured(make):
    model, argument = make()
    saobp.apply(model, "high:0.5")
    with pytest.raises(ValueError, match=f"'{argument}'"):
        model(tiny_batch()["input_ids"])


def bart():
    width = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=64, encoder_layers=1, decoder_layers=1, **width, **heads)
    )


def bert_with_cross_attention():
    return BertLMHeadModel(BertConfig(**SHAPE, is_decoder=True, add_cross_attention=True))


@pytest.mark.parametrize("make", [bart, bert_with_cross_attention])
def test_cross_attention(make):
    with pytest.raises(ValueError, match="cross-attention"):
        saobp.apply(make(), "high:0.5")


def test_a_decoder_that_says_it_is_not_causal():
    width = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = saobp.apply(BigBirdPegasusForCausalLM(BigBirdPegasusConfig(vocab_size=64, **width)), "high:0.5")
    with pytest.raises(ValueError, match=r"BigBirdPegasusDecoderAttention .* not causal"):
        model(tiny_batch()["input_ids"], use_cache=False)


def test_a_causal_mask_of_a_model_that_says_it_is_not_causal():
    """PaliGemma: a prefix sees itself both ways, an answer what is before it; is_causal is False."""
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 8, "patch_size": 4}
    text = {**DECODER, "model_type": "gemma"}
    config = PaliGemmaConfig(
        vision_config={**SHAPE, **vision}, text_config=text, image_token_index=63, projection_dim=32
    )
    model = PaliGemmaForConditionalGeneration(config).train()
    inputs = tiny_batch()
    inputs["token_type_ids"] = (torch.arange(9) > 4).long().expand(2, -1)
    saobp.apply(model, "high:0.5")
    with pytest.raises(ValueError, match=r"not the reverse.*is_causal is an attribute"):
        model(**inputs, labels=inputs["input_ids"])
    for _, module in attention_modules(model.model.language_model):
        module.is_causal = True
    changed = inputs["input_ids"].clone()
    changed[:, 7:] = 5
    first, second = (
        model(**{**inputs, "input_ids": ids}, labels=ids).logits for ids in (inputs["input_ids"], changed)
    )
    torch.testing.assert_close(first[:, :7], second[:, :7])


def test_cross_attention_reached_without_apply():
    model = bert_with_cross_attention().eval()
    model.config.saobp = {"factor": "high", "strength": 0.5}
    model.set_attn_implementation("saobp")
    with pytest.raises(ValueError, match="BertCrossAttention is cross-attention"):
        model(tiny_batch()["input_ids"], encoder_hidden_states=torch.randn(2, 9, 32), use_cache=False)


def test_part_of_the_attention_without_the_registry():
    model = tiny_model("bert")
    model.bert.pooling_attention = torch.nn.MultiheadAttention(32, 4)
    with pytest.raises(ValueError, match="MultiheadAttention"):
        saobp.apply(model, "high:0.5")


def test_what_is_no_transformers_model():
    with pytest.raises(TypeError, match="Transformers model, not Linear"):
        saobp.apply(torch.nn.Linear(2, 2), "high:0.5")
    with pytest.raises(TypeError, match="before it is compiled"):
        saobp.apply(torch.compile(tiny_model("bert"), backend="eager"), "high:0.5")


def test_another_number_of_heads_than_expected():
    model = tiny_model("bert")
    model.bert.encoder.layer[0].attention.self.num_attention_heads = 2
    saobp.apply(model, "high:0.5")
    with pytest.raises(ValueError, match="expected to have 2 heads but has 4"):
        model(tiny_batch()["input_ids"])


def test_a_factor_without_a_causal_form_is_refused_by_apply():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"Sinkhorn attention .* has no causal form"):
        saobp.apply(model, "sinkhorn")
    assert not list(named_refinements(model))
    saobp.apply(tiny_model("bert"), "sinkhorn")


def test_messages_from_a_part_of_the_rows_in_a_causal_model():
    with pytest.raises(ValueError, match=r"message_stride has no causal form.*LlamaForCausalLM is causal"):
        saobp.apply(tiny_model("llama"), "high-key-bias:0.3,message_stride=2")
