"""Random numbers as a function of where a run is: to resume, knowing the place is enough.

Nothing in a run draws from a generator that outlives a step, except the mask's own, which is saved with the
optimizer. So every rank, and a run begun anew in the middle of an epoch, draws what one uninterrupted process does.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What numbers are drawn for; each has a stream of its own."""

    WEIGHTS = 0
    ORDER = 1
    AUGMENT = 2
    LABEL_NOISE = 3
    CORRUPTION = 4
    MASK = 5
    STEP = 6  # dropout and whatever else the model draws
    SUBSET = 7
    VIEWS = 8


def derive(seed: int, purpose: Purpose, *place: int) -> int:
    """A seed for one purpose at one place, such as an epoch and a step."""
    words = np.random.SeedSequence((seed, int(purpose), *place)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def generator(seed: int, purpose: Purpose, *place: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, purpose, *place))
