"""Interleaved timing, so that other load affects all cases equally; ratios are taken between adjacent measurements."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparsesam.lab.experiment.provenance import provenance


def arguments(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser with these integer options, and --cpu-time if there are rounds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    if "rounds" in numbers:
        parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; use with --threads 1")
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, set threads, print provenance; ``clock`` follows --cpu-time."""
    options = parser.parse_args()
    if hasattr(options, "threads"):
        torch.set_num_threads(options.threads)
    options.clock = time.process_time if getattr(options, "cpu_time", False) else time.perf_counter
    print_provenance()
    return options


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


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    reference: str,
    *,
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
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


def compare(cases: Mapping[str, Callable[[], object]], reference: str, options: argparse.Namespace) -> list[Ratio]:
    """Compare each case with the reference, using the rounds, warm-up and clock of the options."""
    return ratios(interleaved(cases, reference, rounds=options.rounds, warmup=options.warmup, clock=options.clock))


def medians(
    cases: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Returns the median seconds of each case, run in turn without a reference; a tenth as many rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    warmup = math.ceil(rounds / 10)
    for _ in range(warmup + rounds):
        for name, run in cases.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(values[warmup:]) for name, values in times.items()}


def ratios(timed: Mapping[str, Sequence[Timed]]) -> list[Ratio]:
    """Returns each case's time divided by that of the adjacent reference runs."""
    table = []
    for name, times in timed.items():
        each = sorted(one.seconds / one.reference for one in times)
        low, median, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        table.append(Ratio(name, statistics.median(one.seconds for one in times), low, median, high))
    return table


def format_ratios(table: Sequence[Ratio], reference: str) -> str:
    """Format the table as text, one line per case."""
    width = max(len(row.name) for row in table)
    lines = [f"{'':{width}}  median ms  x {reference} (quartiles of the rounds)"]
    lines += [
        f"{row.name:{width}}  {1e3 * row.seconds:9.1f}  {row.median:.3f} ({row.low:.3f} to {row.high:.3f})"
        for row in table
    ]
    return "\n".join(lines)


def print_provenance() -> None:
    """Print versions, machine, threads, command and commit, one line each."""
    for key, value in provenance().items():
        print(f"{key:10} {value}")
    print()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
