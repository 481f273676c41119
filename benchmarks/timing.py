"""Interleaved timing, so that other load affects all cases equally; ratios are taken between adjacent measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Cases = Mapping[str, Callable[[], object]]
Clock = Callable[[], float]


class Timed(NamedTuple):
    """Seconds of one run, and of the reference: the mean of its runs just before and just after."""

    seconds: float
    reference: float


@dataclass(frozen=True)
class Ratio:
    """One case against the reference: median seconds, and the quartiles of the ratios over the rounds."""

    name: str
    seconds: float
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"

    def per(self, count: int) -> Ratio:
        """Returns the ratio of one of ``count`` equal parts of the case."""
        return Ratio(self.name, self.seconds / count, self.low / count, self.median / count, self.high / count)

    @property
    def milliseconds(self) -> str:
        return f"{1e3 * self.seconds:.1f}"


def interleaved(
    cases: Cases, reference: str, *, rounds: int, warmup: int, clock: Clock = time.perf_counter
) -> dict[str, list[Timed]]:
    """Time each case in each round, next to the reference.

    A round runs every case once, and the reference before and after each, so that changes of the machine's speed over
    seconds affect both equally. The first case rotates from round to round. ``warmup`` rounds are discarded. With one
    thread, ``time.process_time`` as the clock counts only this process's CPU time: use it on a machine with other load.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; ten or more give a usable median")
    if reference not in cases:
        raise ValueError(f"reference must be one of {', '.join(cases)}, got {reference!r}")

    def seconds(name: str) -> float:
        start = clock()
        cases[name]()
        return clock() - start

    names = [name for name in cases if name != reference]
    timed: dict[str, list[Timed]] = {name: [] for name in cases}
    for number in range(warmup + rounds):
        first = number % len(names) if names else 0
        before = seconds(reference)
        references = [before]
        for name in names[first:] + names[:first]:
            own, after = seconds(name), seconds(reference)
            if number >= warmup:
                timed[name].append(Timed(own, (before + after) / 2))
            before = after
            references.append(after)
        if number >= warmup:
            timed[reference] += [Timed(own, own) for own in references]
    return timed


def ratios(timed: Mapping[str, Sequence[Timed]]) -> dict[str, Ratio]:
    """Returns each case's time divided by that of the adjacent reference runs."""
    table = {}
    for name, times in timed.items():
        each = sorted(run.seconds / run.reference for run in times)
        low, median, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        table[name] = Ratio(name, statistics.median(run.seconds for run in times), low, median, high)
    return table


def medians(cases: Cases, rounds: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Returns the median seconds of each case, run in turn without a reference; a tenth as many rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    warmup = math.ceil(rounds / 10)
    for _ in range(warmup + rounds):
        for name, run in cases.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(values[warmup:]) for name, values in times.items()}


def show(headings: str, rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table; ``headings`` are separated by ``|``."""
    table = [[cell.strip() for cell in headings.split("|")], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    rule = "|".join("-" * (width + 2) for width in widths)
    print("\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:]), ""]))
