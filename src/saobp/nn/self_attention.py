"""Self-attention with its projections, and helpers of refined modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saobp.arguments import check_no_variants
from saobp.functional import attention
from saobp.propagation.factors import has_strength
from saobp.refinement import Refinement


class SelfAttention(nn.Module):
    """Multi-head self-attention whose rows are refined, as ``[batch, length, embed_dim]`` to the same.

    refinement: a strength of ``learned`` (the default) is the parameter ``strength_bias``, one number per
                head of either sign that starts at 0; excluded from weight decay where biases are
    dropout:    on refined rows, while training
    is_causal:  rows see earlier tokens and receive their messages only
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        refinement: Refinement | str = "high:learned",
        *,
        dropout: float = 0.0,
        bias: bool = True,
        is_causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim, num_heads)
        if not isinstance(is_causal, bool):
            raise ValueError(f"is_causal must be True or False, not {is_causal!r}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout, self.is_causal = dropout, is_causal
        self.refinement = layer_refinement(refinement, num_heads)
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.strength_bias = learned_strengths(self.refinement, self.in_proj.weight, num_heads)

    def forward(
        self, states: Tensor, attention_mask: Tensor | None = None, *, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Masks as in :func:`saobp.attention`: attention_mask ``[batch, length]`` is 1 for real tokens."""
        if states.ndim != 3 or states.shape[-1] != self.embed_dim:
            raise ValueError(
                f"states must be [batch, length, {self.embed_dim}], not of shape {tuple(states.shape)}"
            )
        query, key, value = split_heads(self.in_proj(states), self.num_heads)
        output = attention(
            query,
            key,
            value,
            self.refinement,
            attention_mask=attention_mask,
            attn_mask=attn_mask,
            is_causal=self.is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            strength=self.strength_bias,
        )
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def reset_parameters(self) -> None:
        """Initialises the strengths of a module made on the meta device, as the projections do theirs."""
        if self.strength_bias is not None:
            nn.init.zeros_(self.strength_bias)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, refinement={str(self.refinement)!r}, "
            f"dropout={self.dropout}, is_causal={self.is_causal}"
        )


def check_sizes(embed_dim: int, num_heads: int) -> None:
    """Raise on sizes of which no heads can be made."""
    whole = all(isinstance(size, int) and size >= 1 for size in (embed_dim, num_heads))
    if not whole or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, both whole numbers, not {embed_dim!r} and "
            f"{num_heads!r}"
        )


def layer_refinement(refinement: Refinement | str, heads: int) -> Refinement:
    """The refinement of a single layer, checked: no variants, and a strength that needs no model."""
    refinement = Refinement.of(refinement)
    check_no_variants(refinement)
    if has_strength(refinement.factor) and not refinement.is_learned:
        refinement.layer_strengths(0, 1, heads)
    return refinement


def learned_strengths(refinement: Refinement, like: Tensor, heads: int) -> nn.Parameter | None:
    if not has_strength(refinement.factor) or not refinement.is_learned:
        return None
    return nn.Parameter(torch.zeros(heads, device=like.device, dtype=like.dtype))


def split_heads(projected: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value ``[batch, heads, length, dim]`` from ``[batch, length, 3 * embed_dim]``."""
    query, key, value = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return query, key, value
