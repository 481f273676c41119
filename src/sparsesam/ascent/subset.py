"""The part of a batch that the ascent looks at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from sparsesam.masks.samples import batch_size, slice_batch


@dataclass(frozen=True)
class AscentSubset:
    """The first ``kept`` of ``size`` samples; ``whole`` finds the whole tensor that a part was cut from."""

    part: Any
    size: int
    kept: int
    whole: dict[int, Tensor]

    @classmethod
    def of(cls, batch: Any, fraction: float) -> AscentSubset:
        size = batch_size(batch)
        kept = max(1, math.ceil(fraction * size))
        part = slice_batch(batch, slice(0, kept), size)
        pairs = zip(tree_leaves(part), tree_leaves(batch), strict=True)
        whole = {id(a): b for a, b in pairs if isinstance(a, Tensor) and a is not b}
        return cls(part, size, kept, whole)
