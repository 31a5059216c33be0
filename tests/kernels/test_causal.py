"""Strict causal sweeps against the specification: on the GPU in every precision, else in the interpreter."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_helpers import DROPPED, check_dropout, spec_of
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.arguments import BoundedStrength
from saobp.kernels.call_spec import CallSpec
from saobp.testing.error_budget import Operation, assert_within_budget, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _by_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half types have own kernels for short calls, and a backward pass that stores gradients of scores
    (``test_causal_stored.py``); here they take the sweeps like the others."""
    monkeypatch.setattr("saobp.kernels.dispatch.is_short", lambda *_: False)
    monkeypatch.setattr("saobp.kernels.dispatch.STORED_MAX_LENGTH", 0)


def fused(inputs: AttentionInputs, refinement: Refinement, **options: object) -> Operation:
    def operation(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query, key, value, refinement,
            padding_mask=inputs.padding_mask, is_causal=True, strength=strength, backend="fused", **options,
        )  # fmt: skip

    return operation


def check(inputs: AttentionInputs, factor: str = "high") -> None:
    refinement = Refinement(factor, 0.2)
    assert_within_budget(fused(inputs, refinement), inputs, refinement, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 37, 64, 111, 128, 129, 300, *([513, 1023, 2049] if GPU else [])])
