"""Exact statistics against one-line references in numpy and networkx."""

from __future__ import annotations

import networkx
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saobp
from saobp import metrics
from saobp.metrics.functional.gtd import indirect_paths

PER_MAP = [
    metrics.gtd,
    metrics.indirect_entropy,
    metrics.attention_entropy,
    metrics.sparsity,
    metrics.sink_mass,
    metrics.clustering,
    metrics.betweenness,
]


def random_maps(*shape: int, seed: int = 0, sharpness: float = 2.0, causal: bool = False) -> torch.Tensor:
    scores = sharpness * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    if causal:
        hidden = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)


def paths_by_power(a: numpy.ndarray, beta: float, hops: int) -> numpy.ndarray:
    return sum(beta ** (t - 1) * numpy.linalg.matrix_power(a, t) for t in range(2, hops + 1))


def token_graph(a: numpy.ndarray, tau: float) -> networkx.Graph:
    w = (a + a.T) / 2
    return networkx.from_numpy_array(numpy.where((w > tau) & ~numpy.eye(len(a), dtype=bool), w, 0))


def entropy(rows: numpy.ndarray) -> float:
    return float(-(rows * numpy.log(numpy.where(rows > 0, rows, 1))).sum(-1).mean())


@pytest.mark.parametrize("hops", [2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0])
def test_gtd_and_indirect_entropy_equal_the_power_sum(hops: int, beta: float) -> None:
    maps = random_maps(2, 3, 11, 11, causal=hops % 2 == 0)
    for a, value, spread in zip(
        maps.flatten(0, 1).numpy(),
        metrics.gtd(maps, beta=beta, hops=hops).flatten(),
        metrics.indirect_entropy(maps, beta=beta, hops=hops).flatten(),
        strict=True,
    ):
        g = paths_by_power(a, beta, hops)
        assert float(value) == pytest.approx((g**2).sum() / ((a**2).sum() + (g**2).sum()), abs=1e-12)
        assert float(spread) == pytest.approx(entropy(g / g.sum(-1, keepdims=True)), abs=1e-12)


@pytest.mark.parametrize("length", [1, 3, 4, 37])
def test_causal_maps_need_not_be_multiplied_whole(length: int) -> None:
    maps = random_maps(2, 3, length, length, causal=True)
    for hops in (2, 3, 4, 7):
        whole, saved = (indirect_paths(maps, hops=hops, triangular=part) for part in (False, True))
        torch.testing.assert_close(saved, whole, rtol=0, atol=1e-14)


def test_four_hops_take_two_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        metrics.gtd(random_maps(16, 16))
    assert counter.get_total_flops() == 2 * 2 * 16**3


@pytest.mark.parametrize("causal", [False, True])
def test_entropy_sparsity_and_sink_equal_numpy(causal: bool) -> None:
    for a in random_maps(4, 9, 9, causal=causal):
        n = a.numpy()
        assert float(metrics.attention_entropy(a)) == pytest.approx(entropy(n), abs=1e-12)
        assert float(metrics.sparsity(a)) == pytest.approx((n < 1 / 9).mean())
        assert float(metrics.sparsity(a, threshold=0.3)) == pytest.approx((n < 0.3).mean())
        assert float(metrics.sink_mass(a)) == pytest.approx(n.mean(0).max())


def test_autocast_changes_nothing() -> None:
    a = random_maps(2, 3, 16, 16).float()
    query, key = torch.randn(2, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    layers = [a, a.flip(1), a.roll(1, 1)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = [metrics.gtd(a), metrics.indirect_entropy(a), metrics.clustering(a)]
            found += [metrics.cross_layer_gtd(layers), metrics.rollout(layers)]
            for method in ("exact", "sampled"):
                found += [each.value for each in metrics.measure(query, key, method=method).values()]
        results.append(found)
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("length", [1, 3, 5, 64, 100, 1000])
def test_no_entry_of_a_uniform_map_is_sparse(length: int) -> None:
    alike = torch.zeros(1, 1, length, 4)
    for dtype in (torch.float32, torch.float64):
        found = metrics.measure(alike.to(dtype), alike.to(dtype), statistics=["sparsity"])
        assert found["sparsity"].value == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 14),
    tau=st.sampled_from([1e-4, 0.02, 0.1, 0.3]),
    sharpness=st.sampled_from([0.0, 2.0, 8.0]),
    seed=st.integers(0, 99),
)
def test_graph_statistics_equal_networkx(length: int, tau: float, sharpness: float, seed: int) -> None:
    a = random_maps(length, length, seed=seed, sharpness=sharpness)
    graph = token_graph(a.numpy(), tau)
    cc = networkx.average_clustering(graph, weight="weight")
    bc = numpy.mean(list(networkx.betweenness_centrality(graph, normalized=False).values()))
    assert float(metrics.clustering(a, tau=tau)) == pytest.approx(float(cc), abs=1e-9)
    assert float(metrics.betweenness(a, tau=tau)) == pytest.approx(float(bc), abs=1e-9)


