"""What a pass does to a gradient that was there before it.

Trainers that accumulate over micro-batches add to it, which must not be taken for a whole step: the second pass would
see the last micro-batch alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsesam.distributed import is_sharded


class Treatment(enum.Enum):
    CLEARED = enum.auto()  # or there was none
    ADDED_TO = enum.auto()
    UNTOUCHED = enum.auto()  # nothing was cleared and nothing computed


class OldGradient:
    """Watches one small parameter that has a gradient now, until `release`.

    Its gradient is looked at when autograd is about to add to it. Sharded parameters are not watched: their gradients
    are not written by autograd.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._treatment: Treatment | None = None
        with torch._C.DisableTorchFunction():
            with_gradient = [p for p in parameters if p.grad is not None and p.requires_grad and not is_sharded(p)]
            self._watched = min(with_gradient, key=Tensor.numel, default=None)
            self._versions = self._gradient_versions()
            self._gradient = None if self._watched is None else self._watched.grad
            if self._watched is not None:
                with torch.enable_grad():
                    copied: Any = self._watched.expand_as(self._watched)
                self._accumulator = copied.grad_fn.next_functions[0][0]  # lives as long as somebody holds it
                self._handle = self._accumulator.register_prehook(self._before_accumulation)

    def treatment(self) -> Treatment:
        """What happened since; of a gradient that was cleared or added to, the first of the two."""
        if self._watched is None:
            return Treatment.CLEARED
        if self._treatment is not None:
            return self._treatment
        with torch._C.DisableTorchFunction():
            index = next(i for i, p in enumerate(self._parameters) if p is self._watched)
            versions = self._gradient_versions()
            if self._watched.grad is not self._gradient or versions[index] != self._versions[index]:
                return Treatment.CLEARED  # or assigned by hand
            if versions == self._versions:
                return Treatment.UNTOUCHED
            return Treatment.ADDED_TO if self._is_there() else Treatment.CLEARED

    def release(self) -> None:
        if self._watched is not None:
            self._handle.remove()

    def _before_accumulation(self, _: Any) -> None:
        if self._treatment is None:
            with torch._C.DisableTorchFunction():
                self._treatment = Treatment.ADDED_TO if self._is_there() else Treatment.CLEARED

    def _is_there(self) -> bool:
        gradient = None if self._watched is None else self._watched.grad
        if gradient is None:
            return False
        return bool(gradient._nnz() if gradient.is_sparse else gradient.any())

    def _gradient_versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self._parameters]
