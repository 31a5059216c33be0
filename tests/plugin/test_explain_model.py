"""saobp.explain(model, inputs): which path each attention layer takes, and why."""

import pytest
import torch
from transformers import DynamicCache

import saobp
from saobp.testing.tiny_models import FAMILIES, tiny_batch, tiny_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_layer_tells_its_path(family):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
    with torch.no_grad():
        found = saobp.explain(model, batch)
    names = [name for name, _ in saobp.transformers.attention_modules(model)]
    assert [layer.name for layer in found] == names * (2 // len(names))
    assert all(layer.path.name == "cpu inference" for layer in found)
    assert str(found).splitlines()[0].startswith(f"{names[0]}: cpu inference path: on a CPU")
    learning = saobp.explain(model.train(), batch)
    assert [layer.path.name for layer in learning] == ["reference"] * 2


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("bert", {"output_attentions": True}, "rows were asked for"),
        ("bert", {"attention_mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)}, "mask says more than padding"),
    ],
)
def test_why_a_layer_computes_its_whole_map(family, options, reason):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), {**tiny_batch(), **options}
    found = [layer for layer in saobp.explain(model, batch) if layer.path is None]
    assert found
    for layer in found:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(layer.reason)


def test_long_causal_elemmul_goes_by_chunks_of_rows(monkeypatch):
    model = saobp.apply(tiny_model("llama"), "elemmul").train()
    ids = torch.arange(300).view(2, 150) % 50 + 3
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert [layer.path.name for layer in saobp.explain(model, batch)] == ["chunked"] * 2
    weights = list(model.parameters())
    found = torch.autograd.grad(model(**batch).loss, weights)
    monkeypatch.setattr("saobp.kernels.dispatch.CHUNKED_MIN_LENGTH", 151)
    assert [layer.path.name for layer in saobp.explain(model, batch)] == ["reference"] * 2
    expected = torch.autograd.grad(model(**batch).loss, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_decoding_step_and_packed_texts():
    model, cache = saobp.apply(tiny_model("llama"), "high:0.7"), DynamicCache()
    with torch.no_grad():
        model(**tiny_batch(batch=1), past_key_values=cache)
        step = saobp.explain(model, {"input_ids": torch.tensor([[5]]), "past_key_values": cache})
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
        packed = saobp.explain(
            model,
            {**tiny_batch(batch=1), "position_ids": positions, "attention_mask": None, "use_cache": False},
        )
    assert all("10 keys" in layer.reason for layer in step)
    assert all("within each packed sequence" in layer.reason for layer in packed)


def test_a_decoding_step_by_the_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("saobp.transformers.cached_attention.decoding_obstacle", lambda _: None)
    monkeypatch.setattr("saobp.kernels.dispatch.INTERPRETED", True)
    model, cache = saobp.apply(tiny_model("llama"), "high:0.7"), DynamicCache()
    with torch.no_grad():
        model(**tiny_batch(batch=1), past_key_values=cache)
        step = saobp.explain(model, {"input_ids": torch.tensor([[5]]), "past_key_values": cache})
    assert all(
        layer.reason == "fused decoding kernels: one row against the 10 keys of a cache" for layer in step
    )


def test_a_plain_model_and_what_is_no_model():
    found = saobp.explain(tiny_model("bert"), tiny_batch()["input_ids"])
    assert "its rows are not refined" in str(found)
    with pytest.raises(TypeError, match="or a model and its inputs"):
        saobp.explain("bert")
    with pytest.raises(TypeError, match="a mapping or a tensor of token ids, not list"):
        saobp.explain(tiny_model("bert"), [1, 2])


def test_a_model_without_inputs_is_refused():
    with pytest.raises(TypeError, match=r"depend on its inputs: saobp\.explain\(model, inputs\)"):
        saobp.explain(tiny_model("bert"))
    ids = tiny_batch()["input_ids"]
    for arguments, options in (((ids, ids), {}), ((), {"input_ids": ids})):
        with pytest.raises(TypeError, match="one mapping or tensor"):
            saobp.explain(tiny_model("bert"), *arguments, **options)


def test_arguments_that_attention_does_not_take_are_refused():
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match=r"arguments of saobp\.attention: missing .*'value'"):
        saobp.explain(states, states)
    with pytest.raises(TypeError, match=r"arguments of saobp\.attention: .*unexpected .*'causal'"):
        saobp.explain(states, states, states, "high:0.2", causal=True)
