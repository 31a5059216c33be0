"""The rows of one attention head as nodes of a factor graph: masks and the order of messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from saobp.refinement import NO_CAUSAL_STRIDE


@dataclass(frozen=True)
class FactorGraph:
    """Visible labels, nodes that send messages, and the order in which nodes receive them.

    visible: bool, broadcastable to ``[..., node, label]``: keys a row may attend to; None means all
    speaks:  bool, broadcastable to ``[..., node, 1]``: False for padding, which is no node; None means all
    causal:  a node receives messages of earlier nodes only, instead of all others
    stride:  every how many-th node sends messages, each counted for as many nodes as it stands for; 1: all do
    past:    ``[..., 1, label]``: summed log messages of nodes before the first one here (cached decoding)
    """

    visible: Tensor | None = None
    speaks: Tensor | None = None
    causal: bool = False
    stride: int = 1
    past: Tensor | None = None

    def spoken(self, messages: Tensor) -> Tensor:
        """Log messages, set to 0 for padding rows and for keys that the row cannot see.

        ``[..., node, label]``. The second is what lets cached decoding start new labels at 0.
        """
        if self.visible is not None:
            messages = messages.masked_fill(~self.visible, 0.0)
        return messages if self.speaks is None else messages.masked_fill(~self.speaks, 0.0)

    def heard(self, messages: Tensor, *, own: bool = False) -> Tensor:
        """Sum of the log messages that each node receives, broadcastable to ``[..., node, label]``.

        ``own`` includes each node's own message, else it is left out.
        """
        messages = self.spoken(messages)
        if self.stride > 1:
            messages = messages * self.shares(messages.shape[-2], messages)
        if not self.causal:
            total = messages.sum(-2, keepdim=True)
            return total if own else total - messages
        so_far = messages.cumsum(-2)
        is_same = own or not so_far.shape[-2]
        heard = so_far if is_same else functional.pad(so_far, (0, 0, 1, -1))  # sliced, it cannot be exported
        return heard if self.past is None else heard + self.past

    def shares(self, nodes: int, like: Tensor) -> Tensor:
        """How many nodes the message of each counts for, ``[..., node, 1]``.

        Every ``stride``-th node sends, the first included; its message counts for the number of nodes over
        that of sending ones, those of others not at all. Padding, and a row that sees no key, is no node.
        """
        if self.causal:
            raise ValueError(NO_CAUSAL_STRIDE)
        speaks = like.new_ones(nodes, 1, dtype=torch.bool)
        for real in (self.speaks, None if self.visible is None else self.visible.any(-1, keepdim=True)):
            speaks = speaks if real is None else speaks & real
        sends = speaks & ((speaks.cumsum(-2) - 1) % self.stride == 0)
        nodes_heard = sends.sum(-2, keepdim=True, dtype=like.dtype).clamp(min=1)
        return sends * (speaks.sum(-2, keepdim=True, dtype=like.dtype) / nodes_heard)

    def hidden(self, log_values: Tensor) -> Tensor:
        """Minus infinity where a row cannot see; rows that see nothing become 0, so softmax is finite."""
        if self.visible is None:
            return log_values
        log_values = log_values.masked_fill(~self.visible, float("-inf"))
        return log_values.masked_fill(~self.visible.any(-1, keepdim=True), 0.0)

    def shown(self, probabilities: Tensor) -> Tensor:
        """Zero where a row cannot see; rows that see nothing become all zero."""
        return probabilities if self.visible is None else probabilities.masked_fill(~self.visible, 0.0)


def in_window(window: int, queries: int, keys: int, is_causal: bool, device: torch.device) -> Tensor:
    """Keys of a sliding window, bool ``[queries, keys]``, the last query aligned with the last key.

    A row sees fewer than ``window`` keys back, and as many forward if not causal.
    """
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions
    visible = distance.abs() < window
    return visible & (distance >= 0) if is_causal else visible
