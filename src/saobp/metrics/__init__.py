"""Attention health: which heads collapse, from maps, or from queries and keys alone on long inputs."""

from saobp.metrics.entropy import attention_entropy, indirect_entropy, sink_mass, sparsity
from saobp.metrics.graph import betweenness, clustering
from saobp.metrics.gtd import cross_layer_gtd, gtd
from saobp.metrics.rollout import rollout

__all__ = [
    "attention_entropy",
    "betweenness",
    "clustering",
    "cross_layer_gtd",
    "gtd",
    "indirect_entropy",
    "rollout",
    "sink_mass",
    "sparsity",
]
