"""One row against a cache, by the kernels: as the reference, in a call and in a model that generates."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from call_helpers import slow_interpreted
from gluon_on_cpu import OnCpu
from torch import Tensor
from transformers import DynamicCache, StaticCache

import saobp
from saobp.kernels import dispatch
from saobp.kernels.calls import Call
from saobp.kernels.decoding import hopper_step
from saobp.kernels.decoding import launch as step_launch
from saobp.kernels.decoding.launch import decoding_step
from saobp.kernels.dispatch import decoding_obstacle
from saobp.kernels.runtime import launcher
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import Attended, reference_attention
from saobp.refinement import Refinement
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import cached_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16 if GPU else torch.float32, torch.float16]
"""Models use the kernels in half types; without a GPU float32 is tested in the place of bfloat16."""
STRENGTHS = (-0.5, 0.0, 0.2, 4.0, 8.0, 1.0)
needs_kernels = pytest.mark.skipif(not (GPU or dispatch.INTERPRETED), reason="needs a GPU or the interpreter")


def step(
    dtype: torch.dtype, keys: int, *, heads: int = 6, key_heads: int = 2, dim: int = 32, sink: float = 0.0
) -> tuple[list[Tensor], Tensor, Tensor]:
    """States of a row, strengths and sums of messages before it, for all keys but the last."""
    random = torch.Generator().manual_seed(keys)
    shapes = [(2, heads, 1, dim), (2, key_heads, keys, dim), (2, key_heads, keys, dim)]
    states = [torch.randn(shape, generator=random).to(DEVICE, dtype) for shape in shapes]
    if sink:
        states[0][..., 0] = 1.0
        states[1][:, :, keys // 2, 0] = sink * dim**0.5
    past = -3 * torch.rand(2, heads, keys - 1, generator=random)
    return states, torch.tensor(STRENGTHS[:heads], device=DEVICE), past.to(DEVICE)


def reference(
    states: list[Tensor], strength: Tensor, past: Tensor, marks: Tensor | None, scale: float | None = None,
    factor: str = "high",
) -> Attended:  # fmt: skip
    graph = FactorGraph(causal=True)
    if marks is not None:
        senders = ~(marks == 2).any(-1)[:, None, None, None]
        graph = FactorGraph((marks != 0)[:, None, None], senders, causal=True)
    past = torch.nn.functional.pad(past, (0, states[1].shape[2] - past.shape[-1]))[None]
    options = {"past": past.to(states[0].dtype) if states[0].dtype == torch.float64 else past}
    return reference_attention(
        *states, Refinement(factor, 0.2), strength, graph, keep_messages=True, scale=scale, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs of the kernel for Hopper, one number for each plan of a step; without such a GPU, on a CPU."""
    launched: list[int] = []
    if not GPU:
        monkeypatch.setattr(dispatch, "has_hopper_kernel", lambda capability: capability == 90)
        monkeypatch.setattr(step_launch, "multiprocessors", lambda _: 2)
        kernel = OnCpu(
            hopper_step.attend_part_hopper, {hopper_step.BEGIN_NEXT.value: lambda: None}
        )  # fmt: skip
        monkeypatch.setattr(step_launch, "hopper_kernel", lambda: kernel)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another GPU than Hopper")
    add = launcher.LaunchSequence.add

    def noted(launches: launcher.LaunchSequence, kernel: Any, programs: int, *rest: Any) -> None:
        if kernel.__name__ == "attend_part_hopper":
            launched.append(programs)
        add(launches, kernel, programs, *rest)

    monkeypatch.setattr(launcher.LaunchSequence, "add", noted)
    monkeypatch.setattr(step_launch, "_plans", {})
    monkeypatch.setattr(step_launch, "_binaries", {})
    return launched


