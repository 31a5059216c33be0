"""``--refinement``: a refinement in its text form, each of whose fields must do something."""

from __future__ import annotations

from saobp.propagation.factors import has_strength
from saobp.refinement import Refinement


def parse_refinement_option(text: str) -> Refinement:
    """Parse what was typed; a field without effect is an error.

    Code may loop over factors with one strength, and saved configs name one for every factor, so
    :class:`~saobp.refinement.Refinement` itself takes such fields.
    """
    refinement = Refinement.parse(text)
    is_none = refinement.factor == "none"
    if refinement.strength != "auto" and not has_strength(refinement.factor):
        why = "it is plain attention" if is_none else "it is not weighted"
        raise ValueError(f"{refinement.factor!r} takes no strength in {text!r}, since {why}: leave it out")
    if is_none and (refinement.steps > 1 or refinement.damping or refinement.future != "strict"):
        raise ValueError(
            f"'none' takes no steps, damping or future in {text!r}: name a factor, as in high:0.2"
        )
    if refinement.damping and refinement.steps == 1:
        raise ValueError(f"damping has no effect on the single step of {text!r}: add steps=2 or more")
    return refinement
