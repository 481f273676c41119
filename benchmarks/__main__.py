"""``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME …`` runs them."""

from __future__ import annotations

from benchmarks import analyses, devices, masks, report, steps, training  # noqa: F401  each registers its benchmarks
from benchmarks.runner import main

if __name__ == "__main__":
    main()
