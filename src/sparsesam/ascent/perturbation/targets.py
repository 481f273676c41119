"""What a perturbation moves: one tensor, the direction it follows, and which of its entries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsesam.masks.packed import PackedMask


@dataclass
class Target:
    """One weight tensor about to be perturbed along a direction g, usually its gradient.

    ``mask=None`` perturbs all of it, ``eta=None`` means T = 1. A negative ``rho`` goes against the direction. ``rho``
    may be a tensor on the weight's device, which is then not read by the host.
    """

    name: str
    weight: Tensor
    direction: Tensor
    mask: PackedMask | None
    rho: float | Tensor
    eta: float | None
    pieces_saved: int = 0

    @property
    def is_dense(self) -> bool:
        return self.mask is None or self.mask.is_full

    @property
    def is_empty(self) -> bool:
        return self.mask is not None and self.mask.is_empty

    @property
    def is_still(self) -> bool:
        return self.is_empty or (not isinstance(self.rho, Tensor) and self.rho == 0)

    def release(self) -> None:
        """Let go of g: the second pass needs the memory."""
        self.direction = self.weight
