"""Halves of a long call's heads on two streams, against wave quantisation.

Sweeps run one after the other, and the last wave of programs of each leaves most of the GPU idle. Heads are independent, so every launch is
split into two, each for half of the programs, with addresses offset to their heads. Not for strict causal calls: their
programs are sorted, the longest first, and their weak and careful kernels share buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from saobp.kernels.call_spec import CallSpec
from saobp.kernels.runtime.launcher import BufferSlice

LIKE_STATES = ("scaled",)
"""Slices with the layout of states, ``[batch, length, heads, dim]``; others are ``[batch, heads, ...]``."""


def second_half_offsets(
    spec: CallSpec, axis: int | None, strength: Tensor, inputs: Mapping[str, Tensor],
    output_dtypes: Mapping[str, torch.dtype], slices: Mapping[str, BufferSlice], *,
    gradients: Mapping[str, torch.dtype] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Byte offset of the second half of each tensor and slice; empty for a call that is not split.

    axis:          the axis of ``[batch, heads, length, dim]`` that is halved, or None
    inputs:        the call's input states, by kernel argument name
    output_dtypes: types of its output states, likewise
    gradients:     types of gradients of states, likewise
    """
    if axis is None:
        return {}
    count = (spec.batch, spec.heads)[axis] // 2
    offsets = {name: count * one.stride(axis) * one.itemsize for name, one in inputs.items()}
    if axis == 1:
        offsets |= {name: offsets[name] // spec.group for name in ("k", "v")}
        offsets["strength"] = count * strength.itemsize
    elif spec.masked:
        offsets["mask"] = count * spec.length
    offsets |= {name: part.bytes // 2 for name, part in slices.items()}
    offsets["strength_grad"] = spec.batch * spec.heads // 2 * spec.length * 4
    like_states = {name: slices[name].dtype for name in LIKE_STATES if name in slices}
    for name, dtype in {**output_dtypes, **like_states}.items():
        offsets[name] = count * spec.states_strides[axis] * dtype.itemsize
    for name, dtype in (gradients or {}).items():
        offsets[name] = count * spec.gradient_strides[axis] * dtype.itemsize
    return offsets if all(offset % 16 == 0 for offset in offsets.values()) else {}
