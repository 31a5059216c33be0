"""Collapsed heads, blind rows, nothing at all, extreme strengths, low precision, dropout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import saobp
from saobp.testing.error_budget import assert_within_budget, operation_of, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

FACTORS = ["none", "high", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def assert_all_finite(refinement: saobp.Refinement, inputs: AttentionInputs, causal: bool) -> None:
    for name, result in run(operation_of(refinement, inputs, is_causal=causal), inputs).items():
        assert torch.isfinite(result).all(), f"{name} is not finite"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize("causal", [False, True])
def test_collapsed_heads_stay_finite(factor: str, dtype: torch.dtype, collapse: str, causal: bool) -> None:
    """Gaps of 90 and 1000 nats, learned strengths beyond the bound, padding, blind rows, several steps."""
    for gap in (90.0, 1000.0):
        for strength in ((16.0, -16.0), (20.0, -20.0), (0.2, 2.1)):
            plain = attention_inputs(
                3, 2, 12, 8, strength=strength, padding="left", transposed=True, dtype=dtype
            )
            inputs = collapsed_inputs(plain, gap, collapse)  # type: ignore[arg-type]
            for refinement in (saobp.Refinement(factor), saobp.Refinement(factor, steps=3, damping=0.5)):
                assert_all_finite(refinement, inputs, causal)


@pytest.mark.parametrize("factor", ["high", "low"])
def test_collapsed_heads_are_right(factor: str) -> None:
    """Every row sits on key 0 by 90 nats: repulsion of e^(-2) per row over 63 rows breaks that, by hand."""
    inputs = collapsed_inputs(attention_inputs(1, 1, 64, 8, dtype=torch.float64), 90.0)
    scores = inputs.query @ inputs.key.transpose(-1, -2) * 8**-0.5
    sign = -1 if factor == "high" else 1
    heard = torch.zeros(64, dtype=torch.float64)
    heard[0] = sign * 2.0 * 63
    expected = (scores + heard).softmax(-1) @ inputs.value
    found = saobp.attention(inputs.query, inputs.key, inputs.value, saobp.Refinement(factor, 2.0))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_elemmul_gradient_does_not_overflow_for_nearly_disjoint_rows() -> None:
    """Row j sits on key j + 1: similarities vanish and their inverses meet a scaled loss."""
    for gap in (60.0, 80.0, 84.0, 86.0, 90.0):
        scores = (gap * torch.eye(6).roll(1, -1)).requires_grad_()
        identity = torch.eye(6).expand(1, 1, -1, -1)
        rows = saobp.attention(
            scores.expand(1, 1, -1, -1), identity, identity, saobp.Refinement("elemmul-prior"), scale=1.0
        )
        assert torch.isfinite(rows).all()
        (gradient,) = torch.autograd.grad(rows, scores, 2.0**16 * torch.ones(6).cumsum(0).expand_as(rows))
        assert torch.isfinite(gradient).all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_with_no_visible_key_are_zero(factor: str, dtype: torch.dtype, causal: bool) -> None:
    inputs = attention_inputs(3, 2, 8, 4, padding="left", strength=1.0, dtype=dtype)
    with torch.autograd.detect_anomaly():  # no NaN on the way either
        results = run(operation_of(saobp.Refinement(factor), inputs, is_causal=causal), inputs)
    assert inputs.padding_mask is not None
    blind = ~inputs.padding_mask.any(-1)
    assert blind.any()
    for name in ("output", "query", "key", "value"):
        assert (results[name][blind] == 0).all()
    if causal:
        assert (results["output"].transpose(1, 2)[~inputs.padding_mask] == 0).all()
    assert all(torch.isfinite(result).all() for result in results.values())


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_single_token_attends_to_itself(factor: str, causal: bool, steps: int) -> None:
    inputs = attention_inputs(2, 2, 1, 4)
    refinement = saobp.Refinement(factor, 16.0, steps=steps)
    found = saobp.attention(inputs.query, inputs.key, inputs.value, refinement, is_causal=causal)
    assert torch.equal(found, inputs.value)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_gives_nothing(factor: str, causal: bool, batch: int, length: int) -> None:
    inputs = attention_inputs(batch, 2, length, 4)
    refinement = saobp.Refinement(factor, steps=2)
    for mask in (None, torch.ones(batch, length, dtype=torch.bool)):
        output = saobp.attention(
            *inputs.leaves()[:3],
            refinement,
            is_causal=causal,
            padding_mask=mask,
            strength=inputs.strength,
        )
        assert output.shape == (batch, 2, length, 4)
        output.sum().backward()
    rows = torch.zeros(batch, 2, length, length)
    assert saobp.refine(rows, refinement, is_causal=causal, strength=inputs.strength).shape == rows.shape


def test_queries_without_any_key_give_zeros() -> None:
    inputs = attention_inputs(2, 2, 0, 4, queries=3)
    found = saobp.attention(inputs.query, inputs.key, inputs.value, saobp.Refinement("high", 0.2))
    assert torch.equal(found, torch.zeros(2, 2, 3, 4))


@pytest.mark.parametrize("factor", ["high", "low", "high-listing", "low-listing"])
def test_strengths_beyond_the_bound_act_like_the_bound(factor: str) -> None:
    inputs = attention_inputs(dtype=torch.float64)
    at, beyond = (
        saobp.attention(
            inputs.query,
            inputs.key,
            inputs.value,
            saobp.Refinement(factor),
            strength=torch.tensor([s, -s]),
        )
        for s in (16.0, 20.0)
    )
    assert torch.equal(at, beyond)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_output_keeps_the_precision_of_the_input(factor: str, dtype: torch.dtype) -> None:
    inputs = attention_inputs(dtype=dtype)
    output = saobp.attention(inputs.query, inputs.key, inputs.value, saobp.Refinement(factor, 0.2))
    assert output.dtype == dtype
    rows = torch.full((2, 4, 4), 0.25, dtype=dtype)
    assert saobp.refine(rows, saobp.Refinement(factor, 0.2)).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_strides_do_not_matter(dtype: torch.dtype, causal: bool) -> None:
    """Views as models pass them, held to the budget of their own precision."""
    inputs = attention_inputs(3, 4, 24, 8, key_heads=2, padding="both", transposed=True, dtype=dtype)
    assert not inputs.query.is_contiguous()

    def contiguous(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return operation_of(refinement, inputs, is_causal=causal)(
            query.contiguous(), key.contiguous(), value.contiguous(), strength
        )

    refinement = saobp.Refinement("high")
    assert_within_budget(contiguous, inputs, refinement, is_causal=causal)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_messages_keep_full_precision_under_autocast(factor: str, dtype: torch.dtype) -> None:
    """Also where a factor multiplies matrices, which autocast would do in half precision."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 40, 40, generator=random).softmax(-1)
    refinement = saobp.Refinement(factor, 1.0)
    expected = saobp.refine(rows, refinement)
    with torch.autocast("cpu", dtype):
        found = saobp.refine(rows, refinement)
    assert torch.equal(found, expected)


