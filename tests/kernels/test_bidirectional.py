"""The fused operation against its specification, on a GPU or, without one, in Triton's interpreter."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_helpers import check_dropout, clear_plans, spec_of
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.arguments import BoundedStrength
from saobp.kernels.call_spec import WEAK_GAMMA_MAX, WEAK_GAMMA_MIN, CallSpec, parabola
from saobp.kernels.fused import FAMILIES
from saobp.testing.error_budget import assert_within_budget
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

refined_attention = FAMILIES["long"].forward
short_refined_attention = FAMILIES["short"].forward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [1, 7, 37, 64, 111, 128, 129] + ([513, 1023] if GPU else [])


def check(
    inputs: AttentionInputs,
    refinement: Refinement,
    strongest: float | None = None,
    frozen: bool = False,
) -> None:
    """Frozen strengths are known, and weak ones go by shorter ways."""

    def fused(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query,
            key,
            value,
            refinement,
            padding_mask=inputs.padding_mask,
            strength=BoundedStrength(strength.detach() if frozen else strength, strongest),
            backend="fused",
        )

    assert_within_budget(fused, inputs, refinement, frozen=frozen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_in_every_precision(length: int, dtype: torch.dtype) -> None:
    inputs = attention_inputs(
        1 if length > 64 else 2, 2, length, 16, transposed=True, dtype=dtype, device=DEVICE, seed=length
    )
    check(inputs, Refinement("high", 0.2), strongest=0.2)
    if dtype == torch.bfloat16:
        check(inputs, Refinement("high", 0.2), strongest=0.2, frozen=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("factor", ["high", "low", "high-listing", "low-listing"])
def test_every_factor_with_unknown_strengths(factor: str, length: int, dtype: torch.dtype) -> None:
    strength = (-0.7, 1.5) if factor == "high" else (0.0, 0.6)
    inputs = attention_inputs(1, 2, length, 16, strength=strength, dtype=dtype, device=DEVICE)
    check(inputs, Refinement(factor, "learned"))


@pytest.mark.parametrize(
    ("factor", "length", "dtype"),
    [
        ("high-key-bias", 40, torch.float16),
        ("low-key-bias", 40, DTYPES[-1]),
        ("high-key-bias", 150, DTYPES[-1]),
        ("low-key-bias", 140, torch.float32),
    ],
)
def test_a_key_bias(factor: str, length: int, dtype: torch.dtype) -> None:
    """A row receives its own message too."""
    inputs = attention_inputs(
        1, 2, length, 16, strength=(0.3, 1.5), padding="left", dtype=dtype, device=DEVICE
    )
    check(inputs, Refinement(factor, "learned"))


@pytest.mark.parametrize("weak_length", [100, 140])
def test_a_weak_key_bias(weak_length: int) -> None:
    inputs = attention_inputs(1, 2, weak_length, 16, strength=0.2, dtype=torch.bfloat16, device=DEVICE)
    check(inputs, Refinement("high-key-bias", 0.2), 0.2, frozen=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["short", "long"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_have_the_layout_of_their_inputs(dtype: torch.dtype, causal: bool) -> None:
    """Otherwise autograd copies them into leaves laid out differently."""
    for transposed in (False, True):
        inputs = attention_inputs(2, 2, 20, 16, transposed=transposed, dtype=dtype, device=DEVICE)
        *states, strength = inputs.leaves()
        out = saobp.attention(
            *states, Refinement("high"), strength=strength, is_causal=causal, backend="fused"
        )
        found = torch.autograd.grad(out, states, inputs.output_gradient)
        assert [one.stride() for one in found] == [one.stride() for one in states]


@pytest.mark.parametrize("length", [37, 140])
@pytest.mark.parametrize("padding", ["left", "right", "both"])
def test_padding_and_shared_key_heads(padding: str, length: int) -> None:
    inputs = attention_inputs(
        2 if length < 100 else 1,
        2,
        length,
        16,
        key_heads=1,
        padding=padding,
        strength=0.6,
        transposed=True,
        dtype=DTYPES[-1],
        device=DEVICE,
    )
    check(inputs, Refinement("high", "learned"))


@pytest.mark.parametrize("length", [20, 130])
def test_a_sequence_of_padding_gives_zeros_and_no_gradient(length: int) -> None:
    inputs = attention_inputs(2, 1, length, 16, device=DEVICE)
    mask = torch.ones(2, length, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    query, key, value, _ = inputs.leaves()
    out = saobp.attention(query, key, value, Refinement("high", 0.3), padding_mask=mask, backend="fused")
    out.sum().backward()
    assert (out[1] == 0).all()
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert (leaf.grad[1] == 0).all()
        assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize(
    ("length", "dim"), [(20, 1), (140, 1), (33, 8), (33, 64), (33, 80), (20, 128), (20, 256), (140, 48)]
)
def test_head_sizes(length: int, dim: int) -> None:
    check(attention_inputs(1, 1, length, dim, dtype=DTYPES[-1], device=DEVICE), Refinement("high", 0.2), 0.2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [90.0, 1000.0])
@pytest.mark.parametrize("kind", ["sink", "diagonal"])
@pytest.mark.parametrize("length", [24, 140])
@pytest.mark.parametrize("factor", ["high", "high-key-bias"])
def test_collapsed_heads(factor: str, length: int, kind: str, gap: float, dtype: torch.dtype) -> None:
    inputs = attention_inputs(1, 1, length, 16, dtype=dtype, device=DEVICE, strength=2.0)
    check(collapsed_inputs(inputs, gap, kind), Refinement(factor, "learned"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("factor", "strength"), [("high-key-bias", 1.0), ("low-key-bias", 2.0)])
def test_rows_of_a_key_bias_with_small_normalisers(factor: str, strength: float, dtype: torch.dtype) -> None:
    """Scores sharp enough for the log domain, without a sink."""
    inputs = attention_inputs(1, 1, 140, 16, dtype=dtype, device=DEVICE, strength=strength)
    check(replace(inputs, query=inputs.query * 8), Refinement(factor, "learned"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", ["high", "low", "high-key-bias", "low-key-bias"])
def test_logarithms_give_the_same(factor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of heads that may underflow, taken by all, whose rows are usual ones and padding."""
    monkeypatch.setattr("saobp.kernels.dispatch.is_short", lambda *_: False)
    monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
    inputs = attention_inputs(
        2, 2, 70, 16, key_heads=1, strength=(-0.7, 1.0), padding="left", dtype=dtype, device=DEVICE
    )
    check(inputs, Refinement(factor, "learned"))


