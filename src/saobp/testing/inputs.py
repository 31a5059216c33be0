"""Inputs for attention: ordinary, padded, strided and pathological, the same numbers on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Side = Literal["right", "left", "both"]
Collapse = Literal["sink", "diagonal"]


@dataclass(frozen=True)
class AttentionInputs:
    """One call of the operation and the gradient of its output.

    query ``[batch, heads, queries, dim]``, key and value ``[batch, key_heads, keys, dim]``, strength
    ``[heads]`` (at least float32), output_gradient like query, padding_mask ``[batch, keys]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    strength: Tensor
    output_gradient: Tensor
    padding_mask: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    def to(self, dtype: torch.dtype) -> AttentionInputs:
        """The same (already rounded) numbers in another precision; strength stays at least float32."""
        return replace(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            strength=self.strength.to(torch.promote_types(dtype, torch.float32)),
            output_gradient=self.output_gradient.to(dtype),
        )

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key, value and strength as new leaf tensors with gradients, same strides."""
        query, key, value, strength = (
            t.detach().requires_grad_() for t in (self.query, self.key, self.value, self.strength)
        )
        return query, key, value, strength


def attention_inputs(
    batch: int = 2,
    heads: int = 2,
    length: int = 16,
    dim: int = 16,
    *,
    queries: int | None = None,
    key_heads: int | None = None,
    value_dim: int | None = None,
    strength: float | tuple[float, ...] = 0.2,
    padding: Side | None = None,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """Normal samples; ``transposed`` makes strided views of ``[batch, length, heads, dim]``, as models do."""
    random = torch.Generator().manual_seed(seed)
    queries, key_heads = length if queries is None else queries, key_heads or heads
    value_dim = value_dim or dim

    def normal(heads: int, length: int, dim: int) -> Tensor:
        shape = (batch, length, heads, dim) if transposed else (batch, heads, length, dim)
        states = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).to(device)
        return states.transpose(1, 2) if transposed else states

    per_head = (strength,) * heads if isinstance(strength, float | int) else strength
    return AttentionInputs(
        query=normal(heads, queries, dim),
        key=normal(key_heads, length, dim),
        value=normal(key_heads, length, value_dim),
        strength=torch.tensor(
            per_head, dtype=torch.promote_types(dtype, torch.float32), device=torch.device(device)
        ),
        output_gradient=normal(heads, queries, value_dim),
        padding_mask=None if padding is None else padding_mask(batch, length, padding, device=device),
    )


def collapsed_inputs(inputs: AttentionInputs, gap: float, collapse: Collapse = "sink") -> AttentionInputs:
    """The same call with scores (at the default scale) that favour one key by ``gap`` nats.

    ``sink``: every row favours key 0. ``diagonal``: row j favours the keys at j, j + dim, j - dim, ...
    The rest of query and key is shrunk, so that the gap is what decides.
    """
    query, key = 0.1 * inputs.query, 0.1 * inputs.key
    dim = query.shape[-1]
    height = (gap * dim**0.5) ** 0.5
    if collapse == "sink":
        query[..., 0] = height
        key[..., 0] = 0.0
        key[..., :1, 0] = height
    else:
        for states in (query, key):
            position = torch.arange(states.shape[-2], device=states.device)
            states[..., position, position % dim] = height
    return replace(inputs, query=query, key=key)


def drifting_inputs(inputs: AttentionInputs, drift: float) -> AttentionInputs:
    """The same call, but the gradients of neighbouring rows cancel, except along one head dim.

    There all rows pull alike, at values that fall from ``drift`` to minus ``drift`` along the sequence. What
    a key gets from all rows after one is then of one sign for most keys, and small beside what it gets from
    that row.
    """
    gradient, value = inputs.output_gradient.clone(), inputs.value.clone()
    gradient[..., 1::2, :] = -gradient[..., :1, :]
    gradient[..., 0::2, :] = gradient[..., :1, :]
    gradient[..., 0] = 1.0
    value[..., 0] = torch.linspace(drift, -drift, value.shape[-2], device=value.device)
    return replace(inputs, value=value, output_gradient=gradient)


def padding_mask(batch: int, length: int, side: Side, *, device: torch.device | str = "cpu") -> Tensor:
    """``[batch, length]``, True for real tokens: the first sequence is full, later ones shorter and shorter.

    With three or more sequences the last is all padding: rows with no visible key.
    """
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(batch):
        real = length if row == 0 else (0 if row == batch - 1 and batch > 2 else max(1, length - 2 * row - 1))
        start = {"right": 0, "left": length - real, "both": (length - real) // 2}[side]
        mask[row, start : start + real] = True
    return mask.to(device)
