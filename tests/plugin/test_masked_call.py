"""Windows and masks of a model by the kernels for them, which here run in Triton's interpreter."""

import pytest
import torch
from test_masks import ROUNDING, call, logits

import saobp
from saobp import explanation, functional
from saobp.kernels import dispatch
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import masked_call
from saobp.transformers import masks as transformers_masks
from saobp.transformers.capture import watch

pytest.importorskip("triton")


@pytest.fixture
def by_kernels(monkeypatch):
    """Calls under masks and windows take kernels as if they were on a GPU; the paths they take."""
    paths = []

    def select(given):
        path = dispatch.select(given._replace(backend="fused") if given.is_masked else given)
        paths.append(path.family)
        return path

    for module in (masked_call, functional, explanation):
        monkeypatch.setattr(module, "select", select)
    return paths


def masks():
    seen = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    seen = seen | seen.mT | torch.eye(7, dtype=torch.bool)
    seen[1, :, :, 5:] = False
    rows = torch.tensor([[1] * 7, [1] * 5 + [2] * 2])[:, None, :, None]
    return {
        "bool": seen,
        "numbers": torch.where(seen, torch.randn(2, 1, 7, 7), -torch.inf),
        "ours": (seen * rows).to(torch.int8),
        "one row for all": seen[:, :, :1],
        "sequences": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]]),
    }


@pytest.mark.parametrize("kind", masks())
def test_every_mask_means_the_same_to_kernels(kind, request):
    options = {"mask": masks()[kind], "window": 3 if kind in ("sequences", "ours") else None}
    expected = call(**options)
    paths = request.getfixturevalue("by_kernels")
    torch.testing.assert_close(call(**options), expected, **ROUNDING)
    assert paths == ["masked"]


@pytest.mark.parametrize("family", ["modernbert", "mistral"])
def test_local_layers_need_no_mask_of_pairs(by_kernels, family):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
    masks = []
    with watch(model, lambda call: masks.append((call.mask, call.sliding_window))):
        logits(model, batch["input_ids"], batch["attention_mask"])
    assert {mask.ndim for mask, _ in masks} == {2}
    assert "masked" in by_kernels
    windows = [window for _, window in masks]
    assert any(window is not None and window < 9 for window in windows)
    assert "sliding window of" in str(saobp.explain(model, batch))


@pytest.mark.parametrize("family", ["modernbert", "mistral"])
def test_a_window_gives_what_the_mask_of_pairs_gave(monkeypatch, family):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
    found = logits(model, batch["input_ids"], batch["attention_mask"])
    monkeypatch.setattr("saobp.transformers.masks.PASS_THEIR_WINDOW", {})
    expected = logits(model, batch["input_ids"], batch["attention_mask"])
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], **ROUNDING)


def test_layers_share_one_look_at_a_mask(by_kernels, monkeypatch):
    """On a GPU each look waits for the device."""
    looks = []
    check = transformers_masks.check_symmetric_mask
    monkeypatch.setattr(
        transformers_masks, "check_symmetric_mask", lambda *given, **more: looks.append(check(*given, **more))
    )
    model, mask = saobp.apply(tiny_model("bert"), "high:0.7"), masks()["bool"][:1]
    ids = tiny_batch(batch=1, padding=0)["input_ids"][:, :7]
    assert model.config.num_hidden_layers > 1
    first = logits(model, ids, mask)
    assert len(looks) == 1
    assert by_kernels.count("masked") == model.config.num_hidden_layers
    mask[..., 1, 2] = mask[..., 2, 1] = not mask[0, 0, 1, 2]
    assert not torch.equal(logits(model, ids, mask), first)
    assert len(looks) == 2


@pytest.mark.parametrize("kind", ["window", "bool"])
def test_a_model_trains_as_by_the_reference(kind, request):
    """ModernBERT, whose local layers pass a window; with a user's mask its layers get a mask of pairs."""
    model, batch = saobp.apply(tiny_model("modernbert"), "high,strength=learned"), tiny_batch(padding=0)
    mask = batch["attention_mask"] if kind == "window" else masks()["bool"]
    ids = batch["input_ids"][:, : mask.shape[-1]]

    def gradients():
        model.zero_grad()
        model(ids, attention_mask=mask).logits.square().mean().backward()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    expected = gradients()
    paths = request.getfixturevalue("by_kernels")
    found = gradients()
    assert "masked" in paths
    assert any("saobp" in name for name in found)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-5)


def test_a_prompt_longer_than_the_window_leaves_its_messages_in_the_cache(by_kernels):
    model, ids = saobp.apply(tiny_model("mistral"), "high:0.7"), tiny_batch(batch=1)["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        found = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    assert "masked" in by_kernels
    torch.testing.assert_close(found, logits(model, ids, None)[:, -1], **ROUNDING)
