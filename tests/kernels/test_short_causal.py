"""Kernels that hold a short strict causal map whole, against the specification and the sweeps of longer maps.

Calls in float32 take the sweeps. In Triton's interpreter they are sent to these kernels, to see more of their
digits; not on a GPU, since the compiler needs minutes for kernels that no call takes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import saobp
from saobp import Refinement
from saobp.testing.error_budget import Operation, assert_within_budget, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs, drifting_inputs

pytest.importorskip("triton")

from saobp.kernels.calls import POTTS
from saobp.kernels.fused import FAMILIES

causal_refined_attention = FAMILIES["causal"].forward
short_causal_refined_attention = FAMILIES["short causal"].forward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] + ([] if GPU else [torch.float32])
HALF_TYPES = [dtype for dtype in DTYPES if dtype != torch.float32]
in_single_precision = pytest.mark.skipif(GPU, reason="no call in float32 takes these kernels")
DIM = 16
"""Of heads, where it does not matter."""


def by(operator: Any, inputs: AttentionInputs, factor: str = "high", **options: Any) -> Operation:
    """Attention by an operator; ``options`` are those of its arguments that are not usual."""
    length, dim = inputs.query.shape[2:]
    sign, receives = POTTS[factor]

    longest, dropout, bound = (options.get(name) for name in ("longest", "dropout", "bound"))
    numbers = (longest or length, dim**-0.5, dropout or 0.0, sign, receives, bound or 0.0)

    def operation(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        given = (inputs.padding_mask, options.get("cu"), options.get("seed"))
        output: Tensor = operator(query, key, value, strength, *given, *numbers)[0]
        return output

    return operation


def check(inputs: AttentionInputs, factor: str = "high") -> None:
    operation = by(short_causal_refined_attention, inputs, factor)
    assert_within_budget(operation, inputs, Refinement(factor, 0.2), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 37, 64, 65, 111, 128])
def test_lengths(length: int, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 2, length, DIM, strength=(0.2, 1.5), dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["low", "high-listing", "low-listing"])
@pytest.mark.parametrize("length", [37, 100])
def test_factors(factor: str, length: int, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 1, length, DIM, strength=0.7, dtype=dtype, device=DEVICE), factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", ["high", "low-listing"])
@pytest.mark.parametrize("length", [40, 64, 100, 128])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(side: Any, length: int, factor: str, dtype: torch.dtype) -> None:
    """Three sequences: whole, padded and nothing but padding."""
    check(attention_inputs(3, 1, length, DIM, strength=0.7, padding=side, dtype=dtype, device=DEVICE), factor)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_a_sentence_alone(side: str) -> None:
    """With 70 tokens of padding beside it, more than a part of the rows, a sentence gives the same output."""
    inputs = attention_inputs(1, 1, 33, DIM, strength=1.0, device=DEVICE)
    alone = by(short_causal_refined_attention, inputs)(*inputs.leaves())
    beside = (0, 0, 70, 0) if side == "left" else (0, 0, 0, 70)
    mask = torch.nn.functional.pad(torch.ones(1, 33, dtype=torch.bool, device=DEVICE), beside[2:])

    query, key, value = (
        torch.nn.functional.pad(states, beside, value=1.0)
        for states in (inputs.query, inputs.key, inputs.value)
    )
    both = replace(inputs, query=query, key=key, value=value, padding_mask=mask)
    together = by(short_causal_refined_attention, both)(*both.leaves())
    torch.testing.assert_close(together[:, :, mask[0]], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [50, 100])
@pytest.mark.parametrize(("dim", "key_heads"), [(1, 2), (32, 2), (64, 2), (40, 1), (128, 2)])
def test_head_sizes_and_shared_keys(dim: int, key_heads: int, length: int, dtype: torch.dtype) -> None:
    shapes = {"key_heads": key_heads, "transposed": True, "dtype": dtype, "device": DEVICE}
    check(attention_inputs(1, 2, length, dim, strength=(0.2, 1.0), **shapes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strength", [-1.0, 0.0, 3.0])
def test_trained_strengths_of_either_sign(strength: float, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 1, 90, DIM, strength=strength, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize(("gap", "strength"), [(5.0, 0.2), (10.0, 0.5), (90.0, 1.0)])
def test_collapsed_heads(gap: float, strength: float, collapse: Any, dtype: torch.dtype) -> None:
    inputs = attention_inputs(1, 2, 100, DIM, strength=strength, dtype=dtype, device=DEVICE)
    check(collapsed_inputs(inputs, gap, collapse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_are_not_lost_beside_larger_terms(dtype: torch.dtype) -> None:
    """A sink's key gradient is the sum of terms smaller than the last digit of what they are added to."""
    inputs = attention_inputs(1, 2, 128, DIM, strength=0.2, dtype=dtype, device=DEVICE)
    check(drifting_inputs(collapsed_inputs(inputs, 7.0), 64 * torch.finfo(dtype).eps))


