"""A whole run in miniature: what it writes, how it is resumed by hand, what its parts do."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import saobp
from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import RandomRows, small_recipe, small_tokenizer, train_small
from saobp.training import batches
from saobp.training import pretrain as pretraining
from saobp.training.batches import TOGETHER, BatchShard, TrainingStream, held_out_batches
from saobp.training.objectives import row_seeds
from saobp.training.recipes import PretrainRecipe
from saobp.training.trainer import PretrainTrainer, arguments

KEYS = {"step", "tokens", "seconds", "loss", "grad_norm", "learning_rate"}


def test_a_run_leaves_everything_it_should(tmp_path: Path) -> None:
    recipe = small_recipe(refinement="high:learned", steps=8)
    result = train_small(recipe, tmp_path)
    run = RunFolder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "recipe.json", "record.json", "metrics.jsonl", "health.jsonl", "result.json", "model",
    }  # fmt: skip
    assert run.recipe["refinement"]["strength"] == "learned"
    assert run.record["status"] == "finished"
    training = [line for line in run.metrics() if "loss" in line]
    held_out = [line for line in run.metrics() if "eval_loss" in line]
    assert [line["step"] for line in training] == list(range(1, 9))
    assert all(set(line) >= KEYS for line in training)
    assert training[-1]["tokens"] == 8 * 4 * 16 == result.tokens
    assert [set(line) for line in held_out] == [{"step", "eval_loss", "eval_perplexity"}] * 2
    assert result.eval_perplexity == pytest.approx(math.exp(held_out[-1]["eval_loss"]))
    health = run.health()
    assert [line["step"] for line in health] == [4, 8]
    assert health[0]["layers"] == ["bert.encoder.layer.0.attention.self"]
    assert set(health[0]["statistics"]) == {
        "gtd",
        "indirect_entropy",
        "attention_entropy",
        "sink_mass",
    }
    assert np.shape(health[0]["statistics"]["gtd"]) == (1, 2)
    assert health[-1]["strengths"] == result.strengths
    assert np.all(np.array(result.strengths) != 0)
    assert run.result["loss"] == result.loss
    loaded = saobp.load(run.model, AutoModelForMaskedLM)
    assert loaded.config.saobp["strength"] == "learned"
    assert len(AutoTokenizer.from_pretrained(run.model)) == len(small_tokenizer())


def test_a_run_can_stop_early_on_the_schedule_of_a_longer_one(tmp_path: Path) -> None:
    whole = small_recipe(steps=8)
    train_small(whole, tmp_path / "whole")
    result = train_small(replace(whole, stop_after=5), tmp_path / "part")
    part, lines = RunFolder(tmp_path / "part"), RunFolder(tmp_path / "whole").metrics()
    assert (result.steps, result.tokens) == (5, 5 * 4 * 16)
    assert (part.recipe["steps"], part.recipe["stop_after"]) == (8, 5)
    assert part.record["status"] == "finished"
    assert part.model.is_dir()
    kept = ("step", "loss", "learning_rate")
    same = [[line[name] for name in kept] for line in part.metrics() if "loss" in line]
    assert same == [[line[name] for name in kept] for line in lines if "loss" in line][:5]
    assert part.metrics()[-1]["step"] == 5
    short = train_small(replace(whole, stop_after=3, log_steps=4, checkpoint_steps=4), tmp_path / "short")
    assert math.isfinite(short.loss)
    assert "eval_loss" in part.metrics()[-1], "the held-out loss of the last step"


def test_a_decoder_learns(tmp_path: Path) -> None:
    recipe = small_recipe(family="gpt2", steps=60, batch_size=16, learning_rate=2e-2, checkpoint_steps=60)
    result = train_small(recipe, tmp_path)
    losses = [line["loss"] for line in RunFolder(tmp_path).metrics() if "loss" in line]
    assert result.loss < losses[0] - 1
    assert RunFolder(tmp_path).health()[0]["strengths"] is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "gpt2"


def test_tensorboard_gets_losses_and_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    train_small(small_recipe(steps=4), tmp_path / "run", report_to="tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = next(iter(tmp_path.rglob("events.out.*")))
    events = EventAccumulator(str(written.parent)).Reload()
    tags = set(events.Tags()["scalars"])
    assert any(tag.endswith("loss") for tag in tags)
    assert any("health/gtd" in tag for tag in tags)


def test_accumulation_changes_memory_and_not_losses(tmp_path: Path) -> None:
    for parts in (1, 2):
        train_small(small_recipe(steps=4, accumulation=parts), tmp_path / str(parts))
    one, two = (
        [line["loss"] for line in RunFolder(tmp_path / part).metrics() if "loss" in line] for part in "12"
    )
    assert one == pytest.approx(two, rel=1e-5)


def trainer_for(recipe: Any, folder: Path) -> PretrainTrainer:
    tokenizer = small_tokenizer(recipe.family)
    rows = RandomRows(20, recipe.length, len(tokenizer))
    return PretrainTrainer(
        pretraining.new_model(recipe, tokenizer),
        arguments(recipe, folder, "none"),
        recipe,
        RunFolder(folder),
        train=rows,
        validation=rows,
        callbacks=[],
        notify=print,
    )


def test_strengths_have_a_group_of_their_own(tmp_path: Path) -> None:
    recipe = small_recipe(refinement="high:learned", weight_decay=0.1, learning_rate=1e-3, strength_rate=7.0)
    trainer = trainer_for(recipe, tmp_path)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = [
        ({names[id(p)] for p in group["params"]}, group["weight_decay"], group["lr"])
        for group in trainer.create_optimizer().param_groups
    ]
    assert len(groups) == 3
    assert groups[0][1:] == (0.1, 1e-3)
    assert groups[1][1:] == (0.0, 1e-3)
    assert all("bias" in name or "LayerNorm" in name for name in groups[1][0])
    assert groups[2] == ({"bert.encoder.layer.0.attention.self.saobp.strength_bias"}, 0.0, 7e-3)
    assert set.union(*(group[0] for group in groups)) == set(names.values())


def test_nothing_in_a_step_asks_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two log lines no number is read from a tensor: on a GPU each such read would wait."""
    asked: list[str] = []
    for name in ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
            import traceback

            caller = traceback.extract_stack(limit=3)[-2].filename
            # On a CPU alone, the optimiser counts steps, and factors look whether a strength is weak.
            if not any(part in caller for part in ("optim", "propagation/factors")):
                asked.append(f"{name} from {caller}")
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)
    step = PretrainTrainer.training_step

    def counted(*args: Any) -> torch.Tensor:
        asked.append("step")
        return step(*args)

    monkeypatch.setattr(PretrainTrainer, "training_step", counted)
    recipe = small_recipe(log_steps=10, evaluation_steps=10, checkpoint_steps=20, evaluation_rows=0)
    train_small(replace(recipe, steps=9, refinement=saobp.Refinement("high", "learned")), tmp_path)
    assert asked[:9] == ["step"] * 9
    assert len(asked) <= 12, "the loss and the strengths at the end"


