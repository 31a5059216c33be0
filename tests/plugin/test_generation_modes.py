"""Every way in which Transformers generates, with refined decoders, against whole forward passes in float64.

Contrastive, group-beam, constrained and DoLa generation have left Transformers; quantised caches are refused.
Offloaded caches need the streams of a GPU, in plain models too; on a CPU they are stand-ins here.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import saobp
from saobp.testing.tiny_models import DECODERS, tiny_batch, tiny_model

pytestmark = pytest.mark.slow

NEW = 9
REFINEMENTS = ("high:0.7", "high:learned", "low,strength=0.4,steps=3,damping=0.2", "high-listing:0.5")
SINGLE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.95},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "prefilled in chunks": {"prefill_chunk_size": 3},
}
BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "beams, no cache": {"num_beams": 3, "use_cache": False},
    "sampled beams": {"num_beams": 3, "do_sample": True, "length_penalty": 0.5},
}
ASSISTED = ("prompt lookup", "assistant", "assistant of its own layers")


def refined(family: str, refinement: str) -> PreTrainedModel:
    model = saobp.apply(tiny_model(family), refinement)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("strength_bias"):
                parameter.copy_(torch.linspace(-0.8, 0.9, parameter.numel()))
    return model


def prompt(padding: int = 4) -> dict[str, Tensor]:
    return tiny_batch(3, 10, padding, side="left")


def generated(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(7)
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    return model.generate(**inputs, **lengths, **asked, **{"do_sample": False, **options})


def expected_logits(model: PreTrainedModel, sequences: Tensor, mask: Tensor) -> Tensor:
    """Logits ``[rows, new, vocabulary]`` before each new token, by one pass in float64 without a cache."""
    double = copy.deepcopy(model).double()
    rows = sequences.shape[0] // mask.shape[0]
    mask = mask.repeat_interleave(rows, 0)
    mask = torch.cat([mask, mask.new_ones(len(mask), sequences.shape[1] - mask.shape[1])], 1)[:, :-1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = double(
            sequences[:, :-1], attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    return logits[:, -NEW:]


def check_logits(model: PreTrainedModel, found: Any, mask: Tensor) -> None:
    expected = expected_logits(model, found.sequences, mask)
    torch.testing.assert_close(torch.stack(found.logits, 1).double(), expected, rtol=1e-4, atol=5e-4)


def check_greedy(found: Any) -> None:
    """Each token is the likeliest but the end, which may not come yet."""
    logits = torch.stack(found.logits, 1)
    logits[..., 2] = -torch.inf
    chosen = logits.gather(-1, found.sequences[:, -NEW:, None])[..., 0]
    assert (logits.max(-1).values - chosen).max() < 1e-3


@pytest.mark.parametrize("mode", SINGLE)
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_logits_are_those_of_whole_passes(family: str, refinement: str, mode: str) -> None:
    model, inputs = refined(family, refinement), prompt()
    found = generated(model, inputs, **SINGLE[mode])
    check_logits(model, found, inputs["attention_mask"])
    if mode in ("greedy", "no cache", "static cache", "prefilled in chunks"):
        check_greedy(found)


class NoStream(nullcontext):  # type: ignore[type-arg]
    """Stands in for a GPU's stream where there is none."""

    def wait_stream(self, stream: object) -> None:
        pass


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_an_offloaded_cache_changes_nothing(
    family: str, refinement: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "mistral" and cache == "offloaded_static":
        pytest.skip("Transformers does not offload a static cache whose layers all have a window")
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setattr("torch.Stream", NoStream)
        monkeypatch.setattr("torch.cuda.default_stream", NoStream)
    model = refined(family, refinement).to(device)
    inputs = {name: one.to(device) for name, one in prompt().items()}
    found = generated(model, inputs, cache_implementation=cache)
    assert torch.equal(found.sequences, generated(model, inputs).sequences)
    check_logits(model, found, inputs["attention_mask"])


@pytest.mark.parametrize("mode", BEAMS)
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_scores_of_beams_are_those_of_whole_passes(family: str, refinement: str, mode: str) -> None:
    model, inputs = refined(family, refinement), prompt()
    found = generated(model, inputs, **BEAMS[mode])
    logits = expected_logits(model, found.sequences, inputs["attention_mask"])
    tokens = found.sequences[:, -NEW:, None]
    scores = logits.log_softmax(-1).gather(-1, tokens).sum((1, 2)) / NEW ** BEAMS[mode].get(
        "length_penalty", 1
    )
    torch.testing.assert_close(found.sequences_scores.double(), scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("way", ASSISTED)
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_assisted_generation(family: str, refinement: str, way: str) -> None:
    model, inputs = refined(family, refinement), {name: one[:1] for name, one in prompt().items()}
    if way == "prompt lookup":
        options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    elif way == "assistant":
        options = {"assistant_model": tiny_model(family, seed=1)}
    elif family == "gpt2":
        pytest.skip("Transformers' own GPT-2 cannot leave early either: its cache has no layer to crop")
    else:
        options = {"assistant_early_exit": 1}
    found = generated(model, inputs, **options)
    plain = generated(model, inputs)
    assert torch.equal(found.sequences, plain.sequences)
    check_logits(model, found, inputs["attention_mask"])


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_generation_is_continued_from_its_cache(family: str, refinement: str) -> None:
    model, inputs = refined(family, refinement), prompt()
    once = generated(model, inputs)
    cache = DynamicCache(config=model.config)
    first = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
    )
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
    left = NEW - 4
    rest = model.generate(
        first, attention_mask=mask, past_key_values=cache, max_new_tokens=left, min_new_tokens=left,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(rest, once.sequences)


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_padding_on_the_left_changes_nothing(family: str, refinement: str) -> None:
    model, inputs = refined(family, refinement), prompt(padding=4)
    together = generated(model, inputs).sequences
    for row, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
        alone = {"input_ids": ids[mask.bool()][None], "attention_mask": torch.ones(1, int(mask.sum()))}
        assert torch.equal(generated(model, alone).sequences[0, -NEW:], together[row, -NEW:])


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_returned_attentions_and_states_have_a_step_for_each_token(family: str, refinement: str) -> None:
    model, inputs = refined(family, refinement), prompt()
    found = generated(model, inputs, output_attentions=True, output_hidden_states=True)
    assert len(found.attentions) == len(found.hidden_states) == NEW
    for step, layers in enumerate(found.attentions):
        for rows in layers:
            queries = 10 if step == 0 else 1
            assert rows.shape[:3] == (3, 4, queries)
            torch.testing.assert_close(rows[:, :, -1].sum(-1), torch.ones(3, 4), rtol=1e-4, atol=1e-4)
    check_logits(model, found, inputs["attention_mask"])


@pytest.mark.parametrize("family", DECODERS)
def test_a_compiled_forward_generates_the_same(family: str) -> None:
    model, inputs = refined(family, "high:0.7"), prompt()
    plain = generated(model, inputs, cache_implementation="static").sequences
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(generated(model, inputs, cache_implementation="static").sequences, plain)
