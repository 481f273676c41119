"""Speed of a loss landscape."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.runner import Session, benchmark
from sparsesam.analysis import Objective, loss_landscape
from sparsesam.lab.models import build_model


@benchmark(quick={"model": "resnet10-small", "points": 2, "images": 4})
def landscape(session: Session, *, model: str = "resnet18", points: int = 5, images: int = 128) -> None:
    """How fast is a landscape, relative to its forward passes alone?

    A plain evaluation runs after every point, so that other load affects both equally. The startup of a landscape (the
    check that the loss is deterministic, the loss at the center) is reported separately: it is the same for 25 points
    and for 2500.
    """
    torch.manual_seed(0)
    network = build_model(model)
    batches = [(torch.randn(images, 3, 32, 32), torch.randint(10, (images,)))]
    objective = Objective(network, batches, F.cross_entropy)

    @torch.no_grad()
    def bare() -> float:
        start = time.perf_counter()
        for x, y in batches:
            float(F.cross_entropy(network(x), y))
        return time.perf_counter() - start

    forward: list[float] = []
    stamps: list[float] = []

    def between(done: int, total: int) -> None:
        stamps.append(time.perf_counter())
        forward.append(bare())
        stamps.append(time.perf_counter())

    network.eval()
    bare()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        state = Path(folder) / "state.txt"
        result = loss_landscape(objective, points=points, progress=between, state_file=state)
    # From the end of one plain evaluation to the end of the next point.
    seconds = [stamps[i + 1] - stamps[i] for i in range(1, len(stamps) - 1, 2)]
    shares = sorted(f / p for f, p in zip(forward, seconds, strict=False))
    low, median, high = statistics.quantiles(shares, n=4)
    print(f"{result.loss.size} points, {result.weights_moved} weights moved")
    print(f"bare forward  {statistics.median(forward):.3f} s     point {statistics.median(seconds):.3f} s (medians)")
    print(f"speed relative to the forwards: {median:.3f} (quartiles {low:.3f} to {high:.3f}), ", end="")
    print(f"in total {sum(forward[:-1]) / sum(seconds):.3f}")
    print(f"start, once: {stamps[0] - started - statistics.median(seconds):.2f} s")
