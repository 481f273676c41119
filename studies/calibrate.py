"""Cost of a step of each method: ``python -m studies.calibrate``, on an otherwise idle machine.

The methods of a task are interleaved, a few steps at a time. A method's cost is its CPU time divided by SGD's; the
lower quartile of each is used, because other load only adds time. Mask refreshes are timed separately and spread over
the steps between them.
Writes records/cost.jsonl.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from sparsesam.lab.experiment.provenance import provenance
from studies.plan import HERE, Record, Task, read_task, task_names
from studies.run import append, prepare, read


class Stopwatch:
    """Times a method's training, a few steps at a time."""

    def __init__(self, task: Task, method: str, records: list[Record], data_dir: Path | None) -> None:
        self.training = prepare(task.plan(method, records)[-1][0], data_dir)
        mask = getattr(self.training.optimizer, "mask", None)
        self.period = 0 if mask is None else mask.refresh or 0  # steps between masks; 0: only the first mask
        self.steps: list[float] = []

    def run(self, steps: int) -> None:
        """Take steps and record the CPU seconds per step, without mask refreshes."""
        masks = sum(self.training.sums.mask_seconds)
        start, target = time.process_time(), self.training.steps_taken + steps
        while self.training.steps_taken < target:
            self.training.advance(lambda: self.training.steps_taken + 1 >= target)
        spent = time.process_time() - start - (sum(self.training.sums.mask_seconds) - masks)
        self.steps.append(spent / steps)

    @property
    def mask_seconds(self) -> float:
        """Seconds of mask refreshes per step."""
        made = self.training.sums.mask_seconds
        return median(made[1:] or made) / self.period if made and self.period else 0.0


def measure(task: Task, records: list[Record], data_dir: Path | None, *, rounds: int, steps: int) -> dict[str, float]:
    """Returns the cost of each tested method relative to SGD."""
    tested = dict.fromkeys(record["method"] for record in records if record["stage"] == "final")
    watches = {method: Stopwatch(task, method, records, data_dir) for method in tested}
    for watch in watches.values():
        watch.run(steps)
        watch.steps.clear()  # warm-up
    for _ in range(rounds):
        for watch in watches.values():
            watch.run(steps)
    lower = {name: quantiles(watch.steps, n=4)[0] for name, watch in watches.items()}
    return {name: (lower[name] + watch.mask_seconds) / lower["SGD"] for name, watch in watches.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=task_names())
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn; a multiple of every method's period")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tasks:
        records = read(options.records / f"{name}.jsonl")
        cost = measure(read_task(name), records, options.data_dir, rounds=options.rounds, steps=options.steps)
        append(options.records / "cost.jsonl", {"task": name, "cost": cost, **provenance()})
        for method, ratio in cost.items():
            print(f"{name}  {method:45s} {ratio:.3f} x SGD", flush=True)


if __name__ == "__main__":
    main()
