"""MPNet, whose own attention code adds a bias of relative positions to the scores."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import MPNetConfig, MPNetForMaskedLM, MPNetForSequenceClassification

import saobp
from saobp.transformers import mpnet as mpnet_attention
from saobp.transformers.apply import attention_modules
from saobp.transformers.capture import watch
from saobp.transformers.layer_refinement import strength_parameters
from saobp.transformers.projections import HeadParts

HEADS = 4


def mpnet(kind: type = MPNetForMaskedLM):
    torch.manual_seed(0)
    config = MPNetConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64,
        max_position_embeddings=40, initializer_range=0.3,
    )  # fmt: skip
    return kind(config).eval()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 8:], mask[1, 8:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model, **options) -> tuple[Tensor, list[Tensor]]:
    """Logits, and rows of each layer."""
    with torch.no_grad():
        found = model(**(batch() | options), output_attentions=True)
    return found.logits, list(found.attentions)


def real() -> Tensor:
    return batch()["attention_mask"].bool()


def test_strength_zero_is_the_model_as_it_was() -> None:
    model = mpnet()
    expected, rows = run(model)
    logits, refined = run(saobp.apply(model, "high:0"))
    torch.testing.assert_close(logits[real()], expected[real()])
    torch.testing.assert_close(refined[0][0], rows[0][0])
    logits, _ = run(saobp.remove(model))
    torch.testing.assert_close(logits, expected)


def test_a_model_that_was_measured_or_refined_is_as_before() -> None:
    model = mpnet()
    own = type(model.mpnet.encoder.layer[0].attention.attn)

    def kinds() -> set[type]:
        return {type(layer.attention.attn) for layer in model.mpnet.encoder.layer}

    attention_modules(model)
    assert kinds() == {own}
    with saobp.probe(model) as health:
        model(**batch())
    assert len(health.heads()) == 2 * HEADS
    assert kinds() == {own}
    with watch(model, lambda _: None):
        assert own not in kinds()
        saobp.apply(model, "high:0.2")
    assert own not in kinds()
    assert len(run(model)[1]) == 2
    saobp.remove(model)
    assert kinds() == {own}
    assert not hasattr(model.mpnet.encoder.layer[0].attention.attn, "config")


@pytest.mark.parametrize("refinement", ["high:0.7", "low:0.4", "elemmul", "high:0.5,steps=2,damping=0.3"])
def test_rows_are_those_of_the_operation(refinement: str) -> None:
    model = mpnet()
    plain = run(model)[1][0]
    refined = run(saobp.apply(model, refinement))[1][0]
    expected = saobp.refine(plain, refinement, padding_mask=real())
    assert (expected - plain).abs().max() > 1e-3
    for text, row in zip(real(), range(2), strict=True):
        torch.testing.assert_close(refined[row][:, text], expected[row][:, text], atol=1e-5, rtol=1e-4)


def test_padding_changes_nothing() -> None:
    model = saobp.apply(mpnet(), "high:0.7")
    padded = run(model)[0][1, :8]
    alone = run(model, **{name: one[1:, :8] for name, one in batch().items()})[0][0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


def test_strengths_and_position_bias_learn_and_are_saved(tmp_path: Path) -> None:
    model = saobp.apply(mpnet(MPNetForSequenceClassification), "high:learned").train()
    model(**batch(), labels=torch.tensor([0, 1])).loss.backward()
    strengths = strength_parameters(model)
    assert [one.shape for one in strengths] == [(HEADS,)] * 2
    bias = model.mpnet.encoder.relative_attention_bias.weight
    for parameter in (*strengths, bias):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    with torch.no_grad():
        for one in strengths:
            one.fill_(0.6)
    model.eval().save_pretrained(tmp_path)
    loaded = saobp.load(tmp_path, MPNetForSequenceClassification)
    torch.testing.assert_close(run(loaded)[0], run(model)[0])


def test_layers_share_one_mask_with_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    model = saobp.apply(mpnet(MPNetForSequenceClassification), "high:learned").train()
    seen: list[Tensor] = []
    read = mpnet_attention.biased_mask
    monkeypatch.setattr(mpnet_attention, "biased_mask", lambda *given: seen.append(read(*given)) or seen[-1])
    for _ in range(2):
        model(**batch()).logits.sum().backward()
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert seen[2] is not seen[0]
    with torch.no_grad():
        model(**batch())
    assert not seen[-1].requires_grad


def test_recomputed_layers_have_the_same_gradients() -> None:
    model = saobp.apply(mpnet(MPNetForSequenceClassification), "high:learned").eval()
    bias = model.mpnet.encoder.relative_attention_bias.weight
    found = []
    for _ in range(2):
        bias.grad = None
        model(**batch()).logits.square().sum().backward()
        found.append(bias.grad)
        for layer in model.mpnet.encoder.layer:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    torch.testing.assert_close(found[1], found[0])


def test_copies_and_pickles() -> None:
    model = saobp.apply(mpnet(), "high:0.7")
    expected = run(model)[0]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run(again)[0], expected)


def test_watched_numbers_are_those_of_its_rows() -> None:
    model = mpnet()
    expected, rows = run(model)
    with torch.no_grad(), saobp.watch(model) as heads:
        logits = model(**batch()).logits
    torch.testing.assert_close(logits, expected)
    for head in heads.heads():
        own = [rows[head.layer][text, head.head][real()[text]] for text in range(2)]
        entropy = sum(float(torch.special.entr(one).sum(-1).mean()) for one in own) / 2
        assert head.values["attention_entropy"] == pytest.approx(entropy, abs=1e-4)
        sink = sum(float(one[:, 0].mean()) for one in own) / 2
        assert head.values["sink_share"] == pytest.approx(sink, abs=1e-5)


def test_sampled_statistics_see_the_bias() -> None:
    model = mpnet()
    found = []
    for method in ("exact", "sampled"):
        with torch.no_grad(), saobp.probe(model, method=method) as health:  # type: ignore[arg-type]
            model(**batch())
        found.append([head.values["gtd"] for head in health.heads()])
    assert found[1] == pytest.approx(found[0], abs=0.12)


def test_logits_with_a_bias_cannot_be_clipped() -> None:
    (_, module), *_ = attention_modules(mpnet())
    with pytest.raises(ValueError, match="adds a bias of positions to its logits"):
        HeadParts(module)


def test_masks_that_would_be_misread_are_refused() -> None:
    model, ids = saobp.apply(mpnet(), "high:0.7"), torch.randint(4, 60, (HEADS, 9))
    with pytest.raises(ValueError, match=r"reads masks \[batch, keys\] or .*, not \(4, 9, 9\)"):
        model(ids, attention_mask=torch.ones(HEADS, 9, 9).tril())
    one_way = torch.ones(HEADS, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="lets one row see another's token but not the reverse"):
        model(ids, attention_mask=one_way)