def test_shapes_are_known_without_numbers() -> None:
    inputs = attention_inputs(2, 4, 6, 8, key_heads=2, device="meta")
    found = saobp.attention(inputs.query, inputs.key, inputs.value, saobp.Refinement("high", 0.2))
    assert found.shape == (2, 4, 6, 8)


@pytest.mark.filterwarnings("ignore:future='paper'")
@pytest.mark.parametrize("factor", FACTORS)
def test_compiles_without_a_graph_break(factor: str) -> None:
    inputs = attention_inputs(2, 4, 6, 8, key_heads=2, padding="left", transposed=True)
    for options in ({"steps": 2, "damping": 0.25}, {"future": "paper"}):
        attend = operation_of(saobp.Refinement(factor, **options), inputs, is_causal=True)
        expected = run(attend, inputs)
        torch.compiler.reset()
        found = run(torch.compile(attend, fullgraph=True, backend="aot_eager"), inputs)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], msg=name)


class TestDropout:
    def attend(self, dropout_p: float, seed: int = 0, factor: str = "high") -> Tensor:
        inputs = attention_inputs(1, 1, 8, 8, dtype=torch.float64)
        torch.manual_seed(seed)
        identity = torch.eye(8, dtype=torch.float64).expand(1, 1, 8, 8)
        return saobp.attention(
            inputs.query, inputs.key, identity, saobp.Refinement(factor, 1.0), dropout_p=dropout_p
        )

    def test_none_is_exact(self) -> None:
        assert torch.equal(self.attend(0.0, seed=1), self.attend(0.0, seed=2))

    def test_a_seed_repeats_it(self) -> None:
        assert torch.equal(self.attend(0.4, seed=1), self.attend(0.4, seed=1))
        assert not torch.equal(self.attend(0.4, seed=1), self.attend(0.4, seed=2))

    @pytest.mark.parametrize("factor", FACTORS)
    def test_it_drops_refined_entries_and_scales_the_rest(self, factor: str) -> None:
        kept, dropped = self.attend(0.0, factor=factor), self.attend(0.4, factor=factor)
        zero = dropped == 0
        assert zero.any()
        torch.testing.assert_close(dropped[~zero], kept[~zero] / 0.6)

    def test_the_mean_is_kept(self) -> None:
        mean = torch.stack([self.attend(0.3, seed) for seed in range(2000)]).mean(0)
        torch.testing.assert_close(mean, self.attend(0.0), rtol=0.1, atol=0.005)


def test_the_pages_packed_batch_gives_what_the_padded_one_gives() -> None:
    page = Path(__file__).parents[2] / "docs" / "operation.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, names)
    states = [names[name].transpose(1, 2) for name in ("query", "key", "value")]
    expected = saobp.attention(*states, "high:0.2", padding_mask=names["real"]).transpose(1, 2)
    torch.testing.assert_close(names["padded"], expected * names["real"][:, :, None, None])
