"""Errors of a score that are not a mistake of the user."""


class NonFiniteScoreError(ValueError):
    """A score contains NaN or infinity: the optimizer keeps the previous mask and counts the event."""
