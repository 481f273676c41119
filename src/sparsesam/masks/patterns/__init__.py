"""Which sets of weights may be perturbed together.

A pattern turns scores into a mask (SSAM-F) and drops and grows a part of a mask (SSAM-D). It sees
names, shapes and scores, never data or modules.
"""

from sparsesam.masks.patterns.base import Pattern
from sparsesam.masks.patterns.n_of_m import NM, NMFilters
from sparsesam.masks.patterns.named import as_pattern
from sparsesam.masks.patterns.per_layer import PerLayer
from sparsesam.masks.patterns.structured import Structured
from sparsesam.masks.patterns.unstructured import Unstructured

__all__ = ["NM", "NMFilters", "Pattern", "PerLayer", "Structured", "Unstructured", "as_pattern"]
