"""Global token dependency: how much of a head's reach is indirect, over paths of two hops and more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from saobp.metrics.functional.maps import checked_maps
from saobp.propagation.beliefs import without_autocast
from saobp.refinement import check_count

BETA = 0.9
HOPS = 4


def gtd(
    attention: Tensor, *, beta: float = BETA, hops: int = HOPS, padding_mask: Tensor | None = None
) -> Tensor:
    """Share of multi-hop attention, ``||G||^2 / (||A||^2 + ||G||^2)``, between 0 and 1; differentiable.

    attention ``[..., length, length]`` gives ``[...]``. G sums beta^(t-1) A^t over t = 2 .. hops.
    padding_mask ``[batch, length]`` is True or 1 for real tokens.
    """
    check_path(beta, hops)
    rows = checked_maps(attention, padding_mask).rows
    return indirect_share(rows, indirect_paths(rows, beta, hops))


def indirect_paths(rows: Tensor, beta: float = BETA, hops: int = HOPS, *, triangular: bool = False) -> Tensor:
    """G, the discounted sum of paths of 2 to ``hops`` steps. ``[..., length, length]``

    With M = beta A, G = beta A^2 (I + X), X = M + ... + M^(hops-2), and X is built two powers at a time from
    A^2, so ``hops // 2`` matrix products are enough (two for the usual four hops). ``triangular`` says that
    all rows are causal, which saves most of their arithmetic.
    """
    product = triangular_product if triangular else torch.matmul
    with without_autocast(rows.device.type):
        square = product(rows, rows)
        degree = hops - 2
        if degree == 0:
            return beta * square
        one_or_two = torch.add(rows, square, alpha=beta)
        powers = rows if degree % 2 else one_or_two  # X / beta
        for _ in range((degree - 1) // 2):
            powers = torch.add(one_or_two, product(square, powers), alpha=beta**2)
        return product(square, powers).mul_(beta).add_(square).mul_(beta)


def triangular_product(left: Tensor, right: Tensor) -> Tensor:
    """Product of lower triangular matrices, ``[..., length, length]``, without blocks known to be zero.

    Of the 64 products of blocks, a quarter of the length each, 20 are left.
    """
    edges = [left.shape[-1] * part // 4 for part in range(5)]
    result = torch.zeros_like(left)
    for top, bottom in pairwise(edges):
        for first, last in pairwise(edges):
            if first < bottom:
                rows, columns = left[..., top:bottom, first:bottom], right[..., first:bottom, first:last]
                result[..., top:bottom, first:last] = rows @ columns
    return result


def cross_layer_gtd(
    layers: Sequence[Tensor], *, beta: float = BETA, hops: int = HOPS, padding_mask: Tensor | None = None
) -> Tensor:
    """GTD along the depth of a model: A^t becomes the product of the attention of t consecutive layers.

    layers are maps ``[batch, heads, length, length]`` from the first layer to the last; heads are averaged.
    Returns ``[layers - 1, batch]``: for each layer from the second on, the share of what reaches it through
    2 to ``hops`` layers (as many as lie below it), against its own map. Take the mean for one number.
    """
    check_path(beta, hops)
    rows = averaged_heads(layers, padding_mask)
    if len(rows) < 2:
        raise ValueError(f"cross-layer GTD needs the maps of at least two layers, not {len(rows)}")
    below = [rows[max(0, top - hops + 1) : top][::-1] for top in range(len(rows))]
    return torch.stack([share_through_layers(rows[top], below[top], beta) for top in range(1, len(rows))])


def share_through_layers(rows: Tensor, below: Iterable[Tensor], beta: float) -> Tensor:
    """Share of paths through the maps of the layers below a layer, the nearest first, against its own map."""
    path, paths = rows, torch.zeros_like(rows)
    for hop, layer in enumerate(below, 1):
        with without_autocast(rows.device.type):
            path = path @ layer
        paths = paths + beta**hop * path
    return indirect_share(rows, paths)


def averaged_heads(layers: Sequence[Tensor], padding_mask: Tensor | None) -> list[Tensor]:
    """One map ``[batch, length, length]`` per layer, from maps with heads in the second dimension."""
    if not isinstance(layers, Sequence | Tensor) or not all(isinstance(layer, Tensor) for layer in layers):
        raise ValueError(
            "layers must be a list with the map of each layer, [batch, heads, length, length]; a model of "
            "Transformers returns it for attn_implementation='eager' and output_attentions=True"
        )
    for layer in layers:
        if layer.ndim != 4 or layer.shape[-2:] != layers[0].shape[-2:] or len(layer) != len(layers[0]):
            raise ValueError(
                "every layer must be [batch, heads, length, length] of one batch and length, not "
                + ", ".join(str(tuple(layer.shape)) for layer in layers)
            )
    return [checked_maps(layer, padding_mask).rows.mean(1) for layer in layers]


def check_path(beta: float, hops: int) -> None:
    if not isinstance(beta, Real) or not 0 < beta <= 1:
        raise ValueError(f"beta must be a number above 0 and at most 1, not {beta!r}")
    check_count("hops", hops, 2)


def indirect_share(direct: Tensor, paths: Tensor) -> Tensor:
    """Squared norm of ``paths`` in that of both, ``[...]`` from two ``[..., length, length]``."""
    indirect = paths.square().sum((-2, -1))
    return indirect / (direct.square().sum((-2, -1)) + indirect)


def rollout(layers: Sequence[Tensor], *, residual: float = 0.5, padding_mask: Tensor | None = None) -> Tensor:
    """Where each token's last state comes from, ``[batch, length, length]``: output rows, input columns.

    layers are maps ``[batch, heads, length, length]`` from first to last. Each is averaged over heads and
    mixed with the identity (``residual``, the share of the skip connection), then all are multiplied.
    GTD in contrast leaves out single steps and skips, is of one head, and is one number.
    Padding tokens have zero rows and columns.
    """
    averaged = averaged_heads(layers, padding_mask)
    if not averaged:
        raise ValueError("rollout needs the maps of at least one layer")
    if not isinstance(residual, Real) or not 0 <= residual < 1:
        raise ValueError(f"residual must lie from 0 up to but not including 1, not {residual!r}")
    flow: Tensor | None = None
    for rows in averaged:
        identity = torch.diag_embed(rows.sum(-1))
        mixed = (1 - residual) * rows + residual * identity
        with without_autocast(mixed.device.type):
            flow = mixed if flow is None else mixed @ flow
    assert flow is not None
    return flow
