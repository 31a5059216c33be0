"""Steps with a penalty, or with a refinement that has no kernels, are one compiled graph too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from transformers import PreTrainedModel

import saobp
from saobp.metrics.health.recorder import Recorder
from saobp.regularizers import Regularizer, regularizer
from saobp.sizes import Size
from saobp.training import architectures
from saobp.training.architectures import build_model
from saobp.training.compiled_step import loss_as_forward
from saobp.training.head_records import MEASURED
from saobp.training.objectives import CausalLM, MaskedLM, Objective

VOCABULARY = 60
OBJECTIVE = MaskedLM(VOCABULARY, 4, (0, 1, 2, 3, 4))


def small(family: str, refinement: str | None = None) -> PreTrainedModel:
    architectures.SIZES["test"] = Size(2, 16, 2, 32)
    model = build_model(family, "test", vocabulary=VOCABULARY, length=12, dropout=0.0, seed=3)
    return model if refinement is None else saobp.apply(model, refinement)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Forward graphs as they are compiled; a graph break or a second graph for the same step is an error."""
    found: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda graph, _: make_boxed_func(graph))
    original = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **o: original(f, backend=backend, fullgraph=True, **o))
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield found


def trained(
    model: PreTrainedModel,
    objective: Objective,
    *,
    compiled: bool,
    penalty: Regularizer | None,
    **options: Any,
) -> list[Tensor]:
    """Losses and gradients of three steps with an evaluation, and the state after them."""
    drawn = torch.Generator().manual_seed(1)
    ids, seeds = torch.randint(5, VOCABULARY, (3, 4, 12), generator=drawn), torch.arange(4)
    found = []
    with loss_as_forward(model, objective, compiled=compiled, regularizer=penalty, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, rows in enumerate(ids):
            loss = model.train()(rows, seeds + step)
            loss.backward()
            found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), Recorder(model, MEASURED).measuring():
                found.append(model.eval()(rows, seeds))
        return [*found, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize(
    ("family", "penalty", "refinement", "precision"),
    [
        ("bert", "entropy,weight=1", None, "fp32"),
        ("bert", "entropy,weight=1,margin=0", "high:0.5", "bf16"),
        ("gpt2", "entropy,weight=0.1,margin=0,reduction=released,longest=visible", None, "bf16"),
        ("modernbert", "entropy,weight=1", "high:0.5", "bf16"),
        ("bert", "eigen,weight=1", None, "bf16"),
        ("gpt2", "eigen,weight=1,reading=constrained", "high:0.5", "fp32"),
    ],
)
def test_loss_and_penalty_are_one_graph_with_the_same_numbers(
    family: str, penalty: str, refinement: str | None, precision: str, graphs: list[torch.fx.GraphModule]
) -> None:
    objective = CausalLM() if family == "gpt2" else OBJECTIVE
    eager, compiled, without = (
        trained(
            small(family, refinement),
            objective,
            compiled=is_compiled,
            penalty=regularizer(chosen) if chosen else None,
            precision=precision,
        )
        for is_compiled, chosen in ((False, penalty), (True, penalty), (False, None))
    )
    assert len(graphs) == 1
    torch.testing.assert_close(compiled, eager)
    assert not torch.equal(compiled[0], without[0])


@pytest.mark.parametrize(
    "refinement",
    [
        *("high:0.2,steps=2", "low:0.2,steps=3,damping=0.3", "elemmul-prior"),
        "high-key-bias:learned,steps=2+query-bias+alternating+by-distance+later-steps+message-gate",
    ],
)
def test_refinements_without_kernels_are_one_graph(
    refinement: str, graphs: list[torch.fx.GraphModule]
) -> None:
    eager, compiled = (
        trained(small("bert", refinement), OBJECTIVE, compiled=is_compiled, penalty=None, precision="bf16")
        for is_compiled in (False, True)
    )
    assert len(graphs) == 1
    torch.testing.assert_close(compiled, eager)


def test_a_penalty_on_layers_that_are_computed_again_is_not_compiled(
    graphs: list[torch.fx.GraphModule],
) -> None:
    found = []
    for compiled in (False, True):
        model = small("bert")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        penalty = regularizer("entropy,weight=1")
        found.append(trained(model, OBJECTIVE, compiled=compiled, penalty=penalty))
    assert not graphs
    torch.testing.assert_close(*found)
