"""The part of a batch that the ascent looks at."""

from __future__ import annotations

import math
from typing import Any

from sparsesam.masks.batches import batch_size, slice_batch


def ascent_part(batch: Any, fraction: float) -> Any:
    """The first samples of a batch, that share of them rounded up."""
    size = batch_size(batch)
    return slice_batch(batch, slice(0, max(1, math.ceil(fraction * size))), size)