def test_graph_draws_forty_real_tokens() -> None:
    a = random_maps(3, 2, 60, 60, sharpness=4.0)
    chosen = torch.randperm(60, generator=torch.Generator().manual_seed(7))[:40].sort().values
    graphs = [token_graph(m[chosen][:, chosen].numpy(), 1e-3) for m in a.flatten(0, 1)]
    cc = [networkx.average_clustering(g, weight="weight") for g in graphs]
    bc = [numpy.mean(list(networkx.betweenness_centrality(g, normalized=False).values())) for g in graphs]
    assert metrics.clustering(a, tau=1e-3, seed=7).flatten().tolist() == pytest.approx(cc)
    assert metrics.betweenness(a, tau=1e-3, seed=7).flatten().tolist() == pytest.approx(bc)


def test_graphs_without_meaning_give_zero() -> None:
    for a in (torch.eye(5), torch.ones(1, 1), torch.full((2, 2), 0.5)):
        assert float(metrics.clustering(a)) == 0
        assert float(metrics.betweenness(a)) == 0
    path = torch.diag(torch.ones(5), 1)
    path[-1, -1] = 1
    assert float(metrics.clustering(path)) == 0
    assert float(metrics.betweenness(path)) == pytest.approx(
        sum(d - 1 for d in range(2, 6) for _ in range(6 - d)) / 6
    )
    complete = torch.full((6, 6), 1 / 6)
    assert float(metrics.clustering(complete)) == pytest.approx(1)
    assert float(metrics.betweenness(complete)) == 0


@pytest.mark.parametrize("statistic", PER_MAP, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0,)])
@pytest.mark.parametrize("padded", [False, True])
def test_no_maps_give_no_numbers(statistic, shape: tuple[int, ...], padded: bool) -> None:  # type: ignore[no-untyped-def]
    maps = torch.zeros(*shape, 5, 5)
    mask = torch.ones(shape[0], 5, dtype=torch.bool) if padded else None
    assert statistic(maps, padding_mask=mask).shape == shape


@pytest.mark.parametrize("statistic", PER_MAP, ids=lambda f: f.__name__)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(statistic, side: str) -> None:  # type: ignore[no-untyped-def]
    lengths, width = [50, 43, 1], 57
    batch = torch.rand(3, 2, width, width, dtype=torch.float64).softmax(-1)
    mask = torch.zeros(3, width, dtype=torch.bool)
    alone = []
    for item, length in enumerate(lengths):
        here = slice(width - length, width) if side == "left" else slice(0, length)
        a = random_maps(2, length, length, seed=item, causal=True)
        batch[item, :, here, :] = 0
        batch[item, :, here, here] = a
        mask[item, here] = True
        alone.append(statistic(a))
    together = statistic(batch, padding_mask=mask)
    assert together.shape == (3, 2)
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)
    assert torch.equal(statistic(batch, padding_mask=mask.long()), together)  # as tokenizers give it


@pytest.mark.parametrize(
    "statistic", [metrics.gtd, metrics.indirect_entropy, metrics.attention_entropy, metrics.clustering]
)
def test_gradients(statistic) -> None:  # type: ignore[no-untyped-def]
    scores = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: statistic(s.softmax(-1)), scores)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    masked = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    (gradient,) = torch.autograd.grad(statistic(masked).sum(), scores)
    assert torch.isfinite(gradient).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(length=st.integers(1, 12), sharpness=st.floats(0, 20), seed=st.integers(0, 99), causal=st.booleans())
def test_bounds_and_token_order(length: int, sharpness: float, seed: int, causal: bool) -> None:
    a = random_maps(length, length, seed=seed, sharpness=sharpness, causal=causal)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    for statistic in PER_MAP:
        value = float(statistic(a))
        assert value == pytest.approx(float(statistic(a[order][:, order])), abs=1e-9)
        assert value >= 0
    assert 0 <= float(metrics.gtd(a)) <= 1
    assert float(metrics.attention_entropy(a)) <= numpy.log(length) + 1e-9
    assert 1 / length - 1e-9 <= float(metrics.sink_mass(a)) <= 1 + 1e-9


