"""Statistics from queries and keys: exact with a few maps at a time, or sampled in linear memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from saobp.functional import build_graph, call_strength, check_lengths, check_padding, check_states
from saobp.metrics.entropy import attention_entropy_of, indirect_entropy_of, sink_mass_of, sparsity_of
from saobp.metrics.estimate import Estimate, exactly
from saobp.metrics.graph import betweenness_of, clustering_of
from saobp.metrics.gtd import BETA, HOPS, check_path, gtd_of, indirect_paths
from saobp.metrics.maps import Maps, unchecked_maps
from saobp.metrics.sampled import SAMPLED, Draws, Sampling, estimate, observe, operator_for
from saobp.metrics.tiled_operator import Mask
from saobp.propagation.beliefs import propagate, without_autocast
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import head_strength
from saobp.refinement import Refinement

Method = Literal["exact", "sampled"]

PLAIN = Refinement("none")
WORKING_BYTES = 384 * 2**20
"""Memory for the heads that are worked on together; at least one head is."""
MAPS_HELD = 8
"""Maps that one head needs at the peak of the exact method, roughly."""
STATES_HELD = 8
SUMS_HELD = 2
"""Tensors ``[tokens, probes]`` that one head needs at the peak of the sampled method: so many in the states'
type, so many in at least single precision."""

_WITHOUT_PATHS: dict[str, Callable[[Maps], Tensor]] = {
    "attention_entropy": attention_entropy_of,
    "sparsity": sparsity_of,
    "sink_mass": sink_mass_of,
    "clustering": clustering_of,
    "betweenness": betweenness_of,
}
STATISTICS = ("gtd", "indirect_entropy", *_WITHOUT_PATHS)


@dataclass(frozen=True)
class Heads:
    """The attention of some heads, before it is formed.

    query ``[batch, heads, length, dim]``, key ``[batch, heads or fewer, length, dim]``, strength ``[heads]``,
    padding_mask ``[batch, length]``, True for real tokens. With a window a row sees fewer than so many keys
    back (and forward, if not causal). For masks of other shapes, visible (bool) and bias (added to scores)
    are ``[batch or 1, heads or 1, length, length]``; a row may then still hear earlier rows alone (in_order).
    """

    query: Tensor
    key: Tensor
    strength: Tensor
    refinement: Refinement
    causal: bool
    scale: float
    padding_mask: Tensor | None = None
    window: int | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    in_order: bool | None = None

    def hears_in_order(self) -> bool:
        """Whether a row hears earlier rows alone; causal attention decides unless ``in_order`` is given."""
        return self.refinement.future == "strict" and (
            self.causal if self.in_order is None else self.in_order
        )

    def some(self, items: slice, heads: slice) -> Heads:
        """The given texts and heads, with keys shared out to the query heads."""
        groups = self.query.shape[1] // self.key.shape[1]
        places = torch.arange(heads.start, heads.stop, device=self.key.device) // groups
        return replace(
            self,
            query=self.query[items, heads],
            key=self.key[items][:, places] if groups > 1 else self.key[items, heads],
            strength=self.strength[heads],
            padding_mask=None if self.padding_mask is None else self.padding_mask[items],
            visible=_some_of_mask(self.visible, items, heads),
            bias=_some_of_mask(self.bias, items, heads),
        )

    def with_words(self) -> Heads:
        """Without the texts that are padding and nothing else, as fill up a last batch."""
        if self.padding_mask is None:
            return self
        kept = self.padding_mask.any(-1).nonzero()[:, 0]
        if len(kept) == len(self.padding_mask):
            return self
        return replace(
            self,
            query=self.query[kept],
            key=self.key[kept],
            padding_mask=self.padding_mask[kept],
            visible=self.visible if self.visible is None or len(self.visible) == 1 else self.visible[kept],
            bias=self.bias if self.bias is None or len(self.bias) == 1 else self.bias[kept],
        )

    def text(self, item: int) -> Heads:
        """One text freed of its padding; keys stay shared."""
        items, heads = slice(item, item + 1), slice(0, self.query.shape[1])
        one = replace(
            self,
            query=self.query[items],
            key=self.key[items],
            visible=_some_of_mask(self.visible, items, heads),
            bias=_some_of_mask(self.bias, items, heads),
        )
        if self.padding_mask is None:
            return one
        real = self.padding_mask[item].nonzero()[:, 0]
        return replace(
            one,
            query=one.query[:, :, real],
            key=one.key[:, :, real],
            padding_mask=None,
            visible=None if one.visible is None else one.visible[..., real, :][..., real],
            bias=None if one.bias is None else one.bias[..., real, :][..., real],
        )

    def mask(self) -> Mask:
        """The mask of a single text."""
        visible = None if self.visible is None else self.visible[0]
        bias = None if self.bias is None else self.bias[0]
        return Mask(self.causal, self.window, visible, bias, self.hears_in_order())

    def scores(self) -> tuple[Tensor, FactorGraph]:
        """Scores before any refinement, ``[batch, heads, length, length]``, and who sees and hears whom."""
        precision = torch.promote_types(self.query.dtype, torch.float32)
        scores = self.query.to(precision) @ self.key.to(precision).transpose(-1, -2) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        length = scores.shape[-1]
        graph = build_graph(length, length, self.refinement, self.padding_mask, self.causal, scores.device)
        graph = replace(graph, causal=self.hears_in_order())
        for seen in (self.visible, self._near(length)):
            if seen is not None:
                graph = replace(graph, visible=seen if graph.visible is None else seen & graph.visible)
        return scores, graph

    def maps(self) -> Maps:
        """The maps themselves, ``[batch, heads, length, length]``."""
        scores, graph = self.scores()
        rows = propagate(
            scores,
            get_factor(self.refinement.factor),
            head_strength(self.strength, scores),
            graph,
            steps=self.refinement.steps,
            damping=self.refinement.damping,
        ).rows
        return unchecked_maps(rows, self.padding_mask)

    def _near(self, length: int) -> Tensor | None:
        if self.window is None:
            return None
        places = torch.arange(length, device=self.query.device)
        return (places[:, None] - places).abs() < self.window


def measure(
    query: Tensor,
    key: Tensor,
    *,
    refinement: Refinement | str | None = None,
    method: Method = "exact",
    statistics: Collection[str] | None = None,
    padding_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    strength: Tensor | None = None,
    beta: float = BETA,
    hops: int = HOPS,
    sampling: Sampling | None = None,
) -> dict[str, Estimate]:
    """Statistics of the attention between query and key, each an Estimate of ``[batch, heads]``.

    query ``[batch, heads, length, dim]``, key ``[batch, key_heads, length, dim]``; refinement, padding_mask,
    is_causal, scale and strength as in :func:`saobp.attention`. ``exact`` forms a few maps at a time and
    gives any of STATISTICS. ``sampled`` gives gtd, indirect_entropy, attention_entropy and sink_mass with
    standard errors in memory linear in length; the heads of a text share their random draws. There is no
    gradient.
    """
    refinement = PLAIN if refinement is None else Refinement.of(refinement)
    check_states(query, key, key)
    if padding_mask is not None:
        check_padding(padding_mask, (query.shape[0], key.shape[-2]), query.device)
        if not bool(padding_mask.any(-1).all()):
            raise ValueError("padding_mask leaves a text without any real token")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"statistics need as many queries as keys, not {query.shape[-2]} and {key.shape[-2]}"
        )
    if not query.numel() or not key.numel():
        raise ValueError(f"statistics need at least one text and one token, not shape {tuple(query.shape)}")
    check_lengths(query.shape[-2], key.shape[-2], refinement, is_causal)
    check_path(beta, hops)
    if not bool(torch.isfinite(torch.stack([*query.aminmax(), *key.aminmax()])).all()):
        raise ValueError("query or key holds NaN or infinite values")
    heads = Heads(
        query,
        key,
        call_strength(refinement, strength, query.shape[1], query.device),
        refinement,
        is_causal,
        query.shape[-1] ** -0.5 if scale is None else scale,
        padding_mask,
    )
    return measure_heads(heads, method, statistics, beta=beta, hops=hops, sampling=sampling)


def measure_heads(
    heads: Heads,
    method: Method = "exact",
    statistics: Collection[str] | None = None,
    *,
    beta: float = BETA,
    hops: int = HOPS,
    sampling: Sampling | None = None,
) -> dict[str, Estimate]:
    """What ``measure`` does, on states that are known to fit together."""
    wanted = checked_statistics(method, statistics)
    with torch.no_grad(), without_autocast(heads.query.device.type):
        if method == "sampled":
            return _sampled(heads, wanted, beta, hops, sampling or Sampling())
        return _exact(heads, wanted, beta, hops)


def checked_statistics(method: str, statistics: Collection[str] | None) -> tuple[str, ...]:
    """The statistics asked for, or all that the method has."""
    if method not in ("exact", "sampled"):
        raise ValueError(f"method must be 'exact' or 'sampled', not {method!r}")
    known = STATISTICS if method == "exact" else SAMPLED
    wanted = tuple(known if statistics is None else statistics)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown statistic {', '.join(unknown)}" if unknown else "no statistic asked for"
        raise ValueError(f"{what}: method {method!r} has {', '.join(known)}")
    return wanted


def _exact(heads: Heads, wanted: tuple[str, ...], beta: float, hops: int) -> dict[str, Estimate]:
    batch, count, length, _ = heads.query.shape
    values = {name: heads.query.new_empty(batch, count, dtype=torch.float32) for name in wanted}
    if heads.query.dtype == torch.float64:
        values = {name: value.double() for name, value in values.items()}
    for items, some in _blocks(batch, count, MAPS_HELD * 4 * length**2):
        maps = heads.some(items, some).maps()
        needs_paths = "gtd" in wanted or "indirect_entropy" in wanted
        paths = indirect_paths(maps.rows, beta, hops) if needs_paths else None
        for name in wanted:
            if name == "gtd":
                value = gtd_of(maps, paths=paths)
            elif name == "indirect_entropy":
                value = indirect_entropy_of(maps, paths=paths)
            else:
                value = _WITHOUT_PATHS[name](maps)
            values[name][items, some] = value
    return {name: exactly(value) for name, value in values.items()}


def _sampled(
    heads: Heads, wanted: tuple[str, ...], beta: float, hops: int, sampling: Sampling
) -> dict[str, Estimate]:
    generator = torch.Generator(heads.query.device).manual_seed(sampling.seed)
    texts = []
    for item in range(len(heads.query)):
        text = heads.text(item)
        tokens, dim = text.query.shape[-2:]
        draws, parts = Draws.of(tokens, sampling, generator, text.causal), []
        kind = _computable(text.query[:0]).dtype
        held = STATES_HELD * kind.itemsize + SUMS_HELD * max(4, kind.itemsize)
        for _, some in _blocks(1, text.query.shape[1], held * tokens * max(sampling.probes, dim)):
            part = text.some(slice(0, 1), some)
            query, key = _computable(part.query[0]), _computable(part.key[0])
            operator = operator_for(query, key, part.refinement, part.strength, part.mask(), scale=part.scale)
            parts.append(observe(operator, query, wanted, beta, hops, draws))
        seen = {name: torch.cat([part[name] for part in parts]) for name in wanted}
        texts.append({name: estimate(name, values, draws, kind) for name, values in seen.items()})
    return {name: Estimate.joined([text[name] for text in texts], torch.stack) for name in wanted}


def _computable(states: Tensor) -> Tensor:
    """States in a type with the range of single precision: half precision would lose small weights."""
    return states.float() if states.dtype == torch.float16 else states


def _blocks(batch: int, heads: int, bytes_per_head: int) -> Iterator[tuple[slice, slice]]:
    """Texts and heads that fit into the working memory together, in blocks of nearly one size."""
    room = max(1, WORKING_BYTES // max(bytes_per_head, 1))
    for items in _even_parts(batch, max(1, room // heads)):
        for some in _even_parts(heads, room):
            yield items, some


def _even_parts(count: int, largest: int) -> list[slice]:
    """As few parts of ``count`` things as ``largest`` allows, whose sizes differ by at most one."""
    parts = -(-count // largest)
    edges = [count * part // max(parts, 1) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _some_of_mask(mask: Tensor | None, items: slice, heads: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[items] if mask.shape[0] > 1 else mask
    return mask[:, heads] if mask.shape[1] > 1 else mask
