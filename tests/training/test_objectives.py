"""Objectives: exact shares, masks that depend on row seeds alone, the head at chosen places, one graph."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import saobp
from saobp.kernels.calls import Path
from saobp.sizes import Size
from saobp.testing.tiny_training import small_tokenizer
from saobp.training import architectures
from saobp.training.architectures import build_model
from saobp.training.compiled_step import loss_as_forward
from saobp.training.objectives import (
    CausalLM,
    MaskedLM,
    hashed,
    head_of,
    objective_of,
    row_seeds,
)

SPECIAL = (0, 1, 2, 3, 4)
OBJECTIVE = MaskedLM(1000, 4, SPECIAL)


@pytest.fixture(autouse=True)
def small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.SIZES, "test", Size(2, 16, 2, 32))


def small(family: str, refinement: str | None = None, **options):  # type: ignore[no-untyped-def]
    model = build_model(family, "test", vocabulary=100, length=16, seed=1, **options)
    return model if refinement is None else saobp.apply(model, refinement)


def batch(rows: int = 6, length: int = 16, vocabulary: int = 100):  # type: ignore[no-untyped-def]
    ids = torch.randint(5, vocabulary, (rows, length), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 2
    return ids, torch.from_numpy(row_seeds(3, 7, range(rows)))


@given(st.integers(1, 5), st.integers(4, 40), st.integers(0, 2**40), st.integers(0, 10**6))
def test_exactly_the_share_is_predicted_and_nothing_special(
    rows: int, length: int, seed: int, step: int
) -> None:
    ids = torch.randint(5, 1000, (rows, length))
    ids[:, 0] = 2
    shown, places, targets = OBJECTIVE.hide(ids, torch.from_numpy(row_seeds(seed, step, range(rows))))
    assert places.shape == (rows, max(1, round(0.15 * length)))
    assert all(len(set(row)) == len(row) and 0 not in row for row in places.tolist())
    assert torch.equal(targets, ids.gather(1, places))
    elsewhere = torch.ones_like(ids, dtype=torch.bool).scatter(1, places, False)
    assert torch.equal(shown[elsewhere], ids[elsewhere])


def test_eighty_ten_ten_and_every_place_alike() -> None:
    ids = torch.randint(5, 1000, (4000, 40))
    shown, places, targets = OBJECTIVE.hide(ids, torch.from_numpy(row_seeds(0, 0, range(4000))))
    now = shown.gather(1, places)
    masked, kept = now == 4, now == targets
    assert masked.float().mean() == pytest.approx(0.8, abs=0.01)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.01)
    other = now[~masked & ~kept]
    assert other.float().mean() == pytest.approx(500, abs=15)
    counts = torch.bincount(places.flatten(), minlength=40) / 4000
    assert counts.sub(0.15).abs().max() < 0.03


def test_a_row_is_masked_alike_wherever_it_is_computed() -> None:
    ids, seeds = batch()
    whole = OBJECTIVE.hide(ids, seeds)
    for rows in (slice(0, 3), slice(3, 6)):
        for part, all_of_it in zip(OBJECTIVE.hide(ids[rows], seeds[rows]), whole, strict=True):
            assert torch.equal(part, all_of_it[rows])
    other = OBJECTIVE.hide(ids, torch.from_numpy(row_seeds(3, 8, range(6))))
    assert not torch.equal(other[1], whole[1])


def test_numbers_are_mixed_well_and_alike_in_both_libraries() -> None:
    numbers = np.arange(10_000, dtype=np.int64)
    mixed = hashed(numbers)
    assert np.array_equal(hashed(torch.from_numpy(numbers)).numpy(), mixed)
    assert len(set(mixed.tolist())) == 10_000
    assert mixed.min() >= 0
    assert mixed.max() < 2**32
    flipped = np.unpackbits((hashed(numbers ^ 1) ^ mixed).astype(np.uint32).view(np.uint8))
    assert flipped.mean() == pytest.approx(0.5, abs=0.01)


def test_the_masked_loss_is_that_of_the_whole_model_at_those_places() -> None:
    model = small("bert").eval()
    ids, seeds = batch()
    objective = MaskedLM(100, 4, SPECIAL)
    shown, places, targets = objective.hide(ids, seeds)
    labels = torch.full_like(ids, -100).scatter(1, places, targets)
    expected = model(input_ids=shown, labels=labels).loss
    torch.testing.assert_close(objective(model, ids, seeds, "fp32"), expected)


def test_the_causal_loss_is_the_models_own() -> None:
    model = small("gpt2").eval()
    ids, seeds = batch()
    torch.testing.assert_close(CausalLM()(model, ids, seeds, "fp32"), model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_bfloat16_copies_give_gradients_near_those_of_float32(family: str) -> None:
    model = small(family, "high:learned", dropout=0.0)
    ids, seeds = batch()
    objective = MaskedLM(100, 4, SPECIAL) if family == "bert" else CausalLM()
    found = {}
    for precision in ("fp32", "bf16"):
        model.zero_grad()
        loss = objective(model, ids, seeds, precision)
        assert loss.dtype == torch.float32
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        found[precision] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.cosine_similarity(found["fp32"], found["bf16"], 0) > 0.999


@pytest.mark.parametrize(
    ("family", "refinement", "precision"),
    [("bert", "high:0.2", "fp32"), ("bert", "high:learned", "bf16"), ("gpt2", None, "bf16")],
)
def test_a_step_is_one_graph(family: str, refinement: str | None, precision: str) -> None:
    """Forward and backward: losses and gradients are those of the step as it is written."""
    model = small(family, refinement, dropout=0.0)
    ids, seeds = batch()
    objective = MaskedLM(100, 4, SPECIAL) if family == "bert" else CausalLM()
    torch._dynamo.reset()
    whole = torch.compile(
        lambda ids, seeds: objective(model, ids, seeds, precision),
        backend="aot_eager",
        fullgraph=True,
        dynamic=False,
    )
    losses, gradients = [], []
    for step in (whole, lambda ids, seeds: objective(model, ids, seeds, precision)):
        model.zero_grad()
        losses.append(step(ids, seeds))
        losses[-1].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*losses)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_fused_operators_stay_in_the_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.functional.select_path", lambda *_, **__: Path("fused", None))
    model = small("bert", "high:0.2", dropout=0.0)
    ids, seeds = batch()
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph, _):  # type: ignore[no-untyped-def]
        graphs.append(str(graph.code))
        return lambda *_: (torch.zeros(()),)

    whole = torch.compile(lambda i, s: OBJECTIVE(model, i % 100, s, "bf16"), backend=backend, fullgraph=True)
    whole(ids, seeds)
    assert len(graphs) == 1
    assert graphs[0].count("saobp.short_refined_attention") == 2


def test_forward_is_the_loss_only_meanwhile() -> None:
    model = small("bert", dropout=0.0)
    ids, seeds = batch()
    objective = MaskedLM(100, 4, SPECIAL)
    with loss_as_forward(model, objective):
        assert model(input_ids=ids, seeds=seeds).shape == ()
    assert model(input_ids=ids).logits.shape == (6, 16, 100)


def test_many_models_in_one_process_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    original, compiled = torch.compile, []

    def backend(graph, _):  # type: ignore[no-untyped-def]
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **o: original(function, backend=backend, **o))
    ids, seeds = batch()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for vocabulary in (100, 110, 120):
            other = build_model("gpt2", "test", vocabulary=vocabulary, length=16)
            with loss_as_forward(other, CausalLM(), compiled=True) as model:
                model.eval()(ids, seeds)
    assert len(compiled) == 3


def test_a_regularizer_adds_its_penalty_while_training() -> None:
    class Constant(torch.nn.Module):
        watched = 0

        def attach(self, _: torch.nn.Module) -> None:
            pass

        def watch(self, _: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
            self.watched += 1
            return contextlib.nullcontext()

        def penalty(self) -> torch.Tensor:
            return torch.tensor(5.0)

    model = small("bert", dropout=0.0)
    ids, seeds = batch()
    objective = MaskedLM(100, 4, SPECIAL)
    plain = objective(model, ids, seeds, "fp32")
    given = Constant()
    with loss_as_forward(model, objective, regularizer=given):
        torch.testing.assert_close(model.train()(ids, seeds), plain + 5)
        torch.testing.assert_close(model.eval()(ids, seeds), plain)
    assert given.watched == 1


def test_objectives_fit_tokenizers_and_models() -> None:
    tokenizer = small_tokenizer()
    found = objective_of("bert", tokenizer, 0.15)
    assert isinstance(found, MaskedLM)
    assert found.mask == tokenizer.mask_token_id
    assert set(found.special) == {tokenizer.convert_tokens_to_ids(t) for t in tokenizer.all_special_tokens}
    with pytest.raises(ValueError, match="mask token"):
        MaskedLM.of(small_tokenizer("gpt2"))
    with pytest.raises(ValueError, match="no head named cls or lm_head"):
        head_of(small("bert").bert)
