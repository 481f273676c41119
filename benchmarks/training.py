"""Training runs: augmentation, the overhead of the training loop, and how well a sweep uses the cores."""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from lightning_fabric import Fabric
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.lab.data import Augment, Splits
from sparsesam.lab.experiment.batches import Batches
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.run import run_training
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Sweep, sweep_jobs
from sparsesam.lab.experiment.training import Training
from sparsesam.lab.models import build_model
from sparsesam.lab.paper.dry_run import random_splits

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TRIAL = TrainConfig(optimizer="sgd", epochs=20, augment="none")


@benchmark(rounds=31, threads=1, quick={"batch": 8})
def augmentation(session: Session, *, batch: int = 128) -> None:
    """How fast is the augmentation of a batch, against Pillow image by image?

    Both crop (padding 4), flip, convert to a normalized float tensor and cut out 16x16 with probability 0.5. The
    images are random numbers, as the cost does not depend on the content.
    """
    generator, draws = torch.Generator().manual_seed(0), random.Random(0)
    images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, generator=generator)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy().copy()) for image in images]
    augment = Augment(MEAN, STD, padding=4, flip=True, cutout=16)
    ways: dict[str, Callable[[], object]] = {
        "batch of tensors": lambda: augment(images, generator),
        "image by image, Pillow": lambda: torch.stack([pillow_view(picture, draws) for picture in pictures]),
    }
    ratios = session.compare(ways, "batch of tensors")
    rows = [(name, f"{batch / ratio.seconds:,.0f}", ratio) for name, ratio in ratios.items()]
    show(" | images/s | x batch of tensors", rows)


def pillow_view(picture: Image.Image, draws: random.Random) -> Tensor:
    """The same pipeline, in the order and with the operations of the usual per-image transforms."""
    padded = ImageOps.expand(picture, border=4, fill=0)
    left, top = draws.randrange(9), draws.randrange(9)
    seen = padded.crop((left, top, left + 32, top + 32))
    if draws.random() < 0.5:
        seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tensor = torch.from_numpy(np.array(seen)).permute(2, 0, 1).contiguous().float().div_(255)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    tensor.sub_(mean).div_(std)
    if draws.random() < 0.5:
        left, top = draws.randrange(-8, 24), draws.randrange(-8, 24)
        tensor[:, max(0, top) : top + 16, max(0, left) : left + 16] = 0
    return tensor


@benchmark(rounds=15, quick={"models": ("small-cnn",)})
def throughput(session: Session, *, models: tuple[str, ...] = ("resnet18", "small-cnn")) -> None:
    """How many images per second does ``sparsesam train`` with SGD train, relative to a bare loop?

    A round is a few steps of each. The bare loop reads normalized images from memory and does nothing else; ours draws
    the order, normalizes, computes loss and accuracy, checks for a non-finite loss and Ctrl-C, and in the last case
    also augments.
    """
    for name in models:
        side, batch, steps = (8, 64, 3 if session.quick else 30) if name == "small-cnn" else (32, 32, 3)
        print(f"{name}, batch {batch} of {side}x{side}, rounds of {steps} steps")
        splits = random_splits(batch * steps, 10, 3, side)
        torch.manual_seed(0)
        model = build_model(name, 10, 3, side)
        loops = {"bare loop": bare_loop(copy.deepcopy(model), splits, batch)}
        config = TrainConfig(
            model=name, optimizer="sgd", lr=0.01, lr_schedule="constant", epochs=10**6, batch_size=batch, augment="none"
        )
        loops["sparsesam train"] = our_loop(copy.deepcopy(model), config, splits)
        loops["sparsesam train, augmentation"] = our_loop(model, replace(config, augment="standard"), splits)
        rows = []
        for title, ratio in session.compare(loops, "bare loop").items():
            speed = f"{1 / ratio.median:.3f} ({1 / ratio.high:.3f} to {1 / ratio.low:.3f})"
            rows.append((title, f"{steps * batch / ratio.seconds:.0f}", speed))
        show(" | images/s | x bare loop (quartiles)", rows)


def bare_loop(model: nn.Module, splits: Splits, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images, labels = (splits.train.images / 255 - 0.5) / 0.25, splits.train.labels

    def run() -> None:
        model.train()
        for chosen in torch.randperm(len(labels)).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()

    return run


def our_loop(model: nn.Module, config: TrainConfig, splits: Splits) -> Callable[[], None]:
    batches = Batches(config, splits, torch.device("cpu"))
    training = Training(config, model, batches, Fabric(accelerator="cpu", devices=1))

    def run() -> None:
        training.advance(lambda: False)

    return run


@benchmark(quick={"runs": 2, "seconds": 1})
def sweep(session: Session, *, runs: int = 8, cores: int = 2, seconds: int = 60) -> None:
    """How long do equal runs on several cores take, x the ideal: runs per core times one run alone?

    The workers' startup (importing torch) counts for the sweep but not for the run alone. The second ratio uses the
    times of the runs within the sweep: on a machine with other load, it still shows how long workers were idle.
    """

    def timed(config: TrainConfig, name: str) -> float:
        start = time.perf_counter()
        run_training(config, RunEnvironment(out=out / name, threads=1, logger="none", quiet=True))
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        timed(TRIAL, "first")  # imports
        per_epoch = timed(TRIAL, "trial") / TRIAL.epochs
        config = replace(TRIAL, epochs=max(1, round(seconds / per_epoch)))
        alone = timed(config, "alone")
        jobs = Sweep("equal", {"run": config}, range(1, runs + 1)).jobs(out)
        start = time.perf_counter()
        sweep_jobs(jobs, RunEnvironment(), workers=cores)
        took = time.perf_counter() - start
        directories = [RunDirectory(job.directory) for job in jobs]  # of each, from the first file written to the last
        running = sum(made.result.stat().st_mtime - made.config.stat().st_mtime for made in directories)
    ideal = runs / cores * alone
    print(f"{runs} runs on {cores} cores: {took:.1f} s; one alone: {alone:.1f} s")
    print(f"{took / ideal:.3f} x the ideal {ideal:.1f} s")
    print(f"{took * cores / running:.3f} x the ideal of runs as slow as these ({running / runs:.1f} s)")
