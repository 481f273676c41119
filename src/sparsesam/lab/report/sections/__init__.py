"""One module per section of the page, in the page's order. Each has ``build(material) -> Section``."""

from sparsesam.lab.report.sections import (
    bound,
    convergence,
    cost,
    curves,
    fisher,
    gradients,
    hessian,
    landscapes,
    masks,
    paper,
    provenance,
    results,
    runs,
    sharpness,
    sparsity,
)

ORDER = (
    results,
    cost,
    paper,
    curves,
    sparsity,
    landscapes,
    hessian,
    sharpness,
    gradients,
    masks,
    fisher,
    bound,
    convergence,
    runs,
    provenance,
)

__all__ = ["ORDER"]
