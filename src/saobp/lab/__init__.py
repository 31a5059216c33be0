"""The paper's tables and figures, and questions that it leaves open, as experiments that anyone can rerun."""

from saobp.lab.experiments import EXPERIMENTS, Experiment, choose_experiments
from saobp.lab.scales import SCALES, Scale, get_scale

__all__ = ["EXPERIMENTS", "SCALES", "Experiment", "Scale", "choose_experiments", "get_scale"]
