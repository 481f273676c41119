"""Interleaved timing: what else the machine does meets all cases alike; ratios are taken round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsesam.experiment.provenance import provenance


@dataclass(frozen=True)
class Ratio:
    """One case against the reference: seconds, and the quartiles of the per-round ratios."""

    name: str
    seconds: float
    low: float
    median: float
    high: float


def interleaved(
    cases: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each case in each round.

    Every round runs every case once. The case that begins moves on by one each round, so that each takes
    every place in turn. ``warmup`` rounds are run and forgotten. ``time.process_time`` as the clock, with one
    thread, counts only what this process computes: the one to use beside other work.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; ten or more give a usable median")
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            cases[name]()
            if number >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], reference: str) -> list[Ratio]:
    """Each case's time divided by the reference's of the same round."""
    if reference not in seconds:
        raise ValueError(f"reference must be one of {', '.join(seconds)}, got {reference!r}")
    table = []
    for name, times in seconds.items():
        each = sorted(own / other for own, other in zip(times, seconds[reference], strict=True))
        low, median, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        table.append(Ratio(name, statistics.median(times), low, median, high))
    return table


def format_ratios(table: Sequence[Ratio], reference: str) -> str:
    """The table as text, one line per case."""
    width = max(len(row.name) for row in table)
    lines = [f"{'':{width}}  median ms  x {reference} (quartiles of the rounds)"]
    lines += [
        f"{row.name:{width}}  {1e3 * row.seconds:9.1f}  {row.median:.3f} ({row.low:.3f} to {row.high:.3f})"
        for row in table
    ]
    return "\n".join(lines)


def print_provenance() -> None:
    """Versions, machine, threads, command and commit, one line each."""
    for key, value in provenance().items():
        print(f"{key:10} {value}")
    print()
