"""Time of a report of many runs, on synthetic records of a grid of runs."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runner import Session, benchmark
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.cost import passes_per_step
from sparsesam.lab.experiment.run_directory import append_records, seal

_SETTINGS: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd"},
    {"optimizer": "sam"},
    *({"optimizer": name, "sparsity": sparsity} for name in ("ssam-f", "ssam-d") for sparsity in (0.5, 0.8, 0.9, 0.95)),
)
_SEEDS = 5
PROVENANCE = {"cpu": "a chip", "machine": "Linux", "threads": 1, "torch": "2", "python": "3", "commit": "abc"}


@benchmark(quick={"runs": 4, "epochs": 2})
def report(session: Session, *, runs: int = 100, epochs: int = 100) -> None:
    """How long does a report of many runs take? The command is a process of its own; its startup counts."""
    with tempfile.TemporaryDirectory() as folder:
        made, page = Path(folder) / "runs", Path(folder) / "report.html"
        write_runs(made, runs=runs, epochs=epochs)
        command = [sys.executable, "-m", "sparsesam.lab.cli", "report", str(made), "-o", str(page)]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        size = page.stat().st_size / 1e6
    print(f"{runs} runs of {epochs} epochs: {seconds:.2f} s, a page of {size:.1f} MB")
    print(f"{used.ru_utime + used.ru_stime:.2f} s of the processor, which other work on the machine does not lengthen")


def write_runs(folder: Path, *, runs: int, epochs: int) -> None:
    """Write records like those of real runs: every optimizer and sparsity, several seeds, as many tasks as needed."""
    draw = random.Random(0)
    for number in range(runs):
        settings = _SETTINGS[number // _SEEDS % len(_SETTINGS)]
        noise, accuracy = number // (_SEEDS * len(_SETTINGS)) / 10, 0.9 + 0.05 * draw.random()
        settings = {"label_noise": noise, "seed": number % _SEEDS, **settings}
        write_run(folder / str(number), accuracy=accuracy, epochs=epochs, **settings)


def write_run(
    path: Path,
    *,
    accuracy: float = 0.9,
    seconds: float = 2.0,
    epochs: int = 3,
    planned: int | None = None,
    finished: bool = True,
    failure: str | None = None,
    **settings: Any,
) -> Path:
    """Write a run of ``epochs`` epochs; those with a ``failure``, or not ``finished``, have no result."""
    config = TrainConfig(epochs=planned or epochs, **settings)
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    sparsity = None if config.is_plain else config.sparsity or 0.0
    header: dict[str, Any] = {"config": plain, "hash": config.content_hash, "provenance": PROVENANCE}
    records: list[dict[str, Any]] = [{"kind": "run", "step": 0, **header}]
    for epoch in range(1, epochs + 1):
        measured = {"test_accuracy": accuracy * epoch / epochs, "train_accuracy": accuracy, "sparsity": sparsity}
        losses = {"train_loss": 1 / epoch, "test_loss": 1.2 / epoch, "seconds": seconds}
        records.append({"kind": "epoch", "epoch": epoch, "step": 10 * epoch, **measured, **losses})
    append_records(path / "records.jsonl", records)
    (path / "config.yaml").write_text(yaml.safe_dump(seal(plain)))
    if failure is not None:
        (path / "failure.json").write_text(json.dumps({"error": failure}))
    elif finished:
        result: dict[str, Any] = dict.fromkeys(("test_accuracy", "best_test_accuracy", "train_accuracy"), accuracy)
        result |= {"sparsity": sparsity, "forward_backwards_per_step": passes_per_step(config)}
        (path / "result.json").write_text(json.dumps({"result": result, **header}))
    return path
