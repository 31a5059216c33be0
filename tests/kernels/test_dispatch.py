"""Selection of the path of a call, and its explanation."""

from __future__ import annotations

import pytest
import torch

import saobp
from saobp import Refinement
from saobp.kernels.call_spec import CallSpec
from saobp.kernels.calls import Call, KernelChoice, Path
from saobp.kernels.dispatch import for_cuda_graph, is_for_cuda_graph, select, select_kernels

HIGH = Refinement("high", 0.2)
TWO_STEPS = Refinement("high", 0.2, steps=2)
KEY_BIAS = Refinement("high-key-bias", 0.2)
ELEMMUL = Refinement("elemmul")
PART_OF_ROWS = Refinement("high-key-bias", 0.2, message_stride=2)


def call(length: int = 100, refinement: Refinement = HIGH, dim: int = 64, **options: object) -> Call:
    """On a GPU that need not be there."""
    shape = (2, 4, length, dim)
    usual = {"dtype": torch.bfloat16, "device": "cuda", "strongest": refinement.strongest}
    return Call(shape, shape, shape, refinement=refinement, **(usual | options))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.kernels.dispatch.INTERPRETED", False)


@pytest.mark.parametrize(
    ("given", "family"),
    [
        (call(128), "short"),
        (call(129), "long"),
        (call(100, dim=129), "long"),
        (call(100, dtype=torch.float32), "long"),
        (call(512, longest=100), "short"),
        (call(128, is_causal=True), "short causal"),
        (call(129, is_causal=True), "causal"),
        (call(128, KEY_BIAS, is_causal=True), "short causal"),
        (call(129, KEY_BIAS, is_causal=True), "causal"),
        (call(20, Refinement("elemmul")), "elemmul"),
        (call(129, PART_OF_ROWS, backend="fused"), "key bias"),
        (call(128, PART_OF_ROWS, backend="fused"), "short"),
    ],
)
def test_sizes_and_types_choose_the_family(given: Call, family: str) -> None:
    path = select(given)
    assert (path.name, path.family) == ("fused", family)
    assert str(path).startswith(f"fused {family} kernels: ")


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        (call(dtype=torch.float64), "reference", "because torch.float64 is not float16, bfloat16 or float32"),
        (call(refinement=TWO_STEPS), "fused", "2 steps"),
        (call(refinement=Refinement("high", 0.2, steps=5)), "reference", "5 steps were asked for"),
        (call(129, Refinement("high", 6, steps=2)), "reference", "strength 6 in 2 steps leaves rows"),
        (call(128, Refinement("high", 6, steps=2)), "fused", "2 steps"),
        (call(129, Refinement("high", 4, steps=2)), "fused", "2 steps"),
        (call(refinement=ELEMMUL, is_causal=True), "chunked", "linear attention over chunks of rows"),
        (call(20, ELEMMUL, is_causal=True, dtype=torch.float64), "chunked", "20 tokens, head size 64"),
        (call(refinement=ELEMMUL, is_causal=True, dropout_p=0.1), "reference", "dropout on 'elemmul' needs"),
        (call(refinement=ELEMMUL, is_causal=True, window=9), "reference", "not know a sliding window of 9"),
        (call(refinement=ELEMMUL, is_causal=True, has_attn_mask=True), "reference", "do not know attn_mask"),
        (call(refinement=ELEMMUL, is_causal=True, traced=True), "reference", "torch.func needs"),
        (call(refinement=ELEMMUL, is_causal=True, device="xpu"), "reference", "the tensors are on xpu"),
        (call(0, ELEMMUL, is_causal=True), "reference", "nothing to compute"),
        (
            call(refinement=Refinement("elemmul", steps=2), is_causal=True),
            "reference",
            "2 steps were asked for and chunks of rows",
        ),
        (
            call(refinement=Refinement("elemmul-prior"), is_causal=True),
            "reference",
            "factor 'elemmul-prior' has no kernel",
        ),
        (call(128, ELEMMUL, is_causal=True, device="cpu"), "chunked", "128 tokens"),
        (call(128, ELEMMUL, is_causal=True, device="cpu", values_only=True), "chunked", "128 tokens"),
        (call(127, ELEMMUL, is_causal=True, device="cpu"), "reference", "up to 127 tokens take less time"),
        (call(200, ELEMMUL, is_causal=True, device="cpu", longest=100), "reference", "up to 127 tokens"),
        (call(127, ELEMMUL, is_causal=True, device="cpu", values_only=True), "cpu inference", "values"),
        (call(refinement=Refinement("high", 9.0)), "reference", "strength 9 is more than the 8"),
        (
            call(has_attn_mask=True, is_causal=True),
            "reference",
            "causal attention with attn_mask has no kernel",
        ),
        (call(window=9, is_causal=True), "fused", "sliding window of 9"),
        (call(window=9, dtype=torch.float32), "fused", "sliding window of 9"),
        (call(has_attn_mask=True, dtype=torch.float32), "fused", "attn_mask"),
        (call(has_attn_mask=True, has_bias=True), "fused", "attn_mask"),
        (
            call(refinement=Refinement("elemmul"), window=9),
            "reference",
            "no kernel for a sliding window of 9",
        ),
        (call(has_attn_mask=True, window=9), "fused", "sliding window of 9, attn_mask"),
        (call(refinement=Refinement("none")), "torch", "PyTorch"),
        (call(backend="reference"), "reference", "backend='reference' was asked for"),
        (call(refinement=KEY_BIAS), "fused", "100 tokens"),
        (
            call(refinement=KEY_BIAS, is_causal=True, window=9),
            "reference",
            "no kernel for a sliding window of 9",
        ),
        (call(refinement=PART_OF_ROWS, is_causal=True), "reference", "message_stride has no causal form"),
        (
            call(refinement=Refinement("high-key-bias", 0.2, steps=2, message_stride=2)),
            "reference",
            "several steps with messages from a part of the rows have no kernel",
        ),
        (call(refinement=PART_OF_ROWS, window=9), "reference", "no kernel for a sliding window of 9"),
        (call(device="cpu", values_only=True), "cpu inference", "nothing but the values"),
        (call(device="cpu", values_only=True, dropout_p=0.1), "reference", "dropout is for training"),
        (call(device="cpu", values_only=True, has_bias=True), "reference", "attn_mask adds"),
        (call(device="cpu"), "reference", "a gradient"),
        (call(device="xpu"), "reference", "the tensors are on xpu"),
        (call(refinement=Refinement("none"), device="cpu", values_only=True), "torch", "PyTorch"),
    ],
)
def test_a_path_gives_its_reason(given: Call, name: str, words: str) -> None:
    path = select(given)
    assert path.name == name
    assert words in str(path)
    assert str(path).startswith(name)


