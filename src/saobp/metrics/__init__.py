"""Attention health: which heads collapse, from maps, or from queries and keys alone on long inputs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from saobp.metrics.fast.fast_statistics import FAST, fast_statistics
from saobp.metrics.fast.head_watch import HeadWatch
from saobp.metrics.fast.monitor import watch
from saobp.metrics.functional.correlation import Correlation, correlations, pearson
from saobp.metrics.functional.entropy import attention_entropy, indirect_entropy, sink_mass, sparsity
from saobp.metrics.functional.gtd import cross_layer_gtd, gtd, rollout
from saobp.metrics.functional.token_graph import betweenness, clustering
from saobp.metrics.health.head_health import HeadHealth, Health
from saobp.metrics.health.health_log import Alert, HealthLog, health_metrics
from saobp.metrics.health.recorder import probe
from saobp.metrics.health.verdicts import is_untrained, verdict
from saobp.metrics.query_key_statistics import STATISTICS, measure
from saobp.metrics.sampling import Estimate, Sampling

if TYPE_CHECKING:
    from saobp.metrics.health.trainer_callback import HealthCallback, QKClip

__all__ = [
    "FAST",
    "STATISTICS",
    "Alert",
    "Correlation",
    "Estimate",
    "HeadHealth",
    "HeadWatch",
    "Health",
    "HealthCallback",
    "HealthLog",
    "QKClip",
    "Sampling",
    "attention_entropy",
    "betweenness",
    "clustering",
    "correlations",
    "cross_layer_gtd",
    "fast_statistics",
    "gtd",
    "health_metrics",
    "indirect_entropy",
    "is_untrained",
    "measure",
    "pearson",
    "probe",
    "rollout",
    "sink_mass",
    "sparsity",
    "verdict",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Imports the Trainer callbacks on first use, because Trainer is slow to import."""
    if name in ("HealthCallback", "QKClip"):
        return getattr(import_module("saobp.metrics.health.trainer_callback"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
