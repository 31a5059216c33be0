"""Several steps of propagation in linear memory, against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from call_helpers import (
    SLOW_INTERPRETED,
    check_dropout,
    clear_plans,
    fused_operation,
    slow_interpreted,
    spec_of,
)
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.kernels.call_spec import CallSpec, CallTensors
from saobp.kernels.calls import Call
from saobp.kernels.dispatch import select
from saobp.kernels.steps import launch
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
HALF = DTYPES[-1]


def check(inputs: AttentionInputs, refinement: Refinement, strongest: float | None = None) -> None:
    """Strengths of a known bound are frozen."""
    fused = fused_operation(refinement, inputs, strongest)
    assert_within_budget(fused, inputs, refinement, frozen=strongest is not None)


def inputs_of(
    length: int,
    strength: float | tuple[float, ...] = (0.3, 1.5),
    dtype: torch.dtype = HALF,
    **options: object,
) -> AttentionInputs:
    options = {"heads": 2 if isinstance(strength, tuple) else 1, "batch": 1, "dim": 16} | options
    return attention_inputs(length=length, strength=strength, dtype=dtype, device=DEVICE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(70, torch.float32), (130, HALF)] + [(length, HALF) for length in (1, 7, 37, 64, 111, 128)]
    + [pytest.param(length, dtype, marks=SLOW_INTERPRETED) for length in (129, 200, 256) for dtype in DTYPES],
)  # fmt: skip
def test_two_steps(length: int, dtype: torch.dtype) -> None:
    """Up to 128 tokens in half types a program holds the whole map."""
    check(inputs_of(length, dtype=dtype, transposed=True), Refinement("high", "learned", steps=2))


SETTINGS = [
    ("high", 2, 0.5), ("high", 3, 0.0), ("low", 2, 0.0), ("high-key-bias", 2, 0.0), ("high", 4, 0.3),
    ("low-key-bias", 2, 0.3), ("high-listing", 2, 0.0), ("low-listing", 3, 0.3),
]  # fmt: skip
"""The last four in long sequences too, whose many kernels are compiled for each."""


@pytest.mark.parametrize(
    ("length", "factor", "steps", "damping"),
    [(37, "low", 2, 0.3)]
    + [pytest.param(37, *one, marks=SLOW_INTERPRETED) for one in SETTINGS]
    + [pytest.param(135, *one, marks=SLOW_INTERPRETED) for one in SETTINGS[-4:]],
)
def test_every_factor_damped_and_not(length: int, factor: str, steps: int, damping: float) -> None:
    """With padding, on either side, and keys shared by two heads."""
    inputs = inputs_of(length, batch=2, key_heads=1, padding="both")
    check(inputs, Refinement(factor, "learned", steps=steps, damping=damping))


@slow_interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strength", [0.02, 8.0])
@pytest.mark.parametrize("factor", ["high", "low"])
@pytest.mark.parametrize("length", [70, 140])
def test_weak_and_strong(length: int, factor: str, strength: float, dtype: torch.dtype) -> None:
    check(inputs_of(length, strength, dtype), Refinement(factor, "learned", steps=2))


@slow_interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sink", "diagonal"])
@pytest.mark.parametrize("gap", [5.0, 12.0, 90.0])
@pytest.mark.parametrize("strength", [0.2, 2.0])
@pytest.mark.parametrize("length", [24, 140])
def test_collapsed_heads(length: int, strength: float, gap: float, kind: str, dtype: torch.dtype) -> None:
    inputs = collapsed_inputs(inputs_of(length, strength, dtype), gap, kind)  # type: ignore[arg-type]
    check(inputs, Refinement("high", "learned", steps=2))


@slow_interpreted
@pytest.mark.parametrize(("length", "dim"), [(20, 1), (140, 48), (33, 80), (130, 80), (20, 128), (20, 256)])
def test_head_sizes(length: int, dim: int) -> None:
    check(inputs_of(length, 0.2, dim=dim), Refinement("high", 0.2, steps=2), 0.2)


@slow_interpreted
@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("length", [70, 140])
def test_strengths_known_to_be_weak(
    length: int, padding: str | None, damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parabolas belong to bfloat16; the interpreter takes float16, and weaker: they are for fewer digits."""
    monkeypatch.setattr(CallSpec, "precise", 0)
    clear_plans()
    strength = 0.2 if GPU else 0.05
    inputs = inputs_of(length, strength, batch=1 if padding is None else 2, padding=padding)
    check(inputs, Refinement("high", strength, steps=2, damping=damping), strength)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=SLOW_INTERPRETED)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("programs", [1024, 2, 1])
