"""Random generator states of a model's devices, so that both passes can draw the same numbers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

RNGSnapshot = tuple[Tensor, ...]


class RNGState:
    """Reads and sets the states of torch's global generators, from which dropout draws."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self._devices = sorted((d for d in devices if d.type in ("cuda", "xpu", "mps")), key=str)

    def read(self) -> RNGSnapshot:
        return (torch.get_rng_state(), *(_module(d).get_rng_state(*_index(d)) for d in self._devices))

    def write(self, state: RNGSnapshot) -> None:
        torch.set_rng_state(state[0])
        for device, one in zip(self._devices, state[1:], strict=True):
            _module(device).set_rng_state(one, *_index(device))


def other_generators() -> tuple[Any, bytes]:
    """Returns the states of Python's and numpy's global generators, from which some models draw layers and masks."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002


def same_state(left: RNGSnapshot, right: RNGSnapshot) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _module(device: torch.device):  # type: ignore[no-untyped-def]
    return getattr(torch, device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
