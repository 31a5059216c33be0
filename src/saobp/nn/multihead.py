"""Drop-in replacement for ``torch.nn.MultiheadAttention`` with refined self-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from saobp.functional import attention, attention_with_rows
from saobp.nn.self_attention import check_sizes, layer_refinement, learned_strengths, split_heads
from saobp.refinement import Refinement


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` whose rows are refined, for self-attention.

    Constructor, masks, results and names in the state dict are those of PyTorch's module, except that
    learned strengths add ``strength_bias``, one number per head of either sign that starts at 0, that rows
    which see no key give zeros instead of NaN, and that the weights returned are those before dropout.
    Query, key and value must be one tensor; kdim, vdim, add_bias_kv and add_zero_attn must stay unused.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        refinement: Refinement | str = "high:learned",
    ) -> None:
        if add_bias_kv or add_zero_attn or kdim not in (None, embed_dim) or vdim not in (None, embed_dim):
            raise ValueError(
                "saobp.nn.MultiheadAttention refines self-attention, where every key is a row too: leave "
                "add_bias_kv, add_zero_attn, kdim and vdim unused"
            )
        check_sizes(embed_dim, num_heads)
        super().__init__(
            embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype
        )
        self.refinement = layer_refinement(refinement, num_heads)
        self.strength_bias = learned_strengths(self.refinement, self.in_proj_weight, num_heads)
        # Else nn.TransformerEncoderLayer computes plain attention from the weights, without calling forward.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        strengths = getattr(self, "strength_bias", None)  # not yet set when PyTorch's constructor calls
        if strengths is not None:
            nn.init.zeros_(strengths)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As PyTorch's: True in key_padding_mask and in a bool attn_mask hides, numbers are added.

        A causal attn_mask counts as is_causal, so that rows receive messages of earlier rows only.
        """
        if query is not key or key is not value:
            raise ValueError(
                "saobp.nn.MultiheadAttention refines self-attention: pass one tensor as query, key and "
                "value, or use torch.nn.MultiheadAttention"
            )
        if query.is_nested:
            if query.layout is not torch.strided or attn_mask is not None or key_padding_mask is not None:
                raise ValueError(
                    "nested texts must be of the strided layout and have no masks: give a padded tensor with "
                    "key_padding_mask"
                )
            return self._of_nested(query, is_causal), None
        if query.ndim not in (2, 3):
            raise ValueError(f"query must have 2 or 3 dimensions, not the shape {tuple(query.shape)}")
        states = query.unsqueeze(0) if query.ndim == 2 else query
        if query.ndim == 3 and not self.batch_first:
            states = query.transpose(0, 1)
        batch, length, width = states.shape
        if width != self.embed_dim:
            raise ValueError(f"query must have {self.embed_dim} channels, not {width}")
        if attn_mask is not None:
            self._check_attn_mask(attn_mask, batch, length)
            known = not torch.compiler.is_compiling()  # the compiler cannot trace a read of the mask's values
            causal = _is_causal_mask(attn_mask, length) if known else is_causal
            is_causal = is_causal or causal
            attn_mask = None if causal else _positive(attn_mask, batch, self.num_heads)
        projected = functional.linear(states, self.in_proj_weight, self.in_proj_bias)
        options: dict[str, Any] = {
            "attention_mask": _real_tokens(key_padding_mask, batch, length),
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "dropout_p": self.dropout if self.training else 0.0,
            "strength": self.strength_bias,
        }
        heads = split_heads(projected, self.num_heads)
        rows: Tensor | None = None
        if need_weights:
            output, rows = attention_with_rows(*heads, self.refinement, **options)
            rows = rows.mean(1) if average_attn_weights else rows
        else:
            output = attention(*heads, self.refinement, **options)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if query.ndim == 2:
            return output.squeeze(0), None if rows is None else rows.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), rows

    def _of_nested(self, states: Tensor, is_causal: bool) -> Tensor:
        """Texts without padding, as an nn.TransformerEncoder gives them when it evaluates."""
        lengths = torch.tensor([len(text) for text in states.unbind()], device=states.device)
        padded = states.to_padded_tensor(0.0)
        hidden = torch.arange(padded.shape[1], device=states.device) >= lengths[:, None]
        output, _ = self(
            padded, padded, padded, key_padding_mask=hidden, need_weights=False, is_causal=is_causal
        )
        texts = [text[:length] for text, length in zip(output, lengths, strict=True)]
        return torch.nested.as_nested_tensor(texts)

    def _check_attn_mask(self, mask: Tensor, batch: int, length: int) -> None:
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attn_mask must be bool (True hides) or floating point, not {what}")
        shapes = (length, length), (batch * self.num_heads, length, length)
        if tuple(mask.shape) not in shapes:
            raise ValueError(f"attn_mask must have shape {shapes[0]} or {shapes[1]}, not {tuple(mask.shape)}")


def _real_tokens(hidden: Tensor | None, batch: int, length: int) -> Tensor | None:
    """PyTorch's key_padding_mask, bool or numbers, as ``[batch, keys]`` that is True for real tokens."""
    if hidden is None:
        return None
    if tuple(hidden.shape) != (batch, length) and (batch != 1 or tuple(hidden.shape) != (length,)):
        raise ValueError(f"key_padding_mask must have shape ({batch}, {length}), not {tuple(hidden.shape)}")
    if hidden.is_floating_point():
        is_hidden = hidden == float("-inf")
        readable = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and bool(hidden.masked_fill(is_hidden, 0.0).any()):
            raise ValueError("a key_padding_mask of numbers must hold 0 and minus infinity only")
        hidden = is_hidden
    elif hidden.dtype != torch.bool:
        raise ValueError(f"key_padding_mask must be bool (True hides) or floating point, not {hidden.dtype}")
    return ~hidden.view(batch, -1)


def _is_causal_mask(mask: Tensor, length: int) -> bool:
    if mask.shape != (length, length):
        return False
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, later)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill(later, float("-inf")))


def _positive(mask: Tensor, batch: int, heads: int) -> Tensor:
    """PyTorch's attn_mask for modules, ``[length, length]`` or ``[batch * heads, length, length]``.

    There True means masked; in :func:`saobp.attention` it means visible.
    """
    mask = mask.unflatten(0, (batch, heads)) if mask.ndim == 3 else mask
    return ~mask if mask.dtype == torch.bool else mask
