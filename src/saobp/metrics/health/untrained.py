"""Whether a model still has its random weights."""

from __future__ import annotations

from torch import nn


def is_untrained(model: nn.Module) -> bool:
    """Whether every bias and every weight of a norm is constant, as initialised; no training leaves them so.

    A model without such parameters, or whose parameters are on other devices, counts as trained.
    """
    vectors = [one.detach() for one in model.parameters() if one.ndim == 1 and one.numel() > 1]
    return bool(vectors) and all(bool((one == one[0]).all()) for one in vectors)
