"""Random calls of saobp.attention, output and gradients, against a version in double precision of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from double_precision import attention_in_double
from tally import Soak
from torch import Tensor

import saobp
from saobp.testing import oracles
from saobp.testing.inputs import padding_mask

pytestmark = pytest.mark.slow

FACTORS = ("none", "high", "low", "high-listing", "low-listing", "elemmul", "elemmul-prior", "high-key-bias")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STRONGEST = 4.0
"""Beyond it rounding is amplified by up to e^strength; tests/operation covers that range."""
FUSED = 0.02
"""Share of calls that go through the kernels, which Triton's interpreter runs a thousand times slower."""
ROUNDINGS = {torch.float64: 60, torch.float32: 8, torch.bfloat16: 2, torch.float16: 4}
"""Allowed error in roundings of the type, times the conditioning; several times the worst of 1,500 calls."""


def draw_call(draw: random.Random) -> dict[str, Any]:
    """Rows of ``elemmul-prior`` are not saturated: products of weights underflow (docs/operation.md)."""
    heads = draw.choice((1, 2, 4))
    is_causal = draw.random() < 0.4
    factor = draw.choice(FACTORS)
    length = draw.choice((1, 2, 3, draw.randint(4, 12), draw.randint(13, 70)))
    steps = draw.choice((1, 1, 1, 2, 3))
    return {
        "batch": draw.choice((1, 2, 3)),
        "heads": heads,
        "key_heads": draw.choice([count for count in (1, 2, 4) if heads % count == 0]),
        "length": length,
        "dim": draw.choice((1, 4, 8, 16, 32)),
        "dtype": draw.choice(DTYPES),
        "padding": draw.choice((None, "left", "right", "both")),
        "is_causal": is_causal,
        "scale": draw.choice((None, 0.3, 1.0)),
        "spread": draw.choice((0.1, 1.0) if factor == "elemmul-prior" else (0.1, 1.0, 3.0)),
        "backend": "fused" if draw.random() < FUSED else draw.choice(("auto", "reference")),
        "gradients": draw.random() < 0.5,
        "seed": draw.randrange(2**31),
        "refinement": saobp.Refinement(
            factor,
            round(draw.uniform(0, STRONGEST), 2),
            steps=steps,
            damping=draw.choice((0.0, 0.3)) if steps > 1 else 0.0,
            future="paper" if is_causal and draw.random() < 0.2 else "strict",
        ),
    }


