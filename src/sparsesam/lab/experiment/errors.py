"""What can stop a run, each with what to do about it."""

from __future__ import annotations


class RunError(RuntimeError):
    """A run cannot begin or go on; the message says why and what to do."""


class DivergedError(RunError):
    """The loss is not finite."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or must not be read."""


class Interrupted(RunError):
    """Stopped by the user, with everything saved."""
