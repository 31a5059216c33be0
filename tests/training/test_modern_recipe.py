"""The recipe modern: ModernBERT and Llama, a falling masked share, averaged weights and Muon."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, TrainerCallback

from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import forked, small_recipe, small_tokenizer, train_small
from saobp.training import trainer
from saobp.training.architectures import build_model
from saobp.training.averaging import WeightAverage
from saobp.training.batches import BatchShard
from saobp.training.muon import BatchedMuon, MuonWithAdamW, Parts, hidden_matrices
from saobp.training.objectives import HELD_OUT_SHARE, MaskedLM, row_seeds
from saobp.training.recipes import named_recipe, parse_override
from saobp.transformers.apply import apply

ALL = {
    "family": "modernbert",
    "masked_share": 0.5,
    "masked_share_end": 0.2,
    "averaged_share": 0.5,
    "optimizer": "muon",
    "refinement": "high:learned+gate",
}


class Snapshots(TrainerCallback):
    """The weights after every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        self.weights.append({name: one.detach().clone() for name, one in model.named_parameters()})


@pytest.mark.parametrize("family", ["modernbert", "llama"])
@pytest.mark.parametrize("size", ["mini", "small", "medium"])
def test_modern_has_every_size_of_both_families(family: str, size: str) -> None:
    recipe = named_recipe("modern", family, size)
    assert recipe.name == "modern"
    assert recipe.dropout == 0
    masked = (0.30, 0.15) if family == "modernbert" else (0.15, None)  # decoders have no masks
    assert (recipe.masked_share, recipe.masked_share_end) == masked


def test_modern_is_not_for_older_families() -> None:
    with pytest.raises(ValueError, match="for modernbert and llama, not bert"):
        named_recipe("modern", "bert", "mini")


def test_llama_has_the_papers_shape_and_keeps_the_scale_of_what_it_multiplies() -> None:
    model = build_model("llama", "small", vocabulary=1000, length=128, multiple=64, seed=0)
    assert isinstance(model, LlamaForCausalLM)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (4, 512, 8)
    assert config.vocab_size == 1024
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx((8 * 2048) ** -0.5, rel=0.02)


@pytest.mark.parametrize("family", ["modernbert", "llama"])
def test_every_choice_together_learns(family: str, tmp_path: Path) -> None:
    steps = {"steps": 100, "evaluation_steps": 100, "checkpoint_steps": 100}
    result = train_small(small_recipe(**{**ALL, **steps, "family": family, "batch_size": 32}), tmp_path)
    assert result.eval_loss is not None
    assert result.eval_loss < math.log(len(small_tokenizer(family))) - 0.1


def test_a_falling_share_hides_fewer_tokens_at_every_step() -> None:
    recipe = small_recipe(masked_share=0.5, masked_share_end=0.25, steps=12)
    share = BatchShard(recipe, 0, 1, torch.device("cpu"))

    class Zeros:
        def __len__(self) -> int:
            return 100

        def at(self, numbers: Any) -> dict[str, Tensor]:
            return {"input_ids": torch.zeros(len(numbers), 16, dtype=torch.long)}

    counts = share.steps(Zeros(), recipe.seed, 0, 13)["counts"]
    assert counts.shape == (13, 1, 4)
    assert counts[0].unique().tolist() == [8]
    assert counts[12].unique().tolist() == [4]
    assert torch.equal(counts.flatten(1)[:, 0].sort(descending=True).values, counts.flatten(1)[:, 0])
    assert "counts" not in share.held_out(Zeros(), 0, 0, 4)


