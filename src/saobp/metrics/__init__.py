"""Attention health: which heads collapse, from maps, or from queries and keys alone on long inputs."""

from saobp.metrics.entropy import attention_entropy, indirect_entropy, sink_mass, sparsity
from saobp.metrics.estimates import Estimate
from saobp.metrics.graph import betweenness, clustering
from saobp.metrics.gtd import cross_layer_gtd, gtd
from saobp.metrics.health import HeadHealth, Health
from saobp.metrics.methods import STATISTICS, measure
from saobp.metrics.probe import probe
from saobp.metrics.rollout import rollout
from saobp.metrics.sampled import Sampling
from saobp.metrics.verdict import verdict

__all__ = [
    "STATISTICS",
    "Estimate",
    "HeadHealth",
    "Health",
    "Sampling",
    "attention_entropy",
    "betweenness",
    "clustering",
    "cross_layer_gtd",
    "gtd",
    "indirect_entropy",
    "measure",
    "probe",
    "rollout",
    "sink_mass",
    "sparsity",
    "verdict",
]
