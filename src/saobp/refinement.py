"""The one noun of the project: how the rows of attention are refined."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import entry_points
from numbers import Real
from typing import Any

import torch
from torch import Tensor

MAX_STRENGTH = 16.0
"""Beyond this, gamma = 1 - e^(-strength) is 1 in single precision."""

FACTORS = "saobp.factors"
"""Group of entry points by which an installed package names the modules that register its factors."""

Strength = float | str | tuple[float | tuple[float, ...], ...]

_AUTO_STRENGTH, _AUTO_PARAMETERS = 0.2, 11.2e6

_factor_names = [
    *("none", "high", "low", "elemmul", "high-listing", "low-listing", "elemmul-prior"),
    *("high-key-bias", "low-key-bias", "sinkhorn", "sinkhorn-3"),
]


SINKS = ("sink", "softmax-plus-one")
"""Variants that replace softmax."""
KEY_BIAS = ("high-key-bias", "low-key-bias")
"""Factors with one bias per key, the same for all rows, whose messages may come from a part of the rows."""
SINKHORN = ("sinkhorn", "sinkhorn-3")
"""Factors that iterate as often as their name says, from the prior, whatever the beliefs are."""
NO_CAUSAL_STRIDE = "message_stride has no causal form, since causal rows receive unequal shares of messages"
STRENGTH_VARIANTS = ("alternating", "by-distance", "later-steps", "message-gate")
"""Variants of learned strengths, in the order in which they apply."""
VARIANTS = ("temperature", "qk-norm", "query-bias", "sigma-reparam", "gate", *SINKS, *STRENGTH_VARIANTS)
"""Other changes to attention; :mod:`saobp.variants` defines them."""


def factor_names() -> tuple[str, ...]:
    return tuple(_factor_names)


def _import_factor(name: str) -> None:
    """Import the module that an installed package names for this factor; the module registers it."""
    for entry in entry_points(group=FACTORS, name=name):
        entry.load()


def add_factor_name(name: str) -> None:
    """Let refinements name a factor; :func:`saobp.register_factor` calls this."""
    if name not in _factor_names:
        _factor_names.append(name)


@dataclass(frozen=True)
class Refinement:
    """How attention rows are refined; the same object in a call, a config, a command line and a record.

    - ``factor``: ``none``, ``high``, ``low``, ``elemmul``, ``high-listing``, ``low-listing``,
      ``elemmul-prior``, ``high-key-bias``, ``low-key-bias``, ``sinkhorn``, ``sinkhorn-3`` or a name given to
      :func:`saobp.register_factor`
    - ``strength``: lambda, 0 to 16, as a number, one per layer, a list per layer of one per head, ``"auto"``
      (from the model's parameter count) or ``"learned"`` (per head, trained, either sign, starts at 0)
    - ``steps``: belief-propagation steps
    - ``damping``: share of the old belief kept at each of several steps (no effect on a single step)
    - ``future``: causal attention only. ``strict``: a row receives messages of earlier rows only.
      ``paper``: of all rows, which leaks the future, only to reproduce the paper's decoder table.
    - ``message_stride``: key-bias factors only. With s, every s-th row sends messages, weighted to stand for
      all; 1 is every row
    - ``variants``: other changes to attention by name, such as ``qk-norm``: see docs/variants.md
    """

    factor: str = "high"
    strength: Strength = "auto"
    steps: int = 1
    damping: float = 0.0
    future: str = "strict"
    message_stride: int = 1
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.factor not in factor_names():
            _import_factor(self.factor)
        if self.factor not in factor_names():
            raise ValueError(
                f"unknown factor {self.factor!r}: choose one of {', '.join(factor_names())}, in text with a "
                f"strength as in 'high:0.2' or 'high:learned', or a variant: {', '.join(VARIANTS)}; a factor "
                "of your own is known once its file is imported (--import FILE in commands)"
            )
        object.__setattr__(self, "strength", _checked_strength(self.strength))
        check_count("steps", self.steps)
        if not isinstance(self.damping, Real) or not 0 <= self.damping < 1:
            raise ValueError(
                f"damping must be a number from 0 up to but not including 1, not {self.damping!r}"
            )
        object.__setattr__(self, "damping", float(self.damping))
        if self.future not in ("strict", "paper"):
            raise ValueError(f"future must be 'strict' or 'paper', not {self.future!r}")
        check_count("message_stride", self.message_stride)
        if self.message_stride > 1 and self.factor not in KEY_BIAS:
            raise ValueError(
                f"message_stride is for {' and '.join(KEY_BIAS)}, whose rows all receive the same messages; "
                f"rows of {self.factor!r} leave out their own, so each must send one"
            )
        if self.steps > 1 and self.factor in SINKHORN:
            raise ValueError(
                f"{self.factor!r} takes no steps: 'sinkhorn' balances columns and rows once, "
                "'sinkhorn-3' three times"
            )
        object.__setattr__(self, "variants", _checked_variants(self.variants, self.factor))
        of_strengths = [name for name in self.variants if name in STRENGTH_VARIANTS]
        if of_strengths and not self.is_learned:
            raise ValueError(
                f"{of_strengths[0]!r} goes with learned strengths alone, as in high:learned+{of_strengths[0]}"
            )
        if "later-steps" in self.variants and self.steps == 1:
            raise ValueError(
                "'later-steps' needs steps after the first, as in high:learned,steps=2+later-steps"
            )

    @property
    def is_learned(self) -> bool:
        return self.strength == "learned"

    @property
    def is_plain(self) -> bool:
        """Whether this is ordinary softmax attention by name (regardless of its strength)."""
        return self.factor == "none" and not self.variants

    @property
    def strongest(self) -> float | None:
        """Largest strength of any head, or None if not fixed."""
        if isinstance(self.strength, float):
            return self.strength
        if isinstance(self.strength, str):
            return None
        return max(max(entry) if isinstance(entry, tuple) else entry for entry in self.strength)

    @classmethod
    def of(cls, given: Refinement | str | Mapping[str, Any]) -> Refinement:
        """A refinement from any of its forms: itself, text such as ``high:0.2``, or the dict of a config."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        kind = type(given).__name__
        raise TypeError(f"a refinement is a saobp.Refinement, text such as 'high:0.2' or a dict, not {kind}")

    def __str__(self) -> str:
        """The command-line form, which :meth:`parse` reads; fields at their defaults are left out."""
        usual = {field.name: field.default for field in fields(self)}
        head = self.factor if self.strength == "auto" else f"{self.factor}:{_strength_text(self.strength)}"
        others = ((name, getattr(self, name)) for name in ("steps", "damping", "future", "message_stride"))
        text = ",".join([head, *(f"{name}={value}" for name, value in others if value != usual[name])])
        return "+".join([*([] if text == "none" and self.variants else [text]), *self.variants])

    @classmethod
    def parse(cls, text: str) -> Refinement:
        """Read the command-line form: ``high``, ``high:0.2`` or ``high,strength=learned,steps=2``.

        Strengths of layers are joined by ``/`` and those of a layer's heads by ``:``, as in
        ``high:0.1:0.2/0.3:0.4``; a list of one ends in its sign, as in ``high:0.1/``. Variants follow a
        plus sign, as in ``high:learned+gate``, or stand alone.
        """
        text, *variants = re.split(r"\+(?=[a-z])", text.strip())
        if text in VARIANTS:
            text, variants = "none", [text, *variants]
        head, *rest = [part.strip() for part in text.split(",")]
        factor, colon, strength = head.partition(":")
        options: dict[str, Any] = {"factor": factor, "variants": tuple(variants)}
        if colon:
            options["strength"] = _parsed_strength(strength)
        kinds: dict[str, Callable[[str], Any]] = {
            "strength": _parsed_strength,
            "steps": int,
            "damping": float,
            "future": str,
            "message_stride": int,
        }
        for part in rest:
            name, equals, value = part.partition("=")
            if not equals or name not in kinds:
                raise ValueError(
                    f"cannot read {part!r} in {text!r}: write {' or '.join(f'{k}=...' for k in kinds)}; "
                    "a slash joins strengths of layers, as in high:0.1/0.2"
                )
            if name in options:
                raise ValueError(f"{name} is given twice in {text!r}")
            try:
                options[name] = kinds[name](value)
            except ValueError:
                options[name] = value  # the constructor says what would be right
        return cls(**options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Refinement:
        """Read the dict form stored in ``config.saobp``."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ValueError(
                f"unknown refinement field {', '.join(unknown)}: the fields are {', '.join(sorted(names))}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The JSON-serialisable form: tuples become lists; ``variants`` and ``message_stride``
        are omitted at their defaults."""
        plain = asdict(self)
        plain["variants"] = list(self.variants)
        if not self.variants:
            del plain["variants"]
        if self.message_stride == 1:
            del plain["message_stride"]
        if isinstance(self.strength, tuple):
            plain["strength"] = [list(s) if isinstance(s, tuple) else s for s in self.strength]
        return plain

    def resolved(self, parameters: int) -> Refinement:
        """The same refinement with ``auto`` replaced by lambda for a model of that many parameters."""
        if self.strength != "auto":
            return self
        if parameters < 1:
            raise ValueError(f"strength 'auto' needs a model with parameters, not {parameters}")
        strength = min(_AUTO_STRENGTH * _AUTO_PARAMETERS / parameters, MAX_STRENGTH)
        return replace(self, strength=strength)

    def layer_strengths(self, layer: int, layers: int, heads: int) -> Tensor:
        """Strength of each head of one layer, ``[heads]`` in float64."""
        if isinstance(self.strength, str):
            what = "saobp.apply(model, ...) resolves it, or pass a number"
            raise ValueError(f"strength {self.strength!r} has no value outside a model: {what}")
        if isinstance(self.strength, float):
            return torch.full((heads,), self.strength, dtype=torch.float64)
        if len(self.strength) != layers:
            raise ValueError(
                f"strength lists {len(self.strength)} layers but there are {layers} attention layers"
            )
        entry = self.strength[layer]
        if isinstance(entry, float):
            return torch.full((heads,), entry, dtype=torch.float64)
        if len(entry) != heads:
            raise ValueError(f"strength lists {len(entry)} heads for layer {layer} but it has {heads}")
        return torch.tensor(entry, dtype=torch.float64)


def _checked_variants(names: Any, factor: str) -> tuple[str, ...]:
    """In the order of ``VARIANTS``, each known, given once and compatible with the factor."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"variants must be a list of names, as in ['gate'], not {names!r}")
    names = tuple(names)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"unknown variant of attention {unknown[0]!r}: choose from {', '.join(VARIANTS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"a variant of attention is named twice: {', '.join(names)}")
    replaces = [*(name for name in names if name in SINKS), *([factor] if factor != "none" else [])]
    if len(replaces) > 1 and replaces[0] in SINKS:
        raise ValueError(
            f"{replaces[0]!r} takes the place of softmax, so it does not go with {replaces[1]!r}"
        )
    return tuple(sorted(names, key=VARIANTS.index))


def _checked_strength(strength: Any) -> Strength:
    if isinstance(strength, str):
        if strength not in ("auto", "learned"):
            raise ValueError(f"strength must be a number, a list, 'auto' or 'learned', not {strength!r}")
        return strength
    if isinstance(strength, list | tuple):
        if not strength:
            raise ValueError("strength is an empty list: give one entry per attention layer")
        if any(isinstance(entry, list | tuple) and not entry for entry in strength):
            raise ValueError("strength has an empty list for a layer: give one entry per head")
        return tuple(
            tuple(_checked_number(s) for s in entry)
            if isinstance(entry, list | tuple)
            else _checked_number(entry)
            for entry in strength
        )
    return _checked_number(strength)


def check_count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _checked_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"a strength must be a number, not {value!r} of type {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or not 0 <= number <= MAX_STRENGTH:
        hint = " ('low' is the factor for attraction)" if number < 0 else ""
        raise ValueError(f"a strength must lie from 0 to {MAX_STRENGTH:g}, not {number:g}{hint}")
    return number


def _strength_text(strength: Strength | tuple[float, ...], sign: str = "/") -> str:
    if isinstance(strength, tuple):
        return sign.join(_strength_text(entry, ":") for entry in strength) + sign * (len(strength) == 1)
    return str(strength).removesuffix(".0")


def _parsed_strength(text: str) -> Strength:
    """``0.2``, ``auto``, ``learned`` or a list as :meth:`Refinement.parse` describes it."""
    if text in ("auto", "learned"):
        return text
    try:
        layers = [_parsed_heads(layer) for layer in text.removesuffix("/").split("/")]
    except ValueError:
        raise ValueError(f"strength must be a number, 'auto' or 'learned', not {text!r}") from None
    return tuple(layers) if "/" in text else layers[0]


def _parsed_heads(text: str) -> float | tuple[float, ...]:
    heads = tuple(float(head) for head in text.removesuffix(":").split(":"))
    return heads if ":" in text else heads[0]
