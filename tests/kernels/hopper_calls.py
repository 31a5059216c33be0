"""Shared by tests of the kernels for Hopper, which run on a CPU in float16 where there is no such GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_helpers import spec_of
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.kernels import dispatch
from saobp.kernels.call_spec import CallSpec
from saobp.kernels.calls import Family
from saobp.kernels.hopper import launch as hopper_launch
from saobp.kernels.runtime.launcher import is_aligned
from saobp.testing.inputs import AttentionInputs, attention_inputs

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
STRENGTHS = (-0.7, 5.0) if GPU else (-0.7, 1.5)  # float16 has less range

skip_other_gpus = pytest.mark.skipif(
    GPU and torch.cuda.get_device_capability() != (9, 0), reason="another GPU than Hopper"
)

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"length": 256, "transposed": True}, {}),
    "tail": ({"length": 200, "transposed": True}, {}),
    "few tokens": ({"length": 129}, {}),
    "padding": ({"length": 256, "padding": "both", "batch": 2}, {}),
    "padding and tail": ({"length": 190, "padding": "left", "batch": 2}, {}),
    "shared key heads": ({"length": 256, "heads": 4, "key_heads": 2, "strength": 0.5}, {}),
}
"""Sizes of ``states`` of 129 tokens and more, and options of a call, by name."""
WHOLE_MAP_CALLS = CALLS | {
    "an uneven number of heads": ({"length": 256, "heads": 3, "strength": (0.0, 0.5, 1.0)}, {}),
    "key bias": ({"length": 256}, {"receives": 2}),
}


def states(length: int, **options: Any) -> AttentionInputs:
    """Of one sequence and two heads, unless ``options`` of ``attention_inputs`` say otherwise."""
    options = {"strength": STRENGTHS, "dtype": DTYPE, "device": DEVICE, "seed": length} | options
    return attention_inputs(options.pop("batch", 1), options.pop("heads", 2), length, 64, **options)


def use_on_cpu(monkeypatch: pytest.MonkeyPatch, **kernels: Any) -> None:
    """Without a GPU, calls for Hopper take these kernels, by the names of functions in ``hopper.launch``."""
    if not GPU:
        monkeypatch.setattr(dispatch, "has_hopper_kernel", lambda capability: capability == 90)
        for name, kernel in kernels.items():
            monkeypatch.setattr(hopper_launch, name, lambda kernel=kernel: kernel)


def take_strengths_for_weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, take the ways of weak strengths in float16 too."""
    if not GPU:
        monkeypatch.setattr(CallSpec, "precise", 0)
        monkeypatch.setattr(CallSpec, "may_underflow", False)


def assert_padding_gives_zeros(inputs: AttentionInputs, refinement: Refinement, **options: Any) -> None:
    """``inputs`` of two sequences, of which the second is taken for padding."""
    mask = torch.ones(2, inputs.query.shape[2], dtype=torch.bool, device=DEVICE)
    mask[1] = False
    strength = inputs.strength if refinement.strength == "learned" else None
    out = saobp.attention(
        inputs.query, inputs.key, inputs.value, refinement, padding_mask=mask, strength=strength,
        backend="fused", **options,
    )  # fmt: skip
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()


class Taken:
    """Whether calls of a family take a Hopper kernel, a field of ``KernelChoice``.

    Calls have one tensor for queries, keys and values.
    """

    def __init__(self, family: Family, kernel: str) -> None:
        self.family, self.kernel = family, kernel

    def __call__(
        self,
        states: Tensor,
        *,
        packed: Tensor | None = None,
        receives: int = 1,
        dropout: float = 0.0,
        capability: int = 90,
    ) -> bool:
        length = states.shape[2]
        spec = spec_of(states, states, None, packed, length, 1.0, dropout, 1.0, receives, 0.0)
        aligned = is_aligned(states)
        choice = dispatch.select_kernels(self.family, spec, aligned=aligned, capability=capability)
        return bool(getattr(choice, self.kernel))

    def assert_not_for_others(self, longest: Tensor) -> None:
        """``longest``: states ``[2, heads, length, 64]`` of as many tokens as the kernel takes."""
        assert self(longest)
        assert not self(longest, receives=0), "rows that receive no messages"
        assert not self(longest.repeat(1, 1, 2, 1)), "a longer map"
        assert not self(longest[..., :32]), "another head size"
        assert not self(longest.float())
        ends = torch.tensor([0, 200, longest.shape[2]], dtype=torch.int32, device=longest.device)
        assert not self(longest[:1], packed=ends), "packed"
        assert not self(longest.repeat(1, 1, 1, 2)[..., 4:68]), "rows that begin elsewhere than at 16 bytes"
        assert not self(longest, capability=100), "another GPU"
