"""Attention health: which heads collapse, from maps, or from queries and keys alone on long inputs."""

from typing import TYPE_CHECKING, Any

from saobp.metrics.correlation import Correlation, correlations, pearson
from saobp.metrics.entropy import attention_entropy, indirect_entropy, sink_mass, sparsity
from saobp.metrics.estimate import Estimate
from saobp.metrics.graph import betweenness, clustering
from saobp.metrics.gtd import cross_layer_gtd, gtd
from saobp.metrics.health import HeadHealth, Health
from saobp.metrics.health_log import HealthLog, health_metrics
from saobp.metrics.measure import STATISTICS, measure
from saobp.metrics.probe import probe
from saobp.metrics.rollout import rollout
from saobp.metrics.sampled import Sampling
from saobp.metrics.verdict import verdict

if TYPE_CHECKING:
    from saobp.metrics.callback import HealthCallback

__all__ = [
    "STATISTICS",
    "Correlation",
    "Estimate",
    "HeadHealth",
    "Health",
    "HealthCallback",
    "HealthLog",
    "Sampling",
    "attention_entropy",
    "betweenness",
    "clustering",
    "correlations",
    "cross_layer_gtd",
    "gtd",
    "health_metrics",
    "indirect_entropy",
    "measure",
    "pearson",
    "probe",
    "rollout",
    "sink_mass",
    "sparsity",
    "verdict",
]


def __getattr__(name: str) -> Any:
    """Trainer is slow to import, so its callback comes when it is asked for."""
    if name == "HealthCallback":
        from saobp.metrics.callback import HealthCallback

        return HealthCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
