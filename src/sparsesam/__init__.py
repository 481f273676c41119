"""Sharpness-aware training that perturbs only the weights that matter."""

from sparsesam.budget import budget_mask
from sparsesam.compile_blocks import compile_blocks
from sparsesam.masks.fisher import fisher_diagonal
from sparsesam.masks.fixed import NORMALIZATION, fixed_mask, normalization_layers
from sparsesam.masks.mask import Mask, MaskRule, dynamic_mask, fisher_mask, random_mask
from sparsesam.masks.patterns import NM, Pattern, PerLayer, Structured, Unstructured
from sparsesam.masks.scores import Fisher, GradientMagnitude, Score, ScoreContext, WeightMagnitude
from sparsesam.recommended import recommended
from sparsesam.sam import SAM, SSAM, SharpnessAware
from sparsesam.schedules import Cosine, FollowLearningRate, InverseSqrt, RhoSchedule, Warmup
from sparsesam.variants import ESAM, GSAM, WSAM, ExtrapolatedSAM, FriendlySAM, LookSAM, MomentumSAM, ZSharp

__version__ = "0.1.0"

__all__ = [
    "ESAM", "GSAM", "NM", "NORMALIZATION", "SAM", "SSAM", "WSAM", "Cosine", "ExtrapolatedSAM", "Fisher",
    "FollowLearningRate", "FriendlySAM", "GradientMagnitude", "InverseSqrt", "LookSAM", "Mask", "MaskRule",
    "MomentumSAM", "Pattern", "PerLayer", "RhoSchedule", "Score", "ScoreContext", "SharpnessAware",
    "Structured", "Unstructured", "Warmup", "WeightMagnitude", "ZSharp", "budget_mask",
    "compile_blocks", "dynamic_mask", "fisher_diagonal", "fisher_mask", "fixed_mask",
    "normalization_layers", "random_mask", "recommended",
]  # fmt: skip
