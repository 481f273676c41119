"""``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME …`` runs them."""

from __future__ import annotations

from benchmarks import (  # noqa: F401  each registers its benchmarks
    augmentation,
    budget,
    devices,
    fisher,
    hessian,
    landscape,
    predict,
    report,
    selection,
    steps,
    sweep,
    throughput,
)
from benchmarks.runner import main

if __name__ == "__main__":
    main()
