"""Packed sequences give what each would give alone; dropout, empty sequences, bad lengths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import saobp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTORS = ["high", "low", "high-listing", "low-listing", "elemmul"]
if DEVICE == "cuda":
    CASES = [(f, dtype) for f in FACTORS for dtype in (torch.float32, torch.float16, torch.bfloat16)]
else:
    CASES = [("low", torch.float32), ("high-listing", torch.float16), ("elemmul", torch.float16)]
LENGTHS = (7, 1, 0, 129, 37, 128, 0, 200, 0)
SHORT = (37, 0, 1, 128, 7)
HEADS, DIM = 2, 16


def places_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


def packed_states(total: int, dtype: torch.dtype, key_heads: int = HEADS, seed: int = 0) -> list[Tensor]:
    """query, key, value, strength as leaves, and the gradient that comes back."""
    random = torch.Generator().manual_seed(seed)
    states = [
        torch.randn(total, heads, DIM, generator=random, dtype=torch.float64).to(dtype).to(DEVICE)
        for heads in (HEADS, key_heads, key_heads, HEADS)
    ]
    strength = torch.tensor([0.4, -0.3], device=DEVICE, dtype=torch.promote_types(dtype, torch.float32))
    leaves = [x.requires_grad_() for x in (*states[:3], strength)]
    return [*leaves, states[3]]


def alone(
    states: list[Tensor], refinement: saobp.Refinement, places: Tensor, causal: bool = False
) -> list[Tensor]:
    """Output and gradients by the reference with every sequence in a call of its own."""
    *leaves, grad = states
    query, key, value, strength = leaves
    parts = []
    for start, stop in pairwise(places.tolist()):
        one = [x[start:stop].transpose(0, 1)[None] for x in (query, key, value)]
        out = saobp.attention(*one, refinement, is_causal=causal, strength=strength, backend="reference")
        parts.append(out[0].transpose(0, 1))
    return with_gradients(torch.cat(parts), leaves, grad)


def assert_as_alone(
    out: Tensor, states: list[Tensor], refinement: saobp.Refinement, places: Tensor, causal: bool = False
) -> None:
    """Close to single calls in double precision, for the output's precision."""
    *leaves, grad = states
    exact = [x.detach().double().requires_grad_() for x in states]
    step = torch.finfo(out.dtype).eps
    found = with_gradients(out, leaves, grad)
    assert_all_close(found, alone(exact, refinement, places, causal), rtol=8 * step, atol=max(4 * step, 2e-5))


def with_gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)),
    ]


