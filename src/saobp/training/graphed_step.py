"""Loss and gradients of a step captured as a CUDA graph, one for each shape of a batch.

Launching hundreds of small kernels takes longer than BERT-mini's kernels run. torch.compile can capture
graphs by itself, but its Python overhead is 2 ms a step, half of the kernels' time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saobp.kernels.dispatch import for_cuda_graph
from saobp.storage.atomic import first_line
from saobp.training.batches import Batch

WARMUP_STEPS = 3
"""Steps of a shape before its capture, which compile and allocate workspaces."""
TOLERANCE = 0.25
"""Relative difference of gradients that counts as rounding.

In the first steps of BERT-mini, plain, with High and ElemMul with prior, bfloat16 is 0.007 from float32."""


Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]]
"""Captures a computation; returns its static loss and the replay, which computes it."""


class CapturedStep(NamedTuple):
    """A captured graph with its static buffers: batch, loss and gradients."""

    batch: Batch
    loss: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], object]


def capture_on_gpu(compute: Callable[[], Tensor], pool: Any = None) -> tuple[Tensor, Callable[[], object]]:
    """A :data:`Capture` of a CUDA graph; graphs of one ``pool`` share memory, so none may run beside another.

    Restores stream and random generator if the capture fails: PyTorch does not, and dropout would fail in
    every later step.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            loss = compute()
    except RuntimeError:
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        random.graphsafe_set_state(random.clone_state())
        raise
    # PyTorch zeroes the generator's offset on the stream of the capture, and replays set it on another.
    torch.cuda.synchronize()
    return loss, graph.replay


def random_state() -> list[Tensor]:
    """State of the generators that a step draws from: the CPU's and, where it is in use, the GPU's."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def relative_difference(gradients: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> float:
    """Norm of the difference over the norm of ``right``, all parameters together; None counts as zero.

    Infinite if ``gradients`` are not finite; 0 if ``right`` are not, since nothing can be compared then.
    """
    pairs = [(left, other) for left, other in zip(gradients, right, strict=True) if left is not other]
    apart = [(0 if left is None else left) - (0 if other is None else other) for left, other in pairs]
    norm = nn.utils.get_total_norm([torch.as_tensor(difference) for difference in apart]).item()
    right_norm = nn.utils.get_total_norm([other for other in right if other is not None]).item()
    if norm == 0 or not math.isfinite(right_norm):
        return 0.0
    return norm / right_norm if right_norm and math.isfinite(norm) else math.inf


class GraphedStep:
    """Warms up for a few steps, then captures and replays; falls back to launches if a capture fails.

    compute: forward and backward of a batch on parameters without gradients; returns the loss. A replay
    overwrites the gradients of the one before: they cannot be accumulated over steps.
    Batches of each shape have a warm-up and a graph of their own; attention takes kernels for graphs.
    eager: the same without compiler and graph, if it draws the same random numbers. Replays 1, 2, 4, 8 and so
    on of each graph are compared with it; if gradients differ, eager takes over. Wrong gradients of a
    captured step are the suspected cause of runs that did not train (results/pretraining/again.md).
    """

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        parameters: Sequence[nn.Parameter],
        notify: Callable[[str], object],
        capture: Capture = capture_on_gpu,
        *,
        eager: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        self.compute, self.parameters, self.notify, self.capture = compute, parameters, notify, capture
        self.eager = eager
        self.uses_eager = False
        """Whether it fell back to eager because gradients differed."""
        self._captured: dict[tuple[torch.Size, ...], CapturedStep] = {}
        self._warm: Counter[tuple[torch.Size, ...]] = Counter()
        self._may_capture = True
        self._replays: Counter[tuple[torch.Size, ...]] = Counter()

    def use_eager(self) -> None:
        """Run all further steps without graph and compiler."""
        if self.eager is not None:
            self.compute, self._captured, self._may_capture = self.eager, {}, False
            self.uses_eager = True

    def __call__(self, batch: Batch) -> Tensor:
        """The loss of a batch; afterwards the parameters have its gradients."""
        shapes = tuple(tensor.shape for tensor in batch.values())
        if shapes not in self._captured and self._may_capture:
            if self._warm[shapes] == WARMUP_STEPS:
                self._try_to_capture(batch, shapes)
            self._warm[shapes] += 1
        if shapes not in self._captured:
            with for_cuda_graph() if self._may_capture else nullcontext():
                return self.compute(batch)
        static, loss, gradients, replay = self._captured[shapes]
        for name, tensor in static.items():
            tensor.copy_(batch[name])
        self._replays[shapes] += 1
        is_power_of_two = self._replays[shapes] & (self._replays[shapes] - 1) == 0
        if self.eager is None or not is_power_of_two:
            replay()
            self._give(gradients)
            return loss.clone()
        before = random_state()
        replay()
        after = random_state()
        set_random_state(before)
        try:
            return self._compared(batch, self.eager, loss, gradients, self._replays[shapes])
        finally:
            set_random_state(after)

    def _give(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _compared(
        self,
        batch: Batch,
        eager: Callable[[Batch], Tensor],
        loss: Tensor,
        gradients: list[Tensor | None],
        replays: int,
    ) -> Tensor:
        """Loss and gradients of the replayed batch if eager agrees, else those of eager."""
        for parameter in self.parameters:
            parameter.grad = None
        try:
            eager_loss = eager(batch)
            difference = relative_difference(gradients, [parameter.grad for parameter in self.parameters])
        except RuntimeError as problem:  # most likely out of memory
            self.eager, difference = None, 0.0
            why = first_line(problem)
            self.notify(f"The captured step cannot be compared with the uncompiled one ({why}).")
        if difference <= TOLERANCE:
            self._give(gradients)
            if loss.is_cuda:
                torch.cuda.empty_cache()  # of the comparison
            return loss.clone()
        self.use_eager()
        self.notify(
            f"Gradients of the captured step are wrong (apart by {difference:.2g} of their norm at replay "
            f"{replays}), so the run goes on without graph and compiler."
        )
        return eager_loss

    def _try_to_capture(self, batch: Batch, shapes: tuple[torch.Size, ...]) -> None:
        static = {name: tensor.clone() for name, tensor in batch.items()}
        for parameter in self.parameters:
            parameter.grad = None
        try:
            with for_cuda_graph():
                loss, replay = self.capture(lambda: self.compute(static))
        except RuntimeError as problem:
            self._may_capture = False
            for parameter in self.parameters:
                parameter.grad = None
            why = first_line(problem)
            self.notify(
                f"The step cannot be captured as a CUDA graph ({why}), so its kernels are launched one by "
                "one."
            )
        else:
            gradients = [parameter.grad for parameter in self.parameters]
            self._captured[shapes] = CapturedStep(static, loss, gradients, replay)
