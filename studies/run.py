"""Runs the tasks of a study, one run at a time: ``python -m studies.run joint-digits-30 paper-cifar-0``.

Each run is the same as ``sparsesam train`` with its settings, except that it is tested once, at the end. Results are
appended to records/TASK.jsonl; recorded runs are not run again, so a study may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import sparsesam
from sparsesam import replay
from sparsesam.lab.experiment.batches import load_splits
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import DivergedError
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run import make_fabric, make_training
from sparsesam.lab.experiment.training import Training
from studies.parts import PARTS
from studies.plan import HERE, Job, Record, Task, read_task, task_names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=task_names(), help="default: all")
    parser.add_argument("--methods", nargs="*", help="only these; default: all of the task")
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--data-dir", type=Path, help="directory of the data set's files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Passes are counted as on a large network: whether recording an operation pays depends on the machine.
    replay.OPERATION = 0
    for name in options.tasks:
        run_task(read_task(name), options)


def run_task(task: Task, options: argparse.Namespace) -> None:
    """Run the rounds of the search one after the other, each for all methods, and then the test, seed by seed."""
    file = options.records / f"{task.name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    append(file, {"task": task.name, "method": "", "stage": "provenance", "settings": {}, **provenance()})
    for number in range(len(task.content.get("rounds", [])) + 1):
        plans = [task.plan(method, read(file)) for method in options.methods or task.methods]
        done = [{key: record[key] for key in ("task", "method", "stage", "settings")} for record in read(file)]
        due = [job for plan in plans for jobs in plan[number : number + 1] for job in jobs if job.identity not in done]
        for job in sorted(due, key=lambda job: int(job.settings["seed"])):
            record = {**job.identity, **measure(job, options.data_dir)}
            append(file, record)
            print(time.strftime("%H:%M:%S"), record, flush=True)


def prepare(job: Job, data_dir: Path | None) -> Training:
    environment = RunEnvironment(accelerator="cpu", data_dir=data_dir)
    splits = load_splits(job.config, environment)
    training = make_training(job.config, splits, make_fabric(job.config, environment), environment)
    # A quarter less time on CPU; rounding differs.
    training.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if job.part is not None:
        PARTS[job.part](training)
    return training


def measure(job: Job, data_dir: Path | None) -> Record:
    """Train and test once; the accuracy is 0 if the loss was not finite.

    ``passes`` are the multiply-adds of the run, in forward-backward passes over a batch per step, masks included.
    """
    training = prepare(job, data_dir)
    start, lengths, diverged = time.process_time(), [], False
    try:
        while not training.finished:
            training.sums = type(training.sums)()
            training.advance(lambda: False)
            lengths.append(extrapolated_length(training.optimizer))
    except DivergedError:
        diverged = True
    seconds = time.process_time() - start
    loss, accuracy, _ = (None, 0.0, 0.0) if diverged else training.evaluate("test")
    images = sum(training.cost.images.values())
    record: Record = {
        "hash": job.config.content_hash,
        "accuracy": accuracy,
        "loss": loss,
        "train_accuracy": None if diverged else training.sums.correct / training.sums.images,
        "steps": training.steps_taken,
        "passes": training.cost.forward_backwards * training.cost.batch_size / images,
        "cpu_seconds": round(seconds, 3),
    }
    if any(length is not None for length in lengths):
        record["perturbation"] = [round(length, 4) for length in lengths if length is not None]
    return record


def extrapolated_length(optimizer: object) -> float | None:
    """Returns ||e|| of the next step, for an extrapolation by a number of updates."""
    if not isinstance(optimizer, sparsesam.ExtrapolatedSAM):
        return None
    norm = optimizer.last_update_norm
    return None if norm is None else optimizer.updates_per_rho * float(optimizer.param_groups[0]["rho"]) * norm


def read(file: Path) -> list[Record]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line, object_pairs_hook=in_current_names) for line in lines]


def in_current_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Earlier records hold an extrapolation's rho as ``steps_ahead``, the number of updates it looks ahead."""
    updates = sparsesam.ExtrapolatedSAM.updates_per_rho
    return dict(("rho", value / updates) if name == "steps_ahead" else (name, value) for name, value in pairs)


def append(file: Path, record: Record) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
