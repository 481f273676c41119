"""The colours of series: distinct within a figure, also for readers with a colour vision deficiency."""

from __future__ import annotations

from collections.abc import Sequence

from sparsesam.lab.display.figure import SeriesStyle

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
PALETTE_SIZE = len(_PALETTE)


def assign_styles(optimizers: Sequence[str]) -> list[SeriesStyle]:
    """A style for each series, whose number is its place.

    An optimizer's first series has the optimizer's own colour, the same in every figure. When all colours are used,
    lines of the next `PALETTE_SIZE` numbers have another dash.
    """
    colors: dict[int, str] = {}
    for place, optimizer in enumerate(optimizers):
        own = _FIRST_CHOICE.get(optimizer)
        if own is not None and own not in colors.values():
            colors[place] = own
    free = [name for name in _PALETTE if name not in colors.values()]
    for place in range(len(optimizers)):
        if place not in colors:
            colors[place] = free.pop(0) if free else _PALETTE[place % PALETTE_SIZE]
    return [SeriesStyle(colors[place], place) for place in range(len(optimizers))]
