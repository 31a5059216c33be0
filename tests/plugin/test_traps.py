"""The known traps of Transformers' attention registry, one test each."""

import pytest
import torch
from transformers import AutoConfig, BertForMaskedLM, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import record_attention, watch

STRONG = "high:0.7"


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def test_1_the_mask_is_registered_under_the_same_name():
    assert "saobp" in ALL_ATTENTION_FUNCTIONS
    assert "saobp" in ALL_MASK_ATTENTION_FUNCTIONS
    model, batch = saobp.apply(tiny_model("bert"), STRONG), tiny_batch()
    masks = []
    with watch(model, lambda call: masks.append(call.mask)):
        logits(model, **batch)
    assert len(masks) == 2
    assert all(torch.equal(mask, batch["attention_mask"].bool()) for mask in masks)


def test_2_no_mask_means_a_plain_square_batch_only():
    model, ids = saobp.apply(tiny_model("gpt2"), STRONG), tiny_batch(batch=1)["input_ids"]
    seen = {}
    with watch(model, lambda call: seen.setdefault("square", call.mask)):
        expected = logits(model, input_ids=ids)
    assert seen["square"] is None
    cache = StaticCache(config=model.config, max_cache_len=16)
    with watch(model, lambda call: seen.setdefault("static", call.mask)):
        prefill = logits(model, input_ids=ids, past_key_values=cache)
    assert seen["static"].shape == (1, 1, 9, 16)
    torch.testing.assert_close(prefill, expected, rtol=1e-4, atol=1e-4)


def test_2_a_missing_mask_with_fewer_queries_than_keys_is_refused():
    model = saobp.apply(tiny_model("llama"), "high-listing:0.5")
    attention = model.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="missing mask"):
        ALL_ATTENTION_FUNCTIONS["saobp"](attention, query, key, key, None)


def test_3_padding_rows_send_no_message():
    model, batch = saobp.apply(tiny_model("bert"), STRONG), tiny_batch()
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][1, -3:] = 41
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(
        logits(model, **changed)[real], logits(model, **batch)[real], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["modernbert", "mistral"])
def test_3_padding_rows_send_no_message_in_a_window(family):
    model, batch = saobp.apply(tiny_model(family), STRONG), tiny_batch()
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][1, -3:] = 41
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(
        logits(model, **changed)[real], logits(model, **batch)[real], rtol=1e-4, atol=1e-4
    )


def test_4_rows_without_any_key_are_finite_forward_and_backward():
    model, batch = saobp.apply(tiny_model("gpt2"), "high:learned"), tiny_batch(side="left")
    with torch.autograd.set_detect_anomaly(True):
        result = model(**batch, labels=batch["input_ids"])
        result.loss.backward()
    assert torch.isfinite(result.logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_5_rows_are_returned_when_the_call_asks_for_them():
    model, batch = saobp.apply(tiny_model("bert"), STRONG), tiny_batch()
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    with torch.no_grad():
        rows = model(**batch, output_attentions=True).attentions
    assert [tuple(row.shape) for row in rows] == [(2, 4, 9, 9)] * 2


def test_6_gpt2_swallows_the_request_and_rows_still_come():
    model, ids = saobp.apply(tiny_model("gpt2"), STRONG), tiny_batch(batch=1)["input_ids"]
    passed = []
    swallowed = watch(model, lambda call: passed.append(call.options.get("output_attentions")))
    with record_attention(model) as recorded, swallowed, torch.no_grad():
        rows = model(ids, output_attentions=True).attentions
    assert passed == [None, None]
    assert len(rows) == 2
    for row, (own,) in zip(rows, recorded.values(), strict=True):
        torch.testing.assert_close(row, own)


def test_7_a_saved_config_names_the_implementation_which_transformers_does_not_write(tmp_path):
    saobp.apply(tiny_model("bert"), STRONG).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).saobp["strength"] == 0.7
    assert BertForMaskedLM.from_pretrained(tmp_path).config._attn_implementation == "saobp"
    with pytest.warns(UserWarning, match="saobp.load"):
        plain = BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert plain.config._attn_implementation == "sdpa"


def test_8_the_name_is_not_taken_for_another_kind_of_attention():
    assert not is_flash_attention_requested(requested_attention_implementation="saobp")
    model = tiny_model("bert", attn_implementation="saobp")
    assert model.config._attn_implementation == "saobp"


def test_9_checkpointing_does_not_count_twice():
    model, batch = saobp.apply(tiny_model("bert"), STRONG).train(), tiny_batch()
    model.gradient_checkpointing_enable()
    with record_attention(model) as recorded:
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert [len(rows) for rows in recorded.values()] == [1, 1]


def test_10_a_class_without_a_source_file_can_be_refined():
    class Homemade(BertForMaskedLM):
        pass

    Homemade.__module__ = "__main__"
    plain, batch = tiny_model("bert"), tiny_batch()
    model = Homemade(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    expected = logits(saobp.apply(plain, STRONG), **batch)
    torch.testing.assert_close(logits(saobp.apply(model, STRONG), **batch), expected)


def test_is_causal_false_in_the_config_turns_a_decoder_bidirectional():
    model, batch = tiny_model("llama", is_causal=False), tiny_batch()
    model.set_attn_implementation("eager")
    expected = logits(model, **batch, use_cache=False)
    real = batch["attention_mask"].bool()
    plain = logits(saobp.apply(model, "high:0"), **batch, use_cache=False)
    torch.testing.assert_close(plain[real], expected[real], rtol=1e-4, atol=1e-4)
    calls = []
    saobp.apply(model, STRONG)
    with watch(model, calls.append):
        logits(model, **batch, use_cache=False)
    assert not any(call.is_causal or call.graph()[0].causal for call in calls)


def test_packed_sequences_do_not_hear_each_other():
    model = saobp.apply(tiny_model("llama"), STRONG)
    ids = tiny_batch(batch=1)["input_ids"]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    together = logits(model, input_ids=ids, position_ids=packed, use_cache=False)
    alone = logits(model, input_ids=ids[:, 4:], use_cache=False)
    torch.testing.assert_close(together[:, 4:], alone, rtol=1e-4, atol=1e-4)


def test_the_mask_of_a_decoding_step_marks_visible_keys():
    config = tiny_model("llama", attn_implementation="saobp").config
    mask = tiny_batch(side="left")["attention_mask"]
    built = create_causal_mask(config, torch.zeros(2, 9, 4), mask, None)
    assert torch.equal(built, mask.bool())
