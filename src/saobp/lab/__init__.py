"""The paper's tables and figures, and open questions, as reproducible experiments."""

from saobp.lab.experiments import EXPERIMENTS, Experiment, choose_experiments
from saobp.lab.scales import SCALES, Scale, get_scale

__all__ = ["EXPERIMENTS", "SCALES", "Experiment", "Scale", "choose_experiments", "get_scale"]
