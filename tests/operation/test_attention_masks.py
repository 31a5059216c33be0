"""Masks: padding in any type and under either name, and the ``attn_mask`` of PyTorch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import saobp
from saobp.testing.inputs import attention_inputs

HEARING = ["high", "low"]
FACTORS = ["none", *HEARING, "high-listing", "low-listing", "elemmul", "elemmul-prior"]
BATCH, HEADS, LENGTH, DIM, STRENGTH = 2, 2, 6, 4, 0.9


def states(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    inputs = attention_inputs(BATCH, HEADS, LENGTH, DIM, dtype=dtype, seed=seed)
    return [inputs.query, inputs.key, inputs.value]


def symmetric(seed: int) -> Tensor:
    """``[batch, heads, length, length]``: random pairs of tokens see each other, most tokens themselves."""
    random = torch.Generator().manual_seed(seed)
    pairs = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=random) < 0.5
    return pairs.tril() | pairs.tril().mT


def expected_rows(scores: Tensor, seen: Tensor, factor: str, causal: bool) -> list[list[float]]:
    """Refined rows of one head, in loops over nodes and keys, from the definition in docs/operation.md."""
    keys = range(LENGTH)
    sees = [[bool(seen[j, k]) and not (causal and k > j) for k in keys] for j in keys]
    prior = []
    for j in keys:
        weights = [math.exp(float(scores[j, k])) if sees[j][k] else 0.0 for k in keys]
        prior.append([w / (sum(weights) or 1.0) for w in weights])
    nodes = [i for i in keys if any(sees[i]) and any(sees[j][i] for j in keys)]
    sign = -1 if factor.startswith("low") else 1
    gamma = 1 - math.exp(-sign * STRENGTH)

    def weight(j: int, k: int) -> float:
        if factor == "none":
            return prior[j][k]
        if factor.startswith("elemmul"):
            alike = sum(a * b for a, b in zip(prior[j], prior[k], strict=True))
            alike = max(alike, 1e-292)  # rows that share no key with any they see spread evenly
            return alike * (prior[j][k] if factor.endswith("prior") else 1.0)
        if factor.endswith("listing"):
            return prior[j][k] / (1 - gamma * prior[j][k] if j in nodes else 1.0)
        heard = [i for i in nodes if i != j and (i < j or not causal)]
        return prior[j][k] * math.prod(1 - gamma * prior[i][k] for i in heard)

    rows = []
    for j in keys:
        weights = [weight(j, k) if sees[j][k] else 0.0 for k in keys]
        rows.append([w / (sum(weights) or 1.0) for w in weights])
    return rows


def expected(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, factor: str, causal: bool, bias: Tensor
) -> Tensor:
    scores = q @ k.mT / math.sqrt(DIM) + bias
    seen = seen.expand(scores.shape)
    rows = [
        [expected_rows(scores[b, h], seen[b, h], factor, causal) for h in range(HEADS)] for b in range(BATCH)
    ]
    return torch.tensor(rows, dtype=torch.float64) @ v


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_mask_agrees_with_loops(factor: str, causal: bool, backend: Any) -> None:
    for seed in range(4):
        q, k, v = states(seed)
        seen = symmetric(seed)
        seen[0, 0, 2] = False  # a row that sees nothing
        seen[0, 0, :, 2] = False
        numbers = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
        for bias in (torch.zeros_like(numbers), numbers):
            wanted = expected(q, k, v, seen, factor, causal, bias)
            masks = [torch.where(seen, bias, hidden) for hidden in (-math.inf, torch.finfo(bias.dtype).min)]
            for mask in [seen, *masks] if bias is not numbers else masks:
                found = saobp.attention(
                    q, k, v, f"{factor}:{STRENGTH}", attn_mask=mask, is_causal=causal, backend=backend
                )
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
                assert (found[0, 0, 2] == 0).all()


@pytest.mark.parametrize("factor", ["none", "high-listing", "elemmul", "high"])
def test_any_mask_where_rows_hear_no_other_or_earlier_ones(factor: str) -> None:
    q, k, v = states()
    seen = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
    causal = factor == "high"
    found = saobp.attention(q, k, v, f"{factor}:{STRENGTH}", attn_mask=seen, is_causal=causal)
    wanted = expected(q, k, v, seen, factor, causal, torch.zeros(()))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_say_what_other_arguments_say(factor: str, causal: bool) -> None:
    q, k, v = states()
    refinement = saobp.Refinement(factor, STRENGTH)
    real = torch.tensor([[1] * 6, [0, 1, 1, 1, 0, 0]]).bool()
    wanted = saobp.attention(q, k, v, refinement, attention_mask=real, is_causal=causal)
    keys = real[:, None, None, :]
    pairs = keys & real[:, None, :, None]
    for options in ({"attn_mask": keys}, {"attn_mask": pairs}, {"attn_mask": pairs, "attention_mask": real}):
        found = saobp.attention(q, k, v, refinement, is_causal=causal, **options)  # type: ignore[arg-type]
        shown = real[:, None, :, None] if options["attn_mask"] is pairs else torch.tensor(True)
        torch.testing.assert_close(found, wanted * shown)
    if causal:
        lower = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        found = saobp.attention(q, k, v, refinement, attn_mask=lower, is_causal=True)
        torch.testing.assert_close(found, saobp.attention(q, k, v, refinement, is_causal=True))


def test_no_refinement_gives_pytorchs_attention_under_any_mask() -> None:
    q, k, v = states()
    numbers = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    lower = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for mask in (numbers, lower, numbers.masked_fill(~lower, -math.inf), numbers[:, :1]):
        found = saobp.attention(q, k, v, "none", attn_mask=mask)
        torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, mask))


def test_fewer_queries_than_keys() -> None:
    q, k, v = states()
    seen = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
    found = saobp.attention(q[:, :, :3], k, v, "high:0.9", attn_mask=seen)
    prior = (q[:, :, :3] @ k.mT / 2).masked_fill(~seen, -math.inf).softmax(-1)
    logs = torch.log1p(math.expm1(-0.9) * prior)
    rows = prior * (logs.sum(-2, keepdim=True) - logs).exp()
    torch.testing.assert_close(found, rows / rows.sum(-1, keepdim=True) @ v)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_states_and_numbers_of_a_mask(causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in states())
    seen = symmetric(3) | torch.eye(LENGTH, dtype=torch.bool)
    bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)

    def operation(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        mask = bias.masked_fill(~seen, -math.inf)
        return saobp.attention(q, k, v, "high:0.9", attn_mask=mask, is_causal=causal)

    assert torch.autograd.gradcheck(operation, (q, k, v, bias), fast_mode=True)


def test_a_mask_that_learns_alone_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    given, bias = states(), torch.randn(LENGTH, LENGTH, dtype=torch.float64)

    def total(mask: Tensor) -> Tensor:
        return saobp.attention(*given, "none", attn_mask=mask)[0, 0, 2].sum()

    learns = bias.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(total(learns), learns)
    assert torch.autograd.gradcheck(total, learns)
    by_vmap = torch.func.vmap(torch.func.grad(total))(torch.stack([bias, -bias]))
    torch.testing.assert_close(by_vmap[0], slopes)
    assert not recwarn.list


def test_prefix_masks_are_refused_unless_rows_have_an_order() -> None:
    q, k, v = states()
    prefix = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    prefix[:, :3] = True
    for factor in HEARING:
        with pytest.raises(ValueError, match=r"pass is_causal=True, or a mask that is symmetric"):
            saobp.attention(q, k, v, f"{factor}:0.2", attn_mask=prefix)
        with pytest.raises(ValueError, match="but not the reverse"):
            saobp.attention(q, k, v, f"{factor}:0.2", attn_mask=torch.where(prefix, 0.0, -math.inf))


def test_a_mask_compiles_and_a_causal_one_still_raises() -> None:
    q, k, v = states(dtype=torch.float32)

    def attend(mask: Tensor) -> Tensor:
        return saobp.attention(q, k, v, "high:0.9", attn_mask=mask, backend="reference")

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(symmetric(1)), attend(symmetric(1)))
    with pytest.raises(RuntimeError, match="but not the reverse"):
        compiled(torch.ones(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bool).tril())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float16])
def test_attention_masks_of_any_type(dtype: torch.dtype) -> None:
    q, k, v = states()
    real = torch.tensor([[1] * 6, [0, 1, 1, 1, 0, 0]])
    rows = (q @ k.mT).softmax(-1)
    wanted = saobp.attention(q, k, v, "high:0.9", padding_mask=real.bool())
    refined = saobp.refine(rows, "high:0.9", padding_mask=real.bool())
    for name in ("attention_mask", "padding_mask"):
        mask: Any = {name: real.to(dtype)}
        assert torch.equal(saobp.attention(q, k, v, "high:0.9", **mask), wanted)
        assert torch.equal(saobp.refine(rows, "high:0.9", **mask), refined)


@pytest.mark.parametrize("factor", ["none", "high"])
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_casts_as_for_pytorchs_attention(factor: str, grad: bool) -> None:
    q, k, v = (x.requires_grad_(grad) for x in states(dtype=torch.float32))
    half = [x.bfloat16() for x in (q, k, v)]
    wanted = saobp.attention(*half, saobp.Refinement(factor, 0.9), backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        plain = scaled_dot_product_attention(q, k, half[2])
        for given in ((q, k, half[2]), (q, k, v), (half[0], k, v)):
            found = saobp.attention(*given, saobp.Refinement(factor, 0.9))
            assert found.dtype == plain.dtype == torch.bfloat16
            torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="must share one floating-point type"):
        saobp.attention(q, k, half[2], "high:0.2")
