"""Kernels for a key bias whose messages come from a part of the rows, against their specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_helpers import SLOW_INTERPRETED, slow_interpreted
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.testing.error_budget import assert_within_budget, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

pytest.importorskip("triton")

from saobp.kernels.fused import FAMILIES
from saobp.kernels.key_bias import launch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16
TYPES = [HALF, torch.float32, *([torch.float16] if GPU else [])]


def check(inputs: AttentionInputs, refinement: Refinement, **options: Any) -> None:
    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query, key, value, refinement, padding_mask=inputs.padding_mask, strength=strength,
            backend="fused", **options,
        )  # fmt: skip

    assert_within_budget(fused, inputs, refinement, **options)


def sent_by(stride: int, factor: str = "high-key-bias") -> Refinement:
    return Refinement(factor, "learned", message_stride=stride)


@pytest.mark.parametrize("stride", [2, 4, pytest.param(7, marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("length", [150, pytest.param(192, marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_so_many_rows_send(dtype: torch.dtype, length: int, stride: int) -> None:
    inputs = attention_inputs(
        1, 2, length, 16, key_heads=1, strength=(1.3, -0.6), transposed=True, dtype=dtype, device=DEVICE
    )
    check(inputs, sent_by(stride))


@pytest.mark.parametrize("side", ["right", pytest.param("left", marks=SLOW_INTERPRETED), "both"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_padding(dtype: torch.dtype, side: Any) -> None:
    inputs = attention_inputs(
        2, 1, 200, 16, strength=0.9, padding=side, transposed=True, dtype=dtype, device=DEVICE
    )
    check(inputs, sent_by(4, "low-key-bias" if side == "both" else "high-key-bias"))


@slow_interpreted
@pytest.mark.parametrize("dim", [40, 64, 80, 136])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_head_sizes(dtype: torch.dtype, dim: int) -> None:
    inputs = attention_inputs(1, 1, 170, dim, strength=0.8, dtype=dtype, device=DEVICE)
    check(inputs, sent_by(2))


@pytest.mark.parametrize("collapse", ["sink", pytest.param("diagonal", marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("gap", [8.0, pytest.param(30.0, marks=SLOW_INTERPRETED), 90.0])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_collapsed_heads(dtype: torch.dtype, gap: float, collapse: Any) -> None:
    inputs = attention_inputs(1, 2, 140, 16, strength=(0.9, 3.0), dtype=dtype, device=DEVICE)
    check(collapsed_inputs(inputs, gap, collapse), sent_by(4))


def test_scores_far_above_those_of_the_first_tile_are_computed_again() -> None:
    inputs = attention_inputs(1, 1, 190, 16, strength=0.5, dtype=torch.float16, device=DEVICE)
    inputs.key[:, :, 150:] *= 30
    check(inputs, sent_by(4))


@pytest.mark.parametrize("padding", [None, "both"])
@pytest.mark.parametrize("stride", [2, pytest.param(5, marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("dtype", [one for one in TYPES if one != torch.float32], ids=str)
def test_whole_maps(dtype: torch.dtype, stride: int, padding: Any) -> None:
    inputs = attention_inputs(
        2, 2, 60, 16, strength=(1.3, -0.6), padding=padding, transposed=True, dtype=dtype, device=DEVICE
    )
    check(inputs, sent_by(stride))


@pytest.mark.parametrize("longest", [60, 170])
def test_packed_sequences_are_as_alone(longest: int) -> None:
    lengths = (9, 45, longest)
    dtype = torch.float16 if longest == 60 else torch.float32
    random = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), 2, 16, generator=random).to(DEVICE, dtype) for _ in range(4)]
    leaves = [one.requires_grad_() for one in states[:3]]
    cumulative = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    refinement = Refinement("high-key-bias", 0.7, message_stride=4)
    found = saobp.attention_packed(*leaves, refinement, cumulative, max_seqlen=longest, backend="fused")
    gradients = torch.autograd.grad(found, leaves, states[3])
    tolerance = 4e-3 if dtype == torch.float16 else 2e-5
    for part in (slice(0, 9), slice(9, 54), slice(54, None)):
        own = [one[part].transpose(0, 1)[None].double() for one in states]
        alone = [one.detach().requires_grad_() for one in own[:3]]
        expected = saobp.attention(*alone, refinement, backend="reference")
        pairs = zip(
            (found, *gradients), (expected, *torch.autograd.grad(expected, alone, own[3])), strict=True
        )
        for got, truth in pairs:
            torch.testing.assert_close(
                got[part].double(), truth[0].transpose(0, 1), rtol=tolerance, atol=tolerance
            )


def test_dropout_drops_the_same_entries_forward_and_backward() -> None:
    inputs = attention_inputs(1, 1, 140, 144, dtype=torch.float32, device=DEVICE)
    refinement, states = sent_by(4), (inputs.query[:, :, :, :140], inputs.key[:, :, :, :140])
    value, gradient = inputs.value[..., :140], inputs.output_gradient[..., :140]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(3)
        return saobp.attention(
            query, key, value, refinement, strength=inputs.strength, dropout_p=0.25, backend="fused"
        )

    dropped = attend(*states, torch.eye(140, device=DEVICE)[None, None])
    assert 0.2 < float((dropped == 0).float().mean()) < 0.3
    torch.testing.assert_close(attend(*states, value), dropped @ value, rtol=1e-4, atol=1e-4)
    leaves = [one.detach().requires_grad_() for one in (*states, value)]
    found = torch.autograd.grad(attend(*leaves), leaves, gradient)
    rows = [one.detach().requires_grad_() for one in (*states, value)]
    whole = saobp.attention(
        *rows[:2], torch.eye(140, device=DEVICE)[None, None], refinement, strength=inputs.strength,
        backend="reference",
    )  # fmt: skip
    output = torch.where(dropped == 0, 0.0, whole / 0.75) @ rows[2]
    for got, expected in zip(found, torch.autograd.grad(output, rows, gradient), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strength", [1.5, -2.0])
@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_weights_relative_to_no_maximum(
    strength: float, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in bfloat16. With a large shift weights leave the range of the type and are computed again."""
    monkeypatch.setattr(launch, "ANY_RANGE", HALF)
    inputs = attention_inputs(2, 1, 170, 16, strength=strength, padding="right", dtype=HALF, device=DEVICE)
    inputs.query[..., 0] += shift
    inputs.key[..., 0] += 1
    check(inputs, sent_by(4))


def test_repeats_are_equal_bit_by_bit() -> None:
    inputs = attention_inputs(2, 2, 300 if GPU else 140, 16, strength=0.8, dtype=HALF, device=DEVICE)

    def attend(*leaves: Tensor) -> Tensor:
        return saobp.attention(*leaves[:3], sent_by(4), strength=leaves[3], backend="fused")

    first = run(attend, inputs)
    for _ in range(100 if GPU else 2):
        assert all(torch.equal(one, first[name]) for name, one in run(attend, inputs).items())


def test_the_operators_are_well_formed() -> None:
    inputs = attention_inputs(1, 1, 140, 16, dtype=torch.float16, device=DEVICE)
    family, numbers = FAMILIES["key bias"], (140, 0.25, 0.0, 1.0, 2, 0.0, 1, 0.0, 4)
    arguments = (*inputs.leaves(), None, None, None, *numbers)
    kinds = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(family.forward, arguments, test_utils=kinds)
    torch.library.opcheck(family.forward, arguments, test_utils="test_aot_dispatch_static")
    torch.library.opcheck(family.forward, arguments, test_utils="test_aot_dispatch_dynamic")
