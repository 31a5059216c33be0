"""Kernels for windows and masks against their specification, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from call_helpers import SLOW_INTERPRETED, slow_interpreted
from torch import Tensor

import saobp
from saobp import Refinement, functional
from saobp.kernels.masked import attention as masked
from saobp.kernels.masked.tiles import SPAN_BLOCK
from saobp.testing.error_budget import assert_within_budget, distance
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs
from saobp.testing.tiny_models import tiny_batch, tiny_model

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16


def check(inputs: AttentionInputs, refinement: Refinement, **mask: Any) -> None:
    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query, key, value, refinement, padding_mask=inputs.padding_mask, strength=strength,
            backend="fused", **mask,
        )  # fmt: skip

    assert_within_budget(fused, inputs, refinement, **mask)


def symmetric(length: int, share: float) -> Tensor:
    """A random mask ``[length, length]`` of pairs that see each other, each token itself."""
    random = torch.Generator().manual_seed(0)
    seen = torch.rand(length, length, generator=random) < share
    return (seen | seen.mT | torch.eye(length, dtype=torch.bool)).to(DEVICE)


def added(seen: Tensor) -> Tensor:
    """Numbers to add to scores, minus infinity where unseen; not symmetric themselves."""
    random = torch.Generator().manual_seed(1)
    numbers = torch.randn(seen.shape, generator=random).to(seen.device)
    return torch.where(seen, numbers, -math.inf)


@pytest.mark.parametrize("window", [1, 9, pytest.param(70, marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=SLOW_INTERPRETED)], ids=str)
def test_a_sliding_window_with_grouped_heads_and_padding(dtype: torch.dtype, window: int) -> None:
    inputs = attention_inputs(
        2, 2, 100 if window > 1 else 20, 16, key_heads=1, strength=(0.9, -0.5), padding="left",
        transposed=True, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    check(inputs, Refinement("high", "learned"), sliding_window=window)


@pytest.mark.parametrize(
    "factor",
    ["high", *(pytest.param(one, marks=SLOW_INTERPRETED) for one in ("low-listing", "low-key-bias"))],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(HALF, marks=SLOW_INTERPRETED)], ids=str)
def test_a_mask_of_pairs(factor: str, dtype: torch.dtype) -> None:
    inputs = attention_inputs(1, 2, 90, 16, strength=(2.0, 0.0), dtype=dtype, device=DEVICE)
    check(inputs, Refinement(factor, "learned"), attn_mask=symmetric(90, 0.2))


@pytest.mark.parametrize(
    "dtype",
    [HALF, *(pytest.param(one, marks=SLOW_INTERPRETED) for one in (torch.float32, torch.float16))],
    ids=str,
)
def test_numbers_to_add_under_a_window_and_padding(dtype: torch.dtype) -> None:
    inputs = attention_inputs(2, 2, 80, 16, strength=(0.4, 1.0), padding="right", dtype=dtype, device=DEVICE)
    numbers = added(symmetric(80, 0.5)).to(dtype)
    check(inputs, Refinement("low", "learned"), attn_mask=numbers, sliding_window=40)


@pytest.mark.parametrize("window", [9, pytest.param(70, marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("factor", ["high", pytest.param("low-listing", marks=SLOW_INTERPRETED)])
@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=SLOW_INTERPRETED)], ids=str)
def test_a_causal_window(dtype: torch.dtype, factor: str, window: int) -> None:
    inputs = attention_inputs(
        2, 2, 150, 16, key_heads=1, strength=(0.9, 1.5), padding="left", transposed=True, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    check(inputs, Refinement(factor, "learned"), sliding_window=window, is_causal=True)


@slow_interpreted
@pytest.mark.parametrize("dim", [80, 136])
def test_other_head_sizes_have_other_tiles(dim: int) -> None:
    inputs = attention_inputs(1, 1, 140, dim, strength=0.8, dtype=HALF, device=DEVICE)
    for causal in (False, True):
        check(inputs, Refinement("high", "learned"), sliding_window=45, is_causal=causal)


@slow_interpreted
@pytest.mark.parametrize("shape", [(2, 1, 40, 40), (1, 2, 40, 40), (2, 1, 1, 40)])
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    inputs = attention_inputs(2, 2, 40, 16, dtype=HALF, device=DEVICE)
    pairs = torch.stack([symmetric(40, share) for share in (0.2, 0.7)])
    by_text = pairs[:, None] if shape[0] == 2 else pairs[None]
    mask = (
        by_text
        if shape[2] == 40
        else (torch.arange(40) < torch.tensor([[40], [30]]))[:, None, None].to(DEVICE)
    )
    check(inputs, Refinement("high", "learned"), attn_mask=mask.expand(shape))


@slow_interpreted
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize("gap", [20.0, 90.0])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_collapsed_heads(collapse: Any, gap: float, dtype: torch.dtype) -> None:
    inputs = attention_inputs(1, 2, 70, 16, strength=(0.9, 3.0), dtype=dtype, device=DEVICE)
    inputs = collapsed_inputs(inputs, gap, collapse)
    for causal in (False, True):
        check(inputs, Refinement("high", "learned"), sliding_window=60, is_causal=causal)


def test_rows_that_see_nothing_and_tiles_that_nobody_sees() -> None:
    length = 3 * SPAN_BLOCK
    places = torch.arange(length, device=DEVICE)
    seen = (places[:, None] // SPAN_BLOCK == places // SPAN_BLOCK) & (places >= 5) & (places[:, None] >= 5)
    inputs = attention_inputs(1, 1, length, 16, dtype=torch.float32, device=DEVICE)
    states = [one.requires_grad_() for one in (inputs.query, inputs.key, inputs.value)]
    found = saobp.attention(*states, "high:0.7", attn_mask=seen, backend="fused")
    assert not found[0, 0, :5].any()
    assert all(one.isfinite().all() for one in torch.autograd.grad(found.sum(), states))
    for start in range(0, length, SPAN_BLOCK):
        part = slice(start + (5 if start == 0 else 0), start + SPAN_BLOCK)
        alone = saobp.attention(*(one[:, :, part] for one in states), "high:0.7", backend="reference")
        torch.testing.assert_close(found[:, :, part], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_drops_the_same_entries_forward_and_backward(causal: bool) -> None:
    inputs = attention_inputs(1, 1, 40, 40, dtype=torch.float32, device=DEVICE)
    options: dict[str, Any] = {"window": 9, "dropout_p": 0.25, "is_causal": causal}
    refinement, states = Refinement("high", "learned"), (inputs.query, inputs.key)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(3)
        return masked.masked_attention(query, key, value, refinement, inputs.strength, **options)

    dropped = attend(*states, torch.eye(40, device=DEVICE)[None, None])
    leaves = [one.detach().requires_grad_() for one in (*states, inputs.value)]
    found = torch.autograd.grad(attend(*leaves), leaves, inputs.output_gradient)
    _, rows = saobp.functional.attention_with_rows(
        *leaves, refinement, strength=inputs.strength, sliding_window=9, is_causal=causal, backend="reference"
    )
    kept = dropped != 0
    assert 0.6 < kept.sum() / (rows > 0).sum() < 0.9
    expected = torch.where(kept, rows / 0.75, 0.0)
    torch.testing.assert_close(dropped, expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected @ leaves[2], leaves, inputs.output_gradient)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_mask_is_looked_at_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    check = functional.check_symmetric_mask
    monkeypatch.setattr(functional, "check_symmetric_mask", lambda *given: looks.append(check(*given)))
    inputs = attention_inputs(1, 1, 8, 16, dtype=HALF, device=DEVICE)
    states, mask = (inputs.query, inputs.key, inputs.value), symmetric(8, 0.5)

    def attend(**options: Any) -> Tensor:
        return saobp.attention(*states, "high:0.7", attn_mask=mask, backend="fused", **options)

    first = attend()
    assert torch.equal(attend(), first)
    assert len(looks) == 1
    attend(sliding_window=3)
    assert len(looks) == 2
    mask[0, 1], mask[1, 0] = True, False
    with pytest.raises(ValueError, match="pass is_causal=True, or a mask that is symmetric"):
        attend()


def test_an_order_of_rows_under_a_mask_is_refused() -> None:
    inputs = attention_inputs(1, 1, 8, 16, device=DEVICE)
    mask = torch.ones(8, 8, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="causal attention with attn_mask has no kernel"):
        saobp.attention(*inputs.leaves()[:3], "high:0.2", attn_mask=mask, is_causal=True, backend="fused")


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 70, 70), *(pytest.param(one, marks=SLOW_INTERPRETED) for one in ((1, 2, 70, 70), (70, 70)))],
)
@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=SLOW_INTERPRETED)], ids=str)
def test_a_mask_learns_within_twice_the_error_of_the_reference(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    inputs = attention_inputs(2, 2, 70, 16, strength=(0.9, -0.4), padding="right", dtype=dtype, device=DEVICE)
    numbers = added(symmetric(70, 0.6)).expand(shape)

    def gradients(given: AttentionInputs, backend: Any, learns: bool = True) -> tuple[Tensor, ...]:
        mask = numbers.to(torch.promote_types(given.dtype, torch.float32), copy=True).requires_grad_(learns)
        leaves = given.leaves()
        found = saobp.attention(
            *leaves[:3], Refinement("high", "learned"), strength=leaves[3], attn_mask=mask,
            padding_mask=given.padding_mask, backend=backend,
        )  # fmt: skip
        return torch.autograd.grad(found, ((mask,) if learns else ()) + leaves, given.output_gradient)

    truth, plain = gradients(inputs.to(torch.float64), "reference"), gradients(inputs, "reference")
    fused = gradients(inputs, "fused")
    assert fused[0].shape == shape
    assert not fused[0][~numbers.isfinite()].any()
    assert distance(fused[0], truth[0]).typical <= 2 * distance(plain[0], truth[0]).typical
    assert distance(fused[0], truth[0]).worst <= 2 * distance(plain[0], truth[0]).worst
    for one, expected in zip(gradients(inputs, "fused", learns=False), fused[1:], strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_length(causal: bool) -> None:
    from saobp.kernels.masked.launch import MaskedCall, MaskNumbers, plan_backward

    def sizes(length: int) -> tuple[int, int]:
        states = torch.empty(1, 2, length, 16, device=DEVICE, dtype=torch.float16)
        tensors = (states, states, states, torch.ones(2, device=DEVICE), None, None, None)
        made = MaskedCall.of(tensors, MaskNumbers(65, 0.25, 0.0, 1.0, 1, causal))
        return made.saved()[1], plan_backward(made, tensors, states, states).scratch

    for short, long in zip(sizes(512), sizes(4096), strict=True):
        assert long <= 8 * short


@slow_interpreted
def test_the_compiler_sees_one_operator() -> None:
    inputs = attention_inputs(1, 2, 40, 16, device=DEVICE)

    def step(*leaves: Tensor) -> Tensor:
        return saobp.attention(
            *leaves[:3], Refinement("high", "learned"), strength=leaves[3], sliding_window=9, backend="fused"
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    outputs = [one(*inputs.leaves()) for one in (step, compiled)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", ["modernbert", "mistral"])
def test_local_layers_of_a_model_use_the_kernels(family: str) -> None:
    model = saobp.apply(tiny_model(family), "high:0.7").to(DEVICE, torch.bfloat16)
    batch = {name: one.to(DEVICE) for name, one in tiny_batch().items()}
    assert "fused masked kernels" in str(saobp.explain(model, batch))
    assert model(**batch, use_cache=False).logits.isfinite().all()


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_a_hundred_repeats_are_equal_bit_by_bit() -> None:
    inputs = attention_inputs(
        2, 4, 700, 64, strength=(0.2, 1.0, -0.5, 3.0), dtype=torch.bfloat16, device=DEVICE
    )
    leaves, mask = inputs.leaves(), added(symmetric(700, 0.3))

    def step() -> tuple[Tensor, ...]:
        out = saobp.attention(
            *leaves[:3], Refinement("high", "learned"), strength=leaves[3], attn_mask=mask,
            sliding_window=300, backend="fused",
        )  # fmt: skip
        return out, *torch.autograd.grad(out, leaves, inputs.output_gradient)

    first = step()
    for _ in range(100):
        assert all(torch.equal(one, again) for one, again in zip(first, step(), strict=True))
