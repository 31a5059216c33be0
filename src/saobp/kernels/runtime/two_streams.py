"""Two halves of a long call's heads, side by side on a GPU: where a sweep of one runs out of programs, the other's go on.

Sweeps of a call follow each other, and the last programs of each leave most of the GPU idle. Heads have nothing to do
with each other, so all launches are made twice, each for half of the programs, with addresses moved to their heads.
Not for strict causal calls: they begin with their longest programs and end with short ones, and their two ways share memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from saobp.kernels.call_spec import Problem
from saobp.kernels.runtime.launcher import Piece

HALVED_FROM = 1 << 29
"""Entries of all maps from which on that is done: it takes the host as many launches again."""

LIKE_STATES = ("scaled",)
"""Pieces that are laid out as states are, heads of a token side by side; in others a head's numbers are."""


def cut_axis(problem: Problem) -> int | None:
    """Which axis of ``[batch, heads, length, dim]`` is cut in two; None for a call that is better left whole.

    The seeds of dropout count heads from a call's first one. In float32 numbers have two parts, which lie apart.
    """
    if problem.sequences * problem.heads * problem.length**2 < HALVED_FROM:
        return None
    if problem.packed or problem.dropout or problem.dtype == torch.float32:
        return None
    if problem.batch % 2 == 0:
        return 0
    key_heads = problem.heads // problem.group
    return 1 if problem.batch == 1 and key_heads % 2 == 0 else None


def moves(
    problem: Problem, strength: Tensor, given: Mapping[str, Tensor], filled: Mapping[str, torch.dtype],
    pieces: Mapping[str, Piece],
) -> dict[str, int]:  # fmt: skip
    """Bytes from the first to the second half's part of each tensor and piece; nothing for a call that is left whole.

    given:  the call's states ``[batch, heads, length, dim]``, by the names that kernels have for them
    filled: types of states that the call makes, likewise
    """
    axis = cut_axis(problem)
    if axis is None:
        return {}
    count = (problem.batch, problem.heads)[axis] // 2
    found = {name: count * one.stride(axis) * one.itemsize for name, one in given.items()}
    if axis == 1:
        found |= {name: found[name] // problem.group for name in ("k", "v")}
        found["strength"] = count * strength.itemsize
    elif problem.masked:
        found["mask"] = count * problem.length
    found |= {name: piece.bytes // 2 for name, piece in pieces.items()}
    found["strength_grad"] = problem.batch * problem.heads // 2 * problem.length * 4
    like_states = {name: pieces[name].dtype for name in LIKE_STATES if name in pieces}
    for name, dtype in {**filled, **like_states}.items():
        found[name] = count * problem.states_strides[axis] * dtype.itemsize
    return found if all(move % 16 == 0 for move in found.values()) else {}
