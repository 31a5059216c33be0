"""Watching and recording attention, whatever computes it."""

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

import saobp
from saobp.testing.tiny_models import DECODERS, ENCODERS, FAMILIES, tiny_batch, tiny_model
from saobp.transformers import attention_modules, record_attention, watch

ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_rows_are_those_of_eager_attention(family, padding, implementation):
    model, batch = tiny_model(family, attn_implementation="eager"), tiny_batch(padding=max(padding, 1))
    if not padding:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    expected = run(model, **batch, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    with record_attention(model) as recorded:
        run(model, **batch)
    rows = [row for calls in recorded.values() for row in calls]
    assert list(recorded) == [name for name, _ in attention_modules(model)]
    assert len(rows) == len(expected) == 2
    real = batch["attention_mask"].bool()
    for row, eager in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.transpose(1, 2)[real], eager.transpose(1, 2)[real], **ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_rows_of_a_refined_model_are_refined(family):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
    expected = run(model, **batch, output_attentions=True).attentions
    with record_attention(model) as recorded:
        run(model, **batch)
    rows = [row for calls in recorded.values() for row in calls]
    for row, own in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, own)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saobp"])
@pytest.mark.parametrize("family", DECODERS)
def test_rows_are_recorded_while_generating(family, implementation):
    model, ids = tiny_model(family), tiny_batch(batch=1)["input_ids"]
    if implementation == "saobp":
        saobp.apply(model, "high:0.7")
    else:
        model.set_attn_implementation(implementation)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4}
    with record_attention(model) as recorded:
        tokens = model.generate(ids, do_sample=False, **options)
    with record_attention(model) as whole:
        run(model, input_ids=tokens[:, :-1], use_cache=False)
    for name, calls in recorded.items():
        assert [row.shape[-2] for row in calls] == [9, 1, 1, 1]
        last = calls[-1].shape[-1]
        torch.testing.assert_close(calls[-1], whole[name][0][:, :, -1:, -last:], **ROUNDING)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_call_tells_its_place_and_its_padding(family):
    model, batch, calls = tiny_model(family), tiny_batch(), []
    with watch(model, calls.append):
        run(model, **batch)
    places = {name: index for index, (name, _) in enumerate(attention_modules(model))}
    assert [call.index for call in calls] == [places[call.name] for call in calls]
    real = batch["attention_mask"].bool()
    for call in calls:
        assert call.query.shape == (2, 4, 9, 8)
        assert call.module is model.get_submodule(call.name)
        graph, bias = call.graph()
        assert torch.equal(graph.senders.expand(2, 1, 9, 1)[:, 0, :, 0], real)
        assert bias is None or not bias.any()
        assert call.refinement()[0].factor == "none"


def test_a_refined_call_tells_its_refinement():
    model, calls = saobp.apply(tiny_model("bert"), "high:0.3"), []
    with watch(model, calls.append):
        run(model, **tiny_batch())
    refinement, strength = calls[1].refinement()
    assert refinement == saobp.Refinement("high", 0.3)
    assert strength.shape == (4,)


def test_only_the_watched_model_is_reported():
    model, other, calls = tiny_model("bert"), tiny_model("bert"), []
    with watch(model, calls.append):
        run(other, **tiny_batch())
    assert calls == []


def test_everything_is_restored_also_after_an_exception():
    original, model = AttentionInterface.get_interface, tiny_model("bert")

    def fail(_):
        raise RuntimeError("stop here")

    with watch(model, id):
        with pytest.raises(RuntimeError, match="stop here"), watch(model, fail):
            run(model, **tiny_batch())
        assert AttentionInterface.get_interface is not original
    assert AttentionInterface.get_interface is original


def test_watching_does_not_change_the_result():
    for family in ("bert", "llama"):
        model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
        expected = run(model, **batch).logits
        with record_attention(model):
            assert torch.equal(run(model, **batch).logits, expected)


def test_attention_on_a_path_of_its_own_cannot_be_watched():
    model = tiny_model("gpt2", attn_implementation="eager", reorder_and_upcast_attn=True)
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"), watch(model, print):
        pass


def test_flash_masks_are_read_as_flash_attention_reads_them():
    """No flash attention on a CPU: its stand-in is registered by name and gets the 2-D mask."""
    model, batch = tiny_model("mistral", attn_implementation="eager"), tiny_batch(side="left")
    expected = run(model, **batch, output_attentions=True).attentions
    with record_attention(model) as recorded:
        calls = []
        with watch(model, calls.append):
            run(model, **batch)
    real = batch["attention_mask"].bool()
    for call, rows, eager in zip(calls, recorded.values(), expected, strict=True):
        options = {**vars(call), "implementation": "flash_attention_2", "mask": batch["attention_mask"]}
        flash = type(call)(**options).rows()
        torch.testing.assert_close(flash.transpose(1, 2)[real], rows[0].transpose(1, 2)[real], **ROUNDING)
        torch.testing.assert_close(flash.transpose(1, 2)[real], eager.transpose(1, 2)[real], **ROUNDING)
