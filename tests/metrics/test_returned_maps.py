"""Models outside the attention registry, measured from the maps that they return."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from returned_families import (
    ENCODERS,
    FAMILIES,
    batch_for,
    maps_of,
    mean_over_texts,
    tiny,
    translator,
)
from torch import Tensor, nn
from transformers import (
    DebertaV2Model,
    FunnelConfig,
    FunnelModel,
    LongformerConfig,
    LongformerModel,
    MambaConfig,
    MambaModel,
    ReformerConfig,
    ReformerModel,
    RwkvConfig,
    RwkvModel,
)

import saobp
from saobp import metrics
from saobp.metrics.health.verdicts import uniform_map
from saobp.metrics.known_maps import known_maps
from saobp.metrics.returned_maps import ReturnedMaps
from saobp.testing.tiny_models import tiny_batch, tiny_model

STATISTICS = {
    "gtd": metrics.gtd,
    "attention_entropy": metrics.attention_entropy,
    "sink_mass": metrics.sink_mass,
}
QUICK = ("deberta-v2", "xlnet", "falcon", "gpt-neo")


def of_layers(health: metrics.Health, statistic: str) -> Tensor:
    """``[layers, heads]``"""
    return torch.stack(list(health.values(statistic).values()))


def check(family: str, model: Any, batch: dict[str, Tensor]) -> None:
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    with torch.no_grad():
        plain = model(**batch)
        with saobp.probe(model) as health:
            seen = model(**batch)
    assert type(seen) is type(plain)
    assert list(seen) == list(plain)
    real = mask.bool()
    torch.testing.assert_close(seen.logits[real], plain.logits[real], atol=1e-4, rtol=1e-4)
    rows = maps_of(model, batch)
    assert health.measured_from == "the maps that the model returns"
    assert list(health.layers) == [f"layer.{layer}" for layer in range(len(rows))]
    for name, statistic in STATISTICS.items():
        expected = torch.stack([mean_over_texts(statistic, own, mask) for own in rows])
        torch.testing.assert_close(of_layers(health, name).float(), expected, atol=1e-5, rtol=1e-4)
    tokens = mask.sum(-1)
    uniform = uniform_map(tokens, causal=family not in ENCODERS)
    for layer in health.layers.values():
        assert float(layer.context[3]) == pytest.approx(float(uniform.gtd.sum()), rel=1e-5)


@pytest.mark.parametrize(
    "family", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_statistics_are_those_of_the_maps(family: str) -> None:
    model = tiny(family)
    check(family, model, batch_for(family))
    check(family, model, {"input_ids": tiny_batch(padding=0)["input_ids"]})


@pytest.mark.parametrize(
    "family", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_in_training_maps_are_those_before_dropout(family: str) -> None:
    """Their rows sum to 1, and the step is what it would have been."""
    model, batch = tiny(family).train(), batch_for(family, padding=0)
    losses, gradients = [], []
    for observer in (None, saobp.probe):
        torch.manual_seed(3)
        model.zero_grad()
        if observer is None:
            loss = model(**batch).logits.square().mean()
        else:
            with observer(model) as health:
                loss = model(**batch).logits.square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients.append(next(model.parameters()).grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
    assert len(health.heads()) == 8


def test_they_agree_with_queries_and_keys() -> None:
    """BERT can be measured both ways."""
    for family in ("bert", "gpt2"):
        model = tiny_model(family, attn_implementation="eager")
        batch = tiny_batch(side="left" if family == "gpt2" else "right")
        names = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass", "clustering", "betweenness")
        found: list[metrics.Health] = []
        recorder = metrics.health.recorder.Recorder(model, names, "exact")
        with torch.no_grad(), recorder.measuring():
            model(**batch)
        found.append(recorder.health)
        other = metrics.health.recorder.Recorder(model, names, "exact")
        returned = ReturnedMaps(model, other._record)
        returned.parts = {model: ""}
        with torch.no_grad(), returned.observing():
            model(**batch)
        found.append(other.health)
        for one, another in zip(*(health.heads() for health in found), strict=True):
            assert one.values == pytest.approx(another.values, rel=1e-4, abs=1e-5)
            assert one.verdict == another.verdict
            assert one.texts == another.texts == 2
        for one, another in zip(*(health.layers.values() for health in found), strict=True):
            torch.testing.assert_close(one.context, another.context)


def test_encoder_and_decoder_are_two_stacks() -> None:
    model = translator()
    ids = tiny_batch(batch=3, padding=0)["input_ids"].clamp(min=3)
    ids[1:, 7:] = 1
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :6], "attention_mask": (ids != 1).long()}
    with torch.no_grad(), saobp.probe(model, statistics=["gtd", "cross_layer_gtd"]) as health:
        found = model(**batch, output_attentions=True)
    names = [f"{stack}.layer.{layer}" for stack in ("encoder", "decoder") for layer in (0, 1)]
    assert list(health.layers) == names
    assert found.cross_attentions is not None
    decoder = metrics.gtd(torch.stack(list(found.decoder_attentions))).mean(1)
    torch.testing.assert_close(of_layers(health, "gtd")[2:].float(), decoder, atol=1e-5, rtol=1e-4)
    across = health.cross_layer_gtd()
    assert list(across) == [names[1], names[3]]
    expected = float(metrics.cross_layer_gtd(list(found.decoder_attentions)).mean())
    assert across[names[3]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("asked", [{}, {"output_attentions": True}, {"output_attentions": False}])
@pytest.mark.parametrize("tuples", [False, True])
def test_the_caller_gets_what_was_asked_for(asked: dict[str, bool], tuples: bool) -> None:
    model, batch = tiny("deberta-v2"), tiny_batch()
    batch["labels"] = batch["input_ids"]
    options: dict[str, Any] = {**asked, **({"return_dict": False} if tuples else {})}
    with torch.no_grad():
        plain = model(**batch, **options)
        with saobp.probe(model):
            seen = model(**batch, **options)
    assert type(seen) is type(plain)
    assert len(seen) == len(plain)
    if not tuples:
        assert list(seen) == list(plain)
    torch.testing.assert_close(seen[1], plain[1])


def test_arguments_may_come_by_place() -> None:
    model, batch = tiny("deberta-v2"), tiny_batch()
    with torch.no_grad(), saobp.probe(model) as health:
        model(batch["input_ids"], batch["attention_mask"])
        named = of_layers(health, "gtd")
        model(batch["input_ids"], batch["attention_mask"], None, None, None, None, False, None, False)
    torch.testing.assert_close(of_layers(health, "gtd"), named)
    with torch.no_grad(), saobp.probe(model) as health:
        model(**batch)
    torch.testing.assert_close(of_layers(health, "gtd"), named)


def test_every_texts_and_empty_texts() -> None:
    model, batch = tiny("deberta-v2"), tiny_batch(batch=4)
    batch["attention_mask"][1] = 0
    with torch.no_grad(), saobp.probe(model, every=3, texts=2) as health:
        for _ in range(7):
            model(**batch)
    assert health.forwards == 3
    assert {head.texts for head in health.heads()} == {3}


class Classifier(nn.Module):
    """A model around a part of a Transformers model, which it calls in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.text = tiny("deberta-v2")

    def forward(self, **batch: Tensor) -> Tensor:
        return self.text.deberta(**batch)[0].mean(1)


