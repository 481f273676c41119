"""The loss at the points of a grid in weight space; resumable, and the weights are restored."""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sparsesam.analysis.objective import Objective, values_kept
from sparsesam.analysis.results import Array

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MovedTensor:
    """One tensor of the model at base + a * along_x + b * along_y, where base is a copy of its original value."""

    name: str
    tensor: Tensor
    base: Tensor
    along_x: Tensor | None
    along_y: Tensor | None = None


@dataclass(frozen=True)
class Grid:
    """The points where the loss is evaluated. ``y`` is empty for a line."""

    moving: Sequence[MovedTensor]
    x: Array
    y: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.y), len(self.x)) if len(self.y) else (len(self.x),)


def evaluate_grid(
    objective: Objective,
    grid: Grid,
    *,
    state_file: str | os.PathLike[str] | None = None,
    save_every: float = 10.0,
    progress: Progress | None = None,
) -> Array:
    """The loss at every point of the grid, row by row. Call inside ``objective.measuring()``.

    With a ``state_file`` the points done so far are written every ``save_every`` seconds and on exit,
    and a later call with the same weights, directions, grid and batches continues from there.
    """
    losses = _Losses.begin(grid, objective, None if state_file is None else Path(state_file), save_every)
    rows = grid.y if len(grid.y) else np.zeros(1)
    tensors, bases = [one.tensor for one in grid.moving], [one.base for one in grid.moving]
    with values_kept(tensors, bases), losses.saved_on_exit():
        for row, b in enumerate(rows):
            start_of_row = _row(grid.moving, float(b))
            for column, a in enumerate(grid.x):
                at = (row, column) if len(grid.y) else column
                if losses.done[at]:
                    continue
                _move(grid.moving, start_of_row, float(a))
                losses.values[at], losses.done[at] = objective.loss(), True
                losses.save_if_due()
                if progress is not None:
                    progress(int(losses.done.sum()), losses.done.size)
    return losses.values


# ---- moving --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _row(moving: Sequence[MovedTensor], b: float) -> list[Tensor]:
    return [one.base if one.along_y is None else torch.add(one.base, one.along_y, alpha=b) for one in moving]


@torch.no_grad()
def _move(moving: Sequence[MovedTensor], starts: list[Tensor], a: float) -> None:
    for one, start in zip(moving, starts, strict=True):
        if one.along_x is None:
            one.tensor.copy_(start)
        else:
            torch.add(start, one.along_x, alpha=a, out=one.tensor)


# ---- the state file ------------------------------------------------------------------------------------------


@dataclass
class _Losses:
    """The losses of the points that are done; in a file too, if there is a path."""

    values: Array
    done: npt.NDArray[np.bool_]
    path: Path | None
    fingerprint: str
    save_every: float
    saved_at: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, grid: Grid, objective: Objective, path: Path | None, save_every: float) -> _Losses:
        """Those in the file, if it is there."""
        fingerprint = "" if path is None else _fingerprint(objective, grid)
        losses = cls(np.full(grid.shape, np.nan), np.zeros(grid.shape, dtype=bool), path, fingerprint, save_every)
        if path is not None and path.exists():
            losses._load(path)
        return losses

    def _load(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as saved:
                fingerprint, self.values, self.done = str(saved["fingerprint"]), saved["loss"], saved["done"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"state_file {path} is not the state of a landscape ({error}); remove it or choose another name"
            ) from error
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"state_file {path} belongs to another landscape (other weights, directions, grid, batches or "
                "options); remove it to start again, or choose another name"
            )

    def save_if_due(self) -> None:
        if time.monotonic() - self.saved_at >= self.save_every:
            self._save()

    @contextmanager
    def saved_on_exit(self) -> Iterator[None]:
        before = int(self.done.sum())
        try:
            yield
        finally:
            if int(self.done.sum()) > before:
                self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("wb") as file:
            np.savez(file, loss=self.values, done=self.done, fingerprint=np.array(self.fingerprint))
        partial.replace(self.path)
        self.saved_at = time.monotonic()


def _fingerprint(objective: Objective, grid: Grid) -> str:
    """Of everything the losses depend on, except the code of model and loss."""
    digest = hashlib.blake2b(repr(objective.summary()).encode(), digest_size=16)
    digest.update(repr((objective.weights, grid.x.tolist(), grid.y.tolist())).encode())
    for one in grid.moving:
        digest.update(one.name.encode())
        for part in (one.base, one.along_x, one.along_y):
            _feed(digest, part)
    # Tensors that do not move matter too: another checkpoint has other ones.
    for tensor in (*objective.model.parameters(), *objective.model.buffers()):
        _feed(digest, tensor)
    for leaf in tree_leaves(objective.batches):
        _feed(digest, leaf)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(repr((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        digest.update(repr(value).encode() if isinstance(value, (str, int, float, type(None))) else b"other")
