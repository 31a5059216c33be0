"""The maps of every layer of a model, also of models outside Transformers' attention registry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from saobp.metrics.attention_calls import inputs_of
from saobp.metrics.exact_statistics import map_statistics
from saobp.metrics.functional.gtd import BETA, HOPS, cross_layer_gtd
from saobp.metrics.functional.maps import unchecked_maps
from saobp.metrics.health.head_health import CROSS_LAYER, Health
from saobp.metrics.health.uniform_map import uniform_map
from saobp.metrics.query_key_statistics import checked_statistics
from saobp.metrics.sampling.estimate import exact_estimate
from saobp.transformers.apply import attention_modules
from saobp.transformers.capture import AttentionCall, watch

SeeLayer = Callable[[int, Tensor], object]
"""Called with the number of a layer and its maps ``[texts, heads, length, length]``."""


def unreachable(model: PreTrainedModel) -> str | None:
    """Why calls of attention cannot be watched in this model; None if they can."""
    try:
        attention_modules(model)
    except ValueError as problem:
        return str(problem)
    return None


def see_layers(model: PreTrainedModel, ids: Tensor, see: SeeLayer) -> None:
    """Run ``model`` on ids ``[texts, length]`` without padding and show the maps of each layer."""
    if unreachable(model) is not None:
        for layer, rows in enumerate(returned_maps(model, ids)):
            see(layer, rows)
        return
    layer = 0

    def record(call: AttentionCall) -> None:
        nonlocal layer
        heads = inputs_of(call, linear=True)
        if heads is not None:
            every = slice(0, len(heads.query)), slice(0, heads.query.shape[1])
            see(layer, heads.select(*every).maps().rows)
            layer += 1

    with torch.no_grad(), watch(model, record):
        model(input_ids=ids)


def returned_maps(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """What the model returns for ``output_attentions``. Raises if these are no maps of its tokens."""
    with torch.no_grad():
        found = getattr(model(input_ids=ids, output_attentions=True), "attentions", None) or ()
    length = ids.shape[1]
    maps = [one for one in found if isinstance(one, Tensor) and one.shape[2:] == (length, length)]
    if not maps or len(maps) < len(found) or not all(_is_stochastic(one) for one in maps):
        raise ValueError(f"{unreachable(model)}, and it returns no attention maps")
    return maps


def measure_returned_maps(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    statistics: Collection[str],
    progress: Callable[[int], object],
) -> Health:
    """Exact statistics of the maps that a model returns, text by text."""
    wanted = checked_statistics("exact", [name for name in statistics if name != CROSS_LAYER])
    health = Health(wanted)
    for ids in texts:
        layers = returned_maps(model, ids[None])
        across = cross_layer_gtd(layers) if CROSS_LAYER in statistics and len(layers) > 1 else None
        for layer, rows in enumerate(layers):
            causal = not bool(rows.triu(1).any())
            found = map_statistics(unchecked_maps(rows), wanted, BETA, HOPS, triangular=causal)
            tokens = torch.tensor([ids.numel()], device=rows.device)
            health.add(
                f"layer {layer}",
                {name: exact_estimate(value) for name, value in found.items()},
                uniform_map(tokens, causal=causal),
                None if across is None or layer == 0 else across[layer - 1],
            )
        health.forwards += 1
        progress(1)
    return health


def _is_stochastic(rows: Tensor) -> bool:
    sums = rows.sum(-1)
    return bool(torch.isfinite(sums).all()) and bool(((sums - 1).abs() < 0.02).all())
