"""Random numbers as a function of the seed and the position in a run: every rank, and a run resumed within an epoch,
draws the same numbers as one uninterrupted process. Only the mask's generator outlives a step; the optimizer saves it.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch


class Purpose(IntEnum):
    """Purposes of random numbers; each has its own stream."""

    WEIGHTS = 0
    ORDER = 1
    AUGMENT = 2
    LABEL_NOISE = 3
    CORRUPTION = 4
    MASK = 5
    STEP = 6  # dropout and other draws of the model
    SUBSET = 7
    VIEWS = 8
    VALIDATION = 9
    FISHER = 10


def derive_seed(seed: int, purpose: Purpose, *place: int) -> int:
    """Derive a seed for one purpose at one position, such as an epoch and a step."""
    words = " ".join(map(str, (seed, int(purpose), *place)))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: Purpose, *place: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *place))


def seed_global(seed: int, device: torch.device) -> None:
    """Seed the global generators of the CPU and of ``device``.

    torch.manual_seed also queues a call with a formatted stack trace for every accelerator not yet initialized, which
    takes a millisecond and memory that is never freed.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