def assert_all_close(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    names = ("output", "query", "key", "value", "strength")
    for name, got, wanted in zip(names, found, expected, strict=True):
        torch.testing.assert_close(
            got, wanted, msg=lambda m, name=name: f"{name}: {m}", check_dtype=False, **tolerance
        )


@pytest.mark.parametrize(("factor", "dtype"), CASES, ids=str)
def test_mixed_lengths_equal_each_alone(factor: str, dtype: torch.dtype) -> None:
    places = places_of(LENGTHS)
    *leaves, _ = states = packed_states(sum(LENGTHS), dtype, key_heads=1)
    refinement = saobp.Refinement(factor, 0.2)
    out = saobp.attention_packed(
        *leaves[:3], refinement, places, max_seqlen=max(LENGTHS), strength=leaves[3], backend="fused"
    )
    assert out.shape == leaves[0].shape
    assert out.is_contiguous()
    assert_as_alone(out, states, refinement, places)


@pytest.mark.parametrize("factor", [*FACTORS, "high-key-bias"])
@pytest.mark.parametrize("max_seqlen", [128, None], ids=["told", "untold"])
def test_short_sequences_with_and_without_their_longest(factor: str, max_seqlen: int | None) -> None:
    """Told that all are short, the kernels for short sequences run; untold, those for long ones."""
    places = places_of(SHORT)
    *leaves, _ = states = packed_states(sum(SHORT), torch.float16)
    refinement = saobp.Refinement(factor, 0.2)
    out = saobp.attention_packed(
        *leaves[:3], refinement, places, max_seqlen=max_seqlen, strength=leaves[3], backend="fused"
    )
    assert_as_alone(out, states, refinement, places)


@pytest.mark.parametrize("factor", [*FACTORS[:4], "high-key-bias"])
@pytest.mark.parametrize("lengths", [SHORT, LENGTHS], ids=["short", "long"])
def test_causal_sequences_equal_each_alone(factor: str, lengths: tuple[int, ...]) -> None:
    places = places_of(lengths)
    *leaves, _ = states = packed_states(sum(lengths), torch.float16, key_heads=1)
    refinement = saobp.Refinement(factor, 0.2)
    out = saobp.attention_packed(
        *leaves[:3], refinement, places,
        max_seqlen=max(lengths), is_causal=True, strength=leaves[3], backend="fused",
    )  # fmt: skip
    assert_as_alone(out, states, refinement, places, causal=True)


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_steps_may_have_their_own_strengths(backend: str) -> None:
    places = places_of(LENGTHS)
    query, key, value, *_ = packed_states(sum(LENGTHS), torch.float32, key_heads=1)
    by_step = torch.linspace(0.1, 0.6, 2 * HEADS, device=DEVICE).view(2, HEADS)
    out = saobp.attention_packed(
        query, key, value, "high:0.2,steps=3", places, strength=by_step, backend=backend
    )
    for start, stop in pairwise(places.tolist()):
        own = (states[start:stop].transpose(0, 1)[None] for states in (query, key, value))
        expected = saobp.attention(*own, "high:0.2,steps=3", strength=by_step, backend="reference")
        torch.testing.assert_close(out[start:stop], expected[0].transpose(0, 1), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", ["none", "high", "low-listing", "elemmul", "elemmul-prior"])
def test_reference_unpacks_to_the_same_numbers(factor: str, causal: bool) -> None:
    lengths = (3, 0, 12, 1)
    places = places_of(lengths)
    *leaves, grad = states = packed_states(sum(lengths), torch.float64, key_heads=1)
    refinement = saobp.Refinement(factor, 0.2, steps=2, damping=0.5)
    out = saobp.attention_packed(
        *leaves[:3], refinement, places, is_causal=causal, strength=leaves[3], backend="reference"
    )
    found = with_gradients(out, leaves, grad)
    assert_all_close(found, alone(states, refinement, places, causal), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["long", "short"])
def test_dropout_is_one_mask_in_both_directions(dtype: torch.dtype) -> None:
    """The output is linear in the values, so <dO, O> = <dV, V> if both passes drop the same entries."""
    lengths = (24, 0, 40, 16)
    places = places_of(lengths)
    query, key, value, _, grad = packed_states(sum(lengths), dtype)
    refinement = saobp.Refinement("high", 0.2)

    def attend(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return saobp.attention_packed(
            query, key, value, refinement, places, max_seqlen=40, dropout_p=0.4, backend="fused"
        )

    out = attend(0)
    (dv,) = torch.autograd.grad(out, value, grad)
    tolerance = 32 * torch.finfo(dtype).eps
    scale = float((dv * value).double().norm())
    torch.testing.assert_close(
        (dv * value).double().sum(), (out * grad).double().sum(), rtol=0.0, atol=tolerance * scale
    )
    assert torch.equal(out, attend(0))
    assert not torch.equal(out, attend(1))


def test_dropout_mask_keeps_its_share_and_differs_between_sequences() -> None:
    """Values that are rows of the identity show the refined rows themselves."""
    lengths = (DIM, DIM, DIM)
    places = places_of(lengths)
    query = torch.zeros(sum(lengths), HEADS, DIM, device=DEVICE)
    value = torch.eye(DIM, device=DEVICE).repeat(3, 1)[:, None].expand(-1, HEADS, -1)
    rows = saobp.attention_packed(
        query,
        query,
        value,
        saobp.Refinement("high", 0.2),
        places,
        max_seqlen=DIM,
        dropout_p=0.5,
        backend="fused",
    )
    kept = rows != 0
    torch.testing.assert_close(rows[kept], torch.full_like(rows[kept], 2 / DIM))
    assert 0.45 < kept.float().mean() < 0.55
    sequences = kept.unflatten(0, (3, DIM))
    assert not torch.equal(sequences[0], sequences[1])
    assert not torch.equal(sequences[1], sequences[2])


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_nothing_at_all(backend: str) -> None:
    for places in ([0], [0, 0, 0]):
        empty = torch.zeros(0, HEADS, DIM, device=DEVICE)
        cumulative = torch.tensor(places, dtype=torch.int32, device=DEVICE)
        out = saobp.attention_packed(
            empty, empty, empty, saobp.Refinement("high", 0.2), cumulative, backend=backend
        )  # type: ignore[arg-type]
        assert out.shape == (0, HEADS, DIM)


def test_pack_and_unpack_are_inverse() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, True]], device=DEVICE)
    states = torch.randn(3, 3, 2, 4, device=DEVICE, requires_grad=True)
    other = torch.randn(3, 3, device=DEVICE)
    places, packed, packed_other = saobp.pack(mask, states, other)
    assert places.tolist() == [0, 2, 2, 4]
    assert places.dtype == torch.int32
    assert torch.equal(packed, torch.stack([states[0, 0], states[0, 1], states[2, 1], states[2, 2]]))
    assert torch.equal(packed_other, other[mask])
    back = saobp.unpack(mask, packed)
    assert torch.equal(back, states * mask[..., None, None])
    (grad,) = torch.autograd.grad(back.sum(), states)
    assert torch.equal(grad, mask[..., None, None].expand_as(states).float())


