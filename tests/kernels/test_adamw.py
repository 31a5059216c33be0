"""AdamW with clipping as three kernels against PyTorch's: weights, norms, states, and steps of both kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from saobp.training.graphed_adamw import GraphedAdamW

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((70, 33), (5,), (1,), (4, 4, 4))
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]
    for parameter in found:
        parameter.grad = torch.zeros_like(parameter)
    return found


def groups(own: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": own[:1], "weight_decay": 0.1}, {"params": own[1:], "weight_decay": 0.0, "lr": 5e-2}]


def fill(own: list[nn.Parameter], step: int) -> None:
    """Gradients in place, large in every other step, so that clipping acts in some steps only."""
    generator = torch.Generator().manual_seed(step)
    for parameter in own:
        assert parameter.grad is not None
        size = 0.1 if step % 2 else 0.001
        parameter.grad.copy_(size * torch.randn(parameter.shape, generator=generator))


def pair(is_static: Callable[[], bool], max_norm: float = 1.0) -> tuple[GraphedAdamW, torch.optim.AdamW]:
    gpu = {"fused": True} if DEVICE == "cuda" else {"capture": lambda launch: launch}
    mine = GraphedAdamW(groups(parameters()), max_norm=max_norm, is_static=is_static, **OPTIONS, **gpu)
    return mine, torch.optim.AdamW(groups(parameters()), **OPTIONS)  # type: ignore[arg-type]


def of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def compare(mine: GraphedAdamW, theirs: torch.optim.AdamW, steps: range, max_norm: float = 1.0) -> None:
    for step in steps:
        for optimizer in (mine, theirs):
            fill(of(optimizer), step)
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        norm = nn.utils.clip_grad_norm_(of(theirs), max_norm or float("inf"))
        theirs.step()
        mine.step()
        torch.testing.assert_close(mine.norm, norm, rtol=1e-5, atol=0)
    for one, other in zip(of(mine), of(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_captured_steps_are_those_of_pytorch(max_norm: float) -> None:
    step = iter(range(100))
    mine, theirs = pair(lambda: next(step) >= 2, max_norm)  # two steps of warm-up
    compare(mine, theirs, range(8), max_norm)


def test_steps_of_both_kinds_and_checkpoints_count_together() -> None:
    static = [False]
    mine, theirs = pair(lambda: static[0])
    for first in range(0, 12, 3):
        compare(mine, theirs, range(first, first + 3))
        static[0] = not static[0]
    saved = mine.state_dict()
    counts = {float(state["step"]) for state in saved["state"].values()}
    assert counts == {12.0}
    assert len({state["step"].data_ptr() for state in saved["state"].values()}) == len(SHAPES), "one each"
    for one, other in zip(saved["state"].values(), theirs.state_dict()["state"].values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-9)
    again, _ = pair(lambda: True)
    for parameter, old in zip(of(again), of(mine), strict=True):
        parameter.data.copy_(old)
    again.load_state_dict(saved)
    compare(again, theirs, range(12, 15))


def test_gradients_that_move_are_found() -> None:
    """A new capture of the step has other memory."""
    mine, theirs = pair(lambda: True)
    for optimizer in (mine, theirs):  # a state to begin with
        fill(of(optimizer), 0)
    mine.is_static = lambda: False
    compare(mine, theirs, range(1))
    mine.is_static = lambda: True
    compare(mine, theirs, range(1, 4))
    for parameter in of(mine):
        assert parameter.grad is not None
        parameter.grad = torch.full_like(parameter.grad, torch.nan)
    compare(mine, theirs, range(4, 7))


def test_tensors_that_the_kernels_cannot_read_are_updated_by_pytorch() -> None:
    """A gradient in the middle of other numbers, as a slice may lie."""
    mine, theirs = pair(lambda: True)
    odd = of(mine)[1]
    odd.grad = torch.zeros(9, device=DEVICE)[1:6]
    compare(mine, theirs, range(4))
    assert mine._launch is None