def test_a_model_inside_another() -> None:
    model, batch = Classifier().eval(), tiny_batch()
    with torch.no_grad(), saobp.probe(model) as health:
        model(**batch)
        torch.compile(model, backend="eager")
    assert list(health.layers) == ["text.deberta.layer.0", "text.deberta.layer.1"]


def test_compiled_models() -> None:
    """Measured forwards run eagerly, the others compiled."""
    model, batch = tiny("megatron-bert"), tiny_batch()
    with torch.no_grad(), saobp.probe(model) as health:
        model(**batch)
    expected, compiled = of_layers(health, "gtd"), []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    outside = torch.compile(model, backend=backend)
    inside = copy.deepcopy(model)
    inside.compile(backend=backend)
    for one in (outside, inside):
        torch._dynamo.reset()
        compiled.clear()
        with torch.no_grad(), saobp.probe(one, every=2) as health:
            for _ in range(3):
                one(**batch)
        assert health.forwards == 2
        assert list(health.layers) == ["layer.0", "layer.1"]
        torch.testing.assert_close(of_layers(health, "gtd"), expected)
        assert compiled
    torch._dynamo.reset()


def test_gradient_checkpointing_counts_once() -> None:
    model, batch = tiny("deberta-v2").train(), tiny_batch()
    model.gradient_checkpointing_enable()
    with saobp.probe(model) as health:
        model(**batch).logits.sum().backward()
    assert {head.texts for head in health.heads()} == {2}


def test_steps_with_a_cache_are_left_out() -> None:
    model = tiny("bloom")
    ids = tiny_batch(padding=0)["input_ids"]
    with torch.no_grad(), saobp.probe(model) as health:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert {head.texts for head in health.heads()} == {2}
    assert health.skipped == {"layer.0", "layer.1"}


def traces(model: nn.Module) -> tuple:
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    return hooks, model.config._attn_implementation, copy.deepcopy(model.config.to_dict())


