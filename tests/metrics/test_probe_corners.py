"""The probe and padding alone, two stacks of layers, flex attention, or processes that met layers in turn."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import BartConfig, BartModel

import saobp
from saobp import metrics
from saobp.metrics.health.verdicts import UniformMap
from saobp.metrics.sampling import Sampling, exact_estimate
from saobp.testing.tiny_models import DECODERS, tiny_batch, tiny_model
from saobp.transformers import record_attention


def test_layers_of_a_decoder_do_not_follow_those_of_its_encoder() -> None:
    shape = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 32, "vocab_size": 64, "init_std": 0.3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    model = BartModel(BartConfig(**shape, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32)).eval()
    ids = tiny_batch()["input_ids"]
    with torch.no_grad(), saobp.probe(model, statistics=["gtd", "cross_layer_gtd"]) as health:
        model(input_ids=ids, decoder_input_ids=ids)
        with record_attention(model) as recorded:
            model(input_ids=ids, decoder_input_ids=ids)
    expected: dict[str, float] = {}
    for stack in ("encoder.", "decoder."):
        own = {
            name: rows[0]
            for name, rows in recorded.items()
            if name.startswith(stack) and name.endswith("self_attn")
        }
        values = metrics.cross_layer_gtd(list(own.values())).mean(1).tolist()
        expected |= dict(zip(list(own)[1:], values, strict=True))
    assert health.cross_layer_gtd() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["exact", "sampled"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saobp"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_texts_of_padding_alone_are_left_out(family: str, implementation: str, method: str) -> None:
    plain = "sdpa" if implementation == "saobp" else implementation
    model = tiny_model(family, attn_implementation=plain)
    if implementation == "saobp":
        saobp.apply(model, "high:0.5")
    batch = tiny_batch(batch=3, side="left" if family in DECODERS else "right")
    batch["attention_mask"][1] = 0
    healths = []
    with torch.no_grad():
        for places in ([0, 1, 2], [0, 2]):
            with saobp.probe(model, method=method, sampling=Sampling(seed=1)) as health:  # type: ignore[arg-type]
                model(**{name: value[places] for name, value in batch.items()})
            healths.append(health)
        with saobp.probe(model, method=method) as empty:  # type: ignore[arg-type]
            model(**{name: value[1:2] for name, value in batch.items()})
    for one, other in zip(*(health.heads() for health in healths), strict=True):
        assert one.texts == other.texts == 2
        assert one.verdict == other.verdict
        assert one.values == pytest.approx(other.values, rel=1e-4, abs=1e-5)
    assert not empty.heads()
    assert list(empty.layers) == list(healths[0].layers)
    assert metrics.health_metrics(empty) == {}


def test_processes_that_met_layers_in_another_order_reduce_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda packed: sent.append(packed.clone()))
    values = {name: torch.rand(3, 2) for name in "abc"}
    for order in ("abc", "bca"):
        health = metrics.Health(("gtd",))
        for name in order:
            health.add(name, {"gtd": exact_estimate(values[name])}, UniformMap(*torch.ones(3, 3)))
        total = health.reduced()
        assert list(total.layers) == list(order)
        assert all(torch.equal(total.values("gtd")[name], health.values("gtd")[name]) for name in order)
    assert torch.equal(*sent)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("observer", [saobp.probe, saobp.watch])
@pytest.mark.parametrize("family", ["bert", "llama", "mistral"])
def test_flex_attention_is_measured_like_any_other(family: str, observer) -> None:  # type: ignore[no-untyped-def]
    """Its masks are functions; the window of mistral is in them."""
    batch = tiny_batch(batch=3, side="left" if family in DECODERS else "right")
    found = []
    for implementation in ("sdpa", "flex_attention"):
        model = tiny_model(family, attn_implementation=implementation)
        with torch.no_grad(), observer(model) as health:
            model(**batch)
        found.append([head.values for head in health.heads()])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("observer", [saobp.probe, saobp.watch])
def test_a_copy_made_meanwhile_is_not_measured(observer) -> None:  # type: ignore[no-untyped-def]
    """As an average of the weights is; it keeps the hooks of the model for good."""
    model, batch = tiny_model("bert"), tiny_batch()
    with torch.no_grad(), observer(model) as health:
        model(**batch)
        other = copy.deepcopy(model)
        hooks = next(iter(other._forward_pre_hooks.values())).__self__
        with record_attention(other) as recorded:
            other(**batch)
    assert hooks.measuring is nullcontext
    assert health.forwards == 1
    assert all(len(rows) == 1 for rows in recorded.values())


@pytest.mark.parametrize("family", ["bert", "gpt2", "mistral"])
def test_even_rows_are_diffuse_under_every_mask(family: str) -> None:
    """Without scores every head is the uniform map of its mask: full, causal, or a sliding window."""
    model = tiny_model(family, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("query", "c_attn", "q_proj")):
            torch.nn.init.zeros_(parameter)
    with torch.no_grad(), saobp.probe(model) as health:
        model(**tiny_batch(length=24))
    assert {head.verdict for head in health.heads()} == {"diffuse"}
