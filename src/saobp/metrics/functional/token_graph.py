"""Clustering and betweenness of the token graph that attention spans, many small graphs at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from saobp.metrics.functional.maps import Maps, checked_maps
from saobp.propagation.beliefs import without_autocast
from saobp.refinement import check_count

TAU = 1e-4
NODES = 40
GRAPHS_AT_ONCE = 4096
"""Graphs handled together: enough for one batched product, small enough for the processor's cache."""


def clustering(
    attention: Tensor | Maps,
    *,
    tau: float = TAU,
    nodes: int = NODES,
    seed: int = 0,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Mean weighted clustering coefficient of the token graph, ``[..., length, length]`` to ``[...]``.

    Two tokens are joined where their symmetrised weight exceeds ``tau``. A token's coefficient is the mean
    geometric weight (largest weight = 1) of the triangles through it; with fewer than two neighbours it is 0,
    so a graph without edges gives 0. Differentiable wherever no weight sits at ``tau``. ``nodes`` real tokens
    are drawn by ``seed``, the same for maps with equally many real tokens.
    """
    _check_graph(tau, nodes)
    maps = checked_maps(attention, padding_mask)
    weights, sizes = token_graphs(maps, tau, nodes, seed)
    return _in_chunks(clustering_of_graphs, weights, sizes, maps.rows.shape[:-2])


def betweenness(
    attention: Tensor | Maps,
    *,
    tau: float = TAU,
    nodes: int = NODES,
    seed: int = 0,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Mean betweenness of the token graph on hops, not normalised, ``[..., length, length]`` to ``[...]``.

    The graph is that of ``clustering``. Pairs without a path count nothing, so a graph without edges gives 0.
    Not differentiable.
    """
    _check_graph(tau, nodes)
    with torch.no_grad():
        maps = checked_maps(attention, padding_mask)
        weights, sizes = token_graphs(maps, tau, nodes, seed)
        return _in_chunks(betweenness_of_graphs, weights, sizes, maps.rows.shape[:-2])


def clustering_of_graphs(weights: Tensor, sizes: Tensor) -> Tensor:
    """Mean clustering of graphs given by symmetric ``weights [graphs, nodes, nodes]`` without loops.

    The triangles through a node are the diagonal of the cube of the matrix of cube roots.
    """
    edges = weights > 0
    largest = weights.amax((-2, -1), keepdim=True)
    roots = torch.where(edges, weights / largest.clamp(min=torch.finfo(weights.dtype).tiny), 1.0) ** (1 / 3)
    roots = roots * edges
    with without_autocast(roots.device.type):
        triangles = ((roots @ roots) * roots).sum(-1)
    degree = edges.sum(-1).to(weights.dtype)
    pairs = degree * (degree - 1)
    return (triangles / pairs.clamp(min=1)).sum(-1) / sizes


def betweenness_of_graphs(weights: Tensor, sizes: Tensor) -> Tensor:
    """Mean betweenness of the same graphs.

    A shortest path of d hops has d - 1 inner nodes, and the shares of all shortest paths of a pair add up to
    one; so the sum over nodes is the sum of d - 1 over joined pairs, and distances are enough. They come from
    one product per hop, for the graphs that still grow.
    """
    totals = torch.zeros(len(weights), dtype=weights.dtype, device=weights.device)
    edges = (weights > 0).to(torch.float32)
    identity = torch.eye(edges.shape[-1], dtype=edges.dtype, device=edges.device)
    reached, alive, hops = edges + identity, torch.arange(len(weights), device=weights.device), 1
    while len(alive):
        further = ((reached @ edges) > 0) & (reached == 0)
        added = further.sum((-2, -1))
        totals[alive] += hops * added.to(totals.dtype)
        grows = added > 0
        alive, edges = alive[grows], edges[grows]
        reached, hops = reached[grows] + further[grows], hops + 1
    return totals / 2 / sizes


def token_graphs(maps: Maps, tau: float, nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Symmetric weights above ``tau`` without loops, ``[graphs, nodes, nodes]``, and nodes per graph."""
    rows, length = maps.rows, maps.rows.shape[-1]
    batch = rows.shape[0] if rows.ndim > 2 else 1
    flat = rows.reshape(batch, math.prod(rows.shape[1:-2]), length, length)  # -1 is ambiguous without texts
    sampled = _sampled_tokens(maps, batch, nodes, seed).to(rows.device)
    is_sampled = sampled >= 0
    positions = sampled.clamp(min=0)
    index = positions[:, None, :, None].expand(-1, flat.shape[1], -1, length)
    small = flat.gather(-2, index)
    small = small.gather(-1, positions[:, None, None, :].expand(-1, flat.shape[1], positions.shape[1], -1))
    weights = (small + small.transpose(-1, -2)) / 2
    off_diagonal = ~torch.eye(positions.shape[1], dtype=torch.bool, device=rows.device)
    keep = (weights > tau) & off_diagonal & (is_sampled[:, None, :, None] & is_sampled[:, None, None, :])
    sizes = is_sampled.sum(-1).to(rows.dtype)[:, None].expand(-1, flat.shape[1])
    return torch.where(keep, weights, 0.0).flatten(0, 1), sizes.reshape(-1)


def _sampled_tokens(maps: Maps, batch: int, nodes: int, seed: int) -> Tensor:
    """Positions of the drawn tokens in ascending order, ``[batch, nodes]``; padded with -1."""
    length = maps.rows.shape[-1]
    if maps.real is None or not batch:
        return _draw(torch.arange(length), nodes, seed).expand(batch, -1)
    real = maps.real.reshape(batch, length).cpu()
    draws = [_draw(torch.nonzero(row)[:, 0], nodes, seed) for row in real]
    return torch.nn.utils.rnn.pad_sequence(draws, batch_first=True, padding_value=-1)


def _draw(positions: Tensor, nodes: int, seed: int) -> Tensor:
    if len(positions) <= nodes:
        return positions
    chosen = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))[:nodes]
    return positions[chosen.sort().values]


def _in_chunks(
    statistic: Callable[[Tensor, Tensor], Tensor], weights: Tensor, sizes: Tensor, shape: torch.Size
) -> Tensor:
    pieces = zip(weights.split(GRAPHS_AT_ONCE), sizes.split(GRAPHS_AT_ONCE), strict=True)
    return torch.cat([statistic(part, size) for part, size in pieces]).reshape(shape)


def _check_graph(tau: float, nodes: int) -> None:
    if not isinstance(tau, Real) or not 0 <= tau < 1:
        raise ValueError(f"tau must lie from 0 up to but not including 1, not {tau!r}")
    check_count("nodes", nodes)
