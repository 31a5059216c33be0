"""The sampled method against the exact one: products, error bars, memory."""

from __future__ import annotations

import warnings
import weakref

import numpy as np
import pytest
import torch

from saobp import Refinement, metrics
from saobp.metrics.attention_inputs import AttentionInputs
from saobp.metrics.operators.fused import operator_for
from saobp.metrics.operators.plain import ROW_STEPS, PlainOperator
from saobp.metrics.query_key_statistics import STATES_HELD, SUMS_HELD, even_slices
from saobp.metrics.sampling import SAMPLED, Sampling, balanced_signs, exact_estimate

REFINEMENTS = {
    "plain": Refinement("none"),
    "high": Refinement("high", 0.7),
    "damped low": Refinement("low", 0.3, steps=3, damping=0.2),
    "listing": Refinement("high-listing", 1.0),
    "paper": Refinement("high", 0.4, future="paper"),
    "elemmul": Refinement("elemmul", 1.0),
    "part of the rows": Refinement("high-key-bias", 0.7, steps=2, message_stride=4),
}
BIDIRECTIONAL = ("elemmul", "part of the rows")


def states(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, sharpness: float = 1.5
) -> torch.Tensor:
    return (sharpness * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def telling_heads(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six heads from diffuse to sharp, with a sink, and with a local window. ``[1, 6, length, 16]`` each."""
    query, key = states(1, 6, length, 16, seed=seed), states(1, 6, length, 16, seed=seed + 1000)
    place = torch.linspace(0, 8 * torch.pi, length, dtype=torch.float64)
    ring = torch.stack([place.cos(), place.sin()], -1)
    query[:, 0] *= 0.1
    query[:, 1] *= 2
    query[:, 2, :, 0] += 4
    key[:, 2, :2, 0] += 4
    query[:, 3, :, :2], key[:, 3, :, :2] = 5 * ring, 5 * ring
    query[:, 4, :, :2], key[:, 4, :, :2] = 2 * ring, ring
    return query, key


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        (name, causal)
        for name in REFINEMENTS
        for causal in (False, True)
        if not (name in BIDIRECTIONAL and causal)
    ],
)
def test_products_equal_those_with_the_map(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.metrics.operators.tiled.TILE_BYTES", 40_000)
    refinement, strength = REFINEMENTS[name], torch.tensor([0.7, 0.2])
    query, key = states(1, 2, 53, 8), states(1, 2, 53, 8, seed=1)
    heads = AttentionInputs(query, key, strength, refinement, causal, 0.3)
    maps = heads.maps().rows[0]
    operator = operator_for(query[0], key[0], refinement, strength, heads.mask(), scale=0.3)
    forward, backward = states(2, 53, 5, seed=2), states(2, 53, 4, seed=3)
    out, gathered = operator.sweep(forward, backward)
    torch.testing.assert_close(out, maps @ forward)
    torch.testing.assert_close(gathered, maps.transpose(-1, -2) @ backward)
    torch.testing.assert_close(operator.sweep(forward, None)[0], maps @ forward)
    places = torch.tensor([0, 7, 30, 52])
    torch.testing.assert_close(operator.rows(places), maps[:, places])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["plain", "high", "damped low"])
def test_windows_and_other_masks(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.metrics.operators.tiled.TILE_BYTES", 20_000)
    query, key = states(1, 2, 40, 8), states(1, 2, 40, 8, seed=1)
    holes = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(5)) < 0.8
    holes |= torch.eye(40, dtype=torch.bool)
    heads = AttentionInputs(
        query,
        key,
        torch.tensor([0.3, 0.6]),
        REFINEMENTS[name],
        causal,
        0.3,
        None,
        9,
        holes,
        states(1, 2, 40, 40),
    )
    maps = heads.maps().rows[0]
    assert (maps[:, 20, :12] == 0).all()
    operator = operator_for(query[0], key[0], heads.refinement, heads.strength, heads.mask(), scale=0.3)
    forward, backward = states(2, 40, 5, seed=2), states(2, 40, 4, seed=3)
    out, gathered = operator.sweep(forward, backward)
    torch.testing.assert_close(out, maps @ forward)
    torch.testing.assert_close(gathered, maps.transpose(-1, -2) @ backward)
    torch.testing.assert_close(operator.rows(torch.tensor([3, 39])), maps[:, [3, 39]])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_collapsed_head_with_wide_gaps_stays_right(causal: bool) -> None:
    query, key = states(1, 40, 4, dtype=torch.float32), states(1, 40, 4, seed=1, dtype=torch.float32)
    query[..., 0], key[..., 0] = 40.0, 0.0
    key[:, 0, 0] = 5.0
    maps = (
        AttentionInputs(query[None], key[None], torch.zeros(1), Refinement("none"), causal, 1.0)
        .maps()
        .rows[0]
    )
    assert (maps[..., 0] > 0.999).all()
    operator = PlainOperator(query, key, causal=causal, scale=1.0)
    forward, backward = states(1, 40, 3, dtype=torch.float32), states(1, 40, 3, seed=4, dtype=torch.float32)
    out, gathered = operator.sweep(forward, backward)
    torch.testing.assert_close(out, maps @ forward)
    torch.testing.assert_close(gathered, maps.transpose(-1, -2) @ backward, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("step", [1, 16, 128])
@pytest.mark.parametrize("shift", [0.0, 200.0], ids=["tame", "wild"])
def test_lengths_that_kernels_like_change_nothing(
    shift: float, step: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROW_STEPS, "cpu", step)
    query, key = states(2, 79, 8), states(2, 79, 8, seed=1)
    query[..., 0], key[..., 0] = shift, 1.0
    maps = (
        AttentionInputs(query[None], key[None], torch.zeros(2), Refinement("none"), causal, 0.3)
        .maps()
        .rows[0]
    )
    operator = PlainOperator(query, key, causal=causal, scale=0.3)
    for channels in (4, 9):
        forward, backward = states(2, 79, 5, seed=2), states(2, 79, channels, seed=3)
        before = backward.clone()
        out, gathered = operator.sweep(forward, backward)
        torch.testing.assert_close(out, maps @ forward)
        torch.testing.assert_close(gathered, maps.transpose(-1, -2) @ backward)
        assert torch.equal(backward, before)


@pytest.mark.parametrize("first", [-4.0, 4.0])
def test_first_causal_rows_that_see_little_take_no_longer_way(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = states(2, 200, 8, dtype=torch.bfloat16), states(2, 200, 8, seed=1, dtype=torch.bfloat16)
    query[:, 0], key[:, 0] = 1.0, first
    wide = query.float()[None], key.float()[None]
    maps = AttentionInputs(*wide, torch.zeros(2), Refinement("none"), True, 0.3).maps().rows[0]
    forward, backward = (states(2, 200, 5, seed=seed, dtype=torch.bfloat16) for seed in (2, 3))
    attend, calls = torch.nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args) or attend(*args, **kwargs),
    )
    operator = PlainOperator(query, key, causal=True, scale=0.3)
    out, gathered = operator.sweep(forward, backward)
    assert len(calls) == 2
    assert torch.equal(out[:, 0], forward[:, 0])
    torch.testing.assert_close(out.float(), maps @ forward.float(), rtol=0.03, atol=0.03)
    expected = maps.transpose(-1, -2) @ backward.float()
    torch.testing.assert_close(gathered.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shift", [-300.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_far_from_zero_change_nothing(dtype: torch.dtype, shift: float, causal: bool) -> None:
    query, key = states(1, 2, 70, 8, dtype=dtype), states(1, 2, 70, 8, seed=1, dtype=dtype)
    query[..., 0], key[..., 0] = shift, 1.0
    exact = metrics.measure(query.float(), key.float(), statistics=SAMPLED, is_causal=causal)
    found = metrics.measure(query, key, method="sampled", is_causal=causal, sampling=Sampling(rows=70))
    for name in ("indirect_entropy", "sink_mass"):
        torch.testing.assert_close(found[name].value, exact[name].value, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_with_all_rows_only_the_norms_are_sampled(dtype: torch.dtype, causal: bool) -> None:
    query, key = states(2, 4, 90, 16, dtype=dtype), states(2, 2, 90, 16, seed=1, dtype=dtype)
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[1, :31] = False
    options = {"is_causal": causal, "padding_mask": mask}
    exact = metrics.measure(query, key, statistics=SAMPLED, **options)
    sampled = metrics.measure(query, key, method="sampled", sampling=Sampling(rows=90), **options)
    tolerance = max(torch.finfo(dtype).eps, 1e-7)
    for name in SAMPLED:
        assert sampled[name].value.shape == (2, 4)
        assert torch.isfinite(sampled[name].standard_error).all()
        away = (sampled[name].value - exact[name].value).abs()
        assert (away < (0.1 if name == "gtd" else 10 * tolerance)).all(), name


@pytest.mark.parametrize("method", ["exact", "sampled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_half_precision_are_neither_rounded_nor_too_large(dtype: torch.dtype, method: str) -> None:
    """A direction that all queries and keys share changes no row, though its products pass 65,504."""
    query, key = (states(1, 2, 40, 16, seed=seed, dtype=dtype) for seed in (0, 1))
    query[..., 0], key[..., 0] = 320.0, 320.0
    options = {"method": method, "scale": 0.25, "sampling": Sampling(rows=40)}
    found = metrics.measure(query, key, statistics=SAMPLED, **options)
    truth = metrics.measure(query.double(), key.double(), statistics=SAMPLED, **options)
    for name in SAMPLED:
        away = (found[name].value - truth[name].value).abs()
        assert (away < 0.01).all(), name


def test_exact_measure_equals_the_statistics_of_the_maps() -> None:
    query, key = states(2, 4, 20, 8), states(2, 2, 20, 8, seed=1)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 13:] = False
    refinement = Refinement("high", 0.5)
    values = metrics.measure(query, key, refinement=refinement, padding_mask=mask, is_causal=True)
    rows = (
        AttentionInputs(
            query, key.repeat_interleave(2, 1), torch.full((4,), 0.5), refinement, True, 8**-0.5, mask
        )
        .maps()
        .rows
    )
    for name, estimate in values.items():
        torch.testing.assert_close(estimate.value, getattr(metrics, name)(rows, padding_mask=mask))
        assert (estimate.standard_error == 0).all()


def test_small_working_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = states(2, 4, 30, 8), states(2, 2, 30, 8, seed=1)
    whole = [metrics.measure(query, key, method=method) for method in ("exact", "sampled")]
    for name in ("WORKING_BYTES", "CPU_WORKING_BYTES"):
        monkeypatch.setattr(f"saobp.metrics.query_key_statistics.{name}", 1)
    pieces = [metrics.measure(query, key, method=method) for method in ("exact", "sampled")]
    for one, other in zip(whole, pieces, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize(
    ("length", "causal", "refinement", "draws"),
    [
        (301, False, Refinement("none"), 60),
        (640, True, Refinement("none"), 20),
        (300, True, Refinement("high", 0.5), 30),
        (256, False, Refinement("high", 0.2), 30),
    ],
    ids=["odd", "causal", "strict high", "high"],
)
def test_error_bars_cover_the_exact_value_as_often_as_they_claim(
    length: int, causal: bool, refinement: Refinement, draws: int
) -> None:
    query, key = telling_heads(length, seed=3)
    options = {"is_causal": causal, "refinement": refinement}
    exact = metrics.measure(query, key, statistics=SAMPLED, **options)
    hits = {
        (name, level): 0 for name in ("gtd", "indirect_entropy", "attention_entropy") for level in (0.8, 0.95)
    }
    for seed in range(draws):
        found = metrics.measure(query, key, method="sampled", sampling=Sampling(seed=seed), **options)
        for name, level in hits:
            low, high = found[name].interval(level)
            hits[name, level] += int(((low <= exact[name].value) & (exact[name].value <= high)).sum())
        torch.testing.assert_close(found["sink_mass"].value, exact["sink_mass"].value)
    total = draws * query.shape[1]
    for (name, level), count in hits.items():
        slack = 3.5 * (level * (1 - level) / total) ** 0.5
        assert level - slack - 0.02 <= count / total <= min(1.0, level + slack + 0.05), (
            name,
            level,
            count / total,
        )


def test_averaged_over_draws_the_estimate_is_the_exact_value() -> None:
    query, key = telling_heads(128, seed=9)
    exact = metrics.measure(query, key, statistics=SAMPLED)
    found = [
        metrics.measure(query, key, method="sampled", sampling=Sampling(rows=16, seed=s)) for s in range(100)
    ]
    for name in ("gtd", "indirect_entropy", "attention_entropy"):
        values = torch.stack([each[name].value for each in found])
        claimed = torch.stack([each[name].standard_error for each in found]).square().mean(0).sqrt()
        assert ((values.mean(0) - exact[name].value).abs() < 4 * claimed / 10 + 2e-3).all(), name
        ratio = values.std(0) / claimed
        assert ((ratio > 0.7) & (ratio < 1.35)).all(), (name, ratio)


@pytest.mark.parametrize("tokens", [1, 2, 7, 10])
def test_balanced_signs_span_everything_but_the_constant(tokens: int) -> None:
    signs, scale = balanced_signs(tokens, 20_000, torch.Generator().manual_seed(0))
    assert (signs.sum(0) == 0).all()
    moments = scale * signs @ signs.T / signs.shape[1]
    projection = torch.eye(tokens) - 1 / tokens
    torch.testing.assert_close(moments, projection, atol=0.03, rtol=0)


def test_memory_is_linear_in_length() -> None:
    """No tensor made on the way is larger than a few states, let alone a map."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return result

    length = 4096
    query, key = states(1, 1, length, 16, dtype=torch.float32), states(1, 1, length, 16, dtype=torch.float32)
    for refinement in (None, Refinement("high", 0.2)):
        with Largest() as watched:
            metrics.measure(query, key, refinement=refinement, method="sampled", is_causal=True)
        assert watched.size < length**2 / 8


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_need_no_more_memory_than_they_are_given(dtype: torch.dtype, causal: bool) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Held(TorchDispatchMode):
        """Bytes of all tensors made on the way that are still alive."""

        now = most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                    storage = tensor.untyped_storage()
                    known.add(storage._cdata)
                    self.add(storage.nbytes())
                    weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
            return result

        def add(self, size: int) -> None:
            self.now += size
            self.most = max(self.most, self.now)

        def drop(self, place: int, size: int) -> None:
            known.discard(place)
            self.now -= size

    query, key = states(1, 4, 1024, 64, dtype=dtype), states(1, 4, 1024, 64, seed=1, dtype=dtype)
    known = {query.untyped_storage()._cdata, key.untyped_storage()._cdata}
    with Held() as held:
        metrics.measure(query, key, method="sampled", is_causal=causal)
    given = 4 * 1024 * 64 * (STATES_HELD * dtype.itemsize + SUMS_HELD * 4)
    assert 0.6 * given < held.most < 1.05 * given


@pytest.mark.parametrize(("count", "largest", "sizes"), [(16, 6, [5, 5, 6]), (5, 9, [5]), (0, 3, [])])
def test_heads_are_divided_evenly(count: int, largest: int, sizes: list[int]) -> None:
    assert [part.stop - part.start for part in even_slices(count, largest)] == sizes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "guess"}, "'exact' or 'sampled'"),
        ({"method": "sampled", "statistics": ["clustering"]}, "unknown statistic clustering"),
        ({"statistics": []}, "no statistic"),
        ({"padding_mask": torch.zeros(1, 6, dtype=torch.bool)}, "real token"),
        ({"key": torch.randn(1, 2, 5, 4)}, "as many queries as keys"),
        ({"query": torch.randn(0, 2, 6, 4), "key": torch.randn(0, 2, 6, 4)}, "at least one text"),
        ({"key": torch.full((1, 2, 6, 4), float("nan"))}, "NaN"),
        (
            {"method": "sampled", "is_causal": True, "refinement": Refinement("elemmul", 1.0)},
            "use method='exact'",
        ),
        ({"method": "sampled", "refinement": Refinement("elemmul-prior", 1.0)}, "use method='exact'"),
        ({"beta": 2.0}, "beta"),
        ({"refinement": "high:0.2+qk-norm"}, r"use saobp\.apply"),
        ({"is_causal": "no"}, "is_causal must be True or False"),
        ({"scale": float("nan")}, "scale must be a finite number"),
    ],
)
def test_bad_input_gets_a_clear_sentence(change: dict, words: str) -> None:
    options = {"query": torch.randn(1, 2, 6, 4), "key": torch.randn(1, 2, 6, 4)} | change
    with pytest.raises(ValueError, match=words):
        metrics.measure(options.pop("query"), options.pop("key"), **options)
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, not ndarray"):
        metrics.measure(np.zeros((1, 2, 6, 4)), torch.randn(1, 2, 6, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 probes"):
        Sampling(probes=1)
    with pytest.raises(ValueError, match="must be whole numbers"):
        Sampling(probes=2.5)
    with pytest.raises(ValueError, match="confidence"):
        exact_estimate(torch.zeros(1)).interval(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.measure(torch.randn(1, 2, 1, 4), torch.randn(1, 1, 1, 4), method="sampled")
