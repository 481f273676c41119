"""Errors that stop a run."""

from __future__ import annotations


class RunError(RuntimeError):
    """A run cannot start or continue; the message says why and what to do."""


class DivergedError(RunError):
    """The loss is not finite."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class LostRankError(RunError):
    """The process of another rank has ended."""


class Interrupted(RunError):
    """Stopped by the user; a checkpoint was saved."""


def one_line(error: BaseException) -> str:
    """Returns the message in one line, or the kind of error if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
