"""When a mask is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral


def is_whole_number(value: object) -> bool:
    """Python's own and NumPy's integers."""
    return isinstance(value, Integral)


@dataclass(frozen=True)
class Refresh:
    """A mask is made before the first ascent and then every ``every`` steps; ``None``: never again by itself."""

    every: int | None

    def __post_init__(self) -> None:
        if self.every is not None and not (is_whole_number(self.every) and self.every >= 1):
            raise ValueError(
                f"every must be a whole number of at least 1 step, got {self.every}; use manual() for no refreshes"
            )

    def due(self, step: int, last: int) -> bool:
        """Whether the ascent of step 0, 1, 2, … begins with a new mask, the last having been made at ``last``."""
        return self.every is not None and step // self.every > last // self.every


def every_steps(steps: int) -> Refresh:
    """A new mask every ``steps`` optimizer steps."""
    return Refresh(steps)


def every_epochs(epochs: int, *, steps_per_epoch: int) -> Refresh:
    """A new mask every ``epochs`` epochs, the paper's T_m.

    Args:
        epochs: the epochs between two masks.
        steps_per_epoch: the optimizer steps of an epoch, usually ``len(loader)``.
    """
    if not (is_whole_number(epochs) and is_whole_number(steps_per_epoch) and epochs >= 1 and steps_per_epoch >= 1):
        raise ValueError(
            f"epochs and steps_per_epoch must be whole numbers of at least 1, got {epochs} and {steps_per_epoch}; "
            "steps_per_epoch is the number of optimizer steps in an epoch, usually len(loader)"
        )
    return Refresh(epochs * steps_per_epoch)


def manual() -> Refresh:
    """One mask for the whole training, unless ``opt.refresh_mask()`` asks for another."""
    return Refresh(None)
