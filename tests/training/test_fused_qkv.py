"""Queries, keys and values as one product: the same numbers, fewer products, and nothing left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

import saobp
from saobp.sizes import Size
from saobp.training import architectures, compiled_step
from saobp.training.architectures import build_model
from saobp.training.compiled_step import COMPILER_SETTINGS, gpu_options, loss_as_forward
from saobp.training.fast_layers import fusable, fused_projections, is_fused
from saobp.training.objectives import CausalLM, MaskedLM, in_bfloat16, row_seeds

OBJECTIVE = MaskedLM(100, 4, (0, 1, 2, 3, 4))


@pytest.fixture(autouse=True)
def small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.SIZES, "test", Size(2, 16, 2, 32))


def small(refinement: str = "high:learned") -> PreTrainedModel:
    model = build_model("bert", "test", vocabulary=100, length=16, seed=1, dropout=0.0)
    return saobp.apply(model, refinement)


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, 100, (rows, 16), generator=torch.Generator().manual_seed(2))
    return ids, torch.from_numpy(row_seeds(3, 7, range(rows)))


def loss_and_gradients(
    model: PreTrainedModel, run: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = run(*batch())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss.detach(), found


def joined_or_not(model: PreTrainedModel, precision: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    results = []
    for joined in (False, True):
        with fused_projections(model) if joined else nullcontext():
            results.append(
                loss_and_gradients(model, lambda ids, seeds: OBJECTIVE(model, ids, seeds, precision))
            )
    return results


def test_gradients_are_those_of_three_products_in_float64() -> None:
    (loss, apart), (same, together) = joined_or_not(small().double(), "fp32")
    torch.testing.assert_close(loss, same, rtol=1e-6, atol=0)  # the loss itself is taken in float32
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], rtol=0, atol=1e-12, msg=name)


def test_losses_agree_in_float32_and_gradients_in_bfloat16() -> None:
    (loss, _), (same, _) = joined_or_not(small(), "fp32")
    torch.testing.assert_close(same, loss, rtol=1e-6, atol=0)
    (loss, apart), (same, together) = joined_or_not(small(), "bf16")
    torch.testing.assert_close(same, loss, rtol=1e-3, atol=0)
    both = [torch.cat([g.flatten() for g in one.values()]) for one in (apart, together)]
    assert all(gradient.dtype == torch.float32 for gradient in together.values())
    assert torch.cosine_similarity(*both, 0) > 0.9999


@contextmanager
def counting(counts: Counter[str]) -> Iterator[Any]:
    """A backend that counts operators of both passes and the graphs that it was given."""

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    both = aot_autograd(fw_compiler=count, bw_compiler=count)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts["graphs"] += 1
        return both(graph, inputs)

    torch._dynamo.reset()
    yield backend
    torch._dynamo.reset()


def test_a_compiled_step_stays_one_graph_with_fewer_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Per layer two products less forward and four backward; weights are rounded after they are joined."""
    original = torch.compile
    found = []
    for joins in (fused_projections, lambda _: nullcontext()):
        monkeypatch.setattr(compiled_step, "fused_projections", joins)
        counts: Counter[str] = Counter()
        model = small("high:0.2")
        with counting(counts) as backend:
            monkeypatch.setattr(
                torch, "compile", lambda f, backend=backend, **o: original(f, backend=backend, **o)
            )
            with loss_as_forward(model, OBJECTIVE, precision="bf16", compiled=True):
                loss_and_gradients(model, model)
                model(*batch())
        assert counts["graphs"] == 1
        found.append(counts)
    together, apart = found
    layers = 2
    assert apart["aten.addmm.default"] - together["aten.addmm.default"] == 2 * layers
    assert apart["aten.mm.default"] - together["aten.mm.default"] == 4 * layers
    # Weights and biases of three layers, there and back.
    assert apart["aten._to_copy.default"] - together["aten._to_copy.default"] >= 8 * layers


def test_all_is_as_before_afterwards() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with loss_as_forward(model, OBJECTIVE):
        assert sum(is_fused(module) for module in model.modules()) == 6
        assert list(model.state_dict()) == list(before)
        with pytest.raises(IndexError):
            model(torch.full((1, 16), 10**6), torch.zeros(1, dtype=torch.long))
    assert not any(is_fused(module) for module in model.modules())
    assert type(model) is BertForMaskedLM
    assert not any("forward" in vars(module) for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_only_plain_triples_alike_are_joined() -> None:
    class Attention(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.query, self.key, self.value = layers

    class Special(nn.Linear):
        pass

    def linear(**options: Any) -> nn.Linear:
        return nn.Linear(4, 6, **options)

    assert len(fusable(Attention(linear(), linear(), nn.Linear(4, 2)))) == 3
    assert len(fusable(Attention(*(linear(bias=False) for _ in range(3))))) == 3
    assert not fusable(Attention(linear(), linear(), linear(bias=False)))
    assert not fusable(Attention(linear(), Special(4, 6), linear()))
    assert not fusable(Attention(linear(), nn.Linear(5, 6), linear()))
    assert not fusable(Attention(linear(), linear(dtype=torch.float64), linear()))
    assert not fusable(linear())


def test_other_states_for_keys_are_multiplied_apart() -> None:
    """As in cross-attention; and what was kept for a call that never ended is not taken for another."""
    layer = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)).encoder.layer[0]
    attention = layer.attention.self
    here, there = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    expected = [attention.query(here), attention.key(there), attention.value(here), attention.key(here)]
    with fused_projections(layer):
        found = [attention.query(here), attention.key(there), attention.value(here), attention.key(here)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_weights_are_rounded_once() -> None:
    model = small()
    names = set(in_bfloat16(model))
    with fused_projections(model):
        left = names - set(in_bfloat16(model))
    assert left == {
        f"bert.encoder.layer.{layer}.attention.self.{role}.{kind}"
        for layer in range(2)
        for role in ("query", "key", "value")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("how", ["sharded", "checkpointing", "gpt2"])
def test_where_products_stay_apart(how: str) -> None:
    model = small()
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
    elif how == "gpt2":
        model = build_model("gpt2", "test", vocabulary=100, length=16)
    objective = CausalLM() if how == "gpt2" else OBJECTIVE
    with loss_as_forward(model, objective, sharded=how == "sharded"):
        assert not any(is_fused(module) for module in model.modules())
        model.train()(*batch()).backward()


def test_the_compiler_is_told_only_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "COMPILER_SETTINGS", {})
    assert gpu_options() is None
    monkeypatch.setattr(compiled_step, "COMPILER_SETTINGS", {"combo_kernels": True, "of_another_version": 1})
    assert gpu_options() == {"combo_kernels": True}
    assert set(COMPILER_SETTINGS) <= set(torch._inductor.list_options())
