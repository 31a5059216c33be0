"""Random generations of refined decoders with a cache, against whole forward passes without one."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from tally import Soak
from torch import Tensor

import saobp
from saobp.testing.tiny_models import PADDING, VOCABULARY, tiny_model

pytestmark = pytest.mark.slow

FAMILIES = ("gpt2", "llama", "mistral", "qwen3")
REFINEMENTS = ("none", "high:0.3", "low:0.5", "high:2,steps=2", "high-listing:1", "high:learned")
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}
CLOSE = 1e-3
"""Where two tokens are as likely as this, either may be chosen."""


def draw_generation(draw: random.Random) -> dict[str, Any]:
    lengths = [draw.randint(1, 9) for _ in range(draw.choice((1, 1, 2, 3)))]
    return {
        "family": draw.choice(FAMILIES),
        "refinement": draw.choice(REFINEMENTS),
        "prompts": [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths],
        "new": draw.randint(1, 12),
        "cache": draw.choice(("dynamic", "dynamic", "static", "none")),
        "seed": draw.randrange(2**31),
    }


def refined_model(one: dict[str, Any]) -> Any:
    torch.manual_seed(one["seed"])
    model = tiny_model(one["family"]).eval()
    saobp.apply(model, one["refinement"])
    if one["refinement"].endswith("learned"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "strength" in name:
                    parameter.uniform_(-1, 1)
    return model


def generated(model: Any, one: dict[str, Any]) -> Tensor:
    """New tokens ``[prompts, new]`` of a padded batch."""
    longest = max(map(len, one["prompts"]))
    ids = torch.tensor([[PADDING] * (longest - len(prompt)) + prompt for prompt in one["prompts"]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            ids,
            attention_mask=(ids != PADDING).long(),
            max_new_tokens=one["new"],
            min_new_tokens=one["new"],
            do_sample=False,
            pad_token_id=PADDING,
            **OPTIONS[one["cache"]],
        )
    return output[:, longest:]


def wrong_token(model: Any, one: dict[str, Any]) -> str | None:
    """What is wrong with a token, judged by the whole text before it, alone and without padding or cache."""
    for prompt, tokens in zip(one["prompts"], generated(model, one).tolist(), strict=True):
        text = list(prompt)
        for place, token in enumerate(tokens):
            with torch.no_grad():
                logits = model(torch.tensor([text]), use_cache=False).logits[0, -1].double()
            logits[2] = float("-inf")  # the end of the text, which min_new_tokens rules out
            if logits.max() - logits[token] > CLOSE:
                return f"new token {place} is {float(logits.max() - logits[token]):.3g} below the best"
            text.append(token)
    return None


def test_generations_are_those_of_whole_passes(soak: Soak) -> None:
    draw, tally = soak.random("generations"), soak.tally("generations against whole passes")
    for _ in range(soak.counts["generations"]):
        one = draw_generation(draw)
        wrong = wrong_token(refined_model(one), one)
        if wrong is None:
            tally.outcomes[f"{one['cache']} cache" if one["cache"] != "none" else "without cache"] += 1
        else:
            tally.wrong.append(f"{wrong}: {one}")
    assert not tally.wrong, tally.wrong[:5]
