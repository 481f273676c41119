"""Runs the tasks of a study, one run at a time: ``python -m studies.run digits-30 vit-30``.

Each run is the same as ``sparsesam train`` with its settings, except that it is tested once, at the end. Results are
appended to records/TASK.jsonl; recorded runs are not run again, so a study may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import sparsesam
from sparsesam.analysis import Objective, hessian_eigenvalues, sharpness
from sparsesam.lab.experiment.batches import load_splits
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import DivergedError
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run import make_fabric, make_training
from sparsesam.lab.experiment.training import Training
from studies.parts import PARTS
from studies.plan import HERE, Job, Record, Task, passes_with_fisher, read_task, task_names

#: Radius of the sharpness measured on trained networks.
RADIUS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=task_names(), help="default: all")
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--data-dir", type=Path, help="directory of the data set's files")
    parser.add_argument("--core", action="store_true", help="only the task's main methods, not those under `then`")
    parser.add_argument("--tune", metavar="METHOD", help="tune only this method, without final runs")
    parser.add_argument("--stop", help="start no run after this time of day, HH:MM (UTC)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tasks:
        run_task(read_task(name), options)


def run_task(task: Task, options: argparse.Namespace) -> None:
    file = options.records / f"{task.name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    made = provenance()
    made["commit"] = os.environ.get("STUDY_COMMIT") or made["commit"]
    append(file, {"task": task.name, "method": "", "stage": "provenance", "settings": {}, **made})
    for method in [options.tune] if options.tune else task.core if options.core else task.names:
        while due := jobs_due(task, method, read(file)):
            for job in due:
                if options.tune and job.stage == "final":
                    return
                if options.stop is not None and time.strftime("%H:%M", time.gmtime()) >= options.stop:
                    return
                record = {**described(job), **measure(job, options.data_dir)}
                append(file, record)
                print(time.strftime("%H:%M:%S"), task.name, method, job.stage, record, flush=True)


def described(job: Job) -> Record:
    return {"task": job.task, "method": job.method, "stage": job.stage, "settings": dict(job.settings)}


def jobs_due(task: Task, method: str, records: list[Record]) -> list[Job]:
    """Returns the runs without a record: the tuning, and when it is done, the final runs."""
    done = [{key: record[key] for key in ("task", "method", "stage", "settings")} for record in records]
    jobs = [*task.tuning(method), *task.finals(method, records)]
    return [job for job in jobs if described(job) not in done]


def prepare(job: Job, data_dir: Path | None) -> Training:
    environment = RunEnvironment(accelerator="cpu", data_dir=data_dir)
    splits = load_splits(job.config, environment)
    training = make_training(job.config, splits, make_fabric(job.config, environment), environment)
    if job.part is not None:
        PARTS[job.part](training)
    return training


def measure(job: Job, data_dir: Path | None) -> Record:
    """Train and test once; the accuracy is 0 if the loss was not finite."""
    training = prepare(job, data_dir)
    config, batches = training.config, training.batches
    images = len(batches.unaugmented())  # type: ignore[arg-type]
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
    record: Record = {
        "hash": config.content_hash,
        "accuracy": accuracy,
        "loss": loss,
        "train_accuracy": None if diverged else training.sums.correct / training.sums.images,
        "steps": training.steps_taken,
        "passes": job.part_passes + passes_with_fisher(config, images),
        "cpu_seconds": round(seconds, 3),
    }
    if any(length is not None for length in lengths):
        record["perturbation"] = [round(length, 4) for length in lengths if length is not None]
    if job.flatness and not diverged:
        record |= flatness(training.module, batches)
    return record


def extrapolated_length(optimizer: object) -> float | None:
    """Returns ||e|| of the next step, for an extrapolation by a number of updates."""
    if not isinstance(optimizer, sparsesam.ExtrapolatedSAM):
        return None
    norm = optimizer.last_update_norm
    return None if norm is None else float(optimizer.param_groups[0]["rho"]) * norm


def flatness(model: torch.nn.Module, batches: Any) -> dict[str, float]:
    """Returns the largest Hessian eigenvalue of the training loss, and its largest increase within a ball."""
    data = batches.unaugmented()
    pairs = [data[index] for index in range(len(data))]
    images, labels = torch.stack([x for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])
    objective = Objective(model, list(zip(images.split(500), labels.split(500), strict=True)), cross_entropy)
    largest = hessian_eigenvalues(objective, count=1, tolerance=1e-2).eigenvalues[0]
    found = sharpness(objective, RADIUS, steps=10)
    return {"lambda_1": float(largest), "sharpness": found.increase, "train_loss_at_w": found.loss}


def read(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, record: Record) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
