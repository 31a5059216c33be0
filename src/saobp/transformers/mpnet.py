"""MPNet through the attention registry: its rows are softmax of scores plus a bias of relative positions.

Transformers computes them inside MPNet's own class. The class here takes its place in a given model: same
weights and rows, but computed by the registry's function, to which the bias goes as part of the mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from saobp.transformers.position_bias import biased_mask


class RegistryMPNetAttention(MPNetSelfAttention):
    """MPNet's attention with the function that the model's config names."""

    config: Any
    is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """hidden_states ``[batch, length, width]``, position_bias ``[batch, heads, length, length]``."""
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (
            layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        output, rows = attend(
            self, query, key, value, biased_mask(attention_mask, position_bias),
            dropout=self.dropout.p if self.training else 0.0,
            scaling=self.attention_head_size**-0.5,
            output_attentions=output_attentions,
        )  # fmt: skip
        output = self.o(output.reshape(hidden_states.shape))
        return (output, rows) if output_attentions else (output,)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention: output ``[batch, length, heads, dim]`` and rows ``[batch, heads, length, length]``.

    query, key and value ``[batch, heads, length, dim]``; attention_mask: added to the scores
    """
    scores = query @ key.mT * scaling
    rows = torch.softmax(scores if attention_mask is None else scores + attention_mask, -1)
    rows = nn.functional.dropout(rows, dropout, module.training)
    return (rows @ value).transpose(1, 2), rows


def use_registry(model: nn.Module) -> list[nn.Module]:
    """Give MPNet's attention modules of a model the class above, in place; returns those that it changed."""
    changed: list[nn.Module] = []
    for owner in model.modules():
        if not isinstance(owner, PreTrainedModel):
            continue
        for module in owner.modules():
            if type(module) is MPNetSelfAttention:
                module.__class__ = RegistryMPNetAttention
                module.config = owner.config  # type: ignore[assignment]
                changed.append(module)
    return changed


def restore(modules: Iterable[nn.Module]) -> None:
    """Undo ``use_registry`` for those of the modules that it has changed."""
    for module in modules:
        if type(module) is RegistryMPNetAttention:
            module.__class__ = MPNetSelfAttention  # type: ignore[assignment]
            del module.config