def states(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    random_ = torch.Generator().manual_seed(call["seed"])

    def normal(heads: int) -> Tensor:
        shape = (call["batch"], heads, call["length"], call["dim"])
        return call["spread"] * torch.randn(shape, generator=random_, dtype=torch.float64)

    made = normal(call["heads"]), normal(call["key_heads"]), normal(call["key_heads"])
    query, key, value = (part.to(call["dtype"]) for part in made)
    return query, key, value


def largest_error(call: dict[str, Any]) -> tuple[float, float]:
    """Largest error of output and gradients, and what is allowed."""
    refinement = call["refinement"]
    query, key, value = states(call)
    real = None
    if call["padding"] is not None:
        real = padding_mask(call["batch"], call["length"], call["padding"])
    scale = call["dim"] ** -0.5 if call["scale"] is None else call["scale"]
    strength = torch.full((call["heads"],), refinement.strength, dtype=torch.float64)
    exact = [part.double().requires_grad_(call["gradients"]) for part in (query, key, value)]
    given = [part.requires_grad_(call["gradients"]) for part in (query, key, value)]
    expected = attention_in_double(
        *exact,
        factor=refinement.factor,
        strength=strength,
        steps=refinement.steps,
        damping=refinement.damping,
        real=real,
        is_causal=call["is_causal"],
        paper=refinement.future == "paper",
        scale=scale,
    )
    options = {"padding_mask": real, "is_causal": call["is_causal"], "scale": call["scale"]}
    try:
        found = saobp.attention(*given, refinement, **options, backend=call["backend"])
    except ValueError as problem:
        if "the fused backend cannot do this call" not in str(problem):
            raise
        found = saobp.attention(*given, refinement, **options)
    assert found.dtype == call["dtype"]
    assert found.isfinite().all()
    pairs = [(found, expected, value.abs().max())]
    if call["gradients"]:
        pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ours = torch.autograd.grad(found, given, pull.to(found.dtype), allow_unused=True)
        theirs = torch.autograd.grad(expected, exact, pull.to(found.dtype).double(), allow_unused=True)
        reach = call["spread"] ** 2 * call["dim"] * max(scale, 1) * refinement.steps
        pairs += [
            (one, other, other.abs().max() + reach)
            for one, other in zip(ours, theirs, strict=True)
            if one is not None and other is not None
        ]
    step = torch.finfo(call["dtype"]).eps
    errors = [
        float((one.detach().double() - other.detach()).abs().max()) / (step * max(float(size), 1e-3))
        for one, other, size in pairs
    ]
    conditioning = 1 + float(strength[0].exp()) * refinement.steps * (
        1 + call["spread"] ** 2 * scale * call["dim"] ** 0.5
    )
    return max(errors), ROUNDINGS[call["dtype"]] * conditioning


def against_the_printed_formula(draw: random.Random) -> float:
    """The version in double precision itself, held against loops over plain numbers."""
    factor, order = draw.choice(FACTORS), draw.choice(("bidirectional", "strict", "paper"))
    length, strength = draw.randint(1, 6), round(draw.uniform(0, 2), 2)
    real = [True] + [draw.random() < 0.8 for _ in range(length - 1)]
    scores = torch.randn(length, length, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    rows = oracles.masked_softmax(scores.double(), order, real)
    psi = (oracles.low if factor.startswith("low") else oracles.high)(strength)
    if factor.endswith("listing"):
        sign = -1 if factor.startswith("low") else 1
        rows = oracles.listing(rows, sign * strength)
    elif factor.startswith("elemmul"):
        rows = oracles.elemmul(rows, order, real, with_prior=factor == "elemmul-prior")
    elif factor != "none":
        rows = oracles.paper_product(rows, psi, order, real, own=factor.endswith("key-bias"))
    identity = torch.eye(length, dtype=torch.float64)[None, None]
    found = attention_in_double(
        scores.double()[None, None],
        identity,
        identity,
        factor=factor,
        strength=torch.tensor([strength], dtype=torch.float64),
        real=torch.tensor([real]),
        is_causal=order != "bidirectional",
        paper=order == "paper",
        scale=1.0,
    )[0, 0]
    away = found - torch.tensor(rows, dtype=torch.float64)
    return float(away[torch.tensor(real)].abs().max())


@pytest.mark.filterwarnings("ignore:future='paper'")
def test_calls_agree_with_double_precision(soak: Soak) -> None:
    draw, tally = soak.random("calls"), soak.tally("calls against double precision")
    for _ in range(soak.counts["calls"]):
        call = draw_call(draw)
        found, allowed = largest_error(call)
        if found <= allowed:
            tally.outcomes[str(call["dtype"]).removeprefix("torch.")] += 1
        else:
            tally.wrong.append(f"{found:.0f} roundings where {allowed:.0f} are allowed: {call}")
    assert not tally.wrong, tally.wrong[:5]


def test_double_precision_agrees_with_the_printed_formulas(soak: Soak) -> None:
    draw, tally = soak.random("formulas"), soak.tally("double precision against loops")
    for _ in range(max(1, soak.counts["calls"] // 20)):
        error = against_the_printed_formula(draw)
        if error < 1e-9:
            tally.outcomes["equal to 1e-9"] += 1
        else:
            tally.wrong.append(f"off by {error:.2e}")
    assert not tally.wrong, tally.wrong[:5]
