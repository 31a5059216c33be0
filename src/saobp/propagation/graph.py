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
    senders: bool, broadcastable to ``[..., node, 1]``: False for padding, which sends no message; None means
             that all rows send one
    causal:  a node receives messages of earlier nodes only, instead of all others
    stride:  every how many-th node sends messages, each counted for as many nodes as it stands for; 1: all do
    past:    ``[..., 1, label]``: summed log messages of nodes before the first one here (cached decoding)
    """

    visible: Tensor | None = None
    senders: Tensor | None = None
    causal: bool = False
    stride: int = 1
    past: Tensor | None = None

    def mask_messages(self, messages: Tensor) -> Tensor:
        """Log messages ``[..., node, label]`` with 0 for padding rows and for keys that the row cannot see.

        The second is what lets cached decoding start new labels at 0.
        """
        messages = self.mask_rows(messages)
        return messages if self.senders is None else messages.masked_fill(~self.senders, 0.0)

    def incoming(self, messages: Tensor, *, include_own: bool = False) -> Tensor:
        """Sum of the log messages that each node receives, broadcastable to ``[..., node, label]``."""
        messages = self.mask_messages(messages)
        if self.stride > 1:
            messages = messages * self.message_counts(messages.shape[-2], messages)
        if not self.causal:
            total = messages.sum(-2, keepdim=True)
            return total if include_own else total - messages
        received = messages.cumsum(-2)
        if not include_own and received.shape[-2]:
            received = functional.pad(received, (0, 0, 1, -1))  # a slice could not be exported
        return received if self.past is None else received + self.past

    def message_counts(self, nodes: int, like: Tensor) -> Tensor:
        """How many nodes the message of each counts for, ``[..., node, 1]``.

        Every ``stride``-th node sends, the first included; its message counts for the number of nodes over
        that of sending ones, those of others not at all. Padding, and a row that sees no key, is no node.
        """
        if self.causal:
            raise ValueError(NO_CAUSAL_STRIDE)
        is_node = like.new_ones(nodes, 1, dtype=torch.bool)
        for real in (self.senders, None if self.visible is None else self.visible.any(-1, keepdim=True)):
            is_node = is_node if real is None else is_node & real
        sends = is_node & ((is_node.cumsum(-2) - 1) % self.stride == 0)
        sending = sends.sum(-2, keepdim=True, dtype=like.dtype).clamp(min=1)
        return sends * (is_node.sum(-2, keepdim=True, dtype=like.dtype) / sending)

    def mask_scores(self, scores: Tensor) -> Tensor:
        """Minus infinity where a row cannot see; rows that see nothing become 0, so softmax is finite."""
        if self.visible is None:
            return scores
        scores = scores.masked_fill(~self.visible, float("-inf"))
        return scores.masked_fill(~self.visible.any(-1, keepdim=True), 0.0)

    def mask_rows(self, rows: Tensor) -> Tensor:
        """Zero where a row cannot see; rows that see nothing become all zero."""
        return rows if self.visible is None else rows.masked_fill(~self.visible, 0.0)


def in_window(window: int, queries: int, keys: int, is_causal: bool, device: torch.device) -> Tensor:
    """Keys of a sliding window, bool ``[queries, keys]``, the last query aligned with the last key.

    A row sees fewer than ``window`` keys back, and as many forward if not causal.
    """
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions
    visible = distance.abs() < window
    return visible & (distance >= 0) if is_causal else visible
