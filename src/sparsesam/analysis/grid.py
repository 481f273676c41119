"""The loss at the points of a grid in weight space; resumable, and the weights are restored."""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sparsesam.analysis.objective import Objective, values_kept
from sparsesam.analysis.results import Array

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MovedTensor:
    """A tensor of the model that moves by x * along[0] (+ y * along[1]); None where it stands still."""

    name: str
    tensor: Tensor
    along: Sequence[Tensor | None]


def evaluate_grid(
    objective: Objective,
    moving: Sequence[MovedTensor],
    axes: Sequence[Array],
    *,
    state_file: str | os.PathLike[str] | None = None,
    save_every: float = 10.0,
    progress: Progress | None = None,
) -> Array:
    """loss[i] at axes[0][i], or loss[j, i] at axes[0][i], axes[1][j]. Call inside ``objective.measuring()``.

    With a ``state_file`` the points done so far are written every ``save_every`` seconds and on exit,
    and a later call with the same weights, directions, grid and batches continues from there.
    """
    shape = tuple(len(axis) for axis in reversed(axes))
    loss, done = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    state = None if state_file is None else _StateFile(Path(state_file), _fingerprint(objective, moving, axes))
    if state is not None:
        state.read_into(loss, done)
    tensors = [one.tensor for one in moving]
    bases = [tensor.detach().clone() for tensor in tensors]
    saved_at = time.monotonic()
    with values_kept(tensors, bases):
        try:
            for at in np.ndindex(shape):
                if done[at]:
                    continue
                _move(moving, bases, [axis[place] for axis, place in zip(axes, reversed(at), strict=True)])
                loss[at], done[at] = objective.loss(), True
                if state is not None and time.monotonic() - saved_at >= save_every:
                    state.write(loss, done)
                    saved_at = time.monotonic()
                if progress is not None:
                    progress(int(done.sum()), done.size)
        finally:
            if state is not None:
                state.write(loss, done)
    return loss


@torch.no_grad()
def _move(moving: Sequence[MovedTensor], bases: Sequence[Tensor], point: Sequence[float]) -> None:
    for one, base in zip(moving, bases, strict=True):
        one.tensor.copy_(base)
        for direction, distance in reversed(list(zip(one.along, point, strict=True))):
            if direction is not None:
                one.tensor.add_(direction, alpha=float(distance))


@dataclass(frozen=True)
class _StateFile:
    """The losses of the points that are done."""

    path: Path
    fingerprint: str

    def read_into(self, loss: Array, done: Any) -> None:
        """If the file is there."""
        if not self.path.exists():
            return
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                fingerprint, saved_loss, saved_done = str(saved["fingerprint"]), saved["loss"], saved["done"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"state_file {self.path} is not the state of a landscape ({error}); remove it or choose another name"
            ) from error
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"state_file {self.path} belongs to another landscape (other weights, directions, grid, batches or "
                "options); remove it to start again, or choose another name"
            )
        loss[:], done[:] = saved_loss, saved_done

    def write(self, loss: Array, done: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("wb") as file:
            np.savez(file, loss=loss, done=done, fingerprint=np.array(self.fingerprint))
        partial.replace(self.path)


def _fingerprint(objective: Objective, moving: Sequence[MovedTensor], axes: Sequence[Array]) -> str:
    """Of everything the losses depend on, except the code of model and loss."""
    digest = hashlib.blake2b(repr((objective.summary(), objective.weights)).encode(), digest_size=16)
    # Tensors that do not move matter too: another checkpoint has other ones.
    tensors = [*objective.model.parameters(), *objective.model.buffers()]
    lines = [axis.tolist() for axis in axes]
    for leaf in tree_leaves([lines, [(one.name, one.along) for one in moving], tensors, objective.batches]):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode() if isinstance(leaf, (str, int, float, type(None))) else b"other")
    return digest.hexdigest()
