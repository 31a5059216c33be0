"""The fast tier: numbers of every head without eager attention, against the rows themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import saobp
from saobp import metrics
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers.capture import AttentionCall, record_attention
from saobp.transformers.capture import watch as capture


def from_rows(rows: Tensor, values: Tensor, real: Tensor, first: int = 4) -> Tensor:
    """Entropy and the three shares, ``[heads, 4]``, means over the real rows of each text, then over texts.

    rows ``[batch, heads, queries, keys]``, real ``[batch, keys]``; queries are the last of the keys.
    """
    means = []
    for weights, value, kept in zip(rows.double(), values.double(), real, strict=True):
        counted = kept[-weights.shape[-2] :]
        weights, start = weights[:, counted], int(kept.int().argmax())
        moved = weights * value.norm(dim=-1)[:, None]
        shares = [
            torch.special.entr(weights).sum(-1),
            weights[..., start],
            weights[..., start : start + first].sum(-1),
            moved[..., start] / moved.sum(-1),
        ]
        means.append(torch.stack(shares, -1).mean(-2))
    return torch.stack(means).mean(0)


def dense(model: nn.Module, real: Tensor | None = None, **batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Statistics of every layer from its rows, with the largest logit ``[heads]``."""
    values: dict[str, Tensor] = {}
    tops: dict[str, Tensor] = {}
    real = batch["attention_mask"].bool() if real is None else real

    def keep(call: AttentionCall) -> None:
        group = call.query.shape[1] // call.key.shape[1]
        key, values[call.name] = (one.repeat_interleave(group, 1) for one in (call.key, call.value))
        scores = (call.query @ key.mT).double() * call.scaling
        seen = call.rows() > 0
        seen &= real[:, None, -seen.shape[-2] :, None]
        tops[call.name] = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))

    with torch.no_grad(), record_attention(model) as recorded, capture(model, keep):
        model(**batch)
    return {name: (from_rows(rows[0], values[name], real), tops[name]) for name, rows in recorded.items()}


