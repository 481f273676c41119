"""What the analyses of runs have in common."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from sparsesam.lab.inspection.run import Run

Progress = Callable[[int, int], None]
Kind = TypeVar("Kind", bound="Analysis")


class Analysis(ABC):
    """A dataclass whose options are its fields. `measure` gives what the result's file holds, as plain values."""

    help: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the result's file."""

    def prepare(self: Kind, runs: Sequence[Run]) -> tuple[Kind, Sequence[Run]]:
        """The analysis with what the runs must share, and the runs to measure."""
        return self, runs

    @abstractmethod
    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        """The result of one run; ``progress(done, total)`` tells how far it is."""

    def made(self, run: Run) -> dict[str, Any]:
        """Which checkpoint and which images it was measured on."""
        return run.made()

    @abstractmethod
    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The few numbers that a table shows."""


def with_shared_rho(analysis: Any, runs: Sequence[Run]) -> tuple[Any, Sequence[Run]]:
    """Runs are compared at one rho: that of the first, unless one was given."""
    if analysis.rho is None:
        analysis = dataclasses.replace(analysis, rho=runs[0].config.rho)
    return analysis, runs


def usable_masks(run: Run) -> dict[str, Tensor] | None:
    """The masks of a run, None also where they keep no weight."""
    masks = run.masks
    return masks if masks is not None and any(bool(mask.any()) for mask in masks.values()) else None


def patterns(layers: str | None, run: Run) -> list[str] | None:
    """The patterns of ``--layers``; ValueError if they fit no parameter."""
    if layers is None:
        return None
    found = [pattern.strip() for pattern in layers.split(",")]
    names = [name for name, _ in run.model.named_parameters()]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in found):
        some = ", ".join(names[:3])
        raise ValueError(
            f"layers must fit a parameter's name, such as {some}, got {layers!r}; '1.*,fc.*' fits two layers"
        )
    return found


def remarks(result: Any) -> list[str]:
    """Every note in a result once, in order."""
    return list(dict.fromkeys(_remarks(result)))


def _remarks(result: Any) -> Iterator[str]:
    if isinstance(result, dict):
        for key, value in result.items():
            if key in ("notes", "words"):
                yield from value
            else:
                yield from _remarks(value)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
