"""MPNet through the attention registry: its rows are softmax of scores plus a bias of relative positions.

Transformers computes them inside MPNet's own class. The class here takes its place in a given model: same
weights and rows, but computed by the registry's function, to which the bias goes as part of the mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention


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


_biased_masks = WeakTensorKeyDictionary()


def biased_mask(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask of numbers ``[batch, heads, queries, keys]`` that adds the bias to the scores of visible keys.

    mask: None, ``[batch, keys]``, or ``[batch, 1 or heads, queries, keys]``; bool, or numbers to add
    bias: None, or ``[batch, heads, queries, keys]``. Without one the mask is returned as it is.

    Layers share mask and bias, so they get one tensor, which is looked at once (``remembered_nodes``).
    """
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"saobp reads masks [batch, keys] or [batch, heads, queries, keys], not {tuple(mask.shape)}"
        )
    if torch.compiler.is_compiling() or bias.is_inference() or mask.is_inference():
        return _added(mask, bias)
    state = mask, mask._version, bias._version, torch.is_grad_enabled()
    cached = _biased_masks.get(bias)
    if cached is None or cached[0][0] is not mask or cached[0][1:] != state[1:]:
        cached = _biased_masks[bias] = (state, _added(mask, bias))
    biased: Tensor = cached[1]
    return biased


def _added(mask: Tensor, bias: Tensor) -> Tensor:
    """Bias plus the mask as numbers: a sum keeps no tensors for its gradient, so layers may be recomputed."""
    seen = mask[:, None, None, :] if mask.ndim == 2 else mask
    if not seen.is_floating_point():
        hidden = ~seen.bool()
        seen = torch.zeros_like(seen, dtype=bias.dtype).masked_fill_(hidden, torch.finfo(bias.dtype).min)
    return bias + seen


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
