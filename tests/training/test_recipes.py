"""Recipes and models: the paper's numbers, checks, text and JSON forms."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import saobp
from saobp.lab.paper import paper_table
from saobp.sizes import PAPER_SIZES, Size
from saobp.training.architectures import build_model
from saobp.training.recipes import PretrainRecipe, fast, named_recipe, paper, parse_override, tiny, with_steps

PAPER = {
    "mini": (4, 256, 4, 1024, 11e6, 60_000, 5e-5, 3000, 0.2),
    "small": (4, 512, 8, 2048, 29e6, 150_000, 3e-4, 7500, 0.08),
    "medium": (8, 512, 8, 2048, 41e6, 245_000, 3e-4, 12_000, 0.05),
}


@pytest.mark.parametrize("size", PAPER)
def test_bert_has_the_papers_shape_and_recipe(size: str) -> None:
    layers, hidden, heads, ffn, parameters, steps, rate, warmup, strength = PAPER[size]
    with torch.device("meta"):
        model = build_model("bert", size, vocabulary=30522, length=128)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    assert (config.num_attention_heads, config.intermediate_size) == (heads, ffn)
    assert model.num_parameters() == pytest.approx(parameters, rel=0.03)
    resolved = saobp.Refinement("high").resolved(model.num_parameters()).strength
    assert resolved == pytest.approx(strength, rel=0.1)
    recipe = paper("bert", size)
    assert (recipe.steps, recipe.learning_rate, recipe.warmup_steps) == (steps, rate, warmup)
    assert recipe.dropout == config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("row", paper_table("pretraining"), ids=lambda row: row["size"])
def test_the_recipe_is_the_papers_table_field_by_field(family: str, row: dict[str, str]) -> None:
    """All that the table prints; the batch size is not in it."""
    recipe = paper(family, row["size"])
    assert {
        "size": recipe.size,
        "max_steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.schedule,
        "warmup_steps": recipe.warmup_steps,
        "seed": recipe.seed,
    } == {
        name: value if name in ("size", "lr_scheduler_type") else float(value) for name, value in row.items()
    }


def test_the_papers_sizes_are_its_table() -> None:
    assert [row["size"] for row in paper_table("pretraining")] == list(PAPER)
    for row in paper_table("models"):
        assert PAPER_SIZES[row["size"]] == Size(
            *(int(row[name]) for name in ("layers", "hidden", "heads", "ffn"))
        )


def test_gpt2_has_the_same_widths_and_depths() -> None:
    with torch.device("meta"):
        model = build_model("gpt2", "small", vocabulary=50257, length=128, dropout=0.0, multiple=64)
    config = model.config
    assert (config.n_layer, config.n_embd, config.n_head, config.n_inner) == (4, 512, 8, 2048)
    assert config.vocab_size == 50304
    assert config.eos_token_id == 50256
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0


def test_fast_is_for_one_gpu() -> None:
    mini = fast("bert", "mini")
    assert (mini.batch_size, mini.length, mini.precision) == (256, 128, "bf16")
    assert (
        mini.learning_rate
        == 1e-3
        > fast("bert", "small").learning_rate
        > fast("bert", "medium").learning_rate
    )
    assert mini.tokens == 8000 * 256 * 128
    assert mini.dropout == 0


@pytest.mark.parametrize("refinement", [None, "high:learned", "high:0.1/0.2"])
def test_recipes_survive_json(refinement: str | None) -> None:
    recipe = replace(fast("gpt2", "mini"), refinement=refinement, seed=3)  # type: ignore[arg-type]
    assert PretrainRecipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    with pytest.raises(ValueError, match="unknown recipe field colour"):
        PretrainRecipe.from_dict({**recipe.to_dict(), "colour": "red"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"dropout": 1.0}, "dropout must be from 0"),
        ({"learning_rate": float("inf")}, "learning_rate must be above 0 and finite, not inf"),
        ({"precision": "fp16"}, "precision must be fp32 or bf16"),
        ({"warmup_steps": 200}, "warmup_steps must be below the 200 steps"),
        ({"checkpoint_steps": 15}, r"checkpoint_steps must be a multiple of log_steps \(10\), not 15"),
        ({"stop_after": 201}, "stop_after must be from 1 to 200, not 201"),
        ({"stop_after": 0}, "stop_after must be from 1 to 200, not 0"),
        ({"size": "huge"}, "unknown size 'huge'"),
        ({"family": "t5"}, "unknown family 't5'"),
        ({"refinement": "hihg"}, "unknown factor"),
        ({"regularizer": "spectral"}, "spectral"),
        ({"regularizer": "entropy,height=3"}, "entropy has no option 'height'"),
    ],
)
def test_bad_fields_get_one_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(tiny("bert"), **change)


def test_names_and_overrides() -> None:
    assert named_recipe("tiny", "bert", "tiny") == tiny("bert")
    with pytest.raises(ValueError, match="unknown recipe 'slow'"):
        named_recipe("slow", "bert", "mini")
    with pytest.raises(ValueError, match="paper has no size 'tiny'"):
        paper("bert", "tiny")
    assert parse_override("learning_rate=5e-4") == ("learning_rate", 5e-4)
    assert parse_override("compiled=no") == ("compiled", False)
    assert parse_override("betas=0.9,0.95") == ("betas", (0.9, 0.95))
    assert parse_override("stop_after=300") == ("stop_after", 300)
    assert parse_override("stop_after=none") == ("stop_after", None)
    assert parse_override("schedule=cosine") == ("schedule", "cosine")
    for wrong in ("learning_rate", "speed=3", "steps=many", "compiled=perhaps", "betas=1"):
        with pytest.raises(ValueError, match=wrong.split("=")[0]):
            parse_override(wrong)


@pytest.mark.parametrize("steps", [1, 7, 100, 8000, 100_000])
def test_steps_scale_what_depends_on_them(steps: int) -> None:
    recipe = with_steps(fast("bert", "mini"), steps)
    assert recipe.steps == steps
    assert recipe.warmup_steps == steps // 20
    assert recipe.log_steps <= max(1, steps // 20)
    if steps == 8000:
        assert recipe == fast("bert", "mini")
    assert fast("gpt2", "mini").tokens * 2 == fast("bert", "mini").tokens, "it predicts every token"
