"""ElemMul by kernels against the specification: errors, padding, grouped heads, collapse, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from elemmul_inputs import check_even_padding_row, lonely_padding_row
from torch import Tensor

import saobp
from saobp.testing.error_budget import Operation, assert_within_budget, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

ELEMMUL = saobp.Refinement("elemmul")


def fused(inputs: AttentionInputs, scale: float | None = None) -> Operation:
    def attend(query: Tensor, key: Tensor, value: Tensor, strength: Tensor) -> Tensor:
        return saobp.attention(
            query,
            key,
            value,
            ELEMMUL,
            padding_mask=inputs.padding_mask,
            scale=scale,
            strength=strength,
            backend="fused",
        )

    return attend


SIZES = [(1, 16), (7, 64), (37, 24), (64, 16), (111, 64), (128, 16), (129, 64), (300, 16)]
"""Lengths and head sizes; the interpreter, which is slow, takes each in one precision."""

CASES = [
    (length, dim, dtype)
    for place, (length, dim) in enumerate(SIZES)
    for dtype in (DTYPES if DEVICE == "cuda" else [DTYPES[place % 2]])
]


@pytest.mark.parametrize(("length", "dim", "dtype"), CASES, ids=str)
def test_lengths_and_head_sizes(length: int, dim: int, dtype: torch.dtype) -> None:
    inputs = attention_inputs(1, 1, length, dim, dtype=dtype, device=DEVICE)
    assert_within_budget(fused(inputs), inputs, ELEMMUL)


SIDES = [(s, dtype) for s in ("right", "left", "both") for dtype in DTYPES]
if DEVICE == "cpu":
    SIDES = [("right", torch.float16), ("left", torch.float32), ("both", torch.float16)]


@pytest.mark.parametrize(("padding", "dtype"), SIDES, ids=str)
def test_padding_grouped_heads_and_strided_states(padding: str, dtype: torch.dtype) -> None:
    """The last sequence is all padding: its rows see nothing and give zeros."""
    inputs = attention_inputs(
        3, 2, 40, 24, key_heads=1, padding=padding, transposed=True, dtype=dtype, device=DEVICE  # type: ignore[arg-type]
    )  # fmt: skip
    assert_within_budget(fused(inputs, 0.3), inputs, ELEMMUL, scale=0.3)
    assert not run(fused(inputs), inputs, gradients=False)["output"][2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize("gap", [90.0, 1000.0])
def test_collapsed_heads_are_right(gap: float, collapse: str, dtype: torch.dtype) -> None:
    for padding in (None, "right"):
        plain = attention_inputs(2, 1, 40, 16, padding=padding, dtype=dtype, device=DEVICE)  # type: ignore[arg-type]
        inputs = collapsed_inputs(plain, gap, collapse)  # type: ignore[arg-type]
        assert_within_budget(fused(inputs), inputs, ELEMMUL)


HALVES = [dtype for dtype in DTYPES if dtype != torch.float32]

NEARLY_UNIFORM = [(64, 16), (128, 64), (140, 64), (300, 16)]
"""Lengths and head sizes."""


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("times", [0.01, 0.1, 0.3])
@pytest.mark.parametrize(("length", "dim"), NEARLY_UNIFORM, ids=str)
def test_nearly_uniform_heads(length: int, dim: int, times: float, dtype: torch.dtype) -> None:
    """Gradients of queries and keys come from what little weights differ by."""
    plain = attention_inputs(1, 1, length, dim, dtype=dtype, device=DEVICE)
    inputs = replace(plain, query=times * plain.query)
    assert_within_budget(fused(inputs), inputs, ELEMMUL)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_nearly_uniform_heads_beside_padding(padding: str, dtype: torch.dtype) -> None:
    """Padding holds large numbers, and gradients reach its rows too."""
    plain = attention_inputs(2, 2, 70, 16, key_heads=1, dtype=dtype, device=DEVICE)
    mask = torch.arange(70, device=DEVICE) < torch.tensor([[70], [50]], device=DEVICE)
    mask = mask if padding == "right" else mask.flip(1)
    filling = torch.where(mask, 1.0, 30.0).to(dtype)[:, None, :, None]
    inputs = replace(
        plain,
        query=0.1 * plain.query * filling,
        key=plain.key * filling,
        value=plain.value * filling,
        padding_mask=mask,
    )
    assert_within_budget(fused(inputs), inputs, ELEMMUL)


@triton.jit
def fused_relative(raw, high, low, score_scale, PRECISE: tl.constexpr):
    """``relative`` rounded once, as a GPU's fused multiply-add does and the interpreter does not."""
    if PRECISE == 2:
        return ((raw - high).to(tl.float64) * score_scale - low).to(tl.float32)
    return (raw.to(tl.float64) * score_scale - high).to(tl.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has fused multiply-adds of its own")
@pytest.mark.parametrize("gap", [90.0, 1000.0])
def test_collapsed_heads_with_fused_multiply_adds(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp of large scores is rounded, and weights made from it no longer sum to 1."""
    for module in ("bidirectional.forward", "elemmul.forward", "elemmul.backward"):
        monkeypatch.setattr(f"saobp.kernels.{module}.relative", fused_relative)
    inputs = collapsed_inputs(attention_inputs(1, 1, 40, 16, dtype=torch.float16, device=DEVICE), gap)
    assert_within_budget(fused(inputs), inputs, ELEMMUL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_row_like_no_real_row_attends_evenly(dtype: torch.dtype) -> None:
    inputs = lonely_padding_row(dtype, DEVICE)
    check_even_padding_row(run(fused(inputs), inputs)["output"], inputs)
    assert_within_budget(fused(inputs), inputs, ELEMMUL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_that_few_others_resemble(dtype: torch.dtype) -> None:
    """One row spreads over keys that nobody else looks at: its weights are tiny before normalisation."""
    inputs = attention_inputs(1, 1, 150, 16, dtype=dtype, device=DEVICE)
    query, key = 0.1 * inputs.query, 0.1 * inputs.key
    query[..., 0], key[..., 0] = 10.0, 0.0
    key[..., :4, 0] = 10.0
    query[..., 17, 0] = -10.0
    inputs = replace(inputs, query=query, key=key)
    assert_within_budget(fused(inputs), inputs, ELEMMUL)


def test_padding_beside_a_sentence_changes_nothing() -> None:
    short = attention_inputs(1, 2, 20, 16, device=DEVICE)
    long = attention_inputs(1, 2, 90, 16, device=DEVICE, seed=1)
    mask = torch.arange(90, device=DEVICE)[None] < 20
    states = [
        torch.cat([a, 100 * b[:, :, 20:]], 2)
        for a, b in ((short.query, long.query), (short.key, long.key), (short.value, long.value))
    ]
    alone = saobp.attention(short.query, short.key, short.value, ELEMMUL, backend="fused")
    beside = saobp.attention(*states, ELEMMUL, padding_mask=mask, backend="fused")
    torch.testing.assert_close(beside[:, :, :20], alone, rtol=1e-5, atol=1e-6)


def test_repeats_are_equal_to_the_bit() -> None:
    inputs = attention_inputs(1, 2, 40, 16, padding="left", dtype=torch.float16, device=DEVICE)
    first = run(fused(inputs), inputs)
    for _ in range(100 if DEVICE == "cuda" else 1):
        for name, again in run(fused(inputs), inputs).items():
            assert torch.equal(first[name], again), name


@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_sound(packed: bool) -> None:
    from saobp.kernels.fused import FAMILIES

    elemmul_attention = FAMILIES["elemmul"].forward

    inputs = attention_inputs(
        1 if packed else 2, 2, 20, 16, key_heads=1, padding=None if packed else "right", device=DEVICE
    )
    cu = torch.tensor([0, 9, 9, 20], dtype=torch.int32, device=DEVICE) if packed else None
    query, key, value, _ = inputs.leaves()
    strength = torch.zeros(query.shape[1], device=DEVICE)
    numbers = (20, 0.25, 0.0, 1.0, 0, 0.0)
    arguments = (query, key, value, strength, inputs.padding_mask, cu, None, *numbers)
    torch.library.opcheck(elemmul_attention, arguments)


def test_compiles_without_a_graph_break() -> None:
    inputs = attention_inputs(1, 2, 20, 16, padding="right", device=DEVICE)
    compiled = torch.compile(
        fused(inputs), fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager"
    )
    expected = run(fused(inputs), inputs)
    for name, result in run(compiled, inputs).items():
        torch.testing.assert_close(result, expected[name], msg=lambda m, name=name: f"{name}: {m}")


def test_refusals_name_their_reason() -> None:
    inputs = attention_inputs(1, 2, 8, 16, device=DEVICE)
    states = (inputs.query, inputs.key, inputs.value)
    for reason, refinement, options in (
        ("dropout on 'elemmul'", ELEMMUL, {"dropout_p": 0.1}),
        ("causal 'elemmul'", ELEMMUL, {"is_causal": True}),
        ("factor 'elemmul-prior'", saobp.Refinement("elemmul-prior"), {}),
        ("2 steps", saobp.Refinement("elemmul", steps=2), {}),
    ):
        with pytest.raises(ValueError, match=reason):
            saobp.attention(*states, refinement, backend="fused", **options)  # type: ignore[arg-type]
