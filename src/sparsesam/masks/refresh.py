"""When a mask is recomputed."""

from __future__ import annotations

from dataclasses import dataclass

from sparsesam.masks.checks import check_count


@dataclass(frozen=True)
class Refresh:
    """A mask is made before the first ascent and then every ``every`` steps; ``None``: never again by itself."""

    every: int | None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("every", self.every, "use manual() for no refreshes")

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
    check_count("epochs", epochs, "use every_steps(k) for a part of an epoch")
    check_count("steps_per_epoch", steps_per_epoch, "it is usually len(loader)")
    return Refresh(epochs * steps_per_epoch)


def manual() -> Refresh:
    """One mask for the whole training, unless ``opt.refresh_mask()`` asks for another."""
    return Refresh(None)
