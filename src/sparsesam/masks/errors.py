"""What can go wrong with a score, told apart from a user's mistake."""


class NonFiniteScoreError(ValueError):
    """A score contains NaN or infinity: the optimizer keeps the previous mask and counts the event."""
