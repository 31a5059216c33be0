"""Self-attention refined by belief propagation, and instruments that show which heads collapse."""

from saobp.attention import attention, refine
from saobp.metrics.probe import probe
from saobp.propagation import Factor, register_factor
from saobp.refinement import Refinement
from saobp.transformers import apply, load, remove

__version__ = "0.1.0"

__all__ = [
    "Factor",
    "Refinement",
    "apply",
    "attention",
    "load",
    "probe",
    "refine",
    "register_factor",
    "remove",
]
