"""Causal ElemMul in chunks of rows against the specification: errors, padding, memory, operators."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from elemmul_inputs import check_even_padding_row, lonely_padding_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import saobp
from saobp.kernels.elemmul import causal
from saobp.kernels.elemmul.causal_operator import BACKWARD, FORWARD, causal_elemmul_attention
from saobp.testing.error_budget import Operation, assert_within_budget, run
from saobp.testing.inputs import AttentionInputs, attention_inputs, collapsed_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ELEMMUL = saobp.Refinement("elemmul")


def chunked(inputs: AttentionInputs, scale: float | None = None) -> Operation:
    """In chunks at any length."""

    def attend(query: Tensor, key: Tensor, value: Tensor, _strength: Tensor) -> Tensor:
        return causal_elemmul_attention(query, key, value, inputs.padding_mask, scale)

    return attend


def check(inputs: AttentionInputs, scale: float | None = None) -> None:
    assert_within_budget(chunked(inputs, scale), inputs, ELEMMUL, is_causal=True, scale=scale)


@pytest.fixture(params=["float32", "float16", "bfloat16", *([] if DEVICE == "cuda" else ["bfloat16 maps"])])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of states. On a CPU maps are single precision unless they are rounded as on a GPU, with its chunks."""
    if request.param == "bfloat16 maps":
        monkeypatch.setattr(causal, "map_type", lambda query: query.dtype)
        monkeypatch.setattr(causal, "ROWS", causal.GPU_ROWS)
    kind: torch.dtype = getattr(torch, request.param.split()[0])
    return kind


