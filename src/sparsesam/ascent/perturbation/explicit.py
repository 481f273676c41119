"""The explicit perturbation: mask the direction, move the weights, bring them back bit for bit.

    e = rho * m ⊙ T² g / ||T g||          norm="full", the paper's (with T = 1)
    e = rho * m ⊙ T² g / ||m ⊙ T g||      norm="masked"

T = 1 for SAM; T = |w| + eta for the adaptive form (ASAM). g is whatever direction the targets hold.

    targets = [Target(name, weight, direction, mask, rho, eta), …]
    perturbation.apply(targets, perturbation.norm(targets, "full"))
    …                                      # weights at w + e
    perturbation.undo()                    # weights at w, bit for bit

Two implementations stand behind it, with equal results up to rounding: `on_host` goes through the tensors one by one in
pieces that stay in cache, `on_device` moves them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

from sparsesam.ascent.perturbation import on_device, on_host
from sparsesam.ascent.perturbation.targets import Target
from sparsesam.ascent.plan import Norm
from sparsesam.distributed import is_sharded
from sparsesam.masks.packed import is_dense

Implementation = Literal["host", "device"]

_forced: ContextVar[Implementation | None] = ContextVar("implementation", default=None)


@contextmanager
def use_implementation(name: Implementation) -> Iterator[None]:
    """Within the block weights are moved in this way, whatever their device; for tests and benchmarks."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


class Perturbation:
    """Adds e to the weights and can take it back exactly, because the old values of moved entries are kept.

    The buffers are kept from step to step. With ``remember`` the last e is kept as well, so that later steps can use it
    again.
    """

    def __init__(self, *, remember: bool = False) -> None:
        self.last: dict[str, Tensor] = {}
        self._remember = remember
        self._host, self._device = on_host.HostMover(), on_device.DeviceMover()

    @property
    def active(self) -> bool:
        return self._host.active or self._device.active

    @torch.no_grad()
    def norm(self, targets: Sequence[Target], norm: Norm) -> float | Tensor:
        """||T g|| over all targets, or over their kept entries; accumulated in at least float32.

        A tensor where all targets are on accelerators, which nobody needs to wait for; else a number.
        """
        hosted, others = _by_implementation(targets)
        parts = [*on_host.norms(hosted, norm), *self._device.norms(others, norm)]
        if not parts:
            return 0.0
        home = parts[0].device
        total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(home) for part in parts]))
        return float(total) if hosted else total

    @torch.no_grad()
    def apply(self, targets: Sequence[Target], norm: float | Tensor) -> None:
        """Move w to w + e. ``norm`` comes from `norm`; a number must be positive and finite, with a tensor that is not
        nothing moves.
        """
        hosted, others = _by_implementation([target for target in targets if not target.is_still])
        self.last = {}
        noted = self.last if self._remember else None
        if hosted:
            self._host.move(hosted, float(norm), noted)
        if others:
            self._device.move(others, norm, noted)
        self._release(targets)

    @torch.no_grad()
    def apply_last(self, targets: Sequence[Target]) -> None:
        """Move w to w + the last e, whatever the direction is now."""
        hosted, others = _by_implementation([t for t in targets if t.name in self.last and not t.is_still])
        self._host.move_by(hosted, self.last)
        self._device.move_by(others, self.last)
        self._release(targets)

    @torch.no_grad()
    def undo(self) -> None:
        """Bring back w, bit for bit; an interruption (Ctrl-C) is raised only after that."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    def forget(self) -> None:
        """Free the buffers (after the masks or the parameters changed)."""
        self._host.forget()
        self._device.forget()
        self.last = {}

    def _put_back(self) -> None:
        self._host.undo()
        self._device.undo()
        torch.clear_autocast_cache()

    def _release(self, targets: Sequence[Target]) -> None:
        for target in targets:
            target.release()
        torch.clear_autocast_cache()  # a step inside of autocast would go on with the weights as they were


def _by_implementation(targets: Sequence[Target]) -> tuple[list[Target], list[Target]]:
    """Those moved by the host's implementation, and those moved by the devices'."""
    found: tuple[list[Target], list[Target]] = ([], [])
    for target in targets:
        on_accelerator = target.weight.device.type != "cpu" and not is_sharded(target.weight)
        wanted = _forced.get() or ("device" if on_accelerator else "host")
        found[wanted == "device" and is_dense(target.weight)].append(target)
    return found
