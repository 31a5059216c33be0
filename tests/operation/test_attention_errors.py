"""Bad input gets one sentence that says what was wrong and what would be right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import saobp
from saobp.propagation.factors import _FACTORS

HIGH = saobp.Refinement("high", 0.2)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def says(sentence: str) -> str:
    return re.escape(sentence)


def attend(**changes: Any) -> None:
    call: dict[str, Any] = {
        "query": states(2, 4, 5, 8),
        "key": states(2, 2, 5, 8),
        "value": states(2, 2, 5, 8),
        "refinement": HIGH,
    }
    call |= changes
    saobp.attention(**call)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"query": states(4, 5, 8)},
            "query, key and value must be [batch, heads, length, dim], not query (4, 5, 8), "
            "key (2, 2, 5, 8), value (2, 2, 5, 8)",
        ),
        (
            {"key": states(2, 2, 5, 8, dtype=torch.float16)},
            "must share one floating-point type, not torch.float32, torch.float16 and torch.float32",
        ),
        (
            {name: states(2, 2, 5, 8, dtype=torch.int64) for name in ("query", "key", "value")},
            "must share one floating-point type, not torch.int64, torch.int64 and torch.int64",
        ),
        ({"value": states(2, 2, 6, 8)}, "query, key and value do not fit together: query (2, 4, 5, 8)"),
        ({"query": states(3, 4, 5, 8)}, "query, key and value do not fit together: query (3, 4, 5, 8)"),
        ({"query": states(2, 4, 5, 9)}, "query, key and value do not fit together: query (2, 4, 5, 9)"),
        ({"query": states(2, 3, 5, 8)}, "query heads must be a multiple of key heads, not 3 and 2"),
        (
            {"key": states(2, 0, 5, 8), "value": states(2, 0, 5, 8)},
            "query heads must be a multiple of key heads, not 4 and 0",
        ),
        ({"dropout_p": 1.0}, "dropout_p must lie from 0 up to but not including 1, not 1.0"),
        ({"dropout_p": "0.1"}, "dropout_p must lie from 0 up to but not including 1, not 0.1"),
        ({"scale": "1"}, "scale must be a finite number, not 1"),
        ({"scale": torch.tensor(0.5)}, "not 0.5: multiply the query by a tensor"),
        ({"is_causal": "no"}, "is_causal must be True or False, not 'no'"),
        ({"query": states(2, 4, 5, 8).to_sparse()}, "must be dense tensors, neither sparse nor nested"),
        (
            {"key": torch.nested.nested_tensor([states(2, 5, 8)] * 2, layout=torch.jagged)},
            "must be dense tensors, neither sparse nor nested",
        ),
        (
            {name: states(2, 2, 5, 8, dtype=torch.float8_e4m3fn) for name in ("query", "key", "value")},
            "must share one floating-point type, not torch.float8_e4m3fn, torch.float8_e4m3fn",
        ),
        ({"dropout_p": -0.1}, "dropout_p must lie from 0 up to but not including 1, not -0.1"),
        ({"dropout_p": float("nan")}, "dropout_p must lie from 0 up to but not including 1, not nan"),
        (
            {"attention_mask": torch.full((2, 5), 0.5)},
            "attention_mask must hold only 1 for real tokens and 0 for padding, unlike this mask of "
            "torch.float32: numbers to add to the scores are attn_mask",
        ),
        (
            {"attention_mask": torch.ones(2, 5), "padding_mask": torch.ones(2, 5)},
            "padding_mask is the older name of attention_mask: give one of the two",
        ),
        (
            {"padding_mask": states(2, 4, dtype=torch.bool)},
            "padding_mask must have shape (2, 5), not (2, 4)",
        ),
        (
            {"padding_mask": [[True] * 5] * 2},
            "padding_mask must be a tensor of True or 1 for real tokens, not list",
        ),
        (
            {"padding_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")},
            "padding_mask must be on cpu like the rest, not on meta",
        ),
        (
            {"key": torch.zeros(2, 2, 5, 8, device="meta")},
            "query, key and value must be on the same device, not cpu, meta and cpu",
        ),
        (
            {"query": states(2, 4, 5, 0), "key": states(2, 2, 5, 0)},
            "query and key must have a head size of at least 1: query (2, 4, 5, 0)",
        ),
        ({"scale": float("nan")}, "scale must be a finite number, not nan"),
        ({"scale": float("inf")}, "scale must be a finite number, not inf"),
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.int64)},
            "attn_mask must be bool (True: attend) or floating point (added to scores), not torch.int64",
        ),
        (
            {"attn_mask": torch.zeros(5, 5).to(torch.float8_e4m3fn)},
            "floating point (added to scores), not torch.float8_e4m3fn",
        ),
        (
            {"attn_mask": torch.ones(2, 5, dtype=torch.bool)},
            "attn_mask must broadcast to [batch, heads, queries, keys] (2, 4, 5, 5), unlike (2, 5); "
            "[batch, keys] with 1 for real tokens is attention_mask",
        ),
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.bool, device="meta")},
            "attn_mask must be on cpu like the rest, not on meta",
        ),
        (
            {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
            "attn_mask lets one row see another's token but not the reverse, as a causal mask does, so rows "
            "would receive messages about tokens hidden from them: pass is_causal=True, or",
        ),
        ({"strength": [0.1] * 4}, "strength must be a tensor of one real number per head, not list"),
        (
            {"strength": torch.zeros(4, dtype=torch.complex64)},
            "strength must be a tensor of one real number per head, not torch.complex64",
        ),
        ({"backend": "magic"}, "unknown backend 'magic': choose 'auto', 'reference' or 'fused'"),
        ({"strength": states(3)}, "strength must have shape (4,), one per head, not (3,)"),
        ({"strength": states(0, 4)}, "strength must have shape (4,), one per head, not (0, 4)"),
        (
            {"refinement": saobp.Refinement("high")},
            "strength 'auto' has no value outside a model: saobp.apply(model, ...) resolves it, or pass a "
            "number",
        ),
        (
            {"refinement": saobp.Refinement("high", "learned")},
            "strength 'learned' has no value outside a model",
        ),
        (
            {"refinement": saobp.Refinement("high", [0.1, 0.2])},
            "strength lists 2 layers but there are 1 attention layers",
        ),
        (
            {"refinement": saobp.Refinement("high", [[0.1, 0.2]])},
            "strength lists 2 heads for layer 0 but it has 4",
        ),
        (
            {"query": states(2, 4, 3, 8), "is_causal": True},
            "causal 'high' with 3 queries and 5 keys lacks the messages of the earlier rows: pass all rows, "
            "or decode through a model that saobp.apply has prepared",
        ),
        (
            {"query": states(2, 4, 3, 8), "is_causal": True, "refinement": saobp.Refinement("elemmul")},
            "causal 'elemmul' with 3 queries and 5 keys lacks the messages of the earlier rows",
        ),
        (
            {"query": states(2, 4, 3, 8), "refinement": saobp.Refinement("elemmul")},
            "ElemMul compares every row with every other: it needs as many queries as keys, not 3 and 5",
        ),
        (
            {
                "query": states(2, 4, 6, 8),
                "is_causal": True,
                "refinement": saobp.Refinement("high-listing", 1),
            },
            "causal attention needs at least as many keys as queries, not 5 and 6",
        ),
        (
            {"query": states(2, 4, 6, 8), "is_causal": True, "refinement": saobp.Refinement("none")},
            "causal attention needs at least as many keys as queries, not 5 and 6",
        ),
    ],
)
def test_attention_says_what_is_wrong(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=says(sentence)):
        attend(**changes)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_arrays_of_numpy_are_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(
        TypeError, match=says(f"{name} must be a torch.Tensor, not ndarray: torch.from_numpy(array) makes")
    ):
        attend(**{name: np.zeros((2, 2, 5, 8))})
    with pytest.raises(TypeError, match=says("probabilities must be a torch.Tensor, not list")):
        saobp.refine([[0.5, 0.5]], HIGH)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (
            states(5),
            {},
            "probabilities must be floating point with at least two dimensions, not torch.float32 of shape "
            "(5,)",
        ),
        (
            states(5, 5, dtype=torch.int32),
            {},
            "must be floating point with at least two dimensions, not torch.int32 of shape (5, 5)",
        ),
        (
            states(2, 3, 5, 5),
            {"padding_mask": torch.ones(5, dtype=torch.bool)},
            "padding_mask must have shape (2, 5), not (5,)",
        ),
        (
            states(3, 5, 5),
            {"padding_mask": torch.ones(3, 5, dtype=torch.bool)},
            "padding_mask must have shape (5,), not (3, 5)",
        ),
        (
            states(3, 5, 5),
            {"padding_mask": torch.full((5,), 2)},
            "padding_mask must hold only 1 for real tokens and 0 for padding",
        ),
        (states(3, 5, 5), {"strength": states(2)}, "strength must have shape (3,), one per head, not (2,)"),
        (states(5, 5), {"strength": states(2)}, "strength must have shape (1,), one per head, not (2,)"),
        (states(2, 4, 5), {"is_causal": True}, "causal 'high' with 4 queries and 5 keys lacks the messages"),
        (states(3, 5, 5), {"is_causal": "no"}, "is_causal must be True or False, not 'no'"),
    ],
)
def test_refine_says_what_is_wrong(rows: torch.Tensor, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=says(sentence)):
        saobp.refine(rows, HIGH, **options)


def test_refine_does_not_hide_what_is_no_probability() -> None:
    for bad in (float("nan"), -0.5):
        rows = torch.full((3, 3), 1 / 3)
        rows[1, 2] = bad
        assert saobp.refine(rows, HIGH)[1].isnan().all()


def test_leak_warning_is_for_causal_paper_form_alone(recwarn: pytest.WarningsRecorder) -> None:
    rows = torch.full((3, 3), 1 / 3)
    leaking = saobp.Refinement("high", 0.2, future="paper")
    saobp.refine(rows, leaking)
    saobp.refine(rows, HIGH, is_causal=True)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="Use future='strict' for anything but"):
        saobp.refine(rows, leaking, is_causal=True)


def test_factors_are_registered_with_care() -> None:
    class Deaf(saobp.Factor):
        def log_messages(self, beliefs: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
            return torch.zeros_like(beliefs)

    with pytest.raises(
        ValueError, match=says("'high' is a built-in factor: register yours under another name")
    ):
        saobp.register_factor("high", Deaf())
    with pytest.raises(TypeError, match=says("a factor must be an instance of saobp.Factor, not <class")):
        saobp.register_factor("deaf", Deaf)  # type: ignore[arg-type]
    for name in ("", "a,b", "a:b", "a=b", 3):
        with pytest.raises(
            ValueError, match="a factor's name is made of letters, digits, '-' and '_', unlike"
        ):
            saobp.register_factor(name, Deaf())  # type: ignore[arg-type]


def test_a_factor_with_messages_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnePerRow(saobp.Factor):
        def log_messages(self, beliefs: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
            return strength * beliefs.sum(-1, keepdim=True)

    monkeypatch.setitem(_FACTORS, "one-per-row", OnePerRow())
    monkeypatch.setattr("saobp.refinement._factor_names", ["one-per-row"])
    with pytest.raises(ValueError, match=says("entry of beliefs (2, 4, 5, 5), not (2, 4, 5, 1)")):
        attend(refinement="one-per-row:0.2")
