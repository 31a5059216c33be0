"""The inference path on a CPU: as right as the reference, and taken only where nothing but values matters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import saobp
from saobp.propagation import FactorGraph, cpu_inference
from saobp.propagation.reference import reference_attention
from saobp.testing.error_budget import assert_within_budget, operation_of
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

FACTORS = [
    *("none", "high", "low", "high-listing", "low-listing"),
    *("high-key-bias", "low-key-bias", "elemmul", "elemmul-prior"),
]
REFINED = FACTORS[1:]


def assert_right(factor: str, inputs: AttentionInputs, causal: bool = False, **options: float) -> None:
    refinement = saobp.Refinement(factor)

    attend = torch.no_grad()(operation_of(refinement, inputs, is_causal=causal, **options))
    assert_within_budget(attend, inputs, refinement, is_causal=causal, gradients=False, **options)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the quick paths that calls took."""
    names: list[str] = []
    for name in ("cpu_attention", "plain_attention"):
        plain = getattr(cpu_inference, name)

        def noted(*args, plain=plain, name=name, **kwargs):  # type: ignore[no-untyped-def]
            names.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setitem(saobp.attention.__globals__, name, noted)
    return names


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("factor", FACTORS)
def test_error_is_within_the_budget(
    factor: str, padding: str | None, causal: bool, dtype: torch.dtype, taken: list[str]
) -> None:
    """Grouped keys, strided states, padded and empty sequences, strengths of either sign."""
    inputs = attention_inputs(
        3, 4, 37, 16, key_heads=2, strength=(0.2, -0.4, 2.1, 0.0), padding=padding,
        transposed=True, dtype=dtype,
    )  # type: ignore[arg-type]  # fmt: skip
    assert_right(factor, inputs, causal)
    assert taken == ["plain_attention" if factor == "none" else "cpu_attention"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize("factor", REFINED)
def test_collapsed_heads_are_right(factor: str, collapse: str, causal: bool) -> None:
    """Rows with one key near 1: what they hear moves them by more than single precision can multiply."""
    plain = attention_inputs(3, 2, 40, 8, strength=(16.0, -16.0), padding="left")
    for gap in (20.0, 90.0, 1000.0):
        assert_right(factor, collapsed_inputs(plain, gap, collapse), causal)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", ["high", "low", "elemmul", "elemmul-prior"])
@pytest.mark.parametrize("length", [1, 7, 128, 513])
def test_lengths_and_scale(factor: str, length: int) -> None:
    assert_right(factor, attention_inputs(1, 2, length, 16), scale=0.3)


@pytest.mark.parametrize("factor", ["high", "low-listing", "high-key-bias"])
def test_other_numbers_of_queries(factor: str) -> None:
    assert_right(factor, attention_inputs(2, 2, 19, 8, queries=5, value_dim=12, padding="right"))


@pytest.mark.parametrize("entries", [1, 3 * 81, 8 * 81, 100 * 81])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", REFINED)
def test_chunks_change_nothing(
    factor: str, causal: bool, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one head, of some heads, of some sequences, of everything; the last one is smaller."""
    monkeypatch.setattr(cpu_inference, "ENTRIES_PER_THREAD", entries)
    assert_right(factor, attention_inputs(5, 4, 9, 8, strength=(0.2, -1.0, 2.0, 0.0), padding="both"), causal)


def test_output_order_suits_models() -> None:
    inputs = attention_inputs(2, 2, 9, 8)
    output = saobp.attention(inputs.query, inputs.key, inputs.value, saobp.Refinement("high", 0.2))
    assert output.transpose(1, 2).is_contiguous()


def test_kept_memory_is_not_seen_from_outside() -> None:
    """Inference mode, other sizes, and other threads in between change nothing."""
    first, other = attention_inputs(2, 2, 9, 8), attention_inputs(1, 3, 30, 8, seed=1)
    refinement = saobp.Refinement("high", 0.5)

    def attend(inputs: AttentionInputs) -> Tensor:
        return saobp.attention(inputs.query, inputs.key, inputs.value, refinement)

    cpu_inference._scratch.buffer = None
    with torch.inference_mode():
        before = attend(first)
    kept = before.clone()
    attend(other)
    with ThreadPoolExecutor(4) as pool:
        several = list(pool.map(attend, [first, other] * 20))
    assert all(torch.equal(x, several[i % 2]) for i, x in enumerate(several))
    assert torch.equal(attend(first), kept)
    assert torch.equal(before, kept)
    assert torch.equal(several[0], kept)


def test_inputs_are_left_alone() -> None:
    inputs = attention_inputs(2, 2, 9, 8)
    before = [x.clone() for x in (inputs.query, inputs.key, inputs.value)]
    for factor in REFINED:
        saobp.attention(inputs.query, inputs.key, inputs.value, saobp.Refinement(factor, 0.2))
    assert all(
        torch.equal(x, y) for x, y in zip(before, (inputs.query, inputs.key, inputs.value), strict=True)
    )


@pytest.mark.parametrize("factor", ["none", "high"])
@pytest.mark.parametrize("watched", ["query", "key", "value", "strength"])
def test_gradients_take_the_reference(factor: str, watched: str, taken: list[str]) -> None:
    inputs = attention_inputs(1, 2, 5, 8)
    states = {name: getattr(inputs, name).clone() for name in ("query", "key", "value", "strength")}
    states[watched].requires_grad_()
    output = saobp.attention(refinement=saobp.Refinement(factor), **states)
    if factor == "none" and watched == "strength":
        assert taken == ["plain_attention"]
    else:
        assert taken == []
        assert output.requires_grad
    with torch.no_grad():
        saobp.attention(refinement=saobp.Refinement(factor), **states)
    assert taken


def test_forward_gradients_and_vmap_take_the_reference(taken: list[str]) -> None:
    inputs = attention_inputs(1, 2, 5, 8, dtype=torch.float64)
    refinement = saobp.Refinement("high", 0.5)

    def attend(query: Tensor) -> Tensor:
        return saobp.attention(query, inputs.key, inputs.value, refinement)

    _, slope = torch.func.jvp(attend, (inputs.query,), (inputs.output_gradient,))
    step = 1e-6
    moved = [attend(inputs.query + sign * step * inputs.output_gradient) for sign in (1, -1)]
    torch.testing.assert_close(slope, (moved[0] - moved[1]) / (2 * step), rtol=1e-5, atol=1e-7)
    assert len(taken) == 2
    many = torch.func.vmap(attend)(torch.stack([inputs.query, 2 * inputs.query]))
    torch.testing.assert_close(many[1], attend(2 * inputs.query))
    assert len(taken) == 3


@pytest.mark.parametrize("factor", ["none", "high"])
def test_what_takes_the_reference(factor: str, taken: list[str]) -> None:
    inputs = attention_inputs(1, 2, 5, 8)
    states = inputs.query, inputs.key, inputs.value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saobp.attention(*states, saobp.Refinement(factor, 0.2)).dtype == torch.bfloat16
    saobp.attention(*states, saobp.Refinement("high", 0.2), dropout_p=0.5)
    saobp.attention(*states, saobp.Refinement("high", 0.2, steps=2))
    saobp.attention(*states, saobp.Refinement("high-key-bias", 0.2, message_stride=2))
    assert taken == []


def test_graphs_beyond_padding_and_causality() -> None:
    """A window and a row that sees nothing, as a plug-in might ask for."""
    inputs = attention_inputs(2, 2, 12, 8, dtype=torch.float64)
    place = torch.arange(12)
    visible = ((place[:, None] - place).abs() < 4) & (place[:, None] != 5)
    refinement = saobp.Refinement("high")
    states = inputs.query, inputs.key, inputs.value, refinement, inputs.strength, FactorGraph(visible)
    expected = reference_attention(*states).output
    torch.testing.assert_close(cpu_inference.cpu_attention(*states), expected)
    assert (expected[:, :, 5] == 0).all()
