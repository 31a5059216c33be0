"""States divided by their root mean square as a PyTorch operator, with gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from saobp.kernels.qk_norm.rows import unit_rows, unit_rows_gradient
from saobp.kernels.runtime.custom_op import operator, register_autograd, reject_forward_mode
from saobp.kernels.runtime.launcher import INTERPRETED, KernelLaunch, cached

MOST_WIDTH = 256
TILE = 4096
"""Numbers of a program's tile, such as 64 rows of 64."""

_launches: dict[Any, KernelLaunch] = {}


def can_scale(states: Tensor) -> bool:
    """Whether the kernels take these states: on a GPU, up to 256 wide, in at most single precision."""
    kinds = (torch.float16, torch.float32) if INTERPRETED else (torch.float16, torch.bfloat16, torch.float32)
    on_gpu = states.is_cuda or INTERPRETED
    return on_gpu and states.dtype in kinds and states.shape[-1] <= MOST_WIDTH and states.numel() > 0


def scaled_rows(states: Tensor, log_scale: Tensor | None, epsilon: float) -> Tensor:
    """``[batch, heads, length, dim]`` over the root mean square over dim, times e^``log_scale [heads]``.

    epsilon is added to the mean square.
    The result lies in memory as ``[batch, length, heads, dim]``.
    """
    reject_forward_mode(states, *(() if log_scale is None else (log_scale,)))
    if states.stride(-1) != 1:
        states = states.contiguous()
    scaled: Tensor = OPERATOR(states, log_scale, epsilon)[0]
    return scaled


def _forward(states: Tensor, log_scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The scaled states, and the inverse root mean square of each row ``[batch, length, heads]``."""
    launch = _launch(unit_rows, states, log_scale, epsilon)
    out, inverse = _fake_forward(states, log_scale, epsilon)
    launch(states, states if log_scale is None else log_scale, out, inverse)
    return out, inverse


def _backward(
    grad: Tensor, states: Tensor, log_scale: Tensor | None, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the states, and summands ``[programs, heads]`` of that of ``log_scale``, empty without one."""
    launch = _launch(unit_rows_gradient, states, log_scale, None, grad)
    gradient, parts = _fake_backward(grad, states, log_scale, inverse)
    launch(states, states if log_scale is None else log_scale, grad, inverse, gradient, parts)
    return gradient, parts


def _fake_forward(states: Tensor, log_scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = states.shape
    return _like(states), states.new_empty(batch, length, heads, dtype=torch.float32)


def _fake_backward(
    grad: Tensor,
    states: Tensor,
    log_scale: Tensor | None,
    inverse: Tensor,
) -> tuple[Tensor, Tensor]:
    programs = 0 if log_scale is None else _programs(states)
    return _like(states), states.new_empty(programs, states.shape[1], dtype=torch.float32)


def _like(states: Tensor) -> Tensor:
    batch, heads, length, dim = states.shape
    return states.new_empty(batch, length, heads, dim).transpose(1, 2)


def _programs(states: Tensor) -> int:
    return -(-math.prod(states.shape[:3]) // (TILE // _width(states)))


def _width(states: Tensor) -> int:
    return max(16, triton.next_power_of_2(states.shape[-1]))


def _launch(
    kernel: Any, states: Tensor, log_scale: Tensor | None, epsilon: float | None, *grads: Tensor
) -> KernelLaunch:
    """The launch of a kernel on tensors of these forms."""
    scaled = None if log_scale is None else log_scale.dtype
    forms = tuple((one.dtype, one.stride()) for one in (states, *grads))
    key = (kernel.__name__, states.shape, forms, scaled, epsilon, states.device)
    return cached(_launches, key, _make, kernel, states, scaled is not None, epsilon, *grads)


def _make(kernel: Any, states: Tensor, scaled: bool, epsilon: float | None, *grads: Tensor) -> KernelLaunch:
    batch, heads, length, dim = states.shape
    width = _width(states)
    strides = {
        f"{letter}_{axis}": stride
        for letter, one in zip("xg", (states, *grads), strict=False)
        for axis, stride in zip(("batch", "head", "row"), one.stride(), strict=False)
    }
    numbers = {
        **strides, "rows": batch * heads * length, "heads": heads, "length": length, "epsilon": epsilon,
        "DIM": dim, "WIDTH": width, "ROWS": TILE // width, "HEADS": triton.next_power_of_2(heads),
        "SCALED": int(scaled), "num_warps": 4,
    }  # fmt: skip
    return KernelLaunch(kernel, _programs(states), numbers, states.device)


OPERATOR = operator(
    "unit_scale",
    "(Tensor states, Tensor? log_scale, float epsilon) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
GRADIENT = operator(
    "unit_scale_backward", "(Tensor grad, Tensor states, Tensor? log_scale, Tensor inverse) -> (Tensor, Tensor)",
    _backward, _fake_backward,
)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _gradients(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    states, log_scale, inverse = saved
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    gradient, parts = GRADIENT(grad, states, log_scale, inverse)
    return gradient, None if log_scale is None else parts.sum(0).to(log_scale.dtype), None


register_autograd(OPERATOR, _gradients, _save)
