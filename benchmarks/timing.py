"""Interleaved timing, so that other load affects all cases equally; ratios are taken between adjacent measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Cases = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Ratio:
    """One case against the reference: median seconds, and the quartiles of the ratios over the rounds."""

    seconds: float
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"

    def per(self, count: int) -> Ratio:
        """Returns the ratio of one of ``count`` equal parts of the case."""
        return Ratio(self.seconds / count, self.low / count, self.median / count, self.high / count)

    @property
    def milliseconds(self) -> str:
        return f"{1e3 * self.seconds:.1f}"


def compare(
    cases: Cases, reference: str, *, rounds: int, warmup: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Ratio]:
    """Time each case against the mean of the runs of the reference just before and just after.

    A round runs every case once, and the reference before and after each, so that changes of the machine's speed over
    seconds affect both equally. The first case rotates from round to round. ``warmup`` rounds are discarded. With one
    thread, ``time.process_time`` as the clock counts only this process's CPU time: use it on a machine with other load.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; ten or more give a usable median")

    def seconds(name: str) -> float:
        start = clock()
        cases[name]()
        return clock() - start

    names = [name for name in cases if name != reference]
    timed: dict[str, list[float]] = {name: [] for name in cases}
    relative: dict[str, list[float]] = {name: [] for name in names} | {reference: [1.0]}
    for number in range(warmup + rounds):
        first = number % len(names) if names else 0
        times = [(reference, seconds(reference))]
        for name in names[first:] + names[:first]:
            times += [(name, seconds(name)), (reference, seconds(reference))]
        if number >= warmup:
            for name, taken in times:
                timed[name].append(taken)
            for (_, before), (name, own), (_, after) in zip(times[::2], times[1::2], times[2::2], strict=False):
                relative[name].append(2 * own / (before + after))
    return {name: Ratio(statistics.median(timed[name]), *quartiles(relative[name])) for name in cases}


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def show(headings: str, rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table; ``headings`` are separated by ``|``."""
    table = [[cell.strip() for cell in headings.split("|")], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    rule = "|".join("-" * (width + 2) for width in widths)
    print("\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:]), ""]))
