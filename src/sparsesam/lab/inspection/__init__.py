"""Analyses of trained runs: measure a run, write the result to ``RUN/analyses/NAME.json``, and draw its figures."""

from typing import Any

from sparsesam.lab.inspection.analysis import Analysis, LabeledResult
from sparsesam.lab.inspection.bound import BoundAnalysis
from sparsesam.lab.inspection.convergence import ConvergenceAnalysis
from sparsesam.lab.inspection.fisher import FisherAnalysis
from sparsesam.lab.inspection.gradients import GradientAnalysis
from sparsesam.lab.inspection.hessian import HessianAnalysis
from sparsesam.lab.inspection.landscape import LandscapeAnalysis
from sparsesam.lab.inspection.masks import MaskAnalysis
from sparsesam.lab.inspection.sharpness import SharpnessAnalysis
from sparsesam.lab.inspection.trained_run import TrainedRun, load_run

ANALYSES: dict[str, type[Analysis[Any]]] = {
    "landscape": LandscapeAnalysis,
    "hessian": HessianAnalysis,
    "sharpness": SharpnessAnalysis,
    "gradients": GradientAnalysis,
    "masks": MaskAnalysis,
    "fisher": FisherAnalysis,
    "bound": BoundAnalysis,
    "convergence": ConvergenceAnalysis,
}

__all__ = ["ANALYSES", "Analysis", "LabeledResult", "TrainedRun", "load_run"]