def test_lengths(length: int, dtype: torch.dtype) -> None:
    strength = (0.2, 1.5) if GPU else (0.7,)
    check(
        attention_inputs(
            1, len(strength), length, 64 if GPU else 16, strength=strength, dtype=dtype, device=DEVICE
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["low", "high-listing", "low-listing"])
@pytest.mark.parametrize("length", [37, 129])
def test_factors(factor: str, length: int, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 1, length, 16, strength=0.7, dtype=dtype, device=DEVICE), factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["high", "low-listing"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(side: str, factor: str, dtype: torch.dtype) -> None:
    """Three sequences: whole, padded and nothing but padding."""
    check(attention_inputs(3, 1, 71, 16, strength=0.7, padding=side, dtype=dtype, device=DEVICE), factor)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_a_sentence_alone(side: str) -> None:
    """With 70 tokens of padding beside it, in tiles of its own or not, a sentence gives the same output."""
    inputs = attention_inputs(1, 1, 33, 16, strength=1.0, device=DEVICE)
    alone = fused(inputs, Refinement("high"))(*inputs.leaves())
    beside = (0, 0, 70, 0) if side == "left" else (0, 0, 0, 70)
    mask = torch.ones(1, 33, dtype=torch.bool, device=DEVICE)

    def padded(states: Tensor) -> Tensor:
        return torch.nn.functional.pad(states, beside, value=1.0)

    both = replace(
        inputs,
        query=padded(inputs.query), key=padded(inputs.key), value=padded(inputs.value),
        output_gradient=padded(inputs.output_gradient),
        padding_mask=torch.nn.functional.pad(mask, beside[2:]),
    )  # fmt: skip
    together = fused(both, Refinement("high"))(*both.leaves())
    torch.testing.assert_close(together[:, :, both.padding_mask[0]], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "key_heads"), [(64, 2), (40, 1), (128, 2), *([(256, 1)] if GPU else [])])
def test_head_sizes_and_shared_keys(dim: int, key_heads: int, dtype: torch.dtype) -> None:
    inputs = attention_inputs(
        1, 2, 70, dim, key_heads=key_heads, strength=(0.2, 1.0), transposed=True, dtype=dtype, device=DEVICE
    )
    check(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strength", [-1.0, 0.0, 3.0])
def test_trained_strengths_of_either_sign(strength: float, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 1, 70, 16, strength=strength, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize(("gap", "strength"), [(10.0, 0.5), (90.0, 1.0)])
def test_collapsed_heads(gap: float, strength: float, collapse: str, dtype: torch.dtype) -> None:
    """On the diagonal, dQ is what is left of large terms that D, made of rounded outputs, cannot balance."""
    inputs = attention_inputs(1, 1, 100, 16, strength=strength, dtype=dtype, device=DEVICE)
    check(collapsed_inputs(inputs, gap, collapse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_that_sees_one_key_has_no_gradient(dtype: torch.dtype) -> None:
    """All weight on key 0, by 90 nats: what is left of the gradients is rounding, over pairs of rows."""
    inputs = collapsed_inputs(attention_inputs(1, 1, 100, 16, dtype=dtype, device=DEVICE), 90.0)
    refinement = Refinement("high", 0.2)
    operation = fused(inputs, refinement)
    assert_within_budget(operation, inputs, refinement, is_causal=True, gradients=False)
    found = run(operation, inputs)
    terms = float((inputs.output_gradient.double() @ inputs.value[..., :1, :].double().mT).abs().sum())
    for name in ("query", "key", "strength"):
        assert float(found[name].abs().max()) < 1e-4 * terms, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_spans(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of keys carried from span to span, down and up again."""
    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 128)
    check(attention_inputs(1, 1, 270, 16, strength=0.7, dtype=dtype, device=DEVICE))


def test_sums_of_keys_take_bounded_memory_per_token() -> None:
    """At most one number per block of a span's rows; about half of that where all rows are in one span."""
    from saobp.kernels.causal.launch import SPAN, causal_block, sums_plane

    def per_token(length: int) -> float:
        states = torch.empty(1, 1, length, 64, dtype=torch.float16, device="meta")
        problem = spec_of(states, states, None, None, length, 1.0, 0.0, 1.0, 1, 0.18)
        assert causal_block(problem, "output").rows == 64
        return sums_plane(problem) / length

    assert per_token(SPAN) == (SPAN / 64 + 1) / 2
    assert per_token(SPAN // 2) == (SPAN / 128 + 1) / 2
    assert per_token(2 * SPAN) < per_token(64 * SPAN) <= SPAN / 64


def test_spans_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 64)
    check(attention_inputs(2, 1, 140, 16, strength=0.7, padding="left", dtype=torch.float16, device=DEVICE))


@pytest.mark.parametrize("factor", ["high", "high-listing"])
def test_no_row_depends_on_later_tokens(factor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix gives the same rows bit for bit, in one span or several."""
    inputs = attention_inputs(1, 1, 200, 16, strength=1.0, device=DEVICE)
    whole = fused(inputs, Refinement(factor))(*inputs.leaves())
    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 128)
    for length in (1, 65, 150):
        start = replace(
            inputs,
            query=inputs.query[:, :, :length],
            key=inputs.key[:, :, :length],
            value=inputs.value[:, :, :length],
        )
        assert torch.equal(fused(start, Refinement(factor))(*start.leaves()), whole[:, :, :length])


def test_repeats_are_bit_equal() -> None:
    inputs = attention_inputs(1, 1, 70, 16, strength=1.0, device=DEVICE)
    operation = fused(inputs, Refinement("high"))
    first = run(operation, inputs)
    for _ in range(100 if GPU else 1):
        again = run(operation, inputs)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["high", "low-listing"])
def test_dropout_drops_the_same_entries_in_both_directions(factor: str, dtype: torch.dtype) -> None:
    refinement = Refinement(factor, 0.2)
    inputs, dropped = check_dropout(refinement, 80, dtype, is_causal=True)
    rows = fused(inputs, refinement)(*inputs.leaves())
    shown, keep = rows > 1e-3, dropped != 0
    assert not dropped[rows == 0].any()
    assert abs(float(keep[shown].double().mean()) - (1 - DROPPED)) < 0.05
    rtol = 2**-6 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(dropped[keep], rows[keep] / (1 - DROPPED), rtol=rtol, atol=1e-5)


def test_packed_sequences_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    from saobp.kernels.fused import FAMILIES

    causal_refined_attention = FAMILIES["causal"].forward

    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 64)
    lengths = (5, 70, 0, 64)
    inputs = attention_inputs(1, 1, sum(lengths), 16, strength=0.7, device=DEVICE)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    query, key, value, strength = inputs.leaves()
    packed, *_ = causal_refined_attention(
        query, key, value, strength, None, cu, None, max(lengths), 0.25, 0.0, 1.0, 1, 0.0
    )
    found = torch.autograd.grad(packed, (query, key, value, strength), inputs.output_gradient)
    alone = [
        saobp.attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], Refinement("high"),
            is_causal=True, strength=strength, scale=0.25, backend="reference",
        )
        for a, b in itertools.pairwise(bounds) if a < b
    ]  # fmt: skip
    together = torch.cat(alone, 2)
    expected = torch.autograd.grad(together, (query, key, value, strength), inputs.output_gradient)
    torch.testing.assert_close(packed, together, rtol=0, atol=3e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def test_operators_are_sound() -> None:
    from saobp.kernels.fused import FAMILIES

    causal_refined_attention = FAMILIES["causal"].forward

    inputs = attention_inputs(1, 2, 20, 16, key_heads=1, strength=0.7, device=DEVICE)
    query, key, value, strength = inputs.leaves()
    strength = strength.detach().requires_grad_()
    for receives in (0, 1, 2):
        torch.library.opcheck(
            causal_refined_attention,
            (query, key, value, strength, None, None, None, 20, 0.25, 0.0, 1.0, receives, 0.0),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_the_leaking_form_is_refused() -> None:
    inputs = attention_inputs(1, 1, 8, 16, device=DEVICE)
    with (
        pytest.warns(UserWarning, match="messages of later rows"),
        pytest.raises(ValueError, match="leaking form"),
    ):
        fused(inputs, Refinement("high", 0.2, future="paper"))(*inputs.leaves())


def differences(inputs: AttentionInputs, refinement: Refinement) -> dict[str, float]:
    """Relative difference of output and gradients from the specification; the strength does not learn."""
    leaves = inputs.leaves()[:3]

    def results(backend: str) -> list[Tensor]:
        out = saobp.attention(
            *leaves, refinement, is_causal=True, padding_mask=inputs.padding_mask, backend=backend
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.output_gradient)]

    return {
        name: float((found - expected).norm() / expected.norm())
        for name, found, expected in zip(
            ("output", "query", "key", "value"), results("fused"), results("reference"), strict=True
        )
    }


@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize(
    ("factor", "padding", "span", "careful"),
    [
        ("high", None, 2048, False), ("high", "left", 64, False), ("high", "both", 2048, False),
        ("high", "right", 64, True), ("high", None, 64, True), ("low", None, 64, False),
        ("high-listing", None, 2048, False),
    ],
)  # fmt: skip
def test_the_way_of_weak_strengths(
    factor: str, padding: Any, span: int, careful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Careful: every head is taken for one that underflowed."""
    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", span)
    if careful:
        monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
        monkeypatch.setattr(CallSpec, "may_underflow", True)
    batch = 1 if padding is None else 2
    inputs = attention_inputs(batch, 2, 140, 16, key_heads=1, device=DEVICE, padding=padding)
    for name, difference in differences(inputs, Refinement(factor, 0.2)).items():
        assert difference < 1e-3, name


@pytest.mark.usefixtures("weak_way")
def test_heads_that_underflow_are_done_with_care(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head whose rows have nothing but a shunned key, beside one of a common kind."""
    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 128)
    inputs = attention_inputs(1, 2, 250, 16, device=DEVICE)
    collapsed = collapsed_inputs(inputs, 200.0)
    query, key = inputs.query.clone(), inputs.key.clone()
    query[:, 1], key[:, 1] = collapsed.query[:, 1], collapsed.key[:, 1]
    inputs = replace(inputs, query=query, key=key)
    problem = spec_of(query, key, None, None, 250, 0.25, 0.0, 1.0, 1, 0.18)
    assert problem.may_underflow
    assert 250 * 0.2 / math.log(2) > -math.log2(problem.lowest_sum)
    for name, difference in differences(inputs, Refinement("high", 0.2)).items():
        assert difference < 1e-3, name


@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize("dtype", [torch.bfloat16] if GPU else [torch.float16])
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize("gap", [2.0, 5.0, 12.0, 90.0])
def test_collapsed_heads_of_weak_strength(gap: float, collapse: str, dtype: torch.dtype) -> None:
    """What is left of gradients after cancellation comes from weights that are rounded alike everywhere."""
    refinement = Refinement("high", 0.2)
    inputs = attention_inputs(1, 1, 140, 16, strength=0.2, dtype=dtype, device=DEVICE)
    inputs = collapsed_inputs(inputs, gap, collapse)

    def operation(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
        return saobp.attention(query, key, value, refinement, is_causal=True, backend="fused")

    assert_within_budget(operation, inputs, refinement, is_causal=True, frozen=True)


@pytest.mark.usefixtures("weak_way")
def test_dropout_and_packing_of_weak_strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed batch with dropout: identity values show what was kept, and gradients follow from that."""
    from saobp.kernels.fused import FAMILIES

    causal_refined_attention = FAMILIES["causal"].forward

    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 32)
    bounds, share = (0, 5, 75, 75, 139), 0.3
    inputs = attention_inputs(1, 1, 139, 80, device=DEVICE)
    query, key, value, _ = inputs.leaves()
    strength = torch.tensor([0.2], device=DEVICE)
    numbers = (
        None, torch.tensor(bounds, dtype=torch.int32, device=DEVICE), torch.tensor([7], device=DEVICE),
        70, 0.1, share, 1.0, 1, -math.expm1(-0.2),
    )  # fmt: skip
    eyes = torch.cat([torch.eye(80, device=DEVICE)[: b - a] for a, b in itertools.pairwise(bounds)])
    shown, *_ = causal_refined_attention(query.detach(), key.detach(), eyes[None, None], strength, *numbers)
    packed, *_ = causal_refined_attention(query, key, value, strength, *numbers)
    found = torch.autograd.grad(packed, (query, key, value), inputs.output_gradient)
    alone = []
    for a, b in itertools.pairwise(bounds):
        if a < b:
            eye = torch.eye(b - a, device=DEVICE)[None, None]
            rows = saobp.attention(
                query[:, :, a:b], key[:, :, a:b], eye, Refinement("high", 0.2),
                is_causal=True, scale=0.1, backend="reference",
            )  # fmt: skip
            alone.append(rows * (shown[:, :, a:b, : b - a] != 0) / (1 - share) @ value[:, :, a:b])
    together = torch.cat(alone, 2)
    expected = torch.autograd.grad(together, (query, key, value), inputs.output_gradient)
    packed, together = packed.detach(), together.detach()
    for one, other in zip((packed, *found), (together, *expected), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-3


@pytest.mark.usefixtures("weak_way")
def test_the_operator_of_weak_strengths_is_sound() -> None:
    from saobp.kernels.fused import FAMILIES

    causal_refined_attention = FAMILIES["causal"].forward

    query, key, value, _ = attention_inputs(1, 2, 70, 16, key_heads=1, device=DEVICE).leaves()
    strength = torch.tensor([0.2, 0.1], device=DEVICE)
    torch.library.opcheck(
        causal_refined_attention,
        (query, key, value, strength, None, None, None, 70, 0.25, 0.0, 1.0, 1, -math.expm1(-0.2)),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.usefixtures("weak_way")
def test_heads_of_either_sign() -> None:
    """A bound on strengths does not tell their sign; parabolas made for the other sign are less exact."""
    inputs = collapsed_inputs(attention_inputs(1, 2, 150, 16, device=DEVICE), 12.0)
    query, key, value, _ = inputs.leaves()
    results = []
    for backend in ("fused", "reference"):
        out = saobp.attention(
            query, key, value, Refinement("high"), is_causal=True, backend=backend,
            strength=BoundedStrength(torch.tensor([0.2, -0.2], device=DEVICE), 0.2),
        )  # fmt: skip
        results.append([out.detach(), *torch.autograd.grad(out, (query, key, value), inputs.output_gradient)])
    for found, expected in zip(*results, strict=True):
        assert float((found - expected)[:, 0].norm() / expected[:, 0].norm()) < 1e-3
        assert float((found - expected).norm() / expected.norm()) < 1e-2
