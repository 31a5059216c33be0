"""Rows one after the other, with the messages of earlier rows carried along, equal the whole causal pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from saobp.propagation import FactorGraph, get_factor, propagate


def causal_graph(queries: int, keys: int, real: Tensor) -> FactorGraph:
    """The last ``queries`` rows of a causal pass over ``keys`` tokens; real ``[keys]``."""
    order = torch.arange(keys - queries, keys)[:, None] >= torch.arange(keys)
    return FactorGraph(order & real[:keys], senders=real[keys - queries : keys, None], causal=True)


@pytest.mark.parametrize("factor", ["high", "low", "high-listing", "high-key-bias"])
@given(
    seed=st.integers(0, 10_000),
    pieces=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    strength=st.floats(-4, 4),
    steps=st.integers(1, 3),
    damping=st.sampled_from([0.0, 0.4]),
    padding=st.integers(0, 2),
)
def test_decoding_in_pieces_equals_the_whole_pass(
    factor: str, seed: int, pieces: list[int], strength: float, steps: int, damping: float, padding: int
) -> None:
    length = sum(pieces)
    random = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(2, length, length, generator=random, dtype=torch.float64)
    real = torch.arange(length) >= padding
    options = {"steps": steps, "damping": damping, "keep_messages": True}
    chosen, by_head = get_factor(factor), torch.full((2, 1, 1), strength, dtype=torch.float64)
    whole = propagate(scores, chosen, by_head, causal_graph(length, length, real), **options)
    assert whole.messages is not None
    assert whole.messages.shape == (steps, 2, length)
    past, keys, found = None, 0, []
    for queries in pieces:
        keys += queries
        if past is not None:
            past = functional.pad(past, (0, queries))
        piece = propagate(
            scores[:, keys - queries : keys, :keys],
            chosen,
            by_head,
            causal_graph(queries, keys, real),
            past=past,
            **options,
        )
        past = piece.messages
        found.append(functional.pad(piece.rows, (0, length - keys)))
    torch.testing.assert_close(torch.cat(found, -2), whole.rows, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(past, whole.messages, rtol=1e-10, atol=1e-12)


def test_no_factor_keeps_no_messages() -> None:
    scores = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(0))
    result = propagate(scores, None, torch.zeros(1, 1, 1), FactorGraph(), keep_messages=True)
    assert result.messages is None
    assert torch.equal(result.rows, torch.log_softmax(scores, -1).exp())