@pytest.mark.parametrize(
    ("length", "dim"), [(1, 16), (37, 24), (63, 128), (64, 64), (129, 32), (300, 64)], ids=str
)
def test_lengths_and_head_sizes(length: int, dim: int, dtype: torch.dtype) -> None:
    check(attention_inputs(1, 2, length, dim, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("padding", ["right", "left", "both"])
def test_padding_grouped_heads_and_strided_states(padding: str, dtype: torch.dtype) -> None:
    """The last sequence is all padding: its rows see nothing and give zeros. Values are wider than keys."""
    inputs = attention_inputs(
        3, 4, 150, 24, key_heads=2, value_dim=40, padding=padding, transposed=True, dtype=dtype, device=DEVICE  # type: ignore[arg-type]
    )  # fmt: skip
    mask = torch.arange(150, device=DEVICE) < torch.tensor([[150], [70], [0]], device=DEVICE)
    inputs = replace(inputs, padding_mask=mask if padding == "right" else mask.flip(1))
    check(inputs, 0.3)
    assert not run(chunked(inputs), inputs, gradients=False)["output"][2].any()


@pytest.mark.parametrize("collapse", ["sink", "diagonal"])
@pytest.mark.parametrize("gap", [1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 90.0, 1000.0])
def test_collapsed_heads(gap: float, collapse: str, dtype: torch.dtype) -> None:
    check(collapsed_inputs(attention_inputs(1, 2, 200, 32, dtype=dtype, device=DEVICE), gap, collapse))  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("times", [0.01, 0.1, 0.3])
def test_nearly_uniform_heads(times: float, offset: float, dtype: torch.dtype) -> None:
    """Gradients of queries and keys come from what little weights differ by, not from the mean of values."""
    plain = attention_inputs(1, 2, 140, 64, dtype=dtype, device=DEVICE)
    check(replace(plain, query=times * plain.query, value=plain.value + offset))


@pytest.mark.parametrize("gap", [2.0, 4.0, 20.0])
def test_the_states_led_back_keep_their_digits(gap: float) -> None:
    """The first rows of a long text have the largest gradients and the smallest part of the states."""
    check(collapsed_inputs(attention_inputs(1, 1, 1000, 16, device=DEVICE), gap))


@pytest.mark.parametrize(
    ("length", "dim", "gap", "seed"), [(200, 32, 2.0, 14), (200, 32, 3.0, 107), (260, 128, 8.5, 59)], ids=str
)
def test_errors_that_all_rows_of_a_sink_share(
    length: int, dim: int, gap: float, seed: int, dtype: torch.dtype
) -> None:
    """Products of rounded weights with each other, as few as those of a chunk, went over the budget here."""
    check(collapsed_inputs(attention_inputs(1, 2, length, dim, dtype=dtype, device=DEVICE, seed=seed), gap))


def test_gradients_are_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "ROWS", 4)
    monkeypatch.setattr(causal, "GPU_ROWS", 4)
    inputs = attention_inputs(2, 4, 9, 4, key_heads=2, padding="left", dtype=torch.float64, device=DEVICE)
    query, key, value, strength = inputs.leaves()
    attend = chunked(inputs)
    assert torch.autograd.gradcheck(lambda *states: attend(*states, strength), (query, key, value))


def test_padding_row_like_no_real_row_attends_evenly(dtype: torch.dtype) -> None:
    inputs = lonely_padding_row(dtype, DEVICE)
    check_even_padding_row(run(chunked(inputs), inputs)["output"], inputs)
    check(inputs)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_later_tokens_change_nothing(side: str) -> None:
    short = attention_inputs(1, 2, 90, 16, device=DEVICE)
    extra = attention_inputs(1, 2, 80, 16, device=DEVICE, seed=1)
    others = [100 * states for states in (extra.query, extra.key, extra.value)]
    states = [short.query, short.key, short.value]
    real, unreal = (torch.full((1, n), n == 90, device=DEVICE) for n in (90, 80))
    parts = zip(others, states, strict=True) if side == "left" else zip(states, others, strict=True)
    beside = [torch.cat(pair, 2) for pair in parts]
    mask = torch.cat([unreal, real] if side == "left" else [real, unreal], 1)
    alone = causal_elemmul_attention(*states, None, None)
    place = slice(80, None) if side == "left" else slice(90)
    found = causal_elemmul_attention(*beside, mask, None)[:, :, place]
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    if side == "right":
        followed = causal_elemmul_attention(*beside, None, None)[:, :, place]
        torch.testing.assert_close(followed, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_is_so_in_the_reference(which: int, value: float) -> None:
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[1, :10] = False
    for place in (5, 50, 99):
        inputs = attention_inputs(2, 1, 100, 4)
        states = inputs.query, inputs.key, inputs.value
        states[which][:, :, place, 1] = value
        expected = saobp.attention(
            *states, "elemmul", is_causal=True, attention_mask=mask, backend="reference"
        )
        found = causal_elemmul_attention(*states, mask, None)
        assert torch.equal(found.isfinite(), expected.isfinite())
        clean = expected.isfinite()
        torch.testing.assert_close(found[clean], expected[clean], rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Numbers of the largest tensor that an operation gives."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for one in results if isinstance(results, tuple | list) else [results]:
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.numel())
        return results


def test_no_tensor_is_as_large_as_a_map(dtype: torch.dtype) -> None:
    largest = []
    for length in (256, 512):
        inputs = attention_inputs(1, 1, length, 16, dtype=dtype, device=DEVICE)
        query, key, value, _ = inputs.leaves()
        with torch.no_grad(), LargestTensor() as seen:
            _, sums = causal.causal_elemmul(query, key, value, None, 0.25)
            causal.causal_elemmul_gradients(inputs.output_gradient, query, key, value, None, sums, 0.25)
        largest.append(seen.largest)
    assert largest[1] <= 2 * largest[0]


@pytest.mark.parametrize("padded", [False, True])
def test_operators_are_sound(padded: bool, dtype: torch.dtype) -> None:
    inputs = attention_inputs(
        2, 4, 140, 16, key_heads=2, value_dim=24, padding="right" if padded else None, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    query, key, value, _ = inputs.leaves()
    states = (query, key, value, inputs.padding_mask)
    torch.library.opcheck(FORWARD, (*states, 0.25))
    _, sums = FORWARD(*states, 0.25)
    saved = (one if one is None else one.detach() for one in states)
    torch.library.opcheck(BACKWARD, (inputs.output_gradient, *saved, sums, 0.25))


def by_saobp(inputs: AttentionInputs) -> Operation:
    def attend(query: Tensor, key: Tensor, value: Tensor, _strength: Tensor) -> Tensor:
        mask = inputs.padding_mask
        return saobp.attention(query, key, value, ELEMMUL, padding_mask=mask, is_causal=True)

    return attend


def test_compiles_without_a_graph_break() -> None:
    inputs = attention_inputs(1, 2, 150, 16, padding="right", device=DEVICE)
    attend = by_saobp(inputs)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected = run(attend, inputs)
    for name, result in run(compiled, inputs).items():
        torch.testing.assert_close(result, expected[name], msg=lambda m, name=name: f"{name}: {m}")


def test_autocast_casts_the_states_alone() -> None:
    inputs = attention_inputs(1, 2, 150, 16, device=DEVICE)
    half = inputs.to(torch.bfloat16)
    expected = run(by_saobp(half), half)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(by_saobp(inputs), replace(inputs, output_gradient=half.output_gradient))
    for name in ("output", "query", "key", "value"):
        assert torch.equal(found[name].bfloat16(), expected[name]), name


def test_what_needs_pytorchs_own_operations_takes_the_reference() -> None:
    inputs = attention_inputs(1, 2, 140, 8, device=DEVICE)
    states, attend = (inputs.query, inputs.key, inputs.value), by_saobp(inputs)

    def of(*given: Tensor) -> Tensor:
        return attend(*given, inputs.strength)

    expected = of(*states)
    mapped = torch.func.vmap(of)(*(one[None] for one in states))
    torch.testing.assert_close(mapped[0], expected, rtol=1e-4, atol=1e-5)
    plain, slope = torch.func.jvp(of, states, states)
    torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-5)
    assert slope.any()

    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return of(*given)

    exported = torch.export.export(Module(), states)
    assert not [node for node in exported.graph.nodes if "saobp" in str(node.target)]
    query = inputs.query.clone().requires_grad_()
    (slope,) = torch.autograd.grad(of(query, *states[1:]).sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives: use backend='reference'"):
        slope.sum().backward()


def test_packed_sequences_are_as_alone() -> None:
    inputs = attention_inputs(1, 4, 300, 16, key_heads=2, device=DEVICE)
    states = [one[0].transpose(0, 1) for one in (inputs.query, inputs.key, inputs.value)]
    ends = torch.tensor([0, 140, 140, 300], dtype=torch.int32, device=DEVICE)
    found = saobp.attention_packed(*states, ELEMMUL, ends, is_causal=True)
    for start, stop in ((0, 140), (140, 300)):
        alone = [one[:, :, start:stop] for one in (inputs.query, inputs.key, inputs.value)]
        expected = saobp.attention(*alone, ELEMMUL, is_causal=True, backend="reference")[0].transpose(0, 1)
        torch.testing.assert_close(found[start:stop], expected, rtol=1e-4, atol=1e-5)


def test_triton_is_not_needed() -> None:
    program = """if True:
        import sys
        sys.modules["triton"] = None
        import torch
        import saobp
        states = torch.randn(3, 1, 2, 130, 8, requires_grad=True).unbind()
        assert saobp.explain(*states, "elemmul", is_causal=True).name == "chunked"
        saobp.attention(*states, "elemmul", is_causal=True).sum().backward()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
