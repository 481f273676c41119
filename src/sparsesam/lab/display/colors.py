"""The colours of series: distinct within a figure, and told apart also by readers who do not see all colours."""

from __future__ import annotations

from collections.abc import Sequence

#: For light and for dark pages, each with a contrast of at least 3 : 1 to its background.
COLORS = {
    "grey": ("#6b7280", "#a3acba"),
    "blue": ("#0072b2", "#4aa8e0"),
    "orange": ("#d55e00", "#ff8c42"),
    "green": ("#00876a", "#2fc79d"),
    "pink": ("#b8578f", "#ee9bc9"),
    "gold": ("#8a6d1d", "#d9b64c"),
    "violet": ("#5b4a9c", "#a898e8"),
    "cyan": ("#1f8fa8", "#7fd3e6"),
    "red": ("#b3261e", "#ff7b72"),
    "lime": ("#5a7d00", "#a8d14a"),
    "brown": ("#7a4a2b", "#d0a07a"),
    "ink": ("#374151", "#d1d5db"),
}
_FIRST_CHOICE = {
    "sgd": "grey",
    "adam": "gold",
    "adamw": "violet",
    "sam": "blue",
    "asam": "cyan",
    "ssam-f": "orange",
    "ssam-d": "green",
    "ssam-random": "pink",
    "auto": "red",
}
#: "ink" is for references, such as a bound or chance.
_PALETTE = [name for name in COLORS if name != "ink"]


def assign_colors(optimizers: Sequence[str]) -> list[tuple[str, int]]:
    """A colour and a style number for each series, no pair twice.

    An optimizer's first series has the optimizer's own colour, the same in every figure. When all colours are taken,
    the next style number (another dash, another symbol) begins.
    """
    taken: dict[int, tuple[str, int]] = {}
    used: set[tuple[str, int]] = set()
    for place, optimizer in enumerate(optimizers):
        own = (_FIRST_CHOICE.get(optimizer, ""), 0)
        if own[0] and own not in used:
            taken[place] = own
            used.add(own)
    reserved = {_FIRST_CHOICE[one] for one in optimizers if one in _FIRST_CHOICE}
    order = [name for name in _PALETTE if name not in reserved] + [name for name in _PALETTE if name in reserved]
    free = ((name, style) for style in range(len(optimizers) + 1) for name in order if (name, style) not in used)
    return [taken[place] if place in taken else next(free) for place in range(len(optimizers))]