def test_masks_of_numbers_and_older_names() -> None:
    real = torch.tensor([[1, 1, 0], [0, 1, 1]], device=DEVICE)
    states = [torch.randn(2, 3, HEADS, DIM, device=DEVICE) for _ in range(3)]
    places, *packed = saobp.pack(real.bool(), *states)
    for dtype in (torch.int64, torch.float32, torch.uint8):
        again, *packed_again = saobp.pack(real.to(dtype), *states)
        assert torch.equal(again, places)
        assert all(map(torch.equal, packed_again, packed))
        assert torch.equal(saobp.unpack(real.to(dtype), packed[0]), saobp.unpack(real.bool(), packed[0]))
    expected = saobp.attention_packed(*packed, "high:0.2", places, max_seqlen=2)
    found = saobp.attention_packed(*packed, "high:0.2", cumulative_lengths=places, max_length=2)
    assert torch.equal(found, expected)


def test_packed_batch_equals_padded_batch() -> None:
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5], device=DEVICE)
    padded = [torch.randn(2, 9, HEADS, DIM, device=DEVICE) for _ in range(3)]
    expected = saobp.attention(
        *(x.transpose(1, 2) for x in padded), saobp.Refinement("low", 0.3), padding_mask=mask
    )
    places, *packed = saobp.pack(mask, *padded)
    found = saobp.attention_packed(*packed, "low:0.3", places, max_seqlen=9)
    torch.testing.assert_close(
        saobp.unpack(mask, found)[mask], expected.transpose(1, 2)[mask], rtol=1e-5, atol=1e-5
    )


BAD_LENGTHS = [
    ([1, 6], "from 0 to the 6 tokens of query, not from 1 to 6"),
    ([0, 5], "not from 0 to 5"),
    ([0, 4, 2, 6], "must not decrease"),
]


@pytest.mark.parametrize(("places", "message"), BAD_LENGTHS)
def test_bad_lengths_are_named(places: list[int], message: str) -> None:
    states = torch.zeros(6, HEADS, DIM, device=DEVICE)
    cumulative = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        saobp.attention_packed(
            states, states, states, saobp.Refinement("high", 0.2), cumulative, backend="reference"
        )


def test_bad_calls_are_named() -> None:
    states = torch.zeros(6, HEADS, DIM, device=DEVICE)
    whole = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    refinement = saobp.Refinement("high", 0.2)

    def refused(message: str, *tensors: Tensor, cumulative: Tensor = whole, **options: object) -> None:
        with pytest.raises(ValueError, match=message):
            saobp.attention_packed(*tensors, refinement, cumulative, **options)  # type: ignore[arg-type]

    same = (states, states, states)
    refused(r"\[total, heads, dim\]", states[None], states[None], states[None])
    refused("same tokens, not 6 and 5", states, states[:5], states[:5])
    refused("int32", *same, cumulative=whole.long())
    refused("int32", *same, cumulative=whole[None])
    refused("int32", *same, cumulative=whole[:0])
    refused("empty sequences", *same, cumulative=whole[:1])
    refused("not be negative", *same, max_seqlen=-1)
    refused("less than the longest sequence's 6", *same, max_seqlen=5, backend="reference")
    refused("unknown backend", *same, backend="magic")
    refused("dropout_p", *same, dropout_p=1.0)
    refused("strength must have shape", *same, strength=torch.zeros(3, device=DEVICE))
    refused("same device", *same, cumulative=whole.to("meta"))
    refused("scale must be a finite number, not nan", *same, scale=float("nan"))
    refused("older name of cu_seqlens: give one of the two", *same, cumulative_lengths=whole)
    refused("older name of max_seqlen: give one of the two", *same, max_seqlen=6, max_length=6)
    for backend in ("fused", "reference"):
        with pytest.raises(ValueError, match="qk-norm"):
            saobp.attention_packed(*same, "high:0.2+qk-norm", whole, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor, not NoneType"):
        saobp.attention_packed(*same, refinement)
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, not ndarray: torch\.from_numpy"):
        saobp.attention_packed(np.zeros((6, HEADS, DIM)), states, states, refinement, whole)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_mask must hold only 1 for real tokens and 0 for padding"):
        saobp.pack(torch.full((2, 3), 0.5), torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, length\], not of shape \(2,\)"):
        saobp.pack(torch.ones(2), torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="differ in batch or length"):
        saobp.pack(torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 4, 3))
    with pytest.raises(ValueError, match="2 real tokens and the packed states have 3"):
        saobp.unpack(torch.ones(1, 2, dtype=torch.bool), torch.ones(3, 4))
