"""One runner for all benchmarks: their names, the options they share and their own, and the provenance of a run."""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from benchmarks.timing import Cases, Ratio, compare
from sparsesam.lab.experiment.provenance import provenance

Value = TypeVar("Value")
CPU = torch.device("cpu")
BENCHMARKS: dict[str, Benchmark] = {}
HELP = {
    "threads": "threads of torch",
    "rounds": "interleaved rounds of the timed cases",
    "cpu_time": "count CPU seconds of this process, on a machine with other load; with one thread",
    "only": "only cases whose name contains one of these, separated by commas, and the reference",
    "batch": "images in a step",
    "memory": "also measure the peak of live bytes of a step",
}


@dataclass(frozen=True)
class Session:
    """How often, by which clock and which cases are timed."""

    threads: int = 2
    rounds: int = 7
    cpu_time: bool = False
    only: str = ""
    quick: bool = False

    def chosen(self, cases: Mapping[str, Value], *always: str) -> dict[str, Value]:
        words = self.only.split(",")
        return {name: case for name, case in cases.items() if name in always or any(word in name for word in words)}

    def compare(self, cases: Cases, reference: str, device: torch.device = CPU) -> dict[str, Ratio]:
        """Times each case against the reference; first steps, which create momentum and masks, are not timed."""

        def clock() -> float:
            if device != CPU:
                torch.accelerator.synchronize(device)
            return time.process_time() if self.cpu_time else time.perf_counter()

        warmup = 1 if self.quick else 2
        return compare(self.chosen(cases, reference), reference, rounds=self.rounds, warmup=warmup, clock=clock)


@dataclass(frozen=True)
class Benchmark:
    """``options`` are its fields of `Session` and the function's own options, with their defaults."""

    function: Callable[..., None]
    options: Mapping[str, Any]
    quick: Mapping[str, Any]

    @property
    def question(self) -> str:
        return (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")

    def run(self, given: Mapping[str, Any]) -> None:
        quick = {"threads": 1, "rounds": 1, **self.quick} if given.get("quick") else {}
        values = {name: given.get(name, quick.get(name, default)) for name, default in self.options.items()}
        print(f"\n== {self.function.__name__}: {self.question}")
        print(", ".join(f"{name} {value}" for name, value in values.items() if value != ""), end="\n\n")
        of_session = {name: values.pop(name) for name in asdict(Session()).keys() & values.keys()}
        session = Session(**of_session, quick=bool(quick))
        threads = torch.get_num_threads()
        torch.set_num_threads(session.threads)
        try:
            self.function(session, **values)
        finally:
            torch.set_num_threads(threads)


def benchmark(
    *, quick: Mapping[str, Any] | None = None, **session: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a benchmark. Its options are its arguments with a default, and those of `Session` that are given.

    All have --threads, those with a number of rounds --cpu-time. ``quick`` are values with --quick.
    """
    clock = {"cpu_time": False} if "rounds" in session else {}

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function).parameters.values()
        own = {each.name: each.default for each in parameters if each.default is not each.empty}
        BENCHMARKS[function.__name__] = Benchmark(function, {"threads": 2, **clock, **session, **own}, quick or {})
        return function

    return register


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [NAME … | all] [options]; without a name: a list",
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if unknown := [name for name in names if name not in (*BENCHMARKS, "all")]:
        parser.error(f"NAME must be one of {', '.join(BENCHMARKS)}, got {unknown[0]!r}")
    if not words:
        for name, found in BENCHMARKS.items():
            print(f"{name:13} {found.question}")
        return
    chosen = [BENCHMARKS[name] for name in (BENCHMARKS if "all" in names else names)]
    parser.description = "\n\n".join(inspect.getdoc(each.function) or "" for each in chosen)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs; the figures mean nothing")
    for name, default in {name: value for each in chosen for name, value in each.options.items()}.items():
        how: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, tuple):
            how = {"type": type(default[0]), "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{HELP.get(name, '')} (default: {default})", **how)
    given = vars(parser.parse_args(words[len(names) :]))
    if not chosen:
        parser.error("name a benchmark before the options")
    for key, value in provenance().items():
        if key != "threads":
            print(f"{key:10} {value}")
    for each in chosen:
        each.run(given)
