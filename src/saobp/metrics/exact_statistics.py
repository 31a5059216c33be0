"""Exact statistics of heads, with a few maps at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from saobp.metrics.attention_inputs import AttentionInputs
from saobp.metrics.functional.entropy import (
    attention_entropy_of,
    indirect_entropy_of,
    sink_mass_of,
    sparsity_of,
)
from saobp.metrics.functional.gtd import gtd_of, indirect_paths
from saobp.metrics.functional.maps import Maps
from saobp.metrics.functional.token_graph import betweenness_of, clustering_of
from saobp.metrics.sampling.estimate import Estimate, exact_estimate

WORKING_BYTES = 384 * 2**20
"""Bytes for the heads processed together; at least one head is."""
CPU_WORKING_BYTES = 32 * 2**20
"""The same on a CPU, where maps that stay in its cache are processed several times as fast."""
MAPS_HELD = 8
"""Maps that one head needs at the peak, roughly."""

WITHOUT_PATHS: dict[str, Callable[[Maps], Tensor]] = {
    "attention_entropy": attention_entropy_of,
    "sparsity": sparsity_of,
    "sink_mass": sink_mass_of,
    "clustering": clustering_of,
    "betweenness": betweenness_of,
}
STATISTICS = ("gtd", "indirect_entropy", *WITHOUT_PATHS)

SeeMaps = Callable[[slice, Tensor], object]
"""Called with a slice of the texts and some of their maps, ``[texts, heads, length, length]``."""


def exact_statistics(
    heads: AttentionInputs, wanted: tuple[str, ...], beta: float, hops: int, see: SeeMaps | None = None
) -> dict[str, Estimate]:
    """Each statistic of every head, ``[batch, heads]``; ``see`` is called with all maps, block by block.

    On a CPU texts are freed of their padding and measured one by one.
    """
    batch, count = heads.query.shape[:2]
    precision = torch.promote_types(heads.query.dtype, torch.float32)
    values = {name: heads.query.new_empty(batch, count, dtype=precision) for name in wanted}
    on_cpu = heads.query.device.type == "cpu"
    working = CPU_WORKING_BYTES if on_cpu else WORKING_BYTES
    for texts, own in _without_padding(heads):
        length = own.query.shape[-2]
        for items, some in blocks(len(own.query), count, MAPS_HELD * 4 * length**2, working):
            maps = own.select(items, some).maps()
            place = slice(texts.start + items.start, texts.start + items.stop)
            found = map_statistics(maps, wanted, beta, hops, triangular=on_cpu and own.causal)
            for name, value in found.items():
                values[name][place, some] = value
            if see is not None:
                see(place, maps.rows)
    return {name: exact_estimate(value) for name, value in values.items()}


def map_statistics(
    maps: Maps, wanted: tuple[str, ...], beta: float, hops: int, *, triangular: bool
) -> dict[str, Tensor]:
    """Each statistic of some maps; ``triangular`` says that all are causal."""
    needs_paths = "gtd" in wanted or "indirect_entropy" in wanted
    paths = indirect_paths(maps.rows, beta, hops, triangular=triangular) if needs_paths else None
    with_paths: dict[str, Callable[[], Tensor]] = {
        "gtd": lambda: gtd_of(maps, paths=paths),
        "indirect_entropy": lambda: indirect_entropy_of(maps, paths=paths),
    }
    return {name: with_paths[name]() if name in with_paths else WITHOUT_PATHS[name](maps) for name in wanted}


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
    room = max(1, (WORKING_BYTES if working is None else working) // max(bytes_per_head, 1))
    for items in even_slices(batch, max(1, room // heads)):
        for some in even_slices(heads, room):
            yield items, some


def even_slices(count: int, largest: int) -> list[slice]:
    """As few parts of ``count`` things as ``largest`` allows, whose sizes differ by at most one."""
    parts = -(-count // largest)
    edges = [count * part // max(parts, 1) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
