"""What tests of ElemMul share: a padding row that is like no real row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saobp.testing.inputs import AttentionInputs, attention_inputs


def lonely_padding_row(dtype: torch.dtype, device: str) -> AttentionInputs:
    """Real rows sit on keys 0 and 1, the padding row on key 2, by more than any precision can tell."""
    plain = attention_inputs(1, 1, 4, 16, dtype=dtype, device=device)
    query, key = torch.zeros_like(plain.query), torch.zeros_like(plain.key)
    for position in range(3):
        key[..., position, position] = 64.0
    for row, target in enumerate((0, 1, 0, 2)):
        query[..., row, target] = 128.0
    mask = torch.tensor([[True, True, True, False]], device=device)
    return replace(plain, query=query, key=key, padding_mask=mask)


def check_even_padding_row(output: Tensor, inputs: AttentionInputs) -> None:
    """Its output ``[1, 1, 4, dim]`` is the mean of the real rows' values."""
    step = 4 * torch.finfo(inputs.dtype).eps
    torch.testing.assert_close(output[0, 0, 3], inputs.value[0, 0, :3].mean(0), rtol=step, atol=step)
