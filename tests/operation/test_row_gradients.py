"""Analytic gradients against differences in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor

import saobp
from saobp.propagation.factors import SelfProduct, floored
from saobp.testing.error_budget import operation_of
from saobp.testing.inputs import attention_inputs

FACTORS = ["none", "high", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior", "high-key-bias"]
CASES = [(factor, order) for factor in FACTORS for order in ("bidirectional", "strict")]
CASES = [(*case, steps) for case in [*CASES, ("high", "paper"), ("low", "paper")] for steps in (1, 2)]
CASES += [("sinkhorn", "bidirectional", 1), ("sinkhorn-3", "bidirectional", 1)]


@pytest.mark.filterwarnings("ignore:future='paper'")
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize(("factor", "order", "steps"), CASES)
def test_gradients_of_scores_values_and_strengths(
    factor: str, order: str, steps: int, padding: str | None
) -> None:
    """Left padding and causality give rows that see no key, too."""
    inputs = attention_inputs(2, 2, 4, 3, strength=(0.8, -0.6), padding=padding, dtype=torch.float64)  # type: ignore[arg-type]
    refinement = saobp.Refinement(
        factor,
        steps=steps,
        damping=0.3 if steps > 1 else 0.0,
        future="paper" if order == "paper" else "strict",
    )
    operation = operation_of(refinement, inputs, is_causal=order != "bidirectional")
    torch.autograd.gradcheck(operation, inputs.leaves(), fast_mode=True)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_through_refine(factor: str, causal: bool) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 4, generator=random, dtype=torch.float64).softmax(-1).requires_grad_()
    strength = torch.tensor([0.5, -1.5], dtype=torch.float64, requires_grad=True)
    refinement = saobp.Refinement(factor)

    def operation(rows: Tensor, strength: Tensor) -> Tensor:
        return saobp.refine(rows, refinement, is_causal=causal, strength=strength)

    torch.autograd.gradcheck(operation, (rows, strength))


def test_the_similarity_of_rows_has_the_gradient_of_a_product() -> None:
    rows = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(SelfProduct.apply, (rows,))
    torch.autograd.gradgradcheck(SelfProduct.apply, (rows,))


@pytest.mark.parametrize("factor", ["elemmul", "elemmul-prior"])
def test_similarities_keep_forward_mode_derivatives_and_vmap(factor: str) -> None:
    query, key, value, _ = (t.detach() for t in attention_inputs(2, 2, 4, 3, dtype=torch.float64).leaves())

    def operation(query: Tensor) -> Tensor:
        return saobp.attention(query, key, value, factor, backend="reference")

    forwards = torch.func.jvp(operation, (query,), (torch.ones_like(query),))[1]
    jacobian = torch.func.jacrev(operation)(query)
    torch.testing.assert_close(forwards, jacobian.flatten(4).sum(-1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("learning", [False, True])
def test_a_trace_of_similarities_can_be_saved(learning: bool, tmp_path: Path) -> None:
    """Tracing keeps a function with its own gradient as a call into Python, which no file takes."""
    states = [one.detach().requires_grad_(learning) for one in attention_inputs(2, 2, 4, 3).leaves()[:3]]

    def operation(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return saobp.attention(query, key, value, "elemmul-prior")

    torch.jit.trace(operation, states).save(str(tmp_path / "traced.pt"))
    found = torch.jit.load(str(tmp_path / "traced.pt"))(*states)
    torch.testing.assert_close(found, operation(*states))


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
def test_the_similarity_of_collapsed_rows_has_an_exact_gradient(spread: float) -> None:
    """Against float64; the logarithm of tiny similarities has a huge gradient on the way to a small one."""
    random = torch.Generator().manual_seed(1)
    scores = spread * torch.randn(4, 128, 128, generator=random, dtype=torch.float64)
    scores[1:3, :, 7] += spread  # a sink
    heard = torch.randn(4, 128, 128, generator=random, dtype=torch.float64)

    def gradient(dtype: torch.dtype, similarity: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = scores.to(dtype, copy=True).requires_grad_()
        log_rows = torch.log_softmax(leaf, -1)
        (floored(similarity(log_rows.exp())).log() * heard.to(dtype)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    exact = gradient(torch.float64, lambda rows: rows @ rows.mT)
    plain = gradient(torch.float32, lambda rows: rows @ rows.mT)
    found = gradient(torch.float32, SelfProduct.apply)
    assert (found - exact).norm() <= 2 * (plain - exact).norm()
    assert (found - exact).norm() <= 1e-4 * exact.norm()


def test_the_gradient_of_a_similarity_is_one_product() -> None:
    """The other products of a step are those of every factor: gradients of values, rows, queries and keys."""

    def products(factor: str) -> int:
        inputs = attention_inputs(2, 2, 4, 3)
        graphs: list[torch.fx.GraphModule] = []

        def note(graph: torch.fx.GraphModule, _: object) -> object:
            graphs.append(graph)
            return make_boxed_func(graph)

        def operation(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return saobp.attention(query, key, value, factor)

        compiled = aot_function(operation, note, note)
        compiled(*inputs.leaves()[:3]).sum().backward()
        return sum(node.target == torch.ops.aten.bmm.default for node in graphs[1].graph.nodes)

    assert products("high-listing:0.2") == 4
    assert products("elemmul-prior") == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the compiler's kernels for a GPU")
def test_compiled_gradients_are_the_same_every_time() -> None:
    """A kernel whose threads read what others have not written yet gives other gradients now and then."""
    states = torch.randn(3, 256, 4, 128, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    compiled = torch.compile(
        lambda states: saobp.attention(states[0], states[1], states[2], "elemmul-prior"), dynamic=False
    )
    heard = torch.randn(256, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    first = torch.autograd.grad(compiled(states), states, heard)[0]
    for _ in range(50):
        assert torch.equal(torch.autograd.grad(compiled(states), states, heard)[0], first)


def test_strength_learns_from_zero() -> None:
    """A learned strength starts at 0, so its gradient must be alive there."""
    inputs = attention_inputs(strength=0.0, dtype=torch.float64)
    query, key, value, strength = inputs.leaves()
    saobp.attention(query, key, value, saobp.Refinement("high"), strength=strength).square().sum().backward()
    assert strength.grad is not None
    assert (strength.grad.abs() > 1e-4).all()
