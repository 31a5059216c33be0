"""Loss and gradients of a step as one recording, which a GPU replays as a whole.

Launching hundreds of small kernels takes the host longer than BERT-mini's take the GPU. The compiler can
record graphs by itself, but what it then does in Python takes 2 ms a step, half of what the kernels take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saobp.storage.atomic import first_line
from saobp.training.batches import Batch

PLAIN_STEPS = 3
"""Steps before the recording, which compile and make work spaces."""
MOST_APART = 0.25
"""How far gradients may be apart, relative to their norm, where only roundings differ.

In the first steps of BERT-mini, plain, with High and ElemMul with prior, bfloat16 is 0.007 from float32."""


class Recording(NamedTuple):
    """Where a replay finds its batch and leaves the loss and the gradients."""

    batch: Batch
    loss: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], object]


def record_on_gpu(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """The loss of a computation and its replay; nothing is computed before that is called.

    Where it fails, PyTorch leaves the stream and the random numbers of the recording in place: dropout would
    then fail in every later step.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            loss = compute()
    except RuntimeError:
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        random.graphsafe_set_state(random.clone_state())
        raise
    return loss, graph.replay


def distance(gradients: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> float:
    """Norm of the difference over the norm of the right ones, all parameters together; none counts as zero.

    Infinite where something is not a number, but 0 where the right ones are not: they tell nothing then.
    """
    pairs = [(one, other) for one, other in zip(gradients, right, strict=True) if one is not other]
    apart = [(0 if one is None else one) - (0 if other is None else other) for one, other in pairs]
    norm = nn.utils.get_total_norm([torch.as_tensor(difference) for difference in apart]).item()
    own = nn.utils.get_total_norm([other for other in right if other is not None]).item()
    if norm == 0 or not math.isfinite(own):
        return 0.0
    return norm / own if own and math.isfinite(norm) else math.inf


class ReplayedStep:
    """Computes plainly a few times, then records and replays; what cannot be recorded is computed plainly.

    compute: gradients of a batch into the parameters, which have none; returns the loss. Gradients are in the
    same place after every replay, so those of the step before are gone: they cannot be summed over steps.
    A batch of another shape than the recorded one is computed plainly too.
    slowly: the same without compiler and recording, if there is no dropout. Replays 1, 2, 4, 8 and so on are
    compared with it, because wrong gradients look like a method that does not train; where they are apart, it
    takes over.
    """

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        parameters: Sequence[nn.Parameter],
        say: Callable[[str], object],
        record: Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]] = record_on_gpu,
        *,
        slowly: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        self.compute, self.parameters, self.say, self.record = compute, parameters, say, record
        self.slowly = slowly
        self._recording: Recording | None = None
        self._plain_steps: float = PLAIN_STEPS
        self._replays = 0

    @property
    def distrusts(self) -> bool:
        """Whether gradients of the recorded step were wrong."""
        return self.slowly is not None and self.compute is self.slowly

    def go_slowly(self) -> None:
        """From now on without recording and compiler."""
        if self.slowly is not None:
            self.compute, self._recording, self._plain_steps = self.slowly, None, float("inf")

    def __call__(self, batch: Batch) -> Tensor:
        """The loss of a batch; afterwards the parameters have its gradients."""
        if self._recording is None:
            if self._plain_steps == 0:
                self._try_to_record(batch)
            if self._recording is None:
                self._plain_steps -= 1
                return self.compute(batch)
        held, loss, gradients, replay = self._recording
        if any(tensor.shape != batch[name].shape for name, tensor in held.items()):
            return self.compute(batch)
        for name, tensor in held.items():
            tensor.copy_(batch[name])
        replay()
        self._replays += 1
        is_power_of_two = self._replays & (self._replays - 1) == 0
        if self.slowly is not None and is_power_of_two:
            return self._compared(batch, self.slowly, loss, gradients)
        self._give(gradients)
        return loss.clone()

    def _give(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _compared(
        self, batch: Batch, slowly: Callable[[Batch], Tensor], loss: Tensor, gradients: list[Tensor | None]
    ) -> Tensor:
        """The loss of a batch that was replayed, and its gradients, if another way to them agrees."""
        for parameter in self.parameters:
            parameter.grad = None
        try:
            other = slowly(batch)
            apart = distance(gradients, [parameter.grad for parameter in self.parameters])
        except RuntimeError as problem:  # memory, most likely
            self.slowly, apart = None, 0.0
            self.say(f"The recorded step cannot be compared with the uncompiled one ({first_line(problem)}).")
        if apart <= MOST_APART:
            self._give(gradients)
            if loss.is_cuda:
                torch.cuda.empty_cache()  # what only the comparison needed
            return loss.clone()
        self.go_slowly()
        self.say(
            f"Gradients of the recorded step are wrong (apart by {apart:.2g} of their norm at replay "
            f"{self._replays}), so the run goes on without recording and compiler."
        )
        return other

    def _try_to_record(self, batch: Batch) -> None:
        held = {name: tensor.clone() for name, tensor in batch.items()}
        for parameter in self.parameters:
            parameter.grad = None
        try:
            loss, replay = self.record(lambda: self.compute(held))
        except RuntimeError as problem:
            self._plain_steps = float("inf")
            for parameter in self.parameters:
                parameter.grad = None
            why = first_line(problem)
            self.say(f"The step cannot be recorded ({why}), so its kernels are launched one by one.")
        else:
            self._recording = Recording(held, loss, [one.grad for one in self.parameters], replay)