def test_logarithms_give_the_same(dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of rows that underflow, taken by all, in programs of one, two or all blocks of a head."""
    monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
    monkeypatch.setattr(launch, "CAREFUL_PROGRAMS", programs)
    clear_plans()
    check(inputs_of(140, 1.0, dtype), Refinement("high", "learned", steps=2))


def test_each_step_has_its_own_strength() -> None:
    inputs = inputs_of(20, dtype=torch.float32)
    by_step = torch.stack([inputs.strength, 2 * inputs.strength]).to(DEVICE)
    refinement = Refinement("high", "learned", steps=3)

    def results(backend: str) -> list[Tensor]:
        query, key, value, _ = inputs.leaves()
        strength = by_step.clone().requires_grad_()
        out = saobp.attention(query, key, value, refinement, strength=strength, backend=backend)  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out, (query, key, value, strength), inputs.output_gradient)]

    for found, expected in zip(results("fused"), results("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    shared = saobp.attention(
        inputs.query, inputs.key, inputs.value, refinement, strength=by_step[0], backend="reference"
    )
    assert not torch.allclose(results("reference")[0], shared, atol=1e-3)


def test_strengths_of_more_steps_than_there_are_raise() -> None:
    inputs = inputs_of(8)
    with pytest.raises(ValueError, match=r"or \(steps, 2\) for at most 2 steps, not \(3, 2\)"):
        saobp.attention(
            inputs.query, inputs.key, inputs.value, Refinement("high", steps=2), strength=torch.ones(3, 2)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["long", "short"])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_dropout_drops_the_same_entries_in_both_directions(damping: float, dtype: torch.dtype) -> None:
    check_dropout(Refinement("high", "learned", steps=2, damping=damping), 40, dtype)


@slow_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["long", "short"])
def test_packed_sequences_equal_each_alone(dtype: torch.dtype) -> None:
    lengths, refinement = (30, 0, 70, 5), Refinement("high", 0.5, steps=2, damping=0.2)
    places = torch.tensor([0, 30, 30, 100, 105], dtype=torch.int32, device=DEVICE)
    query, key, value = (
        torch.randn(105, 2, 16, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn(105, 2, 16, device=DEVICE, dtype=dtype)
    out = saobp.attention_packed(query, key, value, refinement, places, max_seqlen=70, backend="fused")
    found = [out, *torch.autograd.grad(out, (query, key, value), grad)]
    pieces = []
    for states in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in states)
        pieces.append(saobp.attention(q, k, v, refinement, backend="reference")[0].transpose(0, 1))
    whole = torch.cat(pieces)
    expected = [whole, *torch.autograd.grad(whole, (query, key, value), grad)]
    for one, other in zip(found, expected, strict=True):
        close = 1e-4 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["long", "short"])
def test_a_sequence_of_padding_gives_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    inputs = inputs_of(20, 0.3, dtype, batch=2)
    mask = torch.ones(2, 20, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    leaves = replace(inputs, padding_mask=mask).leaves()[:3]
    out = saobp.attention(*leaves, Refinement("high", 0.3, steps=2), padding_mask=mask, backend="fused")
    gradients = torch.autograd.grad(out.sum(), leaves)
    for result in (out, *gradients):
        assert (result[1] == 0).all()
        assert torch.isfinite(result).all()


@slow_interpreted
@pytest.mark.parametrize("length", [70, 140])
def test_repeats_are_bit_equal(length: int) -> None:
    inputs = inputs_of(length)

    def run() -> list[Tensor]:
        query, key, value, strength = inputs.leaves()
        out = saobp.attention(
            query, key, value, Refinement("high", steps=2), strength=strength, backend="fused"
        )
        return [out, *torch.autograd.grad(out, (query, key, value, strength), inputs.output_gradient)]

    first = run()
    for _ in range(100 if GPU else 1):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))


def test_memory_is_linear_in_length() -> None:
    from saobp.kernels.steps.launch import plan_backward, saved_slices

    def sizes(length: int) -> tuple[int, int]:
        states = torch.empty(1, 2, length, 16, device=DEVICE, dtype=torch.float16)
        spec = spec_of(states, states, None, None, length, 0.25, 0.0, 1.0, 1, 0.0, 3, 0.3)
        tensors = CallTensors(states, states, states, torch.ones(3, 2, device=DEVICE))
        return saved_slices(spec)[1], plan_backward(spec, tensors, states, states).scratch or 0

    for short, long in zip(sizes(512), sizes(4096), strict=True):
        assert long <= 8 * short


@pytest.mark.parametrize("family", ["short steps", pytest.param("steps", marks=SLOW_INTERPRETED)])
def test_the_operators_are_well_formed(family: str) -> None:
    from saobp.kernels.fused import FAMILIES

    query, key, value, strength = inputs_of(20).leaves()
    strength = torch.stack([strength, strength]).detach().requires_grad_()
    numbers = (20, 0.25, 0.0, 1.0, 1, 0.0, 2, 0.0)
    arguments = (query, key, value, strength, None, None, None, *numbers)
    kinds = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(FAMILIES[family].forward, arguments, test_utils=kinds)


@pytest.mark.parametrize(
    ("refinement", "causal", "reason"),
    [
        (Refinement("high", 0.2, steps=5), False, "5 steps were asked for and the kernels do up to 4"),
        (Refinement("high", 0.2, steps=2), True, "2 steps were .* kernels of causal attention do one"),
        (Refinement("elemmul", steps=2), False, "2 steps were asked for and the kernels of 'elemmul' do one"),
    ],
)  # fmt: skip
def test_what_stays_on_the_reference_is_said(refinement: Refinement, causal: bool, reason: str) -> None:
    states = [torch.randn(1, 1, 8, 16, device=DEVICE) for _ in range(3)]
    with pytest.raises(ValueError, match=reason):
        saobp.attention(*states, refinement, is_causal=causal, backend="fused")


@pytest.mark.parametrize(("length", "family"), [(512, "steps"), (100, "short steps")])
def test_the_path_is_explained(length: int, family: str) -> None:
    shape = (1, 2, length, 64)
    refinement = Refinement("high", 0.2, steps=2, damping=0.3)
    given = Call(shape, shape, shape, torch.float16, "cuda", refinement, strongest=0.2, backend="fused")
    sizes = f"{length} tokens, head size 64, float16, 2 steps"
    assert str(select(given)) == f"fused {family} kernels: {sizes}, strength 0.2 known"
