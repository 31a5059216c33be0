"""What must hold in every supported model family."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import saobp
from saobp.testing.tiny_models import DECODERS, ENCODERS, FAMILIES, tiny_batch, tiny_model
from saobp.transformers import strength_parameters

ROUNDING = {"rtol": 1e-4, "atol": 2e-4}
STRONG = "high:0.7"


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strength_zero_is_eager(family, side):
    model, batch = tiny_model(family, attn_implementation="eager"), tiny_batch(side=side)
    expected = logits(model, **batch)
    refined = logits(saobp.apply(model, "high:0"), **batch)
    real = batch["attention_mask"].bool()
    assert torch.isfinite(refined).all()
    torch.testing.assert_close(refined[real], expected[real], **ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_mask_strength_zero_is_eager(family):
    model, ids = tiny_model(family, attn_implementation="eager"), tiny_batch()["input_ids"][:1]
    expected = logits(model, input_ids=ids)
    torch.testing.assert_close(logits(saobp.apply(model, "high:0"), input_ids=ids), expected, **ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_strength_changes_the_result(family):
    model, batch = tiny_model(family), tiny_batch()
    plain = logits(saobp.apply(model, "none"), **batch)
    assert (logits(saobp.apply(model, STRONG), **batch) - plain).abs().max() > 0.05


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_rounds_and_no_more(family, cached):
    """Rotary positions leave queries and keys in single precision beside values in half."""
    model, batch = saobp.apply(tiny_model(family), "high:learned"), tiny_batch()
    for strength in strength_parameters(model):
        torch.nn.init.constant_(strength, 0.7)
    options = {"use_cache": cached} if family in DECODERS else {}
    real, exact = batch["attention_mask"].bool(), logits(model, **batch, **options)
    with torch.autocast("cpu", torch.bfloat16):
        done = model(**batch, **options, labels=batch["input_ids"])
    done.loss.backward()
    assert all(torch.isfinite(strength.grad).all() for strength in strength_parameters(model))
    off = (done.logits.float() - exact)[real].norm() / exact[real].norm()
    assert off < 0.03


@pytest.mark.parametrize("refinement", [STRONG, "low,strength=0.5,steps=2", "elemmul"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_beside_a_sentence_changes_nothing(family, refinement):
    model = saobp.apply(tiny_model(family), refinement)
    batch = tiny_batch(padding=3)
    short = {name: values[1:, :-3] for name, values in batch.items()}
    torch.testing.assert_close(logits(model, **batch)[1:, :-3], logits(model, **short), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("refinement", [STRONG, "low,strength=0.5,steps=3,damping=0.3", "elemmul-prior"])
@pytest.mark.parametrize("family", DECODERS)
def test_strict_rows_ignore_later_tokens(family, refinement):
    model, ids = saobp.apply(tiny_model(family), refinement), tiny_batch(batch=1)["input_ids"]
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 7) % 50 + 3
    before, after = logits(model, input_ids=ids), logits(model, input_ids=changed)
    torch.testing.assert_close(after[:, :5], before[:, :5], **ROUNDING)
    assert (after[:, 5:] - before[:, 5:]).abs().max() > 0.05


@pytest.mark.parametrize("family", DECODERS)
def test_the_papers_causal_form_hears_later_tokens(family):
    with pytest.warns(UserWarning, match="future='paper'"):
        model = saobp.apply(tiny_model(family), "high,strength=0.7,future=paper")
    ids = tiny_batch(batch=1)["input_ids"]
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 7) % 50 + 3
    before, after = logits(model, input_ids=ids), logits(model, input_ids=changed)
    assert (after[:, :5] - before[:, :5]).abs().max() > 0.01


def gradients(model, batch):
    model.zero_grad()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def enable_checkpointing(model):
    """Transformers' own checkpointing, and the same by hand for ALBERT, which has none."""
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        return
    group = model.albert.encoder.albert_layer_groups[0]
    group.forward = partial(checkpoint, group.forward, use_reentrant=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_equal_gradients(family):
    model, batch = saobp.apply(tiny_model(family), "high:learned"), tiny_batch()
    for parameter in saobp.transformers.strength_parameters(model):
        torch.nn.init.constant_(parameter, 0.4)
    expected = gradients(model, batch)
    enable_checkpointing(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    checkpointed = gradients(model, batch)
    assert expected.keys() == checkpointed.keys()
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for p in saobp.transformers.strength_parameters(model)
    )
    for name, gradient in checkpointed.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_without_a_graph_break(family):
    model, batch = saobp.apply(tiny_model(family), STRONG), tiny_batch()
    expected = logits(model, **batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, **batch), expected, **ROUNDING)


@pytest.mark.parametrize("strength", ["0.7", "learned"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again(family, strength, tmp_path):
    model, batch = saobp.apply(tiny_model(family), f"high:{strength}"), tiny_batch()
    for layer, parameter in enumerate(saobp.transformers.strength_parameters(model)):
        torch.nn.init.constant_(parameter, 0.5 - layer)
    expected = logits(model, **batch)
    model.save_pretrained(tmp_path)
    loaded = saobp.load(tmp_path, type(model))
    assert type(loaded) is type(model)
    assert loaded.config.saobp == model.config.saobp
    torch.testing.assert_close(logits(loaded, **batch), expected, **ROUNDING)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_return_refined_rows_on_request(family):
    model, batch = saobp.apply(tiny_model(family), STRONG), tiny_batch()
    with torch.no_grad():
        rows = model(**batch, output_attentions=True).attentions
    assert len(rows) == 2
    real = batch["attention_mask"].bool()
    for row in rows:
        sums = row.sum(-1).transpose(1, 2)[real]
        torch.testing.assert_close(sums, torch.ones_like(sums))
