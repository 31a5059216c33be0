"""Measurements of a language model without training: perplexities, and questions asked zero-shot."""

from saobp.training.evaluation.perplexity import causal_perplexity, masked_perplexity, pseudo_perplexity
from saobp.training.evaluation.run import evaluate
from saobp.training.evaluation.zero_shot import accuracy, boolq_questions, race_questions

__all__ = [
    "accuracy",
    "boolq_questions",
    "causal_perplexity",
    "evaluate",
    "masked_perplexity",
    "pseudo_perplexity",
    "race_questions",
]
