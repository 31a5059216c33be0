"""What servers do with a refined model: none of it may end in a plain softmax without a word."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, PreTrainedModel

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model


@pytest.fixture
def saved(tmp_path):
    model = saobp.apply(tiny_model("llama"), "high:0.7")
    return model, saobp.save(model, tmp_path / "model", portable=True)


def test_a_server_that_names_no_attention_gets_the_refined_model(saved):
    """``transformers serve`` takes the class of the config, and passes None and the tokenizer."""
    model, folder = saved
    batch = tiny_batch(batch=1)
    for load in (LlamaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        served = load(folder, attn_implementation=None, trust_remote_code=False)
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(
            served.generate(**batch, **options, tokenizer=object()), model.generate(**batch, **options)
        )


def test_fixed_strengths_among_the_weights_show_where_a_plain_model_is_made_of_them(saved):
    _, folder = saved
    original = PreTrainedModel.from_pretrained.__func__.__wrapped__
    plain, info = original(LlamaForCausalLM, folder, attn_implementation=None, output_loading_info=True)
    assert plain.config._attn_implementation == "sdpa"
    assert info["unexpected_keys"] == {"saobp.strengths"}
    for options in ({}, {"trust_remote_code": True}):
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
        assert not info["unexpected_keys"]


def test_continuous_batching_refuses_a_refined_model_rather_than_switch_its_attention():
    model = saobp.apply(tiny_model("llama"), "high:0.7")
    assert not model._supports_flash_attn
    with pytest.raises(ValueError, match="saobp is not supported for continuous batching"):
        model.generate_batch([[5, 6, 7]], generation_config=GenerationConfig(max_new_tokens=2))
    assert saobp.remove(model)._supports_flash_attn
