"""The compared training methods and their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from saobp.refinement import Refinement

PAPER_STRENGTH = {"tiny": 0.2, "mini": 0.2, "small": 0.08, "medium": 0.05}
"""The paper's lambda for each size; tiny has no number of its own."""


@dataclass(frozen=True)
class Method:
    """A training method.

    key:         what experiments call it
    title:       what tables call it
    refinement:  in the text form of :class:`saobp.Refinement`; ``{strength}`` is the paper's for the size
    regularizer: a penalty on attention instead
    tier:        0 is trained first
    """

    key: str
    title: str
    refinement: str | None = None
    regularizer: str | None = None
    tier: int = 1

    def refined(self, size: str) -> Refinement | None:
        if self.refinement is None:
            return None
        return Refinement.parse(self.refinement.format(strength=PAPER_STRENGTH[size]))


METHODS = {
    method.key: method
    for method in (
        Method("original", "Original", tier=0),
        Method("high", "High", "high:{strength}", tier=0),
        Method("learned", "High, learned strengths", "high:learned", tier=0),
        Method("low", "Low", "low:{strength}"),
        Method("elemmul", "ElemMul", "elemmul"),
        Method("high-listing", "High, as listed", "high-listing:{strength}"),
        Method("high@0.05", "High, λ = 0.05", "high:0.05"),
        Method("elemmul-prior", "ElemMul with prior", "elemmul-prior", tier=2),
        Method("low-listing", "Low, as listed", "low-listing:{strength}", tier=2),
        Method("high@0.1", "High, λ = 0.1", "high:0.1", tier=2),
        Method("high@0.02", "High, λ = 0.02", "high:0.02", tier=2),
        Method("high@0.2", "High, λ = 0.2", "high:0.2", tier=2),
        Method("two-steps", "High, two steps", "high:{strength},steps=2", tier=3),
        Method("three-steps", "High, three steps", "high:{strength},steps=3", tier=3),
        Method("entropy", "Entropy-Reg", regularizer="entropy", tier=3),
        Method("eigen", "Eigen-Reg", regularizer="eigen", tier=3),
        Method("key-bias", "Key bias, learned strengths", "high-key-bias:learned"),
        Method("temperature", "Temperature per head", "temperature"),
        Method("sink", "Learned sink", "sink"),
        Method("softmax-plus-one", "Softmax plus one", "softmax-plus-one"),
        Method("gate", "Gated heads", "gate"),
        Method("qk-norm", "QK-norm", "qk-norm"),
        Method("sigma-reparam", "Sigma-Reparam", "sigma-reparam"),
        Method("learned-gate", "High, learned strengths + Gated heads", "high:learned+gate", tier=2),
        Method("learned-qk-norm", "High, learned strengths + QK-norm", "high:learned+qk-norm", tier=2),
        Method(
            "learned-temperature", "High, learned strengths + Temperature", "high:learned+temperature", tier=2
        ),
        Method(
            "key-bias-temperature",
            "Key bias, learned strengths + Temperature",
            "high-key-bias:learned+temperature",
            tier=2,
        ),
        Method("query-bias", "Query bias", "query-bias"),
        Method("by-distance", "High, strengths by distance", "high:learned+by-distance", tier=2),
        Method("message-gate", "High, gated messages", "high:learned+message-gate", tier=2),
        Method("alternating", "High, both signs from the start", "high:learned+alternating", tier=2),
        Method("later-steps", "High, two steps of own strengths", "high:learned,steps=2+later-steps", tier=2),
        Method("sinkhorn", "Sinkhorn, one iteration", "sinkhorn"),
        Method("sinkhorn-3", "Sinkhorn, three iterations", "sinkhorn-3"),
        Method("strict", "High, strict", "high:{strength},future=strict", tier=0),
        Method("paper", "High, paper form (leaks)", "high:{strength},future=paper", tier=0),
    )
}


def method_name(refinement: Refinement | None, regularizer: str | None) -> str:
    """Part of a run's name: from its recipe, not from the key of a method."""
    if refinement is None or refinement.is_plain:
        return "original" if regularizer is None else regularizer.replace(",", "-").replace("=", "-")
    return re.sub("[:,=/]", "-", str(refinement).replace("steps=", "steps"))