def test_cross_layer_gtd_equals_products_and_reduces_to_gtd() -> None:
    layers = [random_maps(2, 3, 7, 7, seed=s) for s in range(5)]
    means = [layer.mean(1).numpy() for layer in layers]
    values = metrics.cross_layer_gtd(layers)
    assert values.shape == (4, 2)
    for top in range(1, 5):
        for item in range(2):
            a = means[top][item]
            chain = [
                numpy.linalg.multi_dot([means[top - i][item] for i in range(t)])
                for t in range(2, min(4, top + 1) + 1)
            ]
            g = sum(0.9 ** (t - 1) * p for t, p in enumerate(chain, 2))
            expected = (g**2).sum() / ((a**2).sum() + (g**2).sum())
            assert float(values[top - 1, item]) == pytest.approx(expected)
    same = [random_maps(1, 1, 6, 6)] * 4
    assert float(metrics.cross_layer_gtd(same)[-1]) == pytest.approx(float(metrics.gtd(same[0])))


def test_rollout_equals_the_product_with_skips() -> None:
    layers = [random_maps(2, 3, 7, 7, seed=s) for s in range(3)]
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 7:] = False
    padded = [torch.nn.functional.pad(layer, (0, 2, 0, 2)) for layer in layers]
    expected = numpy.linalg.multi_dot(
        [0.5 * a.mean(1)[0].numpy() + 0.5 * numpy.eye(7) for a in reversed(layers)]
    )
    numpy.testing.assert_allclose(metrics.rollout(layers)[0], expected, atol=1e-12)
    numpy.testing.assert_allclose(metrics.rollout(padded, padding_mask=mask)[0, :7, :7], expected, atol=1e-12)


def test_refined_and_half_precision_maps_are_just_maps() -> None:
    a = random_maps(2, 4, 12, 12).float()
    refined = saobp.refine(a, saobp.Refinement("high", 1.0))
    assert (metrics.sink_mass(refined) < metrics.sink_mass(a)).all()
    torch.testing.assert_close(metrics.gtd(a.bfloat16()), metrics.gtd(a), atol=0.01, rtol=0)
    assert metrics.gtd(a.half()).dtype == torch.float32


@pytest.mark.parametrize(
    ("attention", "options", "words"),
    [
        (torch.rand(3, 4), {}, "length, length"),
        (torch.ones(3, 3, dtype=torch.long), {}, "floating-point"),
        (torch.rand(4, 4), {}, "sum to 1"),
        (torch.randn(4, 4), {}, "negative"),
        (torch.full((4, 4), float("nan")), {}, "NaN"),
        (torch.empty(0, 0), {}, "at least one token"),
        (torch.full((2, 4, 4), 0.25), {"padding_mask": torch.ones(4, dtype=torch.bool)}, "shape"),
        (torch.full((2, 4, 4), 0.25), {"padding_mask": torch.full((2, 4), 2)}, "only 1 for real"),
        (torch.full((1, 4, 4), 0.25), {"padding_mask": torch.zeros(1, 4, dtype=torch.bool)}, "real token"),
        (torch.full((1, 4, 4), 0.25), {"padding_mask": torch.tensor([[True, True, True, False]])}, "padding"),
    ],
)
def test_bad_maps_get_a_clear_sentence(attention: torch.Tensor, options: dict, words: str) -> None:
    for statistic in PER_MAP:
        with pytest.raises(ValueError, match=words):
            statistic(attention, **options)


def test_bad_options_get_a_clear_sentence() -> None:
    a = torch.full((4, 4), 0.25)
    for call in (
        lambda: metrics.gtd(a, beta=0),
        lambda: metrics.gtd(a, hops=1),
        lambda: metrics.sparsity(a, threshold=2),
        lambda: metrics.clustering(a, tau=-1),
        lambda: metrics.betweenness(a, nodes=0),
        lambda: metrics.cross_layer_gtd([a[None, None]]),
        lambda: metrics.cross_layer_gtd([a, a]),
        lambda: metrics.rollout([]),
        lambda: metrics.rollout([a[None, None]], residual=1.0),
        lambda: metrics.rollout([a[None, None]], residual="half"),
        lambda: metrics.rollout(a[None, None]),
        lambda: metrics.cross_layer_gtd(None),
        lambda: metrics.cross_layer_gtd((None, None)),
        lambda: metrics.sparsity(a, threshold="low"),
        lambda: metrics.clustering(a, tau="low"),
    ):
        with pytest.raises(ValueError, match=r".{20,}"):
            call()