@in_single_precision
@pytest.mark.usefixtures("weak_way")
@pytest.mark.parametrize("factor", ["high", "low", "high-listing"])
@pytest.mark.parametrize("padding", [None, "both"])
@pytest.mark.parametrize("length", [50, 128])
def test_weak_known_strengths(length: int, padding: Any, factor: str) -> None:
    """Messages by parabolas and in float16 belong to bfloat16; in float32 one sees what that costs."""
    inputs = attention_inputs(2, 2, length, DIM, key_heads=1, padding=padding, device=DEVICE)
    leaves = inputs.leaves()[:3]
    bound = -math.expm1(-0.2 * POTTS[factor][0])
    out = by(short_causal_refined_attention, inputs, factor, bound=bound)(*leaves, inputs.strength)
    expected = saobp.attention(
        *leaves,
        Refinement(factor, 0.2),
        is_causal=True,
        padding_mask=inputs.padding_mask,
        backend="reference",
    )
    for found, right in zip(gradients(out, leaves, inputs), gradients(expected, leaves, inputs), strict=True):
        assert float((found - right).norm() / right.norm()) < 1e-3


def gradients(out: Tensor, leaves: tuple[Tensor, ...], inputs: AttentionInputs) -> list[Tensor]:
    """Output and gradients, of what learns."""
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.output_gradient)]


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"length": 128}, {}),
    "one part": ({"length": 61}, {"dropout": 0.3}),
    "dropout": ({"length": 117}, {"dropout": 0.3}),
    "padding": ({"batch": 2, "length": 128, "padding": "both"}, {"dropout": 0.2}),
    "listing": ({"length": 128}, {"dropout": 0.3, "factor": "low-listing"}),
    "packed": ({"length": 285}, {"cu": (0, 1, 8, 8, 45, 109, 174, 285), "longest": 111}),
    "packed, dropout": ({"length": 60}, {"cu": (0, 0, 20, 60), "longest": 40, "dropout": 0.3}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_the_sweeps_give(name: str) -> None:
    """Output and gradients; the same entries are dropped; packed sequences exchange no messages."""
    sizes, options = CALLS[name]
    dtype, near = (torch.float16, 0.01) if GPU else (torch.float32, 2e-5)
    usual = {"batch": 1, "dim": 24, "strength": (0.3, 1.1), "dtype": dtype, "device": DEVICE}
    inputs = attention_inputs(**usual | sizes)
    options = {"seed": torch.tensor([7], device=DEVICE), **options}
    if "cu" in options:
        options["cu"] = torch.tensor(options["cu"], dtype=torch.int32, device=DEVICE)
    found = run(by(short_causal_refined_attention, inputs, **options), inputs)
    expected = run(by(causal_refined_attention, inputs, **options), inputs)
    for result, wanted in expected.items():
        assert float((found[result] - wanted).norm() / wanted.norm()) < near, result


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences_give_what_each_gives_alone(dtype: torch.dtype) -> None:
    bounds = (0, 37, 37, 38, 149)
    inputs = attention_inputs(1, 2, bounds[-1], DIM, strength=0.7, dtype=dtype, device=DEVICE)
    cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    found = by(short_causal_refined_attention, inputs, cu=cu, longest=111)(*inputs.leaves())
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            query, key, value = (x[:, :, start:stop] for x in (inputs.query, inputs.key, inputs.value))
            alone = replace(inputs, query=query, key=key, value=value)
            expected = by(short_causal_refined_attention, alone)(query, key, value, inputs.strength)
            torch.testing.assert_close(found[:, :, start:stop], expected)


@pytest.mark.parametrize("factor", ["high", "high-listing"])
def test_no_row_depends_on_later_tokens(factor: str) -> None:
    """Bit for bit, whichever part of the rows the change begins in."""
    inputs = attention_inputs(1, 1, 128, DIM, strength=1.0, dtype=torch.float16, device=DEVICE)
    others = attention_inputs(1, 1, 128, DIM, strength=1.0, dtype=torch.float16, device=DEVICE, seed=1)
    whole = by(short_causal_refined_attention, inputs, factor)(*inputs.leaves())
    for start in (1, 40, 64, 100):
        states = [
            torch.cat([one[:, :, :start], other[:, :, start:]], 2)
            for one, other in zip(inputs.leaves()[:3], others.leaves()[:3], strict=True)
        ]
        query, key, value = states
        changed = by(short_causal_refined_attention, inputs, factor)(query, key, value, inputs.strength)
        assert torch.equal(changed[:, :, :start], whole[:, :, :start])
        assert not torch.equal(changed[:, :, start:], whole[:, :, start:])


def test_repeats_are_bit_equal_for_any_layout_of_gradients() -> None:
    inputs = attention_inputs(1, 2, 100, DIM, strength=1.0, dtype=torch.float16, device=DEVICE)
    operation = by(short_causal_refined_attention, inputs)
    first = run(operation, inputs)
    gradient = inputs.output_gradient
    layouts = (gradient.transpose(1, 2).contiguous().transpose(1, 2), gradient.mT.contiguous().mT, gradient)
    for layout in layouts * (33 if GPU else 1):
        again = run(operation, replace(inputs, output_gradient=layout))
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("length", [20, 70])
@pytest.mark.parametrize("factor", ["high", "low-listing"])
def test_the_operator_is_sound(factor: str, length: int) -> None:
    inputs = attention_inputs(1, 2, length, DIM, key_heads=1, strength=0.7, device=DEVICE)
    sign, receives = POTTS[factor]
    arguments = (*inputs.leaves(), None, None, None, length, DIM**-0.5, 0.0, sign, receives, 0.0)
    torch.library.opcheck(
        short_causal_refined_attention,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    out, past = short_causal_refined_attention(*arguments)
    assert out.requires_grad
    assert not past.requires_grad


@pytest.mark.parametrize(
    ("length", "dim", "dtype", "short"),
    [
        (128, 64, torch.float16, True), (1, 128, torch.float16, True), (129, 64, torch.float16, False),
        (20, 129, torch.float16, False), (20, 64, torch.float32, False), (100, 16, torch.float16, True),
    ],
)  # fmt: skip
def test_calls_that_take_it(length: int, dim: int, dtype: torch.dtype, short: bool) -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = attention_inputs(1, 1, length, dim, dtype=dtype, device=DEVICE)
    states = (inputs.query, inputs.key, inputs.value)
    with Watch(), torch.no_grad():
        found = saobp.attention(*states, Refinement("high", 0.2), is_causal=True, backend="fused")
    assert ("saobp.short_causal_refined_attention.default" in seen) == short
    expected = saobp.attention(*states, Refinement("high", 0.2), is_causal=True, backend="reference")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
