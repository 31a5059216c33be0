"""Self-attention refined by belief propagation, and instruments that show which heads collapse."""

from saobp.attention import attention, refine
from saobp.propagation import Factor, register_factor
from saobp.refinement import Refinement

__version__ = "0.1.0"

__all__ = ["Factor", "Refinement", "attention", "refine", "register_factor"]
