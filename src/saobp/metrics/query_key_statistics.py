"""Statistics from queries and keys: exact with a few maps at a time, or sampled in linear memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from saobp.arguments import (
    check_lengths,
    check_no_variants,
    check_numbers,
    check_states,
    read_padding,
    read_strength,
    require_tensors,
)
from saobp.metrics.attention_inputs import PLAIN, AttentionInputs
from saobp.metrics.functional.entropy import (
    attention_entropy,
    normalised_entropy,
    sink_mass,
    sparsity,
)
from saobp.metrics.functional.gtd import BETA, HOPS, check_path, indirect_paths, indirect_share
from saobp.metrics.functional.maps import Maps
from saobp.metrics.functional.token_graph import betweenness, clustering
from saobp.metrics.operators.fused import operator_for
from saobp.metrics.sampling import (
    SAMPLED,
    Draws,
    Estimate,
    Sampling,
    checked_sampling,
    estimate,
    exact_estimate,
    observe,
)
from saobp.propagation.beliefs import without_autocast
from saobp.refinement import Refinement

Method = Literal["exact", "sampled"]

STATES_HELD = 8
SUMS_HELD = 2
"""Tensors ``[tokens, probes]`` that one head needs at the peak of the sampled method: in the states' type,
and in at least single precision."""


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
    check_no_variants(refinement)
    require_tensors(query=query, key=key)
    check_states(query, key, key)
    check_numbers(is_causal, 0.0, scale)
    padding_mask = read_padding(None, padding_mask, (query.shape[0], key.shape[-2]), query.device)
    if padding_mask is not None and not bool(padding_mask.any(-1).all()):
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
    heads = AttentionInputs(
        query,
        key,
        read_strength(refinement, strength, query.shape[1], query.device).values,
        refinement,
        is_causal,
        query.shape[-1] ** -0.5 if scale is None else scale,
        padding_mask,
    )
    return measure_heads(heads, method, statistics, beta=beta, hops=hops, sampling=sampling)


def measure_heads(
    heads: AttentionInputs,
    method: Method,
    statistics: Collection[str] | None,
    *,
    beta: float,
    hops: int,
    sampling: Sampling | None = None,
    on_maps: OnMaps | None = None,
) -> dict[str, Estimate]:
    """``measure`` without checks; the exact method shows its maps to ``on_maps``."""
    names = checked_statistics(method, statistics)
    with torch.no_grad(), without_autocast(heads.query.device.type):
        if method == "sampled":
            return _sampled(heads, names, beta, hops, checked_sampling(sampling))
        return exact_statistics(heads, names, beta, hops, on_maps)


def checked_statistics(
    method: str, statistics: Collection[str] | None, methods: tuple[str, ...] = ("exact", "sampled")
) -> tuple[str, ...]:
    """The requested statistics, or all that the method has; ``auto`` has those that can be sampled."""
    if method not in methods:
        raise ValueError(f"method must be {' or '.join(map(repr, methods))}, not {method!r}")
    if isinstance(statistics, str):
        raise ValueError(f"statistics must be a list of names, as in [{statistics!r}], not text")
    available = STATISTICS if method == "exact" else SAMPLED
    names = tuple(available if statistics is None else statistics)
    unknown = [name for name in names if name not in available]
    if unknown or not names:
        what = f"unknown statistic {', '.join(map(str, unknown))}" if unknown else "no statistic asked for"
        more = "; method 'exact' has it" if unknown and set(unknown) <= set(STATISTICS) else ""
        raise ValueError(f"{what}: method {method!r} has {', '.join(available)}{more}")
    return names


def _sampled(
    heads: AttentionInputs, names: tuple[str, ...], beta: float, hops: int, sampling: Sampling
) -> dict[str, Estimate]:
    generator = torch.Generator(heads.query.device).manual_seed(sampling.seed)
    texts = []
    for item in range(len(heads.query)):
        text = heads.unpadded_text(item)
        tokens, dim = text.query.shape[-2:]
        draws, parts = Draws.of(tokens, sampling, generator, text.causal), []
        dtype = _at_least_bfloat16_range(text.query[:0]).dtype
        bytes_per_entry = STATES_HELD * dtype.itemsize + SUMS_HELD * max(4, dtype.itemsize)
        channels = max(sampling.probes, len(draws.rows.positions), dim)
        for _, some in blocks(1, text.query.shape[1], bytes_per_entry * tokens * channels):
            part = text.select(slice(0, 1), some)
            query, key = _at_least_bfloat16_range(part.query[0]), _at_least_bfloat16_range(part.key[0])
            operator = operator_for(query, key, part.refinement, part.strength, part.mask(), scale=part.scale)
            parts.append(observe(operator, query, names, beta, hops, draws))
        seen = {name: torch.cat([part[name] for part in parts]) for name in names}
        texts.append({name: estimate(name, values, draws, dtype) for name, values in seen.items()})
    return {name: Estimate.joined([text[name] for text in texts], torch.stack) for name in names}


def _at_least_bfloat16_range(states: Tensor) -> Tensor:
    """States in a type with the range of single precision: half precision would lose small weights."""
    return states.float() if states.dtype == torch.float16 else states


WORKING_BYTES = 384 * 2**20
"""Bytes for the heads processed together; at least one head is."""
CPU_WORKING_BYTES = 8 * 2**20
"""The same on a CPU, where maps that stay in its cache are processed several times as fast."""
MAPS_HELD = 8
"""Maps that one head needs at the peak, roughly."""

WITHOUT_PATHS: dict[str, Callable[[Maps], Tensor]] = {
    "attention_entropy": attention_entropy,
    "sparsity": sparsity,
    "sink_mass": sink_mass,
    "clustering": clustering,
    "betweenness": betweenness,
}
STATISTICS = ("gtd", "indirect_entropy", *WITHOUT_PATHS)

OnMaps = Callable[[slice, Tensor], object]
"""Called with a slice of the texts and some of their maps, ``[texts, heads, length, length]``."""


def exact_statistics(
    heads: AttentionInputs, names: tuple[str, ...], beta: float, hops: int, on_maps: OnMaps | None
) -> dict[str, Estimate]:
    """Each statistic of every head, ``[batch, heads]``; ``on_maps`` is called with all maps, block by block.

    On a CPU texts are freed of their padding and measured one by one.
    """
    batch, count = heads.query.shape[:2]
    precision = torch.promote_types(heads.query.dtype, torch.float32)
    values = {name: heads.query.new_empty(batch, count, dtype=precision) for name in names}
    on_cpu = heads.query.device.type == "cpu"
    working = CPU_WORKING_BYTES if on_cpu else WORKING_BYTES
    for texts, inputs in _without_padding(heads):
        length = inputs.query.shape[-2]
        for items, some in blocks(len(inputs.query), count, MAPS_HELD * 4 * length**2, working):
            maps = inputs.select(items, some).maps()
            batch_slice = slice(texts.start + items.start, texts.start + items.stop)
            block_values = map_statistics(maps, names, beta, hops, triangular=on_cpu and inputs.causal)
            for name, value in block_values.items():
                values[name][batch_slice, some] = value
            if on_maps is not None:
                on_maps(batch_slice, maps.rows)
    return {name: exact_estimate(value) for name, value in values.items()}


def map_statistics(
    maps: Maps, names: tuple[str, ...], beta: float, hops: int, *, triangular: bool
) -> dict[str, Tensor]:
    """Each statistic of some maps; ``triangular`` says that all are causal."""
    values = {name: WITHOUT_PATHS[name](maps) for name in names if name in WITHOUT_PATHS}
    if len(values) < len(names):
        paths = indirect_paths(maps.rows, beta, hops, triangular=triangular)
        if "gtd" in names:
            values["gtd"] = indirect_share(maps.rows, paths)
        if "indirect_entropy" in names:
            values["indirect_entropy"] = maps.mean_over_rows(normalised_entropy(paths))
    return values


def _without_padding(heads: AttentionInputs) -> Iterator[tuple[slice, AttentionInputs]]:
    """Texts to measure together, with their place in the batch."""
    if heads.padding_mask is None or heads.query.device.type != "cpu":
        yield slice(0, len(heads.query)), heads
        return
    for text in range(len(heads.query)):
        yield slice(text, text + 1), heads.unpadded_text(text)


def blocks(
    batch: int, heads: int, bytes_per_head: int, working: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Texts and heads that fit into the working memory together, in blocks of nearly one size."""
    per_block = max(1, (WORKING_BYTES if working is None else working) // max(bytes_per_head, 1))
    for items in even_slices(batch, max(1, per_block // heads)):
        for some in even_slices(heads, per_block):
            yield items, some


def even_slices(count: int, largest: int) -> list[slice]:
    """As few parts of ``count`` things as ``largest`` allows, whose sizes differ by at most one."""
    parts = -(-count // largest)
    edges = [count * part // max(parts, 1) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
