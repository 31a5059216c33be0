"""How many tokens a model takes."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def max_input_length(model: PreTrainedModel) -> int | None:
    """The most tokens that a model's positions reach, as its embeddings or its config say; else None.

    RoBERTa and MPNet count positions from the padding token's number on, so theirs reach less far than
    ``max_position_embeddings``.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None  # XLNet has -1
