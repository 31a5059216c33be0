"""Rows without padding are trained without masks, which would keep SDPA from its fast kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saobp.training.architectures import build_model
from saobp.training.fast_layers import SDPA, hides_nothing, no_masks_for_full_rows

BOTH_WAYS = {"mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True}


@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2", "llama"])
def test_no_layer_gets_a_mask_while_it_is_compiled(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(family, "tiny", vocabulary=50, length=8, dropout=0.0, seed=0).eval()
    ids = torch.arange(16).view(2, 8)
    plain = model(input_ids=ids).logits
    sdpa, given = ALL_ATTENTION_FUNCTIONS[SDPA], []

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        given.append(mask)
        return sdpa(module, q, k, v, mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, SDPA, spy)
    with no_masks_for_full_rows():
        found = torch.compile(lambda ids: model(input_ids=ids).logits, backend="eager")(ids)
    torch.testing.assert_close(found, plain)
    assert given == [None] * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("options", "hides"),
    [
        ({"mask_function": causal_mask_function}, False),
        (BOTH_WAYS, False),
        ({"mask_function": bidirectional_mask_function}, True),
        ({"mask_function": causal_mask_function, "allow_is_causal_skip": False}, True),
        ({**BOTH_WAYS, "attention_mask": torch.ones(2, 8)}, True),
        ({**BOTH_WAYS, "mask_function": lambda *_: True}, True),
        ({**BOTH_WAYS, "q_length": 1}, True),
        ({**BOTH_WAYS, "q_offset": torch.tensor(0)}, True),
    ],
)
def test_only_a_mask_that_says_nothing_is_left_out(options: dict[str, Any], hides: bool) -> None:
    assert hides_nothing(**{"batch_size": 2, "q_length": 8, "kv_length": 8, **options}) is not hides


def test_transformers_builds_its_masks_again_afterwards() -> None:
    before = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]
    with no_masks_for_full_rows():
        outer = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]
        with no_masks_for_full_rows():
            assert ALL_MASK_ATTENTION_FUNCTIONS[SDPA] not in (before, outer)
        assert ALL_MASK_ATTENTION_FUNCTIONS[SDPA] is outer
    assert ALL_MASK_ATTENTION_FUNCTIONS[SDPA] is before
    assert SDPA not in ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
