"""Time of a report of many runs, on synthetic records of a grid of runs."""

from __future__ import annotations

import dataclasses
import json
import math
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
from sparsesam.lab.experiment.run_directory import append_records

_SETTINGS = (
    {"optimizer": "sgd"},
    {"optimizer": "sam"},
    *({"optimizer": name, "sparsity": sparsity} for name in ("ssam-f", "ssam-d") for sparsity in (0.5, 0.8, 0.9, 0.95)),
)
_SEEDS = 5


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
        noise = number // (_SEEDS * len(_SETTINGS)) / 10
        config = TrainConfig(**settings, label_noise=noise, epochs=epochs, seed=number % _SEEDS)  # type: ignore[arg-type]
        _write_run(folder / config.content_hash, config, draw)


def _write_run(path: Path, config: TrainConfig, draw: random.Random) -> None:
    settings = dataclasses.asdict(config)
    seconds, best = (1.0 if config.is_plain else 2.0), 0.9 + 0.05 * draw.random()
    origin = {"cpu": "synthetic", "machine": "none", "threads": 1}
    records: list[dict[str, Any]] = [{"kind": "run", "step": 0, "config": settings, "provenance": origin}]
    for epoch in range(1, config.epochs + 1):
        accuracy = best * (1 - math.exp(-epoch / 10)) + 0.01 * draw.random()
        measured = {"train_loss": 1 / epoch, "train_accuracy": accuracy, "test_loss": 1.1 / epoch}
        records.append({"kind": "epoch", "epoch": epoch, "test_accuracy": accuracy, "seconds": seconds, **measured})
    append_records(path / "records.jsonl", records)
    (path / "config.yaml").write_text(yaml.safe_dump({**settings, "betas": list(config.betas)}))
    result = {**records[-1], "best_test_accuracy": best, "seconds_per_epoch": seconds, "sparsity": config.sparsity}
    result["forward_backwards_per_step"] = passes_per_step(config)
    (path / "result.json").write_text(json.dumps({"result": result, "config": settings, "provenance": origin}))
