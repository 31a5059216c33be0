"""The output layer of a training step: padded logits change neither loss nor gradients."""

from __future__ import annotations

import pytest
import torch

from saobp.sizes import Size
from saobp.training import architectures
from saobp.training.architectures import build_model
from saobp.training.fast_layers import fast_output_layer
from saobp.training.objectives import CausalLM, MaskedLM, Objective, head_scores


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2"])
def test_padded_logits_change_neither_loss_nor_gradients(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures.SIZES, "test", Size(2, 16, 2, 32))
    model = build_model(family, "test", vocabulary=100, length=16, dropout=0.0, seed=1).eval()
    objective: Objective = CausalLM() if family == "gpt2" else MaskedLM(100, 4, (0, 1, 2, 3, 4))
    ids, seeds = torch.randint(5, 100, (6, 16)), torch.arange(6)
    model.zero_grad()
    loss = objective(model, ids, seeds, precision)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    layer = model.get_output_embeddings()
    own = type(layer)
    model.zero_grad()
    with fast_output_layer(model):
        width = head_scores(model, torch.randn(1, 3, 16), "fp32").shape[-1]
        same = objective(model, ids, seeds, precision)
        same.backward()  # type: ignore[no-untyped-call]
    assert type(layer) is own
    assert width == (100 if layer.bias is None else 128), "a layer without bias stays as it is"
    torch.testing.assert_close(same, loss)
    for name, parameter in model.named_parameters():
        if gradients[name] is not None:
            torch.testing.assert_close(
                parameter.grad, gradients[name], msg=lambda text, name=name: name + text
            )
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()


@pytest.mark.slow
def test_the_product_is_part_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.SIZES, "test", Size(1, 16, 2, 32))
    model = build_model("bert", "test", vocabulary=100, length=16, dropout=0.0, seed=1)
    objective, ids, seeds = MaskedLM(100, 4, (0, 1, 2, 3, 4)), torch.randint(5, 100, (3, 16)), torch.arange(3)

    def loss() -> torch.Tensor:
        return objective(model, ids, seeds, "bf16")

    found = []
    with fast_output_layer(model):
        for step in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            model.zero_grad()
            step().backward()  # type: ignore[no-untyped-call]
            gradient = model.get_input_embeddings().weight.grad
            assert gradient is not None
            found.append(gradient)
    torch.testing.assert_close(*found)
