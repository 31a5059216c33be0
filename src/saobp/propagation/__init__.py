"""The mathematics in plain PyTorch: factors, the graph of rows, and belief propagation on it."""

from saobp.propagation.beliefs import Beliefs, propagate
from saobp.propagation.factors import Factor, get_factor, register_factor
from saobp.propagation.graph import FactorGraph

__all__ = ["Beliefs", "Factor", "FactorGraph", "get_factor", "propagate", "register_factor"]
