"""AdamW with gradient clipping, captured as one CUDA graph of three kernels.

Clipping and PyTorch's fused update are some twenty launches and as many passes of Python over all parameters;
for a small model at a small batch that takes longer than its forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

Capture = Callable[[Callable[[], object]], Callable[[], object]]


def capture_on_gpu(compute: Callable[[], object]) -> Callable[[], object]:
    """Capture a computation without running it; the result runs it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compute()
    return graph.replay


class GraphedAdamW(torch.optim.AdamW):
    """AdamW whose :meth:`step` also clips gradients to a norm.

    While gradients stay in the same memory, a step is :class:`ClippedAdamW`: launched once, then captured and
    replayed. It agrees with PyTorch's update to rounding, a few millionths; the state is PyTorch's own.

    max_norm: no clipping if 0
    is_static: whether the gradients of this step lie where those of every such step do
    norm: gradient norm before clipping, of the last step
    """

    def __init__(
        self,
        params: Any,
        *,
        max_norm: float,
        is_static: Callable[[], bool],
        capture: Capture = capture_on_gpu,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.max_norm, self.is_static, self.capture = max_norm, is_static, capture
        self.norm = torch.zeros((), device=self.param_groups[0]["params"][0].device)
        self._rates = torch.zeros(len(self.param_groups), device=self.norm.device)
        self._last_rates: list[float] = []
        self._gradients: list[Tensor | None] = []
        self._steps: Tensor | None = None
        self._replay: Callable[[], object] | None = None
        self._launch: Callable[[], object] | None = None
        self._is_launched = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        if not self.is_static() or not self._is_prepared():
            self._release()
            self.norm.copy_(nn.utils.clip_grad_norm_(self._parameters(), self.max_norm or float("inf")))
            super().step()
            return loss
        assert self._launch is not None
        self._set_rates()
        if not self._is_launched:
            self._launch()  # compiles the kernels
            self._is_launched = True
            return loss
        if self._replay is None:
            try:
                self._replay = self.capture(self._launch)
            except RuntimeError:  # as rare as that of the step itself, which tells of it
                self._replay = self._launch
        self._replay()
        return loss

    def state_dict(self) -> dict[str, Any]:
        self._release()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._release()
        super().load_state_dict(state_dict)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _set_rates(self) -> None:
        """Learning rates of schedulers, which are floats, to the device."""
        rates = [float(group["lr"]) for group in self.param_groups]
        if len(rates) != len(self._rates):
            self._rates, self._last_rates = torch.zeros(len(rates), device=self.norm.device), []
        if rates != self._last_rates:
            for place, rate in enumerate(rates):
                self._rates[place].fill_(rate)
            self._last_rates = rates

    def _is_prepared(self) -> bool:
        """Whether the kernels can update these parameters; prepares them where gradients have moved."""
        from saobp.training.clipped_adamw import ClippedAdamW

        gradients = [parameter.grad for parameter in self._parameters()]
        if len(gradients) == len(self._gradients) and not any(map(is_not, gradients, self._gradients)):
            return True
        self._release()
        owned = [
            (parameter, parameter.grad, place, group["weight_decay"])
            for place, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        parameters = [parameter for parameter, _, _, _ in owned]
        states = [self.state[parameter] for parameter in parameters]
        settings = {(*group["betas"], group["eps"]) for group in self.param_groups}
        if len(settings) > 1 or not all(states):
            return False
        tensors = (
            parameters,
            [gradient for _, gradient, _, _ in owned],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        )
        if not ClippedAdamW.fits(*tensors):
            return False
        self._steps, self._gradients = states[0]["step"].to(self.norm.device, copy=True), gradients
        self._launch = ClippedAdamW(
            *tensors,
            groups=[place for _, _, place, _ in owned],
            decays=[decay for _, _, _, decay in owned],
            rates=self._rates,
            steps=self._steps,
            norm=self.norm,
            settings=settings.pop(),
            max_norm=self.max_norm,
        ).update
        return True

    def _release(self) -> None:
        """Back to PyTorch's state: every parameter has a count of steps of its own."""
        if self._steps is not None:
            for parameter, gradient in zip(self._parameters(), self._gradients, strict=True):
                if gradient is not None:
                    own = self.state[parameter]
                    own["step"] = self._steps.to(own["step"].device, copy=True)
        self._steps, self._launch, self._replay, self._gradients = None, None, None, []
        self._is_launched = False