@pytest.mark.parametrize("gap", [2.0, 5.0, 7.0, 12.0, 90.0] if GPU else [2.0, 5.0, 12.0, 90.0])
@pytest.mark.parametrize("kind", ["sink", "diagonal"])
def test_collapsed_heads_of_weak_strength(kind: str, gap: float) -> None:
    """A sink that the other rows shun: gradients are what is left after large terms cancel."""
    inputs = attention_inputs(1, 1, 260, 32, dtype=torch.bfloat16, strength=0.2, device=DEVICE, seed=3)
    check(collapsed_inputs(inputs, gap, kind), Refinement("high", 0.2), 0.2, frozen=True)


def test_padding_rows_of_weak_strength_say_nothing() -> None:
    """They have an output and a gradient all the same, of plain weights times what the others say."""
    inputs = attention_inputs(
        2, 1, 140, 16, dtype=torch.bfloat16, strength=0.2, padding="left", device=DEVICE
    )
    mask = torch.arange(140, device=DEVICE)[None] >= torch.tensor([[0], [90]], device=DEVICE)
    inputs = replace(collapsed_inputs(inputs, 4.0, "diagonal"), padding_mask=mask)
    check(inputs, Refinement("high", 0.2), 0.2, frozen=True)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize(
    ("factor", "padding"),
    [
        ("high", None), ("low", "right"), ("high", "left"), ("high-listing", None), ("high-key-bias", None),
        ("low-key-bias", "left"),
    ],
)  # fmt: skip
def test_the_way_of_weak_strengths(
    factor: str, padding: str | None, careful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parabolas and their shorter backward sweeps belong to bfloat16; here float32 goes the same way."""
    monkeypatch.setattr(CallSpec, "precise", 0)
    if careful:
        monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
        monkeypatch.setattr(CallSpec, "may_underflow", factor != "high-listing")
    clear_plans()
    inputs = attention_inputs(1 if padding is None else 2, 1, 140, 16, device=DEVICE, padding=padding)
    query, key, value, _ = inputs.leaves()

    def run(backend: Any) -> list[Tensor]:
        refinement = Refinement(factor, 0.2)
        out = saobp.attention(
            query, key, value, refinement, padding_mask=inputs.padding_mask, backend=backend
        )
        return [out, *torch.autograd.grad(out, (query, key, value), inputs.output_gradient)]

    try:
        for found, expected in zip(run("fused"), run("reference"), strict=True):
            assert float((found - expected).norm() / expected.norm()) < 1e-3
    finally:
        clear_plans()


@pytest.mark.parametrize("length", [40, 140])
def test_heads_of_strength_zero_among_weak_ones(length: int) -> None:
    """Without messages a head is plain attention."""
    inputs = attention_inputs(1, 2, length, 16, strength=(0.0, 0.2), dtype=torch.bfloat16, device=DEVICE)
    check(inputs, Refinement("high", 0.2), 0.2, frozen=True)


def test_rows_that_underflow_are_done_with_logarithms() -> None:
    """Many rows on one key and one row that has nothing but it: a product of weights would give 0 / 0."""
    length, dim = 160, 16
    query = torch.zeros(1, 1, length, dim, device=DEVICE)
    key = torch.zeros(1, 1, length, dim, device=DEVICE)
    query[..., 0], key[0, 0, 3, 0] = 200.0, 1.0
    value = torch.randn(1, 1, length, dim, device=DEVICE)
    inputs = AttentionInputs(
        query, key, value, torch.tensor([2.0], device=DEVICE), torch.randn_like(value), None
    )
    check(inputs, Refinement("high", "learned"))


def test_dropout_keeps_the_same_mask_in_the_backward_pass() -> None:
    for length, dtype in ((16, torch.float32), (16, torch.float16), (144, torch.float32)):
        inputs = attention_inputs(1, 2, length, min(length, 256), dtype=dtype, device=DEVICE, seed=3)
        query, key, _, _ = inputs.leaves()
        value = torch.eye(length, device=DEVICE, dtype=dtype).expand(1, 2, length, length)[
            ..., : inputs.value.shape[3]
        ]
        refinement, rate = Refinement("high", 0.3), 0.4
        torch.manual_seed(5)
        dropped = saobp.attention(query, key, value, refinement, dropout_p=rate, backend="fused")
        rows = saobp.attention(query, key, value, refinement, backend="reference")
        mask = dropped.detach() != 0
        half = dtype == torch.float16
        close = {"rtol": 4e-3, "atol": 1e-3} if half else {"rtol": 1e-3, "atol": 1e-5}
        torch.testing.assert_close(dropped, rows * mask / (1 - rate), **close)
        assert abs(mask.float().mean().item() - (1 - rate)) < 0.06
        expected = torch.autograd.grad(
            rows * mask / (1 - rate), (query, key), inputs.output_gradient, retain_graph=True
        )
        found = torch.autograd.grad(dropped, (query, key), inputs.output_gradient)
        torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("factor", ["low", "high-key-bias"])
@pytest.mark.parametrize("careful", [False, True])
def test_gradients_under_dropout(factor: str, careful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the long kernels, in float16. Careful: every head is taken for one that may underflow."""
    monkeypatch.setattr("saobp.kernels.dispatch.is_short", lambda *_: False)
    if careful:
        monkeypatch.setattr(CallSpec, "lowest_sum", 1e9)
    check_dropout(Refinement(factor, "learned"), 64, torch.float16)


def test_dropout_follows_the_random_seed() -> None:
    query, key, value, _ = attention_inputs(1, 1, 40, 16, device=DEVICE).leaves()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return saobp.attention(query, key, value, Refinement("high", 0.3), dropout_p=0.5, backend="fused")

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize("length", [50, 150])
def test_repeats_are_bit_equal(length: int) -> None:
    inputs = attention_inputs(1, 2, length, 16, dtype=DTYPES[-1], device=DEVICE)

    def run() -> list[Tensor]:
        query, key, value, strength = inputs.leaves()
        out = saobp.attention(query, key, value, Refinement("high", 0.2), strength=strength, backend="fused")
        return [out, *torch.autograd.grad(out, (query, key, value, strength), inputs.output_gradient)]

    first = run()
    for _ in range(100 if GPU else 2):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))


