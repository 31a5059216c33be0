"""The tools that other tests lean on: poisoned memory, input makers, error budgets, processes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import saobp
from saobp.testing.error_budget import Operation, assert_within_budget
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs, padding_mask
from saobp.testing.tiny_training import in_processes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HIGH = saobp.Refinement("high")


def test_unwritten_memory_is_nan() -> None:
    like = torch.zeros(3)
    for unwritten in (
        torch.empty(64),
        torch.empty_like(like),
        like.new_empty(64),
        torch.empty_strided((2, 2), (2, 1)),
    ):
        assert unwritten.isnan().all()


@pytest.mark.parametrize("transposed", [False, True])
def test_inputs_have_the_asked_shapes(transposed: bool) -> None:
    inputs = attention_inputs(3, 4, 7, 8, queries=5, key_heads=2, value_dim=6, transposed=transposed)
    assert inputs.query.shape == (3, 4, 5, 8)
    assert inputs.key.shape == (3, 2, 7, 8)
    assert inputs.value.shape == (3, 2, 7, 6)
    assert inputs.output_gradient.shape == (3, 4, 5, 6)
    assert inputs.query.is_contiguous() is not transposed
    assert inputs.leaves()[0].stride() == inputs.query.stride()


def test_inputs_are_quantised_before_they_are_promoted() -> None:
    low = attention_inputs(dtype=torch.bfloat16)
    double = low.to(torch.float64)
    assert double.query.dtype == torch.float64
    assert torch.equal(double.query.bfloat16(), low.query)
    assert low.strength.dtype == torch.float32


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padding_masks(side: str) -> None:
    mask = padding_mask(4, 9, side)  # type: ignore[arg-type]
    assert mask.sum(-1).tolist() == [9, 6, 4, 0]
    assert mask[:3, {"right": 0, "left": -1, "both": 4}[side]].all()


@pytest.mark.parametrize("gap", [90.0, 1000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collapsed_heads_have_the_asked_gap(gap: float, dtype: torch.dtype) -> None:
    plain = attention_inputs(2, 2, 12, 16, dtype=dtype)
    for collapse, favoured in (("sink", torch.zeros(12).long()), ("diagonal", torch.arange(12))):
        inputs = collapsed_inputs(plain, gap, collapse).to(torch.float64)  # type: ignore[arg-type]
        best, at = (inputs.query @ inputs.key.transpose(-1, -2) / 4).topk(2, -1)
        assert (at[..., 0] == favoured).all()
        torch.testing.assert_close(
            best[..., 0] - best[..., 1], torch.full((2, 2, 12), gap).double(), rtol=0.15, atol=0
        )


def streamed(
    inputs: AttentionInputs, causal: bool, *, wrong_gamma: float = 1.0, own_message: bool = False
) -> Operation:
    """Arithmetic like a fused kernel's: float32 inside, another order of operations."""

    def operation(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
        visible = visible.tril() if causal else visible
        speaks = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        if inputs.padding_mask is not None:
            visible = visible & inputs.padding_mask[:, None, None, :]
            speaks = inputs.padding_mask[:, None, :, None]
        scores = query.float() @ key.float().transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~visible, -1e30)
        scores = scores - scores.detach().amax(-1, keepdim=True)
        rows = torch.where(visible, (scores - scores.logsumexp(-1, keepdim=True)).exp(), 0.0)
        gamma = wrong_gamma * (1 - torch.exp(-strength)).view(-1, 1, 1)
        message = torch.where(speaks, torch.log(1 - gamma * rows), 0.0)
        if causal:
            heard = functional.pad(message.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        else:
            heard = message.sum(-2, keepdim=True) - (0.0 if own_message else message)
        refined = torch.where(visible, (scores + heard).softmax(-1), 0.0)
        return (refined.to(value.dtype).float() @ value.float()).to(query.dtype)

    return operation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [None, "right"])
def test_budget_lets_sound_arithmetic_pass(dtype: torch.dtype, causal: bool, padding: str | None) -> None:
    for seed in range(2):
        plain = attention_inputs(
            2,
            2,
            48,
            16,
            strength=(0.2, 1.5),
            padding=padding,  # type: ignore[arg-type]
            dtype=dtype,
            seed=seed,
        )
        for inputs in (
            plain,
            collapsed_inputs(plain, 90.0),
            collapsed_inputs(plain, 90.0, "diagonal"),
            collapsed_inputs(plain, 1000.0),
        ):
            measured = assert_within_budget(streamed(inputs, causal), inputs, HIGH, is_causal=causal)
            assert [error.name for error in measured] == ["output", "query", "key", "value", "strength"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_budget_catches_wrong_arithmetic(dtype: torch.dtype) -> None:
    inputs = attention_inputs(2, 2, 48, 16, strength=(0.5, 1.5), dtype=dtype)

    def fails(candidate: Operation, sentence: str) -> None:
        with pytest.raises(AssertionError, match=sentence):
            assert_within_budget(candidate, inputs, HIGH)

    sound = streamed(inputs, False)
    fails(streamed(inputs, False, own_message=True), "outside the error budget: output: worst")
    off = {torch.float32: 1.0001, torch.float16: 1.01, torch.bfloat16: 1.1}[dtype]
    fails(streamed(inputs, False, wrong_gamma=off), "outside the error budget: .*key: worst")
    fails(lambda q, k, v, s: sound(q, k, v, s.detach()), "outside the error budget: strength: worst")
    fails(lambda q, k, v, s: sound(q, k.detach(), v, s), "outside the error budget: key: worst")
    fails(lambda q, k, v, s: torch.empty_like(sound(q, k, v, s)) * s.sum(), "output has entries that are not")
    with pytest.raises(
        AssertionError, match=r"output has shape \(2, 1, 48, 16\) instead of \(2, 2, 48, 16\)"
    ):
        assert_within_budget(lambda q, k, v, s: sound(q, k, v, s)[:, :1], inputs, HIGH, gradients=False)


def test_processes_that_do_not_end_have_failed() -> None:
    with pytest.raises(RuntimeError, match=r"\[None, None\]"):
        in_processes(2, lambda: time.sleep(60), seconds=0.2)