def assert_equal(watched: metrics.HeadWatch, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert list(watched.layers) == list(expected)
    for name, (means, top) in expected.items():
        torch.testing.assert_close(watched.values("max_logit")[name].double(), top, rtol=1e-5, atol=1e-5)
        for place, statistic in enumerate(metrics.FAST[1:]):
            found = watched.values(statistic)[name].double()
            torch.testing.assert_close(found, means[:, place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "mistral", "modernbert", "qwen3"])
def test_models_are_watched_with_any_implementation(family: str, implementation: str, side: str) -> None:
    model, batch = tiny_model(family), tiny_batch(side=side)
    model.set_attn_implementation(implementation)
    with torch.no_grad(), saobp.watch(model) as heads:
        model(**batch)
    assert_equal(heads, dense(model, **batch))
    assert heads.heads()[0].values.keys() == set(metrics.FAST)


def test_without_padding_no_mask_is_needed() -> None:
    model, batch = tiny_model("llama"), tiny_batch(padding=0)
    with torch.no_grad(), saobp.watch(model) as heads:
        model(input_ids=batch["input_ids"])
    assert_equal(heads, dense(model, **batch))


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_calls_with_a_cache_are_watched(family: str) -> None:
    model, ids = tiny_model(family), tiny_batch(padding=0)["input_ids"]
    seen: list[int] = []
    for chunk in (1, 3):
        seen.clear()
        with torch.no_grad():
            caches = [DynamicCache(config=model.config) for _ in range(2)]
            for cache in caches:
                model(ids[:, :-chunk], past_key_values=cache)
            with saobp.watch(model) as heads:
                model(ids[:, -chunk:], past_key_values=caches[0])
            with capture(model, lambda call: seen.append(call.key.shape[-2])):
                real = torch.ones(len(ids), ids.shape[1], dtype=torch.bool)
                if family == "mistral":
                    real = real[:, : 3 + chunk]
                expected = dense(model, real=real, input_ids=ids[:, -chunk:], past_key_values=caches[1])
        assert set(seen) == {real.shape[1]}
        assert not heads.skipped
        assert_equal(heads, expected)


def test_generation_is_watched_token_by_token() -> None:
    model, ids = tiny_model("llama"), tiny_batch(padding=0)["input_ids"]
    with saobp.watch(model) as heads:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert heads.forwards == 4
    assert heads.heads()[0].texts == 4 * len(ids)


def test_refined_models_tell_of_their_rows_before_refinement() -> None:
    model, batch = tiny_model("bert"), tiny_batch()
    plain = dense(model, **batch)
    saobp.apply(model, "high:0.0")
    with torch.no_grad(), saobp.watch(model) as heads:
        model(**batch)
    assert_equal(heads, plain)


def test_packed_sequences_are_texts_of_their_own() -> None:
    model, ids = tiny_model("llama"), tiny_batch(batch=1, padding=0, length=12)["input_ids"]
    saobp.apply(model, "high:0.0")
    parts = [
        dense(model, input_ids=part, attention_mask=torch.ones_like(part))
        for part in (ids[:, :5], ids[:, 5:])
    ]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad(), saobp.watch(model) as heads:
        model(ids, position_ids=positions, use_cache=False)
    first = next(iter(heads.layers))
    expected = (5 * parts[0][first][0] + 7 * parts[1][first][0]) / 12
    for place, statistic in enumerate(metrics.FAST[1:]):
        torch.testing.assert_close(
            heads.values(statistic)[first].double(), expected[:, place], rtol=1e-4, atol=1e-5
        )


def test_maxima_and_means_run_over_forwards_and_texts() -> None:
    model, many = tiny_model("bert"), tiny_batch(batch=5)
    with torch.no_grad(), saobp.watch(model) as whole:
        model(**many)
    with torch.no_grad(), saobp.watch(model) as parts:
        for some in (slice(0, 2), slice(2, 5)):
            model(**{name: one[some] for name, one in many.items()})
    with torch.no_grad(), saobp.watch(model, texts=2, every=2) as few:
        model(**many)
        model(**many)
    for statistic in metrics.FAST:
        for name, values in whole.values(statistic).items():
            torch.testing.assert_close(parts.values(statistic)[name], values)
    assert (few.forwards, few.heads()[0].texts) == (1, 2)


def test_states_alone_are_enough() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    found = metrics.fast_statistics(query, key, value, is_causal=True)
    whole = metrics.measure(query, key, is_causal=True, statistics=["attention_entropy"])[
        "attention_entropy"
    ].value
    torch.testing.assert_close(found["attention_entropy"], whole)
    assert found["max_logit"].shape == (2, 4)
    last = metrics.fast_statistics(query[:, :, -1:], key, is_causal=True, first=20)
    torch.testing.assert_close(last["sink_share_first_k"], torch.ones(2, 4))
    assert "sink_share_by_norm" not in last
    with pytest.raises(ValueError, match="without any real token"):
        metrics.fast_statistics(query, key, padding_mask=torch.zeros(2, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match="21 of 20 cannot"):
        metrics.fast_statistics(torch.randn(2, 4, 21, 8), key, is_causal=True)
    with pytest.raises(ValueError, match="is_causal must be True or False, not 'no'"):
        metrics.fast_statistics(query, key, is_causal="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"key must be a torch\.Tensor, not ndarray"):
        metrics.fast_statistics(query, key.numpy())  # type: ignore[arg-type]


def test_values_of_small_norm_make_a_small_sink() -> None:
    """A sink that moves nothing: all weight on the first token, whose value is nearly zero."""
    query, key, value = torch.ones(1, 1, 30, 4), torch.zeros(1, 1, 30, 4), torch.ones(1, 1, 30, 4)
    key[:, :, 0], value[:, :, 0] = 5.0, 0.0
    found = metrics.fast_statistics(query, key, value)
    assert float(found["sink_share"]) > 0.99
    assert float(found["sink_share_by_norm"]) == 0


def test_what_cannot_be_watched_is_refused_in_a_sentence() -> None:
    with (
        pytest.raises(ValueError, match="without Transformers' attention registry"),
        saobp.watch(nn.Linear(2, 2)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="every must be a whole number"),
        saobp.watch(tiny_model("bert"), every=0),
    ):
        pass
    for first in (0, "a"):
        with (
            pytest.raises(ValueError, match="first must be between 1 and 64 tokens"),
            saobp.watch(tiny_model("bert"), first=first),
        ):
            pass
    with pytest.warns(UserWarning, match="saw no forward"), saobp.watch(tiny_model("bert")):
        pass


def test_processes_are_reduced_together(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, batch = tiny_model("llama"), tiny_batch()
    with torch.no_grad(), saobp.watch(model) as heads:
        model(**batch)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        whole = heads.reduced()
    finally:
        torch.distributed.destroy_process_group()
    assert whole is not heads
    for statistic in metrics.FAST:
        for name, values in heads.values(statistic).items():
            torch.testing.assert_close(whole.values(statistic)[name], values)