def test_counts_hide_and_predict_the_first_places_alone() -> None:
    objective = MaskedLM(vocabulary=60, mask=4, special=(0, 1, 2, 3, 4), share=0.5)
    ids = torch.randint(5, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    seeds = torch.from_numpy(row_seeds(0, 0, range(3)))
    full, places, _ = objective.hide(ids, seeds)
    shown, same, targets = objective.hide(ids, seeds, torch.tensor([8, 2, 1]))
    assert torch.equal(places, same)
    for row, count in enumerate([8, 2, 1]):
        hidden = places[row, :count]
        assert torch.equal(shown[row, hidden], full[row, hidden])
        others = torch.ones(16, dtype=torch.bool)
        others[hidden] = False
        assert torch.equal(shown[row, others], ids[row, others])
    model = build_model("modernbert", "tiny", vocabulary=60, length=16, dropout=0.0, seed=0).train()
    counts = torch.tensor([2, 2, 2])
    found = objective(model, ids, seeds, "fp32", counts)
    shown, places, targets = objective.hide(ids, seeds, counts)
    losses = [
        -model(shown).logits[row, places[row, n]].log_softmax(-1)[targets[row, n]]
        for row in range(3)
        for n in range(2)
    ]
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_held_out_losses_hide_the_same_share_whatever_the_recipe() -> None:
    model = build_model("modernbert", "tiny", vocabulary=60, length=20, dropout=0.0, seed=0).eval()
    ids = torch.randint(5, 60, (3, 20), generator=torch.Generator().manual_seed(0))
    seeds = torch.from_numpy(row_seeds(0, 0, range(3)))
    losses = {
        objective(model, ids, seeds, "fp32").item()
        for objective in (MaskedLM(60, 4, (0, 1, 2, 3, 4), share) for share in (HELD_OUT_SHARE, 0.3, 0.5))
    }
    assert len(losses) == 1


def test_the_model_is_the_mean_of_the_last_weights(tmp_path: Path) -> None:
    seen = Snapshots()
    result = train_small(small_recipe(averaged_share=0.25), tmp_path, callbacks=[seen])
    assert len(seen.weights) == 12
    saved = load_file(tmp_path / "model" / "model.safetensors")
    latest = seen.weights[-1]
    for name, value in saved.items():
        mean = torch.stack([weights[name] for weights in seen.weights[-3:]]).mean(0)
        torch.testing.assert_close(value, mean, msg=name)
    assert any(not torch.equal(saved[name], latest[name]) for name in saved)
    evaluated = [line["eval_loss"] for line in RunFolder(tmp_path).metrics() if "eval_loss" in line]
    assert result.eval_loss == evaluated[-1]


def test_evaluating_the_mean_leaves_training_as_it_is(tmp_path: Path) -> None:
    often, seldom = Snapshots(), Snapshots()
    train_small(small_recipe(averaged_share=1.0, evaluation_steps=1), tmp_path / "often", callbacks=[often])
    train_small(
        small_recipe(averaged_share=1.0, evaluation_steps=12), tmp_path / "seldom", callbacks=[seldom]
    )
    for name, value in often.weights[-1].items():
        assert torch.equal(value, seldom.weights[-1][name])


def test_a_mean_is_written_where_the_weights_are() -> None:
    """A recorded step goes on reading the same memory."""
    weight = nn.Parameter(torch.zeros(3))
    place, average = weight.data_ptr(), WeightAverage([weight], first=2)
    for step in (1, 2, 3):
        weight.data.fill_(step)
        average.add(step)
    with average.in_place():
        assert weight.tolist() == [2.5] * 3
        assert weight.data_ptr() == place
    assert weight.tolist() == [3.0] * 3
    average.settle()
    assert weight.tolist() == [2.5] * 3
    assert weight.data_ptr() == place


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(tmp_path: Path, monkeypatch: Any) -> None:
    made = []

    class Spy(MuonWithAdamW):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(trainer, "MuonWithAdamW", Spy)
    train_small(small_recipe(**ALL, learning_rate=1e-3, muon_rate=2.0, schedule="constant"), tmp_path)
    (optimizer,) = made
    adamw, muon = optimizer.parts["adamw"], optimizer.parts["muon"]
    shapes = sorted(tuple(p.shape) for group in muon.param_groups for p in group["params"])
    assert shapes == [(16, 16), (16, 32), (48, 16), (64, 16)]
    others = [p for group in adamw.param_groups for p in group["params"]]
    assert {p.ndim for p in others} == {1, 2}
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 1e-2, 2e-3]


