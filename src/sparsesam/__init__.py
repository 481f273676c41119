"""Sharpness-aware training that perturbs only the weights that matter."""

from sparsesam.budget import BudgetMask, budget_mask
from sparsesam.masks.fisher import FisherDiagonal, fisher_diagonal
from sparsesam.masks.fixed import NORMALIZATION, FixedMask, fixed_mask, normalization_layers
from sparsesam.masks.mask import DynamicMask, Mask, MaskRule, RandomMask, Refresh, every_epochs, every_steps, manual
from sparsesam.masks.patterns import NM, NMFilters, Pattern, PerLayer, Structured, Unstructured, as_pattern
from sparsesam.masks.recipes import dynamic_mask, fisher_mask, random_mask
from sparsesam.masks.scores import BatchFisher, Fisher, GradientEnergy, GradientMagnitude, Inverted, Score, ScoreContext
from sparsesam.recommended import recommended
from sparsesam.sam import SAM, SSAM, SharpnessAware
from sparsesam.savings import Savings
from sparsesam.schedules import Constant, Cosine, InverseSqrt, RhoSchedule, Warmup
from sparsesam.variants import GSAM, WSAM, ExtrapolatedSAM, MomentumSAM

__version__ = "0.1.0"

__all__ = [
    "GSAM", "NM", "NORMALIZATION", "SAM", "SSAM", "WSAM", "BatchFisher", "BudgetMask", "Constant", "Cosine", "DynamicMask",
    "ExtrapolatedSAM", "Fisher", "FisherDiagonal", "FixedMask", "GradientEnergy", "GradientMagnitude", "InverseSqrt",
    "Inverted", "Mask", "MaskRule", "MomentumSAM", "NMFilters", "Pattern", "PerLayer", "RandomMask", "Refresh", "RhoSchedule", "Savings", "Score",
    "ScoreContext", "SharpnessAware", "Structured", "Unstructured", "Warmup", "as_pattern", "budget_mask",
    "compile_blocks", "dynamic_mask", "every_epochs", "every_steps", "fisher_diagonal", "fisher_mask", "fixed_mask",
    "manual", "normalization_layers", "random_mask", "recommended",
]  # fmt: skip
