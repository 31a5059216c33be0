"""A replayed step gives the loss and the gradients of the step that was captured, of every batch anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from saobp.kernels.dispatch import is_for_cuda_graph
from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import small_recipe, train_small
from saobp.training import graphed_step
from saobp.training.graphed_step import WARMUP_STEPS, Batch, GraphedStep, relative_difference

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class Line:
    """A straight line through points, and how often it was computed."""

    def __init__(self) -> None:
        self.slope, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))
        self.parameters = [self.slope, self.unused]
        self.computed = 0

    def compute(self, batch: Batch) -> Tensor:
        self.computed += 1
        loss = (self.slope * batch["x"]).square().sum()
        loss.backward()
        return loss.detach()

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """As a GPU does it: results always come into the same memory, and Python sees none of it."""
        loss, gradient = torch.tensor(float("nan")), torch.tensor(float("nan"))

        def again() -> None:
            self.slope.grad = None
            loss.copy_(compute())
            assert self.slope.grad is not None
            gradient.copy_(self.slope.grad)
            self.slope.grad = None

        self.slope.grad = gradient
        return loss, again


def batches(count: int) -> list[Batch]:
    return [{"x": torch.tensor([1.0, float(number)])} for number in range(count)]


def test_kernels_are_chosen_for_graphs_where_a_graph_is_made() -> None:
    """In warm-up and capture, but not once graphs are given up."""
    line, chosen = Line(), []

    def compute(batch: Batch) -> Tensor:
        chosen.append(is_for_cuda_graph())
        return line.compute(batch)

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        compute()
        raise RuntimeError("no graphs here")

    step = GraphedStep(compute, line.parameters, lambda _: None, capture)
    for batch in batches(WARMUP_STEPS + 2):
        step(batch)
    assert chosen == [True] * (WARMUP_STEPS + 1) + [False] * 2


def test_a_captured_step_is_compared_with_kernels_that_are_launched() -> None:
    line, chosen = Line(), []

    def eager(batch: Batch) -> Tensor:
        chosen.append(is_for_cuda_graph())
        return line.compute(batch)

    step = GraphedStep(line.compute, line.parameters, print, line.capture, eager=eager)
    for batch in batches(WARMUP_STEPS + 2):
        step(batch)
    assert chosen == [False] * 2


def test_every_batch_is_computed_once_and_its_gradients_are_there() -> None:
    line = Line()
    step = GraphedStep(line.compute, line.parameters, print, line.capture)
    losses = []
    for number, batch in enumerate(batches(WARMUP_STEPS + 4)):
        losses.append(step(batch))
        assert line.slope.grad is not None
        assert line.slope.grad.item() == 2 * line.slope.item() * (1 + number**2)
        assert line.unused.grad is None
        line.slope.grad.zero_()  # clipping changes gradients in place
        line.slope.grad = None
    assert [loss.item() for loss in losses] == [4.0 * (1 + number**2) for number in range(WARMUP_STEPS + 4)]
    assert line.computed == WARMUP_STEPS + 4


def test_a_batch_of_another_shape_is_computed_for_itself() -> None:
    """It would be copied into all rows of the captured one."""
    line = Line()
    step = GraphedStep(line.compute, line.parameters, print, line.capture)
    for batch in batches(WARMUP_STEPS + 1):
        step(batch)
        line.slope.grad = None
    assert step({"x": torch.tensor([3.0])}).item() == 36.0
    assert line.slope.grad is not None
    assert line.slope.grad.item() == 36.0
    line.slope.grad = None
    assert step({"x": torch.tensor([1.0, 3.0])}).item() == 40.0


def test_every_shape_is_captured_for_itself() -> None:
    line, captured = Line(), list[int]()

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        captured.append(line.computed)
        return line.capture(compute)

    step = GraphedStep(line.compute, line.parameters, print, capture)
    for number in range(WARMUP_STEPS + 4):
        for length in (1, 2, 3):
            loss = step({"x": torch.full((length,), float(number))})
            assert loss.item() == 4 * length * number**2
            assert line.slope.grad is not None
            assert line.slope.grad.item() == 4 * length * number**2
            line.slope.grad = None
    assert captured == [3 * WARMUP_STEPS, 3 * WARMUP_STEPS + 1, 3 * WARMUP_STEPS + 2]


def test_what_cannot_be_recorded_is_computed_and_said_once() -> None:
    def refuse(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        compute()
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    line, said = Line(), list[str]()
    step = GraphedStep(line.compute, line.parameters, said.append, refuse)
    for number, batch in enumerate(batches(WARMUP_STEPS + 3)):
        line.slope.grad = None
        assert step(batch).item() == 4.0 * (1 + number**2)
        assert line.slope.grad is not None
        assert line.slope.grad.item() == 4 * (1 + number**2)
    assert said == [
        "The step cannot be captured as a CUDA graph (operation not permitted when stream is capturing), "
        "so its kernels are launched one by one."
    ]


@pytest.mark.parametrize("factor", [1e4, 0.5, float("nan")])
def test_wrong_gradients_of_a_recording_end_it(factor: float) -> None:
    """Spoilt from the third replay on, found at the fourth; right gradients go on, and it is said once."""
    line, said = Line(), list[str]()
    replays = 0

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        loss, again = line.capture(compute)
        gradient = line.slope.grad
        assert gradient is not None

        def spoilt() -> None:
            nonlocal replays
            replays += 1
            again()
            gradient.mul_(factor if replays > 2 else 1.0)

        return loss, spoilt

    step = GraphedStep(line.compute, line.parameters, said.append, capture, eager=line.compute)
    for number, batch in enumerate(batches(WARMUP_STEPS + 8)):
        line.slope.grad = None
        assert step(batch).item() == 4.0 * (1 + number**2)
        assert line.slope.grad is not None
        if number != WARMUP_STEPS + 2:
            assert line.slope.grad.item() == 4 * (1 + number**2)
    assert replays == 4
    assert len(said) == 1
    assert "Gradients of the captured step are wrong" in said[0]
    assert "at replay 4" in said[0]


def test_a_recording_that_agrees_is_compared_ever_more_rarely() -> None:
    line, said, compared = Line(), list[str](), list[float]()

    def eager(batch: Batch) -> Tensor:
        compared.append(batch["x"][1].item() - WARMUP_STEPS + 1)
        return line.compute(batch)

    step = GraphedStep(line.compute, line.parameters, said.append, line.capture, eager=eager)
    for number, batch in enumerate(batches(WARMUP_STEPS + 20)):
        line.slope.grad = None
        assert step(batch).item() == 4.0 * (1 + number**2)
        assert line.slope.grad is not None
        assert line.slope.grad.item() == 4 * (1 + number**2)
    assert compared == [1, 2, 4, 8, 16]
    assert not said


def test_a_comparison_draws_the_same_random_numbers_and_leaves_no_trace() -> None:
    """Dropout of a replay and of its comparison agree, and the next step draws as if nothing was compared."""
    slope, said = torch.nn.Parameter(torch.tensor(2.0)), list[str]()

    def compute(batch: Batch) -> Tensor:
        loss = slope * (batch["x"] * torch.rand(2)).sum()
        loss.backward()
        return loss.detach()

    def capture(_: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        loss, gradient = torch.zeros(()), torch.zeros(())
        slope.grad = gradient

        def replay() -> None:
            slope.grad = None
            loss.copy_(compute({"x": torch.ones(2)}))
            assert slope.grad is not None
            gradient.copy_(slope.grad)

        return loss, replay

    found = []
    for eager in (compute, None):
        torch.manual_seed(5)
        step = GraphedStep(compute, [slope], said.append, capture, eager=eager)
        found.append([])
        for _ in range(WARMUP_STEPS + 9):
            slope.grad = None
            found[-1].append(step({"x": torch.ones(2)}).item())
        assert not step.uses_eager
    assert found[0] == found[1]
    assert not said


def test_a_comparison_that_fails_is_said_once_and_changes_nothing() -> None:
    line, said = Line(), list[str]()

    def eager(_: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    step = GraphedStep(line.compute, line.parameters, said.append, line.capture, eager=eager)
    for number, batch in enumerate(batches(WARMUP_STEPS + 9)):
        assert step(batch).item() == 4.0 * (1 + number**2)
        assert line.slope.grad is not None
        assert line.slope.grad.item() == 4.0 * (1 + number**2)
        line.slope.grad = None
    assert said == ["The captured step cannot be compared with the uncompiled one (CUDA out of memory.)."]
    assert not step.uses_eager


def test_a_step_told_to_go_slowly_records_nothing() -> None:
    line, other = Line(), Line()
    step = GraphedStep(line.compute, line.parameters, print, line.capture, eager=other.compute)
    assert not step.uses_eager
    step.use_eager()
    assert step.uses_eager
    for batch in batches(WARMUP_STEPS + 3):
        step(batch)
    assert (line.computed, other.computed) == (0, WARMUP_STEPS + 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_run_that_diverged_does_not_blame_the_recording(value: float) -> None:
    """Both ways give the same then, which says nothing against the replay."""
    line, said, slow_steps = Line(), list[str](), 0

    def eager(batch: Batch) -> Tensor:
        nonlocal slow_steps
        slow_steps += 1
        return line.compute(batch)

    step = GraphedStep(line.compute, line.parameters, said.append, line.capture, eager=eager)
    for number, batch in enumerate(batches(WARMUP_STEPS + 20)):
        if number == WARMUP_STEPS + 2:
            line.slope.data.fill_(value)
        line.slope.grad = None
        step(batch)
    assert not said
    assert slow_steps == 5


def test_gradients_where_there_should_be_none_are_infinitely_apart() -> None:
    assert relative_difference([torch.ones(2)], [torch.zeros(2)]) == float("inf")
    assert relative_difference([torch.ones(2)], [None]) == float("inf")
    assert relative_difference([None], [None]) == 0


@on_gpu
@pytest.mark.parametrize(
    ("family", "refinement", "regularizer"),
    [
        ("bert", "high:learned", None),
        ("bert", "elemmul-prior", None),
        ("bert", None, "eigen"),
        ("gpt2", "high:0.2,future=paper", None),
    ],
)
def test_a_run_learns_the_same_by_replay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    refinement: str | None,
    regularizer: str | None,
) -> None:
    recipe = small_recipe(family=family, refinement=refinement, regularizer=regularizer, steps=8)
    recipe = replace(recipe, compiled=True, precision="bf16", dropout=0.0)
    said: list[str] = []
    train_small(recipe, tmp_path / "replayed", notify=said.append)
    monkeypatch.setattr(graphed_step, "WARMUP_STEPS", 100)
    train_small(recipe, tmp_path / "plain")
    assert not said
    one, other = (
        [line["loss"] for line in RunFolder(tmp_path / name).metrics() if "loss" in line]
        for name in ("replayed", "plain")
    )
    assert len(one) == 8
    assert one == other


def with_dropout(weight: nn.Parameter, batch: Batch) -> Tensor:
    loss = torch.dropout(weight * batch["x"], 0.5, True).sum()
    loss.backward()
    return loss.detach()


@on_gpu
def test_dropout_is_drawn_anew_in_every_replay() -> None:
    weight = nn.Parameter(torch.ones(1000, device="cuda"))
    step = GraphedStep(partial(with_dropout, weight), [weight], print)
    batch = {"x": torch.ones(1000, device="cuda")}
    gradients = []
    for _ in range(WARMUP_STEPS + 5):
        weight.grad = None
        loss = step(batch)
        assert weight.grad is not None
        assert loss.item() == weight.grad.sum().item()
        gradients.append(tuple(weight.grad.tolist()))
    assert len(set(gradients)) == len(gradients)


@on_gpu
def test_after_a_recording_that_fails_dropout_goes_on_in_the_same_stream() -> None:
    weight = nn.Parameter(torch.ones(1000, device="cuda"))

    def compute(batch: Batch) -> Tensor:
        loss = with_dropout(weight, batch)
        assert loss.item() > 0  # waits for the device, which no capture allows
        return loss

    said: list[str] = []
    step, stream = GraphedStep(compute, [weight], said.append), torch.cuda.current_stream()
    losses = []
    for _ in range(WARMUP_STEPS + 4):
        weight.grad = None
        losses.append(step({"x": torch.ones(1000, device="cuda")}).item())
    assert len(said) == 1
    assert len(set(losses)) > 1
    assert torch.cuda.current_stream() == stream
