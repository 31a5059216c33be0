"""Kernels that divide states by their root mean square, against the plain form and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from saobp.variants import EPSILON, QKNorm, unit_scale

pytest.importorskip("triton")
from saobp.kernels.qk_norm import launch as qk_norm
from saobp.kernels.qk_norm.launch import can_scale, scaled_rows

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KINDS = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
Numbers = tuple[Tensor, ...]


def states(batch: int, heads: int, length: int, dim: int, kind: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of very different sizes, in the memory layout of a model."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(batch, length, heads, dim, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-3, 2, batch * length * heads, dtype=torch.float64).view(batch, length, heads, 1)
    return (drawn * sizes).to(kind).to(DEVICE).transpose(1, 2)


def eager(x: Tensor, log_scale: Tensor | None) -> Tensor:
    """As PyTorch computes it in the type of x."""
    scaled = functional.rms_norm(x, x.shape[-1:], eps=EPSILON)
    return scaled if log_scale is None else scaled * log_scale.exp().view(-1, 1, 1).to(x.dtype)


def exact(x: Tensor, log_scale: Tensor | None) -> Tensor:
    """The definition, written out."""
    size = (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPSILON).sqrt()
    return x / size if log_scale is None else x / size * log_scale.exp().view(-1, 1, 1)


def with_gradients(form: object, x: Tensor, log_scale: Tensor | None, grad: Tensor) -> Numbers:
    """Output and gradients of states and scale."""
    learning = [x.detach().requires_grad_()]
    learning += [] if log_scale is None else [log_scale.detach().requires_grad_()]
    out = form(learning[0], learning[1] if len(learning) > 1 else None)  # type: ignore[operator]
    return out.detach(), *torch.autograd.grad(out, learning, grad)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 7, 24), (1, 4, 130, 64), (1, 2, 40, 256)], ids=str)
def test_error_is_at_most_twice_that_of_eager(
    shape: tuple[int, int, int, int], scaled: bool, kind: torch.dtype
) -> None:
    """Outputs relative to each number, gradients to each row: rows differ by five orders of magnitude."""
    x, grad = states(*shape, kind), states(*shape, kind, seed=1)
    log_scale = torch.linspace(-1.5, 1.5, shape[1], device=DEVICE) if scaled else None
    wide = None if log_scale is None else log_scale.double()
    truth = with_gradients(exact, x.double(), wide, grad.double())
    own = with_gradients(lambda x, b: scaled_rows(x, b, EPSILON), x, log_scale, grad)
    usual = with_gradients(eager, x, log_scale, grad)
    assert own[0].dtype == own[1].dtype == kind
    tiny = torch.finfo(kind).eps
    for name, ours, theirs, true in zip(("output", "gradient", "scale"), own, usual, truth, strict=False):
        size = true.abs().amax(-1, keepdim=name != "scale") if name != "output" else true.abs() + 1e-9
        allowed = 2 * ((theirs - true).abs() / size).max() + tiny
        assert ((ours - true).abs() / size).max() <= allowed, name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_layout_gives_the_same(kind: torch.dtype) -> None:
    """Slices of one product of queries, keys and values, contiguous heads, and a last dimension with gaps."""
    x = states(2, 3, 9, 16, kind)
    parts = torch.stack([x.transpose(1, 2)] * 3, 2)
    log_scale = torch.tensor([0.3, -1.0, 0.0], device=DEVICE)
    expected = scaled_rows(x, log_scale, EPSILON)
    spread = torch.stack([x, x], -1)[..., 0]
    for other in (parts[:, :, 1].transpose(1, 2), x.contiguous(), spread):
        assert other.stride() != x.stride()
        assert torch.equal(scaled_rows(other, log_scale, EPSILON), expected)
    assert expected.transpose(1, 2).is_contiguous()


def test_gradients_of_expanded_and_transposed_gradients() -> None:
    """A sum's gradient has stride 0, and that of a transposed product a last dimension with gaps."""
    x = states(1, 2, 6, 16, torch.float32).requires_grad_()
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for loss in (torch.sum, lambda y: (y.mT @ weight.to(y.dtype)).square().sum()):
        (ours,) = torch.autograd.grad(loss(scaled_rows(x, None, EPSILON)), x)
        (theirs,) = torch.autograd.grad(loss(exact(x.double(), None)), x)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-3)


def test_repeats_are_equal_bit_by_bit() -> None:
    x, grad = states(2, 4, 200, 64, KINDS[-1]), states(2, 4, 200, 64, KINDS[-1], seed=1)
    log_scale = torch.zeros(4, device=DEVICE)
    runs = [with_gradients(lambda x, b: scaled_rows(x, b, EPSILON), x, log_scale, grad) for _ in range(10)]
    assert all(torch.equal(one, other) for run in runs for one, other in zip(run, runs[0], strict=True))


def test_what_is_refused() -> None:
    assert can_scale(torch.zeros(1, 1, 2, 16, device=DEVICE))
    for other in (
        torch.zeros(1, 1, 2, 16, dtype=torch.float64),
        torch.zeros(1, 1, 2, 512),
        torch.zeros(1, 1, 0, 16),
    ):
        assert not can_scale(other.to(DEVICE))
    x = torch.ones(1, 1, 2, 16, device=DEVICE, requires_grad=True)
    (first,) = torch.autograd.grad(scaled_rows(x, None, EPSILON).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.skipif(not GPU, reason="without a GPU QK-norm is computed in plain PyTorch")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_qk_norm_takes_the_kernels(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer key heads than query heads, also where the graph is compiled whole."""
    launched: list[str] = []
    launch = qk_norm._launch

    def noted(kernel: Any, *rest: Any) -> Any:
        launched.append(kernel.__name__)
        return launch(kernel, *rest)

    monkeypatch.setattr(qk_norm, "_launch", noted)
    variant = QKNorm(4, 256, 64, torch.empty(0, device=DEVICE))
    with torch.no_grad():
        variant.head_bias.copy_(torch.tensor([0.5, -0.5, 0.0, 1.0]))
    query, key = states(2, 4, 33, 64, torch.bfloat16), states(2, 2, 33, 64, torch.bfloat16, seed=1)
    made = torch.compile(variant.states, fullgraph=True) if compiled else variant.states
    own_query, own_key, value = made(query, key, key, lambda: (query, key, key))
    assert launched == ["unit_rows", "unit_rows"]
    torch.testing.assert_close(
        own_query.double(), exact(query.double(), variant.head_bias.double()), rtol=5e-3, atol=1e-5
    )
    torch.testing.assert_close(own_key.double(), exact(key.double(), None), rtol=5e-3, atol=1e-5)
    assert value is key


def test_plain_form_is_the_definition() -> None:
    x = states(1, 3, 5, 16, torch.float64)
    log_scale = torch.tensor([0.3, -1.0, 0.0], device=DEVICE)
    torch.testing.assert_close(unit_scale(x, log_scale), exact(x, log_scale.double()))
