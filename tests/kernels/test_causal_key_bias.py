"""Strict causal kernels with a key bias against the specification: a row receives its own message too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_helpers import check_dropout, clear_plans, fused_operation, note_launches

import saobp
from saobp import Refinement
from saobp.kernels.call_spec import CallSpec
from saobp.testing.error_budget import assert_within_budget, operation_of, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs, drifting_inputs

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16
HIGH, LOW = Refinement("high-key-bias", "learned"), Refinement("low-key-bias", "learned")
FORWARD = {"short": "short_causal_forward", "stored": "causal_output", "sweeps": "causal_output"}
BACKWARD = {
    "short": "short_causal_backward", "stored": "stored_climb", "sweeps": "causal_query_gradient",
}  # fmt: skip
PAIRS = [("short", HIGH), ("short", LOW), ("stored", HIGH), ("stored", LOW), ("sweeps", HIGH)]
"""In half types the sweeps have larger errors than eager attention where messages attract, with a key bias as
without: D is that of rounded outputs. So up to 1024 tokens these types take the stored sweeps."""


def by_ways(pairs: list[tuple[str, Refinement]]) -> Callable[[Callable], Callable]:
    """Runs a test by some kinds of kernels, each with a factor."""
    cases = pytest.mark.parametrize(("way", "refinement"), pairs, indirect=["way"], ids=str)
    return lambda test: pytest.mark.usefixtures("way")(cases(test))


each_way = by_ways(PAIRS)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of up to 128 tokens by one kind of kernels; a test that uses it launches these and no others."""
    if request.param != "short":
        monkeypatch.setattr("saobp.kernels.dispatch.is_short", lambda *_: False)
    if request.param == "sweeps":
        monkeypatch.setattr("saobp.kernels.dispatch.STORED_MAX_LENGTH", 0)
    launched = note_launches(monkeypatch)
    yield
    assert {FORWARD[request.param], BACKWARD[request.param]} <= set(launched)
    assert not (set(BACKWARD.values()) - {BACKWARD[request.param]}) & set(launched)


def check(inputs: AttentionInputs, refinement: Refinement, bound: float | None = None) -> None:
    """Output and gradients within the budget; with a bound on strengths, these do not learn."""
    operation = fused_operation(refinement, inputs, bound, is_causal=True)
    assert_within_budget(operation, inputs, refinement, is_causal=True, frozen=bound is not None)


@pytest.mark.parametrize(
    ("length", "padding"), [(1, None), (40, "right"), (100, "left"), (128, "both")], ids=str
)
@each_way
def test_lengths_and_padding(refinement: Refinement, length: int, padding: Any) -> None:
    """With padding, three sequences: whole, padded and nothing but padding."""
    inputs = attention_inputs(
        1 if padding is None else 3, 2, length, 16, key_heads=1, strength=(0.3, 1.5), padding=padding,
        transposed=True, dtype=HALF, device=DEVICE,
    )  # fmt: skip
    check(inputs, refinement)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize(("refinement", "length"), [(LOW, 150), (HIGH, 300)], ids=str)