def check_step(states: list[Tensor], strength: Tensor, past: Tensor, marks: Tensor | None = None) -> None:
    """Errors of a step are at most twice eager attention's."""
    exact = reference([x.double() for x in states], strength.double(), past.double(), marks)
    eager = reference(states, strength, past, marks)
    out, totals = decoding_step(*states, strength, past, marks, states[0].shape[-1] ** -0.5, 1.0)
    assert (out - exact.output).abs().max() <= 2 * (eager.output - exact.output).abs().max() + 1e-6
    # 1 - gamma a cancels where a row's whole weight is on one key and the strength is large
    assert (totals - exact.messages[0]).abs().max() <= 2 * (
        eager.messages[0] - exact.messages[0]
    ).abs().max() + 2e-4


@needs_kernels
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("keys", "sink"), [(1, 0), (70, 0), (300, 9), (300, 60)])
def test_a_row_on_hopper(hopper: list[int], dim: int, keys: int, sink: float) -> None:
    dtype = torch.bfloat16 if GPU else torch.float16
    states, strength, past = step(dtype, keys, dim=dim, sink=sink)
    check_step(states, strength, past)
    assert hopper == [4 * min(3, -(-keys // 32))] or GPU


@needs_kernels
def test_hidden_keys_and_padding_rows_on_hopper(hopper: list[int]) -> None:
    dtype = torch.bfloat16 if GPU else torch.float16
    states, strength, past = step(dtype, 90, dim=64)
    marks = torch.ones(2, 90, dtype=torch.int8, device=DEVICE)
    marks[0, :30] = 0
    marks[1, 10:] = 0
    marks[1] *= 2
    check_step(states, strength, past, marks)
    out, totals = decoding_step(*states, strength, past, torch.zeros_like(marks), 0.125, 1.0)
    assert (out == 0).all()
    assert torch.equal(totals[..., :89], past)
    assert len(hopper) == 1  # both steps by one plan


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("keys", "sink"), [(1, 0), (70, 0), (200, 9), (200, 60)])
def test_a_row_against_a_cache(dtype: torch.dtype, keys: int, sink: float) -> None:
    states, strength, past = step(dtype, keys, sink=sink)
    check_step(states, strength, past)


@needs_kernels
def test_hidden_keys_padding_rows_and_any_layout() -> None:
    states, strength, past = step(torch.float32, 90)
    marks = torch.ones(2, 90, dtype=torch.int8, device=DEVICE)
    marks[0, :30] = 0
    marks[1, 10:] = 0
    marks[1] *= 2
    scale = states[0].shape[-1] ** -0.5
    expected = reference(states, strength, past, marks)
    views = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in states]
    wide = torch.cat([past, past], -1)[..., :89]
    for given, before in ((states, past), (views, wide)):
        out, totals = decoding_step(*given, strength, before, marks, scale, 1.0)
        torch.testing.assert_close(out, expected.output)
        torch.testing.assert_close(totals, expected.messages[0])
    assert torch.equal(totals[1, :, :89], past[1])
    hidden = decoding_step(*states, strength, past, torch.zeros_like(marks), scale, 1.0)
    assert (hidden[0] == 0).all()
    assert torch.equal(hidden[1][..., :89], past)


@needs_kernels
@pytest.mark.parametrize("spare", [0, 7])
def test_sums_are_read_within_their_memory(spare: int) -> None:
    """Kernels read whole vectors: the caller's sums are copied where the last row's end is missing."""
    states, strength, past = step(torch.float32, 90)
    room = torch.zeros(11 * 96 + 89 + spare, device=DEVICE)
    before = room.as_strided(past.shape, (6 * 96, 96, 1)).copy_(past)
    assert step_launch._is_readable(before) is (spare == 7)
    expected = reference(states, strength, past, None)
    out, totals = decoding_step(*states, strength, before, None, 32**-0.5, 1.0)
    torch.testing.assert_close(out, expected.output)
    torch.testing.assert_close(totals, expected.messages[0])


def shifted(states: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    return (
        torch.empty(states.numel() + 1, dtype=states.dtype, device=DEVICE)[1:].view_as(states).copy_(states)
    )


def varied_steps() -> dict[str, dict[str, Any]]:
    """Steps that differ from the plain one in one thing each."""
    (query, key, value), strength, past = step(torch.float32, 40)
    marks = torch.ones(2, 40, dtype=torch.int8, device=DEVICE)
    marks[0, :9] = 0
    rows_first = lambda one: one.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "strides of queries": {"query": torch.cat([query, query], -1)[..., :32]},
        "strides of keys": {"key": rows_first(key)},
        "strides of values": {"value": rows_first(value)},
        "an address": {"key": shifted(key)},
        "one key head": {"key": key[:, :1], "value": value[:, :1]},
        "a key less": {"key": key[:, :, :39], "value": value[:, :, :39]},
        "sums about fewer keys": {"past": past[..., :20]},
        "rows of sums": {"past": torch.cat([past, torch.zeros_like(past)], -1)[..., :39]},
        "sums ready to be read": {"past": torch.zeros(2, 6, 64, device=DEVICE)[..., :39].copy_(past)},
        "an address of sums": {"past": torch.zeros(2, 6, 64, device=DEVICE)[..., 1:40].copy_(past)},
        "sums in double precision": {"past": past.double()},
        "a mask": {"mask": marks},
        "an address of a mask": {"mask": shifted(marks)},
        "a mask for all sequences": {"mask": marks[:1]},
        "a longer mask": {"mask": torch.cat([marks, marks], -1)[:, None, None]},
        "columns of a mask": {"mask": torch.stack([marks, 1 - marks], -1)[..., 0]},
        "strengths in half precision": {"strength": strength.half()},
        "scale": {"scale": 0.5},
        "sign": {"sign": -1.0},
    }
    plain = {"query": query, "key": key, "value": value, "strength": strength, "past": past, "mask": None}
    return {name: {**plain, "scale": 0.25, "sign": 1.0, **change} for name, change in changes.items()}


@needs_kernels
@pytest.mark.parametrize("name", [name for name in varied_steps() if name != "plain"])
def test_steps_in_turn_do_not_get_each_others_plan(name: str) -> None:
    steps = varied_steps()
    for given in (steps["plain"], steps[name], steps["plain"], steps[name]):
        query, key, value, strength, past, mask, scale, sign = given.values()
        keys = key.shape[2]
        marks = None if mask is None else mask.view(mask.shape[0], -1)[:, :keys].expand(2, -1)
        factor = "high" if sign > 0 else "low"
        expected = reference([query, key, value], strength.float(), past.float(), marks, scale, factor)
        out, totals = decoding_step(*given.values())
        torch.testing.assert_close(out, expected.output, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(totals, expected.messages[0], atol=2e-4, rtol=2e-4)


@needs_kernels
def test_layers_share_a_plan_and_longer_caches_its_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_launch, "_plans", {})
    monkeypatch.setattr(step_launch, "_binaries", {})
    for keys in (40, 40, 41, 41):
        states, strength, past = step(torch.float32, keys)
        decoding_step(*states, strength, past, None, 0.25, 1.0)
    assert len(step_launch._plans) == 2
    assert len(step_launch._binaries) == 1
    for changed in (
        {"mask": torch.ones(2, 41, dtype=torch.bool, device=DEVICE)},
        {"strength": strength.half()},
    ):
        given = {"strength": strength, "past": past, "mask": None, **changed}
        decoding_step(*states, *given.values(), 0.25, 1.0)
    assert len(step_launch._binaries) == 3


@needs_kernels
def test_plans_are_bounded_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_launch, "_plans", {})
    monkeypatch.setattr(launcher, "MAX_CACHED", 2)
    used: list[weakref.ref[Tensor]] = []
    for keys in (20, 21, 22):
        states, strength, past = step(torch.float32, keys)
        tensors = [*states, strength, past, torch.ones(2, keys, dtype=torch.bool, device=DEVICE)]
        used += map(weakref.ref, [*tensors, *decoding_step(*tensors, 0.25, 1.0)])
    assert len(step_launch._plans) == 1  # both before were dropped for the third
    del states, strength, past, tensors
    assert [one() for one in used] == [None] * len(used)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
