"""Analyses of a trained model: gradient differences, loss landscapes, Hessian spectra, masks, bounds.

Every analysis takes an `Objective`: a model, its loss and a fixed list of batches. Results are dataclasses with
``to_dict()`` for JSON and ``from_dict()`` to read it back.
"""

from sparsesam.analysis.bound import GeneralizationBound, generalization_bound
from sparsesam.analysis.fisher import FisherAgreement, fisher_vs_hessian
from sparsesam.analysis.gradients import GradientDifference, compare_gradients, gradient_difference
from sparsesam.analysis.hessian import (
    HessianOperator,
    HessianSpectrum,
    HessianTrace,
    SpectralDensity,
    hessian_diagonal,
    hessian_eigenvalues,
    hessian_trace,
    spectral_density,
)
from sparsesam.analysis.landscape import Landscape, ProgressCallback, loss_between, loss_landscape, random_directions
from sparsesam.analysis.masks import MaskHistory, masks_over_time
from sparsesam.analysis.objective import Objective, select_parameters
from sparsesam.analysis.results import AnalysisResult, ObjectiveSummary
from sparsesam.analysis.sharpness import Sharpness, sharpness

__all__ = [
    "AnalysisResult", "FisherAgreement", "GeneralizationBound", "GradientDifference", "HessianOperator",
    "HessianSpectrum", "HessianTrace", "Landscape", "MaskHistory", "Objective", "ObjectiveSummary", "ProgressCallback",
    "Sharpness", "SpectralDensity", "compare_gradients", "fisher_vs_hessian", "generalization_bound",
    "gradient_difference", "hessian_diagonal", "hessian_eigenvalues", "hessian_trace", "loss_between",
    "loss_landscape", "masks_over_time", "random_directions", "select_parameters", "sharpness", "spectral_density",
]  # fmt: skip
