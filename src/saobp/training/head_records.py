"""Logged per head: attention statistics and strength, learned or fixed."""

from __future__ import annotations

from typing import Any

from torch import nn

from saobp.metrics.health.head_health import CROSS_LAYER, Health
from saobp.training.sharding import full_tensor
from saobp.transformers.layer_refinement import named_refinements

STATISTICS = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")
MEASURED = (*STATISTICS, CROSS_LAYER)


def health_line(step: int, health: Health, strengths: list[list[float]] | None) -> dict[str, Any]:
    """A line of ``health.jsonl``: every statistic as a list of heads for each layer."""
    return {
        "step": step,
        "layers": list(health.layers),
        "statistics": {
            name: [heads.tolist() for heads in health.values(name).values()] for name in STATISTICS
        },
        CROSS_LAYER: list(health.cross_layer_gtd().values()),
        "strengths": strengths,
    }


def strengths_of(model: nn.Module) -> list[list[float]] | None:
    """Strength of each head by layer, None without refinement; a collective call."""
    strengths = [
        full_tensor(layer().detach()).float().cpu().tolist() for _, layer in named_refinements(model)
    ]
    return strengths or None