@pytest.mark.parametrize(("length", "operator"), [(20, short_refined_attention), (140, refined_attention)])
def test_the_operators_are_well_formed(length: int, operator: Any) -> None:
    inputs = attention_inputs(1, 1, length, 16, dtype=torch.float16, device=DEVICE)
    query, key, value, strength = inputs.leaves()
    arguments = (query, key, value, strength, None, None, None, length, 0.25, 0.0, 1.0, 1, 0.0)
    kinds = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, arguments, test_utils=kinds)
    torch.library.opcheck(operator, arguments, test_utils="test_aot_dispatch_static")
    torch.library.opcheck(operator, arguments, test_utils="test_aot_dispatch_dynamic")


def test_compiled_without_a_graph_break() -> None:
    query, key, value, _ = attention_inputs(1, 2, 40, 16, device=DEVICE).leaves()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return saobp.attention(query, key, value, Refinement("high", 0.2), backend="fused") * 2

    compiled = torch.compile(call, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    torch.testing.assert_close(compiled(query, key, value), call(query, key, value))
    gradient = torch.autograd.grad(compiled(query, key, value).sum(), (query, key, value))
    expected = torch.autograd.grad(call(query, key, value).sum(), (query, key, value))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
def test_under_a_cuda_graph() -> None:
    inputs = attention_inputs(2, 2, 200, 64, dtype=torch.bfloat16, device=DEVICE)
    call = lambda: saobp.attention(inputs.query, inputs.key, inputs.value, Refinement("high", 0.2))  # noqa: E731
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.skipif(not GPU, reason="falling back is announced on a GPU")
def test_auto_says_once_why_it_falls_back() -> None:
    query, key, value, _ = attention_inputs(1, 1, 8, 16, device=DEVICE).leaves()
    with pytest.warns(UserWarning, match="5 steps were asked for"):
        saobp.attention(query, key, value, Refinement("high", 0.2, steps=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saobp.attention(query, key, value, Refinement("high", 0.2, steps=5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"refinement": Refinement("elemmul-prior")}, "'elemmul-prior' has no kernel"),
        ({"refinement": Refinement("high", 0.2, steps=5)}, "5 steps"),
        ({"scale": -1.0}, "not positive"),
        ({"dim": 300}, "head size 300"),
        ({"dtype": torch.float64}, "float64"),
        ({"queries": 5}, "differ in number"),
        ({"value_dim": 24}, "values of size 24"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(changes: dict, reason: str) -> None:
    sizes = {name: changes[name] for name in ("queries", "value_dim", "dtype") if name in changes}
    inputs = attention_inputs(1, 1, 8, changes.get("dim", 16), device=DEVICE, **sizes)
    with pytest.raises(ValueError, match=reason):
        saobp.attention(
            inputs.query,
            inputs.key,
            inputs.value,
            changes.get("refinement", Refinement("high", 0.2)),
            scale=changes.get("scale"),
            backend="fused",
        )


@pytest.mark.parametrize("bound", [WEAK_GAMMA_MIN, -0.05, 0.05, 0.18, WEAK_GAMMA_MAX])
def test_parabolas_are_far_below_the_rounding_of_bfloat16(bound: float) -> None:
    for function in (lambda x: 1 / (1 - x), lambda x: math.log2(1 - x) / x):
        c0, c1, c2 = parabola(function, bound)
        points = [bound * i / 200 for i in range(1, 201)]
        assert max(abs((c0 + x * (c1 + x * c2)) / function(x) - 1) for x in points) < 5e-4


def test_normalisers_cannot_fall_below_their_bound() -> None:
    """Where ``may_underflow`` is False, the smallest normaliser of the worst map is above ``lowest_sum``."""

    def problem(strength: float, length: int) -> CallSpec:
        states = torch.empty(1, 1, length, 16, dtype=torch.bfloat16)
        return spec_of(states, states, None, None, length, 0.25, 0.0, 1.0, 1, -math.expm1(-strength))

    assert not problem(0.2, 128).may_underflow
    assert problem(0.2, 4096).may_underflow
    longest = next(n for n in range(64, 4096) if problem(0.2, n).may_underflow) - 1
    rows = torch.zeros(longest, longest, dtype=torch.float64)
    rows[:, 0] = 1.0
    log_message_sum = (longest * math.log1p(math.expm1(-0.2))) / math.log(2)
    assert 2.0 ** (log_message_sum + 0.2 / math.log(2)) > problem(0.2, longest).lowest_sum