def test_model_is_as_before_also_after_an_exception() -> None:
    model, batch = tiny("falcon", attn_implementation="sdpa"), tiny_batch()
    before = traces(model)
    with torch.no_grad(), saobp.probe(model):
        model(**batch)
        other = copy.deepcopy(model)
    assert traces(model) == before
    with torch.no_grad():
        other(**batch)
    with pytest.raises(IndexError), saobp.probe(model):
        model(input_ids=torch.full((1, 4), 9999))
    assert traces(model) == before
    reason = r"needs attention_mask \[batch, length\], not \[2, 1, 9, 9\]"
    with pytest.raises(ValueError, match=reason), saobp.probe(model):
        model(batch["input_ids"], attention_mask=torch.ones(2, 1, 9, 9))
    assert traces(model) == before
    with torch.no_grad(), saobp.probe(model) as health:
        model(**batch)
    assert len(health.heads()) == 8


def test_long_texts_are_measured_exactly() -> None:
    model = tiny("bloom")
    ids = torch.randint(3, 64, (1, 1100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), saobp.probe(model) as health:
        model(ids)
    assert all(head.errors["gtd"] == 0 for head in health.heads())
    with pytest.raises(ValueError, match=r"not sampled: use method 'exact' or 'auto'"):
        saobp.probe(model, method="sampled")


def test_a_window_is_recognised() -> None:
    """GPT-Neo's second layer sees 80 tokens."""
    model = tiny("gpt-neo")
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            nn.init.zeros_(parameter)
    ids = torch.randint(3, 64, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), saobp.probe(model) as health:
        model(ids)
    assert {head.verdict for head in health.heads()} == {"diffuse"}
    rows = maps_of(model, {"input_ids": ids})[1]
    assert known_maps(rows, None, "it").window == 80


def test_keys_that_no_row_sees_are_padding() -> None:
    rows = torch.rand(1, 2, 5, 5)
    rows[..., 3:] = 0
    heads = known_maps(rows / rows.sum(-1, keepdim=True), None, "it")
    assert heads.padding_mask is not None
    assert heads.padding_mask.tolist() == [[True, True, True, False, False]]


def funnel() -> Any:
    return FunnelModel(FunnelConfig(vocab_size=64, d_model=32, n_head=4, d_head=8, d_inner=64))


def longformer() -> Any:
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LongformerModel(LongformerConfig(**shape, intermediate_size=64, attention_window=4))


def reformer() -> Any:
    config = ReformerConfig(
        attn_layers=["local"], hidden_size=32, num_attention_heads=4, attention_head_size=8,
        feed_forward_size=32, axial_pos_embds=False, vocab_size=64, max_position_embeddings=64,
        local_attn_chunk_length=8,
    )  # fmt: skip
    return ReformerModel(config)


def rwkv() -> Any:
    return RwkvModel(RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32))


REFUSED = {
    "funnel": (funnel, r"returns \[2, 4, 8, 16\] for the attention of a layer, not maps"),
    "longformer": (longformer, "returns .* for the attention of a layer, not maps|rows do not sum to 1"),
    "reformer": (reformer, "returns .* for the attention of a layer, not maps|rows do not sum to 1"),
    "rwkv": (rwkv, r"returns \[2, 16, 32\] for the attention of a layer, not maps"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_no_map_of_the_tokens_is_refused(family: str) -> None:
    make, reason = REFUSED[family]
    model, batch = make().eval(), tiny_batch(length=16)
    with torch.no_grad(), pytest.raises(ValueError, match=reason), saobp.probe(model):
        model(**batch)


def test_models_without_attention() -> None:
    mamba = MambaModel(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(ValueError, match="MambaModel has no attention layers"):
        saobp.probe(mamba)


def test_other_forms_of_padding_are_refused() -> None:
    model, batch = tiny("xlnet"), tiny_batch()
    with pytest.raises(ValueError, match="from attention_mask, not from input_mask"), saobp.probe(model):
        model(batch["input_ids"], input_mask=1.0 - batch["attention_mask"])


def test_maps_that_are_not_those_attended_by_are_refused() -> None:
    """Falcon adds ALiBi twice with eager attention, once with sdpa."""
    model = tiny("falcon-alibi", attn_implementation="sdpa")
    with pytest.raises(ValueError, match="adds ALiBi twice"), saobp.probe(model):
        model(**tiny_batch())
    assert model.config._attn_implementation == "sdpa"


def test_without_with() -> None:
    model = tiny("deberta-v2")
    with pytest.raises(AttributeError, match=r"with saobp\.probe\(model\) as health"):
        saobp.probe(model).heads()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"with saobp\.watch\(model\) as health"):
        saobp.watch(tiny_model("bert")).heads()  # type: ignore[attr-defined]


def test_watch_points_to_the_probe() -> None:
    with pytest.raises(ValueError, match=r"saobp\.probe measures such models"):
        saobp.watch(tiny("deberta-v2"))


def test_the_name_of_a_base_model() -> None:
    model = tiny("deberta-v2").deberta
    assert isinstance(model, DebertaV2Model)
    with torch.no_grad(), saobp.probe(model) as health:
        model(**tiny_batch())
    assert list(health.layers) == ["layer.0", "layer.1"]