def test_batches_are_gathered_some_steps_at_once_and_pass_on_what_went_wrong() -> None:
    class Failing(RandomRows):
        def at(self, numbers: Any) -> Any:
            asked.append(len(numbers))
            if numbers[0] >= TOGETHER * recipe.batch_size:
                raise OSError("the disk has gone")
            return super().at(numbers)

    asked: list[int] = []
    recipe = small_recipe()
    share = BatchShard(recipe, 0, 1, torch.device("cpu"))
    stream = iter(TrainingStream(Failing(10, recipe.length, 60), share, lambda: 0))
    assert len([next(stream) for _ in range(TOGETHER)]) == TOGETHER
    assert asked == [TOGETHER * recipe.batch_size]
    with pytest.raises(OSError, match="gone"):
        next(stream)


def test_the_stream_starts_anywhere_and_never_ends() -> None:
    recipe = small_recipe(accumulation=2)
    rows = RandomRows(10, recipe.length, 60)
    share = BatchShard(recipe, 0, 1, torch.device("cpu"))
    parts = 2 * (TOGETHER + 5)
    first = list(itertools.islice(TrainingStream(rows, share, lambda: 0), parts))
    later = list(itertools.islice(TrainingStream(rows, share, lambda: 3), parts - 6))
    for mine, theirs in zip(later, first[6:], strict=True):
        assert torch.equal(mine["input_ids"], theirs["input_ids"])
        assert torch.equal(mine["seeds"], theirs["seeds"])
    seen = torch.cat([one["input_ids"] for one in first])
    assert torch.equal(seen, rows.at(np.arange(len(seen)))["input_ids"])
    assert len({int(seed) for one in first for seed in one["seeds"]}) == len(seen)


