"""The random streams of the devices a model lives on, so that both passes can draw the same numbers."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

RNGSnapshot = tuple[Tensor, ...]


class RNGState:
    """Reads and sets the global generators that dropout and its kin draw from."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self._devices = sorted((d for d in devices if d.type in ("cuda", "xpu", "mps")), key=str)

    def read(self) -> RNGSnapshot:
        return (torch.get_rng_state(), *(_module(d).get_rng_state(*_index(d)) for d in self._devices))

    def write(self, state: RNGSnapshot) -> None:
        torch.set_rng_state(state[0])
        for device, one in zip(self._devices, state[1:], strict=True):
            _module(device).set_rng_state(one, *_index(device))


class OtherGenerators:
    """Python's and numpy's global generators, from which some models draw layers and masks; read, never set.

    numpy takes longer to tell its state than a small model to run. So its memory is looked at instead, where that is
    enough: from a state that holds no normal number ready, every draw changes the memory.
    """

    _SIZE = 624 * 4 + 4  # of a Mersenne twister: key and position

    def __init__(self) -> None:
        self._without_normal: bytes | None = None

    def read(self) -> tuple[Any, ...]:
        return random.getstate(), self._numpy()

    def _numpy(self) -> Any:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            return repr(np.random.get_state(legacy=False))  # noqa: NPY002 (what models draw from)
        memory = ctypes.string_at(generator.ctypes.state_address, self._SIZE)
        if memory == self._without_normal:
            return memory, None
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
        if not state["has_gauss"]:
            self._without_normal = memory
        return memory, state["gauss"] if state["has_gauss"] else None


def same_state(left: RNGSnapshot, right: RNGSnapshot) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _module(device: torch.device):  # type: ignore[no-untyped-def]
    return getattr(torch, device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
