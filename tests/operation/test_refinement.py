"""The one noun: its forms, its checks, its strengths."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saobp import Refinement
from saobp.propagation import get_factor
from saobp.refinement import factor_names

FACTORS = ["none", "high", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior"]
numbers = st.floats(0, 16)
strengths = st.one_of(
    numbers,
    st.sampled_from(["auto", "learned"]),
    st.lists(st.one_of(numbers, st.lists(numbers, min_size=1, max_size=3)), min_size=1, max_size=3),
)
refinements = st.builds(
    Refinement,
    factor=st.sampled_from(FACTORS),
    strength=strengths,
    steps=st.integers(1, 5),
    damping=st.floats(0, 0.99),
    future=st.sampled_from(["strict", "paper"]),
)


@given(refinements)
def test_dict_and_json_round_trip(refinement: Refinement) -> None:
    plain = refinement.to_dict()
    assert Refinement.from_dict(plain) == refinement
    assert Refinement.from_dict(json.loads(json.dumps(plain))) == refinement
    assert hash(Refinement.from_dict(plain)) == hash(refinement)


@given(refinements)
def test_text_round_trip(refinement: Refinement) -> None:
    assert Refinement.parse(str(refinement)) == refinement


@pytest.mark.parametrize(
    ("refinement", "text"),
    [
        (Refinement("high", 0.2), "high:0.2"),
        (Refinement("high", 1), "high:1"),
        (Refinement(), "high"),
        (
            Refinement("high-key-bias", "learned", message_stride=4),
            "high-key-bias:learned,message_stride=4",
        ),
        (Refinement("none"), "none"),
        (Refinement("low", "learned", steps=2), "low:learned,steps=2"),
        (Refinement("high", [0.1, 2], damping=0.5, future="paper"), "high:0.1/2,damping=0.5,future=paper"),
        (Refinement("high", [[0.1, 0.2], [0.3]]), "high:0.1:0.2/0.3:"),
        (Refinement("high", [0.1]), "high:0.1/"),
    ],
)
def test_text(refinement: Refinement, text: str) -> None:
    assert str(refinement) == text
    assert Refinement.parse(text) == refinement


def test_every_name_has_a_factor() -> None:
    for name in factor_names():
        assert (get_factor(name) is None) == (name == "none")


def test_defaults() -> None:
    assert Refinement().to_dict() == {
        "factor": "high",
        "strength": "auto",
        "steps": 1,
        "damping": 0.0,
        "future": "strict",
    }


def test_frozen_and_hashable() -> None:
    refinement = Refinement("high", [[0.1, 0.2], [0.3, 0.4]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        refinement.strength = 0.1  # type: ignore[misc]
    assert len({refinement, Refinement("high", ((0.1, 0.2), (0.3, 0.4))), Refinement()}) == 2


def test_numbers_of_other_libraries_become_plain() -> None:
    refinement = Refinement("high", [np.float32(0.5), np.float64(1)], damping=np.float32(0.5))
    assert (
        json.loads(json.dumps(refinement.to_dict())) == Refinement("high", [0.5, 1.0], damping=0.5).to_dict()
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("high", Refinement()),
        ("none", Refinement("none")),
        ("high:0.2", Refinement("high", 0.2)),
        ("low:learned", Refinement("low", "learned")),
        ("high:0.1/0.2/0.3", Refinement("high", [0.1, 0.2, 0.3])),
        ("high,strength=learned,steps=2", Refinement("high", "learned", steps=2)),
        (
            "low-listing:1, steps=3, damping=0.5, future=paper",
            Refinement("low-listing", 1.0, 3, 0.5, "paper"),
        ),
    ],
)
def test_parse(text: str, expected: Refinement) -> None:
    assert Refinement.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hihg", "unknown factor 'hihg': choose one of none, high, low, elemmul"),
        ("", "unknown factor ''"),
        ("high:", "strength must be a number, 'auto' or 'learned', not ''"),
        ("high:strong", "strength must be a number, 'auto' or 'learned', not 'strong'"),
        ("high,strength=strong", "strength must be a number, a list, 'auto' or 'learned', not 'strong'"),
        ("high,steps=two", "steps must be a whole number of at least 1, not 'two'"),
        ("high,steps=1.5", "steps must be a whole number of at least 1, not '1.5'"),
        ("high,damping=half", "damping must be a number from 0 up to but not including 1, not 'half'"),
        ("high:0.1,0.2", "a slash joins strengths of layers, as in high:0.1/0.2"),
        ("high,steps", "cannot read 'steps' in 'high,steps': write strength=... or steps=... or damping=..."),
        ("high,steps=2,steps=3", "steps is given twice in 'high,steps=2,steps=3'"),
        ("high:0.2,strength=0.5", "strength is given twice in 'high:0.2,strength=0.5'"),
        ("high,colour=red", "cannot read 'colour=red' in 'high,colour=red': write strength=..."),
        ("high:-1", "a strength must lie from 0 to 16, not -1 ('low' is the factor for attraction)"),
        ("high:nan", "a strength must lie from 0 to 16, not nan"),
    ],
)
def test_parse_says_what_is_wrong(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Refinement.parse(text)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"factor": None}, "unknown factor None: choose one of"),
        ({"strength": "strong"}, "strength must be a number, a list, 'auto' or 'learned', not 'strong'"),
        ({"strength": []}, "strength is an empty list: give one entry per attention layer"),
        ({"strength": [0.1, []]}, "strength has an empty list for a layer: give one entry per head"),
        ({"strength": True}, "a strength must be a number, not True of type bool"),
        ({"strength": None}, "a strength must be a number, not None of type NoneType"),
        ({"strength": [0.1, "x"]}, "a strength must be a number, not 'x' of type str"),
        ({"strength": [[[0.1]]]}, "a strength must be a number, not [0.1] of type list"),
        ({"strength": 17}, "a strength must lie from 0 to 16, not 17"),
        ({"strength": float("inf")}, "a strength must lie from 0 to 16, not inf"),
        ({"strength": [-0.5]}, "a strength must lie from 0 to 16, not -0.5 ('low' is the factor"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"steps": 1.5}, "steps must be a whole number of at least 1, not 1.5"),
        ({"steps": True}, "steps must be a whole number of at least 1, not True"),
        ({"damping": 1.0}, "damping must be a number from 0 up to but not including 1, not 1.0"),
        ({"damping": "half"}, "damping must be a number from 0 up to but not including 1, not 'half'"),
        (
            {"factor": "sinkhorn", "steps": 3},
            "'sinkhorn' takes no steps: 'sinkhorn' balances columns and rows",
        ),
        ({"future": "open"}, "future must be 'strict' or 'paper', not 'open'"),
        ({"variants": "gate"}, "variants must be a list of names, as in ['gate'], not 'gate'"),
        ({"variants": None}, "variants must be a list of names, as in ['gate'], not None"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Refinement(**fields)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Refinement.from_dict(fields)


def test_unknown_fields_are_named() -> None:
    sentence = (
        "unknown refinement field colour: the fields are damping, factor, future, message_stride, steps"
    )
    with pytest.raises(ValueError, match=sentence):
        Refinement.from_dict({"factor": "high", "colour": "red"})


@pytest.mark.parametrize(("parameters", "expected"), [(11.2e6, 0.2), (28.8e6, 0.08), (41.4e6, 0.05)])
def test_auto_gives_the_strengths_of_the_paper(parameters: float, expected: float) -> None:
    resolved = Refinement().resolved(int(parameters))
    assert resolved.strength == pytest.approx(expected, abs=0.005)
    assert resolved.resolved(1) == resolved


def test_auto_stays_in_bounds() -> None:
    assert Refinement().resolved(100).strength == 16.0
    assert Refinement("high", "learned").resolved(100).strength == "learned"
    with pytest.raises(ValueError, match="strength 'auto' needs a model with parameters, not 0"):
        Refinement().resolved(0)


def test_strengths_of_a_layer() -> None:
    def layer(strength: Any, index: int) -> list[float]:
        found = Refinement("high", strength).layer_strengths(index, 2, 3)
        assert found.dtype == torch.float64
        return found.tolist()

    assert layer(0.5, 1) == [0.5] * 3
    assert layer([0.1, 0.2], 1) == [0.2] * 3
    assert layer([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], 1) == [0.4, 0.5, 0.6]
    assert layer([0.1, [0.4, 0.5, 0.6]], 0) == [0.1] * 3


def test_what_it_is() -> None:
    assert Refinement("high", "learned").is_learned
    assert not Refinement("high", [0.1]).is_learned
    assert Refinement("none").is_plain
    assert not Refinement("high", 0.0).is_plain


@pytest.mark.parametrize("factor", ["high-key-bias", "low-key-bias"])
def test_messages_from_a_part_of_the_rows_have_every_form(factor: str) -> None:
    refinement = Refinement(factor, 0.3, steps=2, message_stride=3)
    assert Refinement.parse(str(refinement)) == refinement
    assert Refinement.from_dict(refinement.to_dict()) == refinement
    assert "message_stride" not in Refinement(factor).to_dict()


@pytest.mark.parametrize("factor", FACTORS)
def test_only_a_key_bias_has_messages_from_a_part_of_the_rows(factor: str) -> None:
    with pytest.raises(ValueError, match="message_stride is for high-key-bias and low-key-bias"):
        Refinement(factor, 0.3, message_stride=2)


@pytest.mark.parametrize("stride", [0, -1, 1.5, True, "2"])
def test_a_message_stride_is_a_whole_number(stride: Any) -> None:
    with pytest.raises(ValueError, match="message_stride must be a whole number of at least 1"):
        Refinement("high-key-bias", 0.3, message_stride=stride)
