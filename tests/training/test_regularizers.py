"""Entropy-Reg and Eigen-Reg against plain numpy, on models of several families."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import saobp
from saobp.regularizers import EigenReg, EntropyReg, Regularizer, regularizer
from saobp.testing.tiny_models import FAMILIES, HEADS, LAYERS, WIDTH, tiny_batch, tiny_model
from saobp.transformers.apply import attention_modules
from saobp.transformers.capture import record_attention, watch
from saobp.transformers.projections import query_key_weights

BATCH = tiny_batch()
LENGTHS = BATCH["attention_mask"].sum(-1).tolist()


def penalty_of(penalty: Regularizer, model: PreTrainedModel, batch: dict[str, Tensor] = BATCH) -> Tensor:
    with penalty.watch(model):
        model(**batch)
    return penalty.penalty()


def maps_of(model: PreTrainedModel, batch: dict[str, Tensor] = BATCH) -> list[np.ndarray]:
    with torch.no_grad(), record_attention(model) as recorded:
        model(**batch)
    return [rows.double().numpy() for calls in recorded.values() for rows in calls]


def entropies(rows: np.ndarray, added: float = 0.0) -> np.ndarray:
    logs = np.log(np.where(rows + added > 0, rows + added, 1.0))
    return -(rows * logs).sum(-1)


def expected(
    maps: list[np.ndarray],
    *,
    margin: float,
    thresholds: np.ndarray,
    released: bool = False,
    visible: bool = False,
) -> float:
    """The printed formula, text by text and row by row."""
    layers = []
    for layer, rows in enumerate(maps):
        heads = []
        for head in range(rows.shape[1]):
            theta = thresholds[0 if released else layer, head]
            texts, largest, summed = [], [], 0.0
            for text, length in enumerate(LENGTHS):
                most = np.log([row + 1 for row in range(length)] if visible else [length] * length)
                found = entropies(rows[text, head, :length], 1e-9 if released else 0.0)
                for value, top in zip(found, most, strict=True):
                    away = value - theta * top
                    summed += away**2 if abs(away) > margin * top else 0.0
                texts.append(found.mean())
                largest.append(most.mean())
            away = np.mean(texts) - theta * np.mean(largest)
            once = away**2 if abs(away) > margin * np.mean(largest) else 0.0
            heads.append(summed if released else once)
        layers.append(np.mean(heads))
    return float(np.mean(layers))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_entropy_reg_is_its_formula(released: bool, visible: bool, margin: float) -> None:
    model = tiny_model("gpt2")
    penalty = EntropyReg(
        0.5,
        margin=margin,
        reduction="released" if released else "paper",
        longest="visible" if visible else "length",
    )
    penalty.attach(model)
    thresholds = np.linspace(0.2, 0.7, LAYERS * HEADS).reshape(LAYERS, HEADS)
    assert len(penalty.threshold_bias) == (1 if released else LAYERS)
    for parameter, values in zip(penalty.threshold_bias, thresholds, strict=False):
        parameter.data = torch.tensor(values, dtype=torch.float32)
    found = penalty_of(penalty, model)
    due = expected(maps_of(model), margin=margin, thresholds=thresholds, released=released, visible=visible)
    assert due > 0
    assert float(found.detach()) == pytest.approx(0.5 * due, rel=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "high:0.7"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_and_implementation(family: str, implementation: str) -> None:
    model = tiny_model(family, attn_implementation="sdpa" if ":" in implementation else implementation)
    if ":" in implementation:
        saobp.apply(model, implementation)
    penalty = EntropyReg(1.0, margin=0.0, threshold=0.9, learned=False)
    found = penalty_of(penalty, model)
    maps = maps_of(model)
    thresholds = np.full((len(maps), HEADS), 0.9)
    assert float(found.detach()) == pytest.approx(expected(maps, margin=0.0, thresholds=thresholds), rel=1e-3)
    found.backward()
    gradient = query_key_gradient(model)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def query_key_gradient(model: PreTrainedModel) -> Tensor:
    named = [
        p.grad for _, module in attention_modules(model) for p in module.parameters() if p.grad is not None
    ]
    return torch.cat([gradient.flatten() for gradient in named])


def test_padding_beside_a_text_changes_nothing() -> None:
    model = tiny_model("bert")
    alone = {name: values[1:, : LENGTHS[1]] for name, values in BATCH.items()}
    padded = {name: values[1:] for name, values in BATCH.items()}
    for options in ({}, {"reduction": "released"}, {"longest": "visible"}):
        found = [
            penalty_of(EntropyReg(1.0, margin=0.0, threshold=0.9, **options), model, batch)
            for batch in (alone, padded)
        ]
        torch.testing.assert_close(found[0], found[1])


def test_the_gradient_is_that_of_the_formula() -> None:
    model = tiny_model("bert", attn_implementation="eager")
    penalty = EntropyReg(1.0, margin=0.0, threshold=0.9)
    penalty_of(penalty, model).backward()
    weights = [p for _, module in attention_modules(model) for p in module.query.parameters()]  # type: ignore[union-attr]
    found = [weight.grad for weight in weights]
    model.zero_grad()
    real = BATCH["attention_mask"].bool()
    total = torch.zeros(())
    for rows in model(**BATCH, output_attentions=True).attentions:
        entropy = -(rows * rows.clamp(min=1e-30).log()).sum(-1)
        means = torch.stack([entropy[text, :, real[text]].mean(-1) for text in range(2)])
        away = means - 0.9 * torch.tensor(LENGTHS).log()[:, None]
        total = total + away.mean(0).square().mean() / LAYERS
    for one, other in zip(found, torch.autograd.grad(total, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is not None for parameter in penalty.threshold_bias)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradient(family: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = tiny_model(family).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        penalty = EntropyReg(1.0, margin=0.0, threshold=0.9)
        with penalty.watch(model):
            loss = model(**BATCH, labels=BATCH["input_ids"]).loss
        (loss + penalty.penalty()).backward()
        gradients.append(query_key_gradient(model))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_reentrant_checkpointing_is_refused() -> None:
    model = tiny_model("bert").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    penalty = EntropyReg()
    with penalty.watch(model):
        model(**BATCH)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        penalty.penalty()


def test_learned_strengths_feel_the_penalty() -> None:
    model = saobp.apply(tiny_model("bert"), "high,strength=learned")
    penalty_of(EntropyReg(1.0, margin=0.0, threshold=0.9), model).backward()
    strengths = [p.grad for name, p in model.named_parameters() if "saobp" in name]
    assert strengths
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in strengths)


def test_a_few_steps_reach_the_threshold() -> None:
    model = tiny_model("bert")
    penalty = EntropyReg(1.0, margin=0.0, threshold=0.95, learned=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(15):
        loss = penalty_of(penalty, model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def test_thresholds_are_saved_and_learn() -> None:
    model = tiny_model("bert")
    penalty = EntropyReg(1.0, margin=0.0)
    penalty.attach(model)
    assert [parameter.shape for parameter in penalty.parameters()] == [(HEADS,)] * LAYERS
    optimizer = torch.optim.SGD(penalty.parameters(), lr=0.1)
    before = copy.deepcopy(penalty.state_dict())
    penalty_of(penalty, model).backward()
    optimizer.step()
    assert any(not torch.equal(before[name], values) for name, values in penalty.state_dict().items())


@pytest.mark.slow
def test_compiled_inside_the_watch_or_refused() -> None:
    model = tiny_model("bert")
    plain = penalty_of(EntropyReg(1.0, margin=0.0), model)
    compiled: Any = torch.compile(model, backend="eager")
    penalty = EntropyReg(1.0, margin=0.0)
    with penalty.watch(model):
        compiled(**BATCH)
    torch.testing.assert_close(penalty.penalty(), plain)
    torch._dynamo.reset()
    compiled(**BATCH)
    with penalty.watch(model):
        compiled(**BATCH)
    with pytest.raises(ValueError, match="rather than a form that was compiled earlier"):
        penalty.penalty()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3"}))
def test_query_and_key_weights_are_found_head_by_head(family: str) -> None:
    """At position 0, where rotary positions turn nothing, queries are the weights times the input."""
    model = tiny_model(family)
    inputs: dict[nn.Module, Tensor] = {}
    checked = []

    def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[module] = args[0] if args else kwargs["hidden_states"]

    def check(call: Any) -> None:
        query, key = query_key_weights(call.module)
        first = inputs[call.module][:, 0].detach()
        for states, weights in ((call.query, query), (call.key, key)):
            due = torch.einsum("bw,hdw->bhd", first, weights)
            due = due if states.shape[1] == HEADS else due[:, :: HEADS // states.shape[1]]
            torch.testing.assert_close(states[:, :, 0].detach(), due.detach(), rtol=1e-4, atol=1e-5)
        checked.append(call.name)

    for _, module in attention_modules(model):
        module.register_forward_pre_hook(keep, with_kwargs=True)
    with watch(model, check):
        model(input_ids=BATCH["input_ids"][:1])
    assert checked


@pytest.mark.parametrize("count", ["head", "model"])
@pytest.mark.parametrize("spread", ["frobenius", "trace"])
@pytest.mark.parametrize("scaled", [False, True])
def test_eigen_reg_is_its_formula(count: str, spread: str, scaled: bool) -> None:
    model = tiny_model("gpt2")
    penalty = EigenReg(0.5, mean_weight=3.0, spread=spread, count=count, scaled=scaled)
    penalty.attach(model)
    for place in range(LAYERS):
        penalty.get_buffer(f"mean_{place}").fill_(0.1)
    terms = []
    for _, module in attention_modules(model):
        queries, keys = (weights.detach().double().numpy() for weights in query_key_weights(module))
        for query, key in zip(queries, keys, strict=True):
            matrix = query.T @ key / (np.sqrt(WIDTH // HEADS) if scaled else 1.0)
            values = np.linalg.eigvals(matrix)
            number = WIDTH // HEADS if count == "head" else WIDTH
            mean = values.sum().real / number
            square = (values**2).sum().real if spread == "trace" else np.square(matrix).sum()
            terms.append(square / number - mean**2 + 3.0 * (mean - 0.1) ** 2)
    assert float(penalty_of(penalty, model).detach()) == pytest.approx(0.5 * np.mean(terms), rel=1e-4)


@pytest.mark.parametrize("spread", ["frobenius", "trace"])
def test_the_constrained_reading_leaves_the_trace_alone(spread: str) -> None:
    model = tiny_model("bert")
    penalty = EigenReg(1.0, reading="constrained", spread=spread)
    module = attention_modules(model)[0][1]

    def facts() -> tuple[Tensor, Tensor]:
        query, key = query_key_weights(module)
        return (query * key).sum((-2, -1)).detach(), (query.mT @ key).square().sum().detach()

    trace, size = facts()
    loss = penalty_of(penalty, model)
    if spread == "frobenius":
        squares = [
            (q.mT @ k).square().sum() for _, m in attention_modules(model) for q, k in [query_key_weights(m)]
        ]
        torch.testing.assert_close(loss, sum(squares) / (LAYERS * WIDTH))
    loss.backward()
    step = 1e-4
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= step * parameter.grad
    after, smaller = facts()
    assert (after - trace).abs().max() < 1e-4 * trace.abs().max()
    if spread == "frobenius":
        assert smaller < size


def test_eigen_reg_keeps_its_first_mean_and_saves_it() -> None:
    model = tiny_model("bert")
    penalty = EigenReg(1.0)
    penalty.attach(model)
    kept = copy.deepcopy(penalty.state_dict())
    with torch.no_grad():
        for _, module in attention_modules(model):
            module.query.weight.mul_(2.0)  # type: ignore[union-attr]
    penalty.attach(model)
    assert all(torch.equal(kept[name], values) for name, values in penalty.state_dict().items())


def test_options_in_text() -> None:
    found: Any = regularizer("entropy, weight=1e-4, reduction=released, learned=false")
    assert (found.weight, found.reduction, found.learned) == (1e-4, "released", False)


def test_refusals() -> None:
    for wrong, said in (
        (lambda: regularizer("rank"), "unknown regularizer 'rank': choose one of entropy, eigen"),
        (lambda: regularizer("entropy,weight"), "cannot read 'weight'"),
        (lambda: regularizer("eigen,margin=2"), "eigen has no option 'margin': it has weight, mean_weight"),
        (lambda: regularizer("entropy", reduction="sum"), "'paper' or 'released', not 'sum'"),
        (lambda: regularizer("entropy", longest="row"), "'length' or 'visible', not 'row'"),
        (lambda: regularizer("entropy", margin=2), "margin is a share"),
        (lambda: regularizer("eigen", spread="rank"), "'frobenius' or 'trace', not 'rank'"),
        (lambda: regularizer("eigen", weight=-1), "at least 0, not -1"),
        (lambda: regularizer("eigen,weight=much"), "weight is a number, as in weight=0.001, not 'much'"),
        (lambda: regularizer("entropy,learned=no"), "learned is true or false, not 'no'"),
        (lambda: EntropyReg().penalty(), "no attention call was seen"),
        (lambda: EigenReg().penalty(), "no model to look at"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
    strange = tiny_model("bert")
    module: Any = attention_modules(strange)[0][1]
    module.ask = module.query
    del module.query
    with pytest.raises(ValueError, match="no query and key weights under a name that saobp knows"):
        EigenReg().attach(strange)


@pytest.mark.parametrize("kind", [EntropyReg, EigenReg])
def test_a_model_of_another_shape_is_refused(kind: type[EntropyReg | EigenReg]) -> None:
    penalty = kind()
    penalty.attach(tiny_model("llama"))
    penalty.attach(tiny_model("llama"))
    for change in ({"num_attention_heads": 2, "num_key_value_heads": 2}, {"num_hidden_layers": 3}):
        with pytest.raises(ValueError, match=r"whose layers have .* heads, and this one's"):
            penalty.attach(tiny_model("llama", **change))


def test_a_forward_without_gradients_is_refused() -> None:
    model, penalty = tiny_model("bert"), EntropyReg()
    with penalty.watch(model), torch.no_grad():
        model(**tiny_batch())
    with pytest.raises(ValueError, match=r"without torch\.no_grad"):
        penalty.penalty()