def test_matrices_of_one_shape_together_move_as_by_muon_of_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(48, 16), (16, 16), (48, 16), (16, 64), (16, 16), (16, 64)]
    start = [torch.randn(shape, generator=draw) for shape in shapes]
    mine, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    batched = BatchedMuon(dict.fromkeys(mine, Parts()), 0.02, 0.1)
    single = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
        mine[1].grad = theirs[1].grad = None if step == 2 else mine[1].grad  # a matrix without a gradient
        batched.step()
        single.step()
    for before, one, other in zip(start, mine, theirs, strict=True):
        moved = (other - before).norm()
        assert (one - other).norm() < 0.01 * moved  # rounding of bfloat16
        assert moved > 0.5 * 0.2 * 0.02 * one.numel() ** 0.5


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_fused_matrix_move_as_matrices_of_their_own(dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(16, 24, generator=draw) for _ in range(3)]
    fused = nn.Parameter(torch.cat(start, dim))
    apart = [nn.Parameter(one.clone()) for one in start]
    mine = BatchedMuon({fused: Parts(3, dim)}, 0.02, 0.1)
    theirs = torch.optim.Muon(apart, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        # queries and keys have small gradients at first: together the values would drown them
        gradients = [scale * torch.randn(16, 24, generator=draw) for scale in (0.01, 0.1, 1.0)]
        fused.grad = torch.cat(gradients, dim)
        for one, gradient in zip(apart, gradients, strict=True):
            one.grad = gradient
        mine.step()
        theirs.step()
    for before, one, other in zip(start, fused.chunk(3, dim), apart, strict=True):
        assert (one - other).norm() < 0.01 * (other - before).norm()  # rounding of bfloat16


def test_muon_computes_gradients_by_a_closure_and_waits_where_there_are_none() -> None:
    matrices = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    muon = BatchedMuon(dict.fromkeys(matrices, Parts()), 0.02, 0.0)
    muon.step()
    assert all(bool((matrix == 1).all()) for matrix in matrices)

    def closure() -> float:
        loss = sum(matrix.square().sum() for matrix in matrices)
        loss.backward()
        return loss.item()

    assert muon.step(closure) == 48.0
    assert all(bool((matrix < 1).all()) for matrix in matrices)


@pytest.mark.parametrize("method", ["high:learned+temperature", "high:learned+qk-norm", "temperature"])
def test_numbers_per_head_keep_their_own_rate_beside_muon(method: str, tmp_path: Path) -> None:
    seen: list[dict[int, tuple[float, float]]] = []
    names: dict[int, str] = {}

    class Groups(TrainerCallback):
        def on_step_end(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
            names.update({id(one): name for name, one in model.named_parameters()})
            groups = optimizer.param_groups
            seen.append({id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]})

    recipe = small_recipe(
        family="modernbert", refinement=method, optimizer="muon", muon_rate=2.0, weight_decay=0.1
    )
    train_small(replace(recipe, learning_rate=1e-3, strength_rate=10.0), tmp_path, callbacks=[Groups()])
    assert {len(groups) for groups in seen} == {len(names)}  # every parameter is in one group
    for step, groups in enumerate(seen, 1):
        by_name = {names[number]: group for number, group in groups.items()}
        share = step / 2 if step <= 2 else (12 - step) / 10  # warm-up, then linear, of the next step
        for name, (rate, decay) in by_name.items():
            own = name.endswith(("strength_bias", "head_bias"))
            matrix = name.endswith(("Wqkv.weight", "Wo.weight", "Wi.weight"))
            assert rate == pytest.approx((1e-2 if own else 2e-3 if matrix else 1e-3) * share), name
            assert decay == (0.1 if matrix or name.endswith(("tok_embeddings.weight", "dense.weight")) else 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_strengths_begin_to_learn_after_their_delay(optimizer: str, tmp_path: Path) -> None:
    seen, changes = Snapshots(), {"refinement": "high:learned+temperature", "strength_delay": 0.5}
    train_small(small_recipe(**changes, family="modernbert", optimizer=optimizer), tmp_path, callbacks=[seen])
    numbers = [name for name in seen.weights[0] if name.endswith(("strength_bias", "head_bias"))]
    assert len(numbers) == 2
    for name in numbers:
        moved = [bool(weights[name].any()) for weights in seen.weights]
        assert moved == [False] * 6 + [True] * 6


@pytest.mark.parametrize("changes", [{"optimizer": "muon"}, {"averaged_share": 0.5}])
def test_a_divided_model_has_no_whole_matrices(changes: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="which FSDP divides"):
        train_small(small_recipe(**changes), tmp_path)


def test_hidden_matrices_are_found_in_every_family() -> None:
    for family, per_layer in (("bert", 6), ("gpt2", 4), ("modernbert", 4), ("llama", 7)):
        model = apply(build_model(family, "tiny", vocabulary=60, length=16), "high:learned+gate")
        assert len(hidden_matrices(model)) == 2 * per_layer, family


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("bert", {}),
        ("gpt2", {"c_attn": (3, 1)}),
        ("modernbert", {"Wqkv": (3, 0), "Wi": (2, 0)}),
        ("llama", {}),
    ],
)
def test_muon_knows_what_matrices_a_layer_holds(family: str, fused: dict[str, Any]) -> None:
    model = build_model(family, "tiny", vocabulary=60, length=16)
    names = {parameter: name.split(".")[-2] for name, parameter in model.named_parameters()}
    found = {names[one]: tuple(parts) for one, parts in hidden_matrices(model).items() if parts.number > 1}
    assert found == fused


def test_a_killed_run_goes_on_with_the_same_means_and_momenta(tmp_path: Path) -> None:
    recipe = small_recipe(**ALL)
    straight, run = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "killed")
    train_small(recipe, straight.path)
    for step in (4, 8, 10):
        process = forked(lambda step=step: killed_after(recipe, run.path, step))  # type: ignore[misc]
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert run.last_good_checkpoint() == step
    train_small(recipe, run.path, resume=True)
    weights = [load_file(one.model / "model.safetensors") for one in (straight, run)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def killed_after(recipe: Any, folder: Path, step: int) -> None:
    seal = trainer.seal

    def deadly(*args: Any) -> None:
        seal(*args)
        if str(args[1]).endswith(str(step)):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.seal = deadly
    train_small(recipe, folder, resume=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("masked_share_end=0.15", 0.15), ("masked_share_end=none", None), ("optimizer=muon", "muon")],
)
def test_new_fields_are_set_from_the_command_line(text: str, value: Any) -> None:
    assert parse_override(text)[1] == value


@pytest.mark.parametrize(
    "changes", [{"masked_share_end": 0.5}, {"optimizer": "sgd"}, {"averaged_share": 1.5}, {"muon_rate": -1.0}]
)
def test_wrong_values_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        small_recipe(**changes)