def test_a_captured_step_is_replayed_on_its_own_tensors() -> None:
    states, strength, past = step(torch.float16, 40, dim=64)
    call = *states, strength, past, None, 0.125, 1.0
    decoding_step(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decoding_step(*call)
    for keys in (40, 41):  # by the captured step's plan, then by another, on other tensors
        others, _, past_of_others = step(torch.float16, keys, dim=64)
        decoding_step(*others, strength, past_of_others, None, 0.125, 1.0)
    states[0].neg_()
    graph.replay()
    for replayed, expected in zip(captured, decoding_step(*call), strict=True):
        assert torch.equal(replayed, expected)


@pytest.fixture
def fused_steps(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Decoding steps by the kernels, in float32 and on a CPU too, and why a call was none."""
    obstacles: list[str | None] = []

    def obstacle(call: Call) -> str | None:
        obstacles.append(decoding_obstacle(call._replace(backend="fused")))
        return obstacles[-1]

    monkeypatch.setattr(cached_attention, "decoding_obstacle", obstacle)
    return obstacles


@needs_kernels
@pytest.mark.parametrize("static", [False, True])
def test_a_model_decodes_as_it_reads(fused_steps: list[str | None], static: bool) -> None:
    model = saobp.apply(tiny_model("llama"), "high:0.7").to(DEVICE)
    inputs = {name: one.to(DEVICE) for name, one in tiny_batch(2, 6, 2, side="left").items()}
    cache = StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=places, use_cache=False).logits
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            decoded = model(
                inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                position_ids=places[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            ).logits
    assert fused_steps.count(None) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(decoded[:, -1], whole[:, -1], rtol=1e-4, atol=5e-4)


@slow_interpreted
@needs_kernels
def test_a_compiled_step_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cached_attention, "decoding_obstacle", lambda call: decoding_obstacle(call._replace(backend="fused"))
    )
    steps: list[int] = []
    plain = cached_attention.fused_step
    monkeypatch.setattr(
        "saobp.transformers.attention_function.fused_step", lambda *call: (steps.append(1), plain(*call))[1]
    )
    model = saobp.apply(tiny_model("llama"), "high:0.7").to(DEVICE)
    inputs = {name: one.to(DEVICE) for name, one in tiny_batch(2, 6, 2, side="left").items()}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = StaticCache(config=model.config, max_cache_len=8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        for call, start, stop in ((model, 0, 4), (compiled, 4, 5), (compiled, 5, 6)):
            found = call(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places[:, start:stop],
                past_key_values=cache, use_cache=True,
            ).logits  # fmt: skip
    assert steps
    torch.testing.assert_close(found[:, -1], whole[:, -1], rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": (2, 4, 3, 16)}, "3 rows are new"),
        ({"query": (0, 4, 1, 16)}, "nothing to compute"),
        ({"refinement": Refinement("high-listing", 0.2)}, "'high-listing'"),
        ({"refinement": Refinement("high", 0.2, steps=2)}, "several steps"),
        ({"query": (2, 4, 1, 20), "value": (2, 4, 9, 20)}, "head sizes 20"),
        ({"device": "cpu"}, "not on a CUDA GPU"),
        ({"dtype": torch.float64}, "torch.float64 has no kernel"),
        ({"dtype": torch.float32}, "twice the error"),
        ({"dtype": torch.float32, "backend": "fused"}, None),
        ({}, None),
    ],
)
def test_why_a_call_is_no_step(changes: dict, words: str | None) -> None:
    states = ((2, 4, 1, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    call = Call(*states, torch.float16, "cuda", Refinement("high", 0.2), is_causal=True)
    obstacle = decoding_obstacle(call._replace(**changes))
    assert obstacle is None if words is None else words in str(obstacle)
