"""What must hold for refined rows whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import saobp
from saobp.testing.inputs import AttentionInputs, attention_inputs

FACTORS = ["none", "high", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior", "high-key-bias"]
POTTS = ["high", "low", "high-listing", "low-listing"]

seeds = st.integers(0, 10_000)
lengths = st.integers(1, 7)
strengths = st.floats(0.0, 8.0)
steps = st.integers(1, 3)
factors = st.sampled_from(FACTORS)


def inputs_of(seed: int, length: int, *, batch: int = 2, heads: int = 2) -> AttentionInputs:
    return attention_inputs(batch, heads, length, 4, seed=seed, dtype=torch.float64)


def attend(inputs: AttentionInputs, refinement: saobp.Refinement, **options: object) -> Tensor:
    return saobp.attention(inputs.query, inputs.key, inputs.value, refinement, **options)  # type: ignore[arg-type]


def rows_of(seed: int, length: int) -> Tensor:
    """Priors ``[2, 3, length, length]``."""
    random = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(2, 3, length, length, generator=random, dtype=torch.float64)).softmax(-1)


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@given(
    factor=factors,
    seed=seeds,
    length=lengths,
    strength=strengths,
    steps=steps,
    damping=st.floats(0, 0.9),
    causal=st.booleans(),
    kept=st.floats(0, 1),
)
def test_rows_sum_to_one_and_masked_entries_stay_zero(
    factor: str,
    seed: int,
    length: int,
    strength: float,
    steps: int,
    damping: float,
    causal: bool,
    kept: float,
) -> None:
    real = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < kept
    visible = real[:, None, None, :].expand(2, 3, length, length)
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    rows = saobp.refine(
        rows_of(seed, length),
        saobp.Refinement(factor, strength, steps=steps, damping=damping),
        padding_mask=real,
        is_causal=causal,
    )
    assert_same(rows.sum(-1), visible.any(-1).double())
    assert (rows >= 0).all()
    assert (rows[~visible] == 0).all()


@pytest.mark.parametrize("factor", POTTS)
@given(seed=seeds, length=lengths, steps=steps, causal=st.booleans())
def test_strength_zero_is_softmax(factor: str, seed: int, length: int, steps: int, causal: bool) -> None:
    inputs = inputs_of(seed, length)
    expected = functional.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, is_causal=causal
    )
    assert_same(attend(inputs, saobp.Refinement(factor, 0.0, steps=steps), is_causal=causal), expected)
    assert_same(attend(inputs, saobp.Refinement("none"), is_causal=causal), expected)


@pytest.mark.parametrize("suffix", ["", "-listing"])
@given(seed=seeds, length=lengths, strength=strengths, steps=steps, causal=st.booleans())
def test_low_is_high_with_the_sign_turned(
    suffix: str, seed: int, length: int, strength: float, steps: int, causal: bool
) -> None:
    inputs = inputs_of(seed, length)
    signed = torch.tensor([strength, -strength], dtype=torch.float64)
    high, low = (saobp.Refinement(name + suffix, steps=steps) for name in ("high", "low"))
    assert_same(
        attend(inputs, high, strength=-signed, is_causal=causal),
        attend(inputs, low, strength=signed, is_causal=causal),
    )
    number = saobp.Refinement("low" + suffix, strength, steps=steps)
    assert_same(
        attend(inputs, high, strength=-signed.abs(), is_causal=causal),
        attend(inputs, number, is_causal=causal),
    )


@given(factor=factors, seed=seeds, length=lengths, strength=strengths, steps=steps)
def test_permuting_tokens_permutes_the_result(
    factor: str, seed: int, length: int, strength: float, steps: int
) -> None:
    inputs = inputs_of(seed, length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    real = torch.rand(2, length, generator=torch.Generator().manual_seed(seed + 1)) < 0.7
    refinement = saobp.Refinement(factor, strength, steps=steps)
    straight = attend(inputs, refinement, padding_mask=real)
    mixed = saobp.attention(
        *(states[:, :, order] for states in (inputs.query, inputs.key, inputs.value)),
        refinement,
        padding_mask=real[:, order],
    )
    assert_same(mixed, straight[:, :, order])


@given(
    factor=factors,
    seed=seeds,
    length=lengths,
    strength=strengths,
    steps=steps,
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    order=st.sampled_from(["bidirectional", "strict", "paper"]),
)
@pytest.mark.filterwarnings("ignore:future='paper'")
def test_padding_changes_nothing(
    factor: str, seed: int, length: int, strength: float, steps: int, before: int, after: int, order: str
) -> None:
    """Neither its amount, nor its side, nor what stands in it."""
    refinement = saobp.Refinement(
        factor, strength, steps=steps, damping=0.25, future="paper" if order == "paper" else "strict"
    )
    wide = inputs_of(seed, before + length + after)
    inner = slice(before, before + length)
    real = torch.zeros(2, before + length + after, dtype=torch.bool)
    real[:, inner] = True
    alone = saobp.attention(
        *(states[:, :, inner] for states in (wide.query, wide.key, wide.value)),
        refinement,
        is_causal=order != "bidirectional",
    )
    padded = attend(wide, refinement, padding_mask=real, is_causal=order != "bidirectional")
    assert_same(padded[:, :, inner], alone)


@pytest.mark.parametrize("factor", FACTORS)
@given(seed=seeds, length=st.integers(2, 7), strength=st.floats(0.1, 8.0), steps=steps, data=st.data())
def test_strict_rows_do_not_see_the_future(
    factor: str, seed: int, length: int, strength: float, steps: int, data: st.DataObject
) -> None:
    """The rows up to the cut stay where they are whatever follows."""
    cut = data.draw(st.integers(1, length - 1))
    one, other = inputs_of(seed, length), inputs_of(seed + 1, length)
    mixed = [
        torch.cat([a[:, :, :cut], b[:, :, cut:]], 2)
        for a, b in zip((one.query, one.key, one.value), (other.query, other.key, other.value), strict=True)
    ]
    refinement = saobp.Refinement(factor, strength, steps=steps, damping=0.25)
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, 0] = False
    straight = attend(one, refinement, is_causal=True, padding_mask=real)
    changed = saobp.attention(*mixed, refinement, is_causal=True, padding_mask=real)
    assert_same(changed[:, :, :cut], straight[:, :, :cut], tolerance=1e-13)


@pytest.mark.parametrize("factor", ["high", "low"])
def test_paper_rows_do_see_the_future(factor: str) -> None:
    one, other = inputs_of(0, 6), inputs_of(1, 6)
    key = torch.cat([one.key[:, :, :5], other.key[:, :, 5:]], 2)
    query = torch.cat([one.query[:, :, :5], other.query[:, :, 5:]], 2)
    value = torch.cat([one.value[:, :, :5], other.value[:, :, 5:]], 2)
    refinement = saobp.Refinement(factor, 1.0, future="paper")
    with pytest.warns(UserWarning, match="sees the tokens it has to predict"):
        straight = attend(one, refinement, is_causal=True)
    with pytest.warns(UserWarning, match="sees the tokens it has to predict"):
        changed = saobp.attention(query, key, value, refinement, is_causal=True)
    moved = (changed - straight)[:, :, :5].abs().amax((0, 1, 3))
    assert (moved[1:] > 1e-4).all()
    assert moved[0] < 1e-12  # the first row sees one key, whatever it is told


@given(factor=factors, seed=seeds, length=lengths, strength=strengths, steps=steps, causal=st.booleans())
def test_refine_and_attention_are_one_operation(
    factor: str, seed: int, length: int, strength: float, steps: int, causal: bool
) -> None:
    inputs = inputs_of(seed, length)
    scores = inputs.query @ inputs.key.transpose(-1, -2) * inputs.query.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
    refinement = saobp.Refinement(factor, strength, steps=steps, damping=0.25)
    rows = saobp.refine(scores.softmax(-1), refinement, is_causal=causal)
    assert_same(rows @ inputs.value, attend(inputs, refinement, is_causal=causal))
    assert_same(saobp.refine(scores[0].softmax(-1), refinement, is_causal=causal), rows[0])
    assert_same(saobp.refine(scores[0, 0].softmax(-1), refinement, is_causal=causal), rows[0, 0])


def test_refine_takes_one_mask_for_maps_without_a_batch() -> None:
    rows, refinement = rows_of(0, 5), saobp.Refinement("high", 1.0)
    real = torch.tensor([True, True, True, False, False])
    whole = saobp.refine(rows, refinement, padding_mask=real.expand(2, 5))
    assert_same(saobp.refine(rows[1], refinement, padding_mask=real), whole[1])
    assert_same(saobp.refine(rows[1, 2], refinement, padding_mask=real), whole[1, 2])


def test_strength_per_head_is_each_head_alone() -> None:
    inputs = attention_inputs(2, 3, 6, 4, dtype=torch.float64)
    together = attend(inputs, saobp.Refinement("high", [[0.1, 1.0, 3.0]]))
    for head, strength in enumerate([0.1, 1.0, 3.0]):
        alone = attend(inputs, saobp.Refinement("high", strength))
        assert_same(together[:, head], alone[:, head])


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_equal_repeated_heads(factor: str, causal: bool) -> None:
    inputs = attention_inputs(2, 4, 6, 4, key_heads=2, padding="left", dtype=torch.float64)
    refinement = saobp.Refinement(factor, [[0.1, 0.5, 1.0, 2.0]])
    options = {"padding_mask": inputs.padding_mask, "is_causal": causal}
    repeated = saobp.attention(
        inputs.query,
        inputs.key.repeat_interleave(2, 1),
        inputs.value.repeat_interleave(2, 1),
        refinement,
        **options,
    )
    assert torch.equal(attend(inputs, refinement, **options), repeated)


@pytest.mark.parametrize("factor", ["none", *POTTS])
def test_queries_may_differ_in_number_without_causality(factor: str) -> None:
    """Rows hear the rows that are there: the messages of four queries about six keys."""
    inputs = attention_inputs(2, 2, 6, 4, queries=4, dtype=torch.float64)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    refinement = saobp.Refinement(factor, 0.7)
    found = attend(inputs, refinement, padding_mask=real)
    scores = (inputs.query @ inputs.key.transpose(-1, -2) / 2).masked_fill(
        ~real[:, None, None], float("-inf")
    )
    prior = scores.softmax(-1)
    message = 1 - (1 - torch.tensor(-0.7 if "high" in factor else 0.7).double().exp()) * prior
    belief = {
        "none": prior,
        "high-listing": prior / message,
        "low-listing": prior / message,
    }.get(factor, prior * message.prod(-2, keepdim=True) / message)
    assert_same(found, belief / belief.sum(-1, keepdim=True) @ inputs.value, 1e-6)


@pytest.mark.parametrize("factor", ["none", "high-listing", "low-listing"])
def test_last_queries_alone_are_aligned_with_the_last_keys(factor: str) -> None:
    inputs = inputs_of(0, 6)
    refinement = saobp.Refinement(factor, 0.7)
    whole = attend(inputs, refinement, is_causal=True)
    tail = saobp.attention(inputs.query[:, :, 4:], inputs.key, inputs.value, refinement, is_causal=True)
    assert_same(tail, whole[:, :, 4:])