def test_the_fused_backend_raises_with_the_reason() -> None:
    with pytest.raises(ValueError, match="cannot do this call because the tensors are on cpu"):
        select(call(device="cpu", backend="fused"))
    with pytest.raises(ValueError, match="unknown backend 'quick'"):
        select(call(backend="quick"))


def test_explain_takes_what_attention_takes() -> None:
    states = torch.randn(3, 1, 2, 8, 16).unbind()
    path = saobp.explain(*states, "high:0.2", is_causal=True, padding_mask=torch.ones(1, 8, dtype=torch.bool))
    assert isinstance(path, Path)
    assert str(path) == "cpu inference path: on a CPU where nothing but the values is needed"
    assert saobp.explain(*states, "high:0.2", dropout_p=0.1).name == "reference"
    assert saobp.explain(*states, "none").name == "torch"
    assert saobp.explain(*states, "high:0.2", backend="reference").name == "reference"
    queries = states[0].clone().requires_grad_()
    assert "a gradient" in str(saobp.explain(queries, *states[1:], HIGH))
    with torch.no_grad():
        assert saobp.explain(queries, *states[1:], HIGH).name == "cpu inference"


def test_explain_raises_what_attention_raises() -> None:
    states = torch.randn(3, 1, 2, 8, 16).unbind()
    with pytest.raises(ValueError, match="dropout_p"):
        saobp.explain(*states, "high:0.2", dropout_p=2.0)
    with pytest.raises(TypeError, match="beginning with a query"):
        saobp.explain("high:0.2", *states)
    triangle = torch.ones(8, 8, dtype=torch.bool).tril()
    for factor, options, sentence in (
        ("high:0.2", {"attn_mask": triangle}, "lets one row see another's token but not the reverse"),
        ("sinkhorn", {"is_causal": True}, "has no causal form"),
        ("elemmul", {}, "needs as many queries as keys, not 5 and 8"),
    ):
        own = states if factor != "elemmul" else (states[0][..., :5, :], *states[1:])
        for call in (saobp.attention, saobp.explain):
            with pytest.raises(ValueError, match=sentence):
                call(*own, factor, **options)