@pytest.mark.parametrize("processes", [1, 2])
def test_held_out_batches_are_shared_and_fit_little_text(processes: int) -> None:
    recipe = small_recipe(batch_size=8, evaluation_rows=20)
    shares = [BatchShard(recipe, rank, processes, torch.device("cpu")) for rank in range(processes)]
    many, few = RandomRows(50, recipe.length, 60), RandomRows(5, recipe.length, 60)
    found = [held_out_batches(many, share) for share in shares]
    assert [[len(one["seeds"]) for one in own] for own in found] == [[16 // processes]] * processes, "joined"
    assert (
        sum(len(held_out_batches(few, share)[0]["seeds"]) for share in shares) == 5 // processes * processes
    )
    one = held_out_batches(RandomRows(1, recipe.length, 60), shares[0])
    assert len(one) == (1 if processes == 1 else 0)


def held_out_seeds(recipe: PretrainRecipe) -> list[int]:
    rows = RandomRows(512, recipe.length, 60)
    batch = batches.joined(held_out_batches(rows, BatchShard(recipe, 0, 1, torch.device("cpu"))))
    assert torch.equal(batch["input_ids"], rows.at(np.arange(512))["input_ids"])
    return batch["seeds"].tolist()


def seeds_by_batches_of(size: int) -> list[int]:
    steps = [row_seeds(batches.HELD_OUT_SEED, step, range(size)) for step in range(512 // size)]
    return np.concatenate(steps).tolist()


@pytest.mark.parametrize(("size", "accumulation"), [(256, 1), (128, 1), (64, 2), (512, 1)])
def test_held_out_rows_are_masked_alike_whatever_the_batch(size: int, accumulation: int) -> None:
    """Losses of recipes with other batches compare, and with those of recorded runs, of 256 rows a step."""
    recipe = small_recipe(
        batch_size=size, accumulation=accumulation, evaluation_rows=512, masked_share_end=0.1, length=128
    )
    assert held_out_seeds(recipe) == seeds_by_batches_of(256)


def test_held_out_rows_are_masked_as_in_recorded_runs_of_other_batches() -> None:
    longer = small_recipe(batch_size=64, length=512, evaluation_rows=512)
    assert held_out_seeds(longer) == seeds_by_batches_of(64)
    printed = replace(small_recipe(batch_size=32, length=128, evaluation_rows=512), name="paper")
    assert held_out_seeds(printed) == seeds_by_batches_of(32)


def test_small_held_out_batches_are_joined_to_batches_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(batch_size=4, evaluation_rows=6 * 4)
    rows, share = RandomRows(50, recipe.length, 60), BatchShard(recipe, 0, 1, torch.device("cpu"))
    found = {}
    for most in (4, 19, 1000):
        monkeypatch.setattr(batches, "HELD_OUT_ROWS", most)
        found[most] = held_out_batches(rows, share)
    assert [[len(one["seeds"]) for one in own] for own in found.values()] == [[4] * 6, [12] * 2, [24]]
    for own in found.values():
        for name in ("input_ids", "seeds"):
            assert torch.equal(torch.cat([one[name] for one in own]), found[1000][0][name])


def test_a_compiled_run_agrees_with_an_eager_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **o: original(f, backend="aot_eager", fullgraph=True, **o)
    )
    for compiled in (True, False):
        torch._dynamo.reset()
        recipe = small_recipe(steps=4, compiled=compiled, refinement="high:0.2", evaluation_rows=0)
        train_small(recipe, tmp_path / str(compiled))
    one, two = ([line["loss"] for line in RunFolder(tmp_path / name).metrics()] for name in ("True", "False"))
    assert one == pytest.approx(two, rel=1e-5)


def test_products_are_as_precise_afterwards_as_before() -> None:
    """Whatever the process computes next in float32 must not be rounded like a training step."""
    before = torch.get_float32_matmul_precision()
    with pretraining.tensor_core_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with pretraining.tensor_core_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before
