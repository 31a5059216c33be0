"""The example of docs/factors.md, run as printed, keeps every promise of the built-in factors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import saobp
from saobp.propagation import FactorGraph, get_factor, propagate
from saobp.propagation.factors import _FACTORS
from saobp.refinement import _factor_names
from saobp.testing import oracles
from saobp.testing.error_budget import operation_of
from saobp.testing.inputs import attention_inputs, collapsed_inputs

PAGE = Path(__file__).parents[2] / "docs" / "factors.md"
NAME = "near-potts"


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[dict[str, object]]:
    """Everything the page's code defines; the factor is taken back afterwards."""
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    yield names
    del _FACTORS[NAME]
    _factor_names.remove(NAME)


def attend(inputs, refinement: saobp.Refinement, **options: object) -> Tensor:
    return saobp.attention(inputs.query, inputs.key, inputs.value, refinement, **options)  # type: ignore[arg-type]


def test_the_page_runs(example: dict[str, object]) -> None:
    refined, output = example["refined"], example["output"]
    assert isinstance(refined, Tensor)
    assert isinstance(output, Tensor)
    torch.testing.assert_close(refined.sum(-1), torch.ones(2, 4, 8))
    assert output.shape == (2, 4, 8, 16)
    assert saobp.Refinement.parse("near-potts:0.5") == saobp.Refinement(NAME, 0.5)


@pytest.mark.parametrize("order", ["bidirectional", "strict"])
def test_it_is_the_product_over_nodes(order: oracles.Order) -> None:
    """With messages about unseen keys neutral, as the page says."""
    length, strength = 5, 0.8
    scores = torch.randn(length, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prior = oracles.masked_softmax(scores, order)
    psi = torch.tensor(
        [[-strength * 2.718281828459045 ** (-abs(r - k) / 2) for k in range(length)] for r in range(length)],
        dtype=torch.float64,
    ).exp()
    rows = torch.tensor(prior, dtype=torch.float64)
    message = torch.where(rows > 0, rows @ psi, 1.0)
    if order == "strict":
        heard = torch.stack([message[:j].prod(0) for j in range(length)])
    else:
        heard = torch.stack([message[torch.arange(length) != j].prod(0) for j in range(length)])
    expected = rows * heard / (rows * heard).sum(-1, keepdim=True)
    found = saobp.refine(rows, saobp.Refinement(NAME, strength), is_causal=order == "strict")
    torch.testing.assert_close(found, expected)


def test_short_reach_is_the_factor_high() -> None:
    factor = get_factor(NAME)
    scores = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    strength = torch.tensor([0.7, -0.7], dtype=torch.float64).view(2, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factor, "reach", 1e-3)
        near = propagate(scores, factor, strength, FactorGraph())
    torch.testing.assert_close(near.rows, propagate(scores, get_factor("high"), strength, FactorGraph()).rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (2, 2)])
def test_padding_changes_nothing(causal: bool, before: int, after: int) -> None:
    refinement = saobp.Refinement(NAME, 1.5, steps=2, damping=0.25)
    wide = attention_inputs(2, 2, before + 5 + after, 4, dtype=torch.float64)
    inner = slice(before, before + 5)
    real = torch.zeros(2, before + 5 + after, dtype=torch.bool)
    real[:, inner] = True
    alone = saobp.attention(
        *(states[:, :, inner] for states in (wide.query, wide.key, wide.value)), refinement, is_causal=causal
    )
    padded = attend(wide, refinement, padding_mask=real, is_causal=causal)
    torch.testing.assert_close(padded[:, :, inner], alone)


def test_the_future_is_not_seen() -> None:
    one, other = (attention_inputs(1, 2, 6, 4, seed=seed, dtype=torch.float64) for seed in (0, 1))
    mixed = [
        torch.cat([a[:, :, :4], b[:, :, 4:]], 2)
        for a, b in zip((one.query, one.key, one.value), (other.query, other.key, other.value), strict=True)
    ]
    refinement = saobp.Refinement(NAME, 1.5, steps=3)
    straight = attend(one, refinement, is_causal=True)
    changed = saobp.attention(*mixed, refinement, is_causal=True)
    torch.testing.assert_close(changed[:, :, :4], straight[:, :, :4], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("steps", [1, 2])
def test_decoding_row_by_row_equals_the_whole_pass(steps: int) -> None:
    length, factor, strength = 6, get_factor(NAME), torch.full((1, 1, 1), 1.5, dtype=torch.float64)
    scores = torch.randn(1, length, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.ones(length, length, dtype=torch.bool).tril()
    whole = propagate(scores, factor, strength, FactorGraph(order, causal=True), steps=steps)
    past = None
    for row in range(length):
        result = propagate(
            scores[:, row : row + 1, : row + 1],
            factor,
            strength,
            FactorGraph(order[row : row + 1, : row + 1], causal=True),
            steps=steps,
            past=past,
            keep_messages=True,
        )
        assert result.messages is not None
        past = functional.pad(result.messages, (0, 1))
        torch.testing.assert_close(result.rows[0, 0], whole.rows[0, row, : row + 1])


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_with_blind_rows(causal: bool) -> None:
    inputs = attention_inputs(3, 2, 4, 3, padding="left", strength=(0.8, -0.6), dtype=torch.float64)
    operation = operation_of(saobp.Refinement(NAME, steps=2), inputs, is_causal=causal)
    torch.autograd.gradcheck(operation, inputs.leaves(), fast_mode=True)


@pytest.mark.parametrize("gap", [0.0, 90.0, 1000.0])
def test_collapsed_heads_stay_finite(gap: float) -> None:
    plain = attention_inputs(3, 2, 40, 8, padding="right", strength=(20.0, -20.0))
    inputs = collapsed_inputs(plain, gap)
    leaves = inputs.leaves()
    output = saobp.attention(
        *leaves[:3],
        saobp.Refinement(NAME, steps=2),
        padding_mask=inputs.padding_mask,
        strength=leaves[3],
    )
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(output, leaves, inputs.output_gradient))


@pytest.mark.parametrize("causal", [False, True])
def test_it_compiles_without_a_graph_break(causal: bool) -> None:
    """With torch's own tracing; code generation adds nothing to the question."""
    inputs = attention_inputs(2, 2, 6, 4, padding="left")
    refinement = saobp.Refinement(NAME, steps=2, damping=0.25)

    operation = operation_of(refinement, inputs, is_causal=causal)
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    leaves = inputs.leaves()
    eager, traced = operation(*leaves), compiled(*leaves)
    torch.testing.assert_close(traced, eager)
    for ours, theirs in zip(
        torch.autograd.grad(traced, leaves, inputs.output_gradient),
        torch.autograd.grad(eager, leaves, inputs.output_gradient),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)

    rows = torch.rand(2, 5, 5).softmax(-1)
    number = saobp.Refinement(NAME, 0.5)
    refine = torch.compile(saobp.refine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        refine(rows, number, is_causal=causal), saobp.refine(rows, number, is_causal=causal)
    )


@pytest.mark.parametrize(("gives", "found"), [(None, "NoneType"), (torch.zeros(2, 5), r"\(2, 5\)")])
def test_messages_of_another_shape_are_refused(gives: torch.Tensor | None, found: str) -> None:
    class Wrong(saobp.Factor):
        def log_messages(self, beliefs: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
            return gives  # type: ignore[return-value]

    graph = FactorGraph(None, None, causal=False)
    with pytest.raises(ValueError, match=rf"one number for every entry of beliefs \(2, 5, 5\), not {found}"):
        propagate(torch.randn(2, 5, 5), Wrong(), torch.tensor(0.5), graph)