@pytest.mark.parametrize("factor", ["high:0.2", "elemmul"])
def test_explain_names_the_kernels(factor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("saobp.kernels.dispatch.INTERPRETED", True)
    monkeypatch.setattr("saobp.kernels.runtime.launcher.INTERPRETED", True)
    states = torch.randn(3, 1, 2, 40, 16).half().unbind()
    words = str(saobp.explain(*states, factor, backend="fused"))
    assert "40 tokens, head size 16, float16" in words
    assert "exponentials" in words


def spec(length: int, **options: object) -> CallSpec:
    usual = {"longest": length, "length": length, "bound": 0.18, "dtype": torch.bfloat16, "heads": 16}
    shapes = {"batch": 128, "sequences": 128, "group": 1, "dim": 64, "scale": 0.125, "dropout": 0.0}
    kind = {"sign": 1.0, "receives": 1, "masked": False, "packed": False}
    return CallSpec(**(usual | shapes | kind | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [
        ("short", spec(128), {"weak": True, "hopper": True}),
        ("short", spec(128, heads=8), {"weak": True}),
        ("short", spec(60), {"weak": True}),
        ("short", spec(30), {}),
        ("short", spec(128, bound=0.0), {"careful": True, "hopper": True}),
        ("long", spec(200, bound=0.0), {"careful": True, "hopper": True, "hopper_back": True}),
        ("short", spec(128, bound=0.0, dtype=torch.float16), {"careful": True}),
        (
            "long",
            spec(512),
            {"weak": True, "careful": True, "joint_sums": True, "tma": True, "split_axis": 0},
        ),
        ("long", spec(448, bound=0.0), {"careful": True, "tma": True}),
        ("long", spec(449, bound=0.0), {"careful": True, "joint_sums": True, "tma": True}),
        (
            "long",
            spec(512, bound=0.0, dtype=torch.float16),
            {"careful": True, "tma": True, "split_axis": 0},
        ),
        ("long", spec(512, receives=0, batch=1, sequences=1, heads=2), {"weak": True}),
        ("long", spec(512, dtype=torch.float32, receives=0), {}),
        ("long", spec(512, dropout=0.1, receives=0), {"weak": True, "tma": True}),
        (
            "causal",
            spec(512),
            {"weak": True, "careful": True, "hopper": True, "stored": True, "tma": True},
        ),
        ("causal", spec(512, bound=-0.2), {"careful": True, "hopper": True, "stored": True}),
        ("causal", spec(2048), {"weak": True, "careful": True, "tma": True}),
        ("causal", spec(512, bound=0.0, receives=2), {"careful": True, "stored": True}),
        ("elemmul", spec(512, receives=0, bound=0.0), {}),
    ],
)
def test_kernels_follow_from_the_call(
    family: str, given: CallSpec, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saobp.kernels.dispatch.has_hopper_kernel", lambda capability: capability == 90)
    choice = select_kernels(family, given, aligned=True, capability=90)  # type: ignore[arg-type]
    assert choice == KernelChoice(**expected)  # type: ignore[arg-type]
    unknown = select_kernels(family, given)  # type: ignore[arg-type]
    assert (unknown.weak, unknown.careful) == (choice.weak, choice.careful)
    assert not unknown.hopper
    assert not unknown.hopper_back
    assert not unknown.joint_sums
    assert not unknown.tma


def test_graphs_of_two_threads_may_overlap() -> None:
    """The one that began first ends first."""
    first, second = for_cuda_graph(), for_cuda_graph()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_for_cuda_graph()
    second.__exit__(None, None, None)
    assert not is_for_cuda_graph()
    with pytest.raises(KeyError), for_cuda_graph():
        raise KeyError
    assert not is_for_cuda_graph()