def test_several_blocks_of_rows(refinement: Refinement, length: int, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 1, length, 16, strength=0.7, dtype=dtype, device=DEVICE), refinement)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_several_spans(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of keys carried from span to span, down and up again."""
    monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 64)
    monkeypatch.setattr("saobp.kernels.dispatch.STORED_MAX_LENGTH", 0)
    inputs = attention_inputs(2, 1, 150, 16, strength=0.7, padding="left", dtype=dtype, device=DEVICE)
    check(inputs, HIGH)


@pytest.mark.parametrize("dim", [80, 136])
def test_larger_heads(dim: int) -> None:
    check(attention_inputs(1, 1, 140, dim, strength=0.7, dtype=HALF, device=DEVICE), LOW)


@pytest.mark.parametrize("strength", [0.0, 3.0])
@each_way
def test_strengths(refinement: Refinement, strength: float) -> None:
    check(attention_inputs(1, 1, 90, 16, strength=strength, dtype=HALF, device=DEVICE), refinement)


@by_ways([pair for pair in PAIRS if pair[0] != "sweeps"])
def test_strengths_of_the_other_sign(refinement: Refinement) -> None:
    check(attention_inputs(1, 1, 90, 16, strength=-2.0, dtype=HALF, device=DEVICE), refinement)


@pytest.mark.parametrize(
    ("collapse", "gap", "strength"), [("sink", 10.0, 0.5), ("sink", 90.0, 1.0), ("diagonal", 18.0, 1.0)]
)
@each_way
def test_collapsed_heads(refinement: Refinement, collapse: Any, gap: float, strength: float) -> None:
    """On the diagonal each row's own message is nearly all that its key receives."""
    inputs = attention_inputs(1, 2, 100, 16, strength=strength, dtype=HALF, device=DEVICE)
    check(collapsed_inputs(inputs, gap, collapse), refinement)


@each_way
def test_messages_are_not_lost_beside_larger_terms(refinement: Refinement) -> None:
    """A sink's key gradient is the sum of terms smaller than the last digit of what they are added to."""
    inputs = attention_inputs(1, 2, 128, 16, strength=0.2, dtype=HALF, device=DEVICE)
    check(drifting_inputs(collapsed_inputs(inputs, 7.0), 64 * torch.finfo(HALF).eps), refinement)


@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize("kind", ["short", "one span", "spans", "careful"])
def test_weak_known_strengths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages by polynomials belong to bfloat16; in float32 one sees what they cost. Careful: every head is
    taken for one that underflowed."""
    monkeypatch.setattr("saobp.kernels.dispatch.is_short", lambda *_: kind == "short")
    if kind in ("spans", "careful"):
        monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", 64)
    monkeypatch.setattr(CallSpec, "may_underflow", kind == "careful")
    if kind == "careful":
        monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
    launched = note_launches(monkeypatch)
    length = 128 if kind == "short" else 140
    inputs = attention_inputs(2, 2, length, 16, key_heads=1, strength=0.2, padding="both", device=DEVICE)
    refinement = Refinement("high-key-bias", 0.2)
    found = run(fused_operation(refinement, inputs, 0.2, is_causal=True), inputs)
    expected = run(operation_of(refinement, inputs, is_causal=True, backend="reference"), inputs)
    for name in ("output", "query", "key", "value"):
        assert float((found[name] - expected[name]).norm() / expected[name].norm()) < 1e-3, name
    weak = {"weak_messages", "weak_output", "weak_climb", "weak_query_gradient"}
    assert ({"short_causal_forward"} if kind == "short" else weak) <= set(launched)
    assert ("causal_query_gradient" in launched) == (kind == "careful")


@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "sweeps"])
@pytest.mark.parametrize(("gap", "collapse"), [(0.0, "sink"), (7.0, "sink"), (12.0, "diagonal")])
def test_heads_of_weak_strength(
    gap: float, collapse: Any, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collapsed or not: what is left of gradients comes from weights that are rounded alike everywhere."""
    if not stored:
        monkeypatch.setattr("saobp.kernels.dispatch.STORED_MAX_LENGTH", 0)
    inputs = attention_inputs(1, 1, 140, 16, strength=0.2, dtype=HALF, device=DEVICE)
    inputs = collapsed_inputs(inputs, gap, collapse) if gap else inputs
    check(inputs, Refinement("high-key-bias", 0.2), 0.2)


@each_way
def test_dropout_drops_the_same_entries_in_both_directions(refinement: Refinement) -> None:
    check_dropout(refinement, 64, HALF, is_causal=True)


@each_way
def test_no_row_depends_on_later_tokens(refinement: Refinement) -> None:
    """Bit for bit, wherever the change begins; the first row has its own key alone."""
    inputs, others = (
        attention_inputs(1, 1, 128, 16, strength=1.0, dtype=HALF, device=DEVICE, seed=seed) for seed in (0, 1)
    )
    operation = fused_operation(refinement, inputs, is_causal=True)
    whole = run(operation, inputs)["output"]
    assert torch.equal(whole[:, :, 0], inputs.value[:, :, 0])
    for start in (1, 64, 100):
        query, key, value = (
            torch.cat([one[:, :, :start], other[:, :, start:]], 2)
            for one, other in zip(inputs.leaves()[:3], others.leaves()[:3], strict=True)
        )
        changed = operation(query, key, value, inputs.strength)
        assert torch.equal(changed[:, :, :start], whole[:, :, :start])
        assert not torch.equal(changed[:, :, start:], whole[:, :, start:])


def test_a_sum_over_spans_is_that_of_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, output and gradients."""
    inputs = attention_inputs(1, 1, 100, 16, strength=1.0, device=DEVICE)
    found = []
    for span in (1024, 32):
        monkeypatch.setattr("saobp.kernels.causal.launch.SPAN", span)
        clear_plans()
        found.append(run(fused_operation(HIGH, inputs, is_causal=True), inputs))
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["short causal", "causal"])
def test_the_operators_are_sound(name: str) -> None:
    from saobp.kernels.fused import FAMILIES

    inputs = attention_inputs(1, 2, 70, 16, key_heads=1, strength=0.7, dtype=HALF, device=DEVICE)
    torch.library.opcheck(
        FAMILIES[name].forward,
        (*inputs.leaves(), None, None, None, 70, 0.25, 0.0, 1.0, 2, 0.0),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_other_calls_say_what_is_missing() -> None:
    states, fixed = (
        torch.randn(3, 1, 2, 20, 16, device=DEVICE).to(HALF).unbind(),
        Refinement("high-key-bias", 0.2),
    )
    with pytest.raises(ValueError, match="a key bias has no kernel for a sliding window of 5"):
        saobp.attention(*states, fixed, is_causal=True, sliding_window=5, backend="fused")
    with (
        pytest.warns(UserWarning, match="messages of later rows"),
        pytest.raises(ValueError, match="leaking form"),
    ):
        saobp.attention(*states, replace(fixed, future="paper"), is_causal=True, backend="fused")
    packed = [one[0].transpose(0, 1) for one in states]
    places = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    part = replace(fixed, message_stride=2)
    with pytest.raises(ValueError, match="message_stride has no causal form"):
        saobp.attention_packed(*packed, part, places, is_causal=True, backend="fused")
