"""Points per second of a ResNet-18 landscape relative to plain forward passes over the same batches.

    python -m benchmarks.landscape [--threads 2] [--points 5] [--images 128]

A plain evaluation runs after every point, so that other load affects both equally. The startup of a landscape (the
check that the loss is deterministic, the loss at the center) is reported separately: it is the same for 25 points and
for 2500. Target: at least 0.9.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.timing import arguments, begin
from sparsesam.analysis import Objective, loss_landscape
from sparsesam.lab.models import resnet18


def main() -> None:
    options = begin(arguments(__doc__, threads=2, points=5, images=128))
    torch.manual_seed(0)
    model = resnet18(10)
    batches = [(torch.randn(options.images, 3, 32, 32), torch.randint(10, (options.images,)))]
    objective = Objective(model, batches, F.cross_entropy)

    @torch.no_grad()
    def bare() -> float:
        start = time.perf_counter()
        for x, y in batches:
            float(F.cross_entropy(model(x), y))
        return time.perf_counter() - start

    forward: list[float] = []
    stamps: list[float] = []

    def between(done: int, total: int) -> None:
        stamps.append(time.perf_counter())
        forward.append(bare())
        stamps.append(time.perf_counter())

    model.eval()
    bare()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = loss_landscape(
            objective, points=options.points, progress=between, state_file=Path(folder) / "state.npz"
        )
    # From the end of one plain evaluation to the end of the next point.
    points = [stamps[i + 1] - stamps[i] for i in range(1, len(stamps) - 1, 2)]
    shares = sorted(f / p for f, p in zip(forward, points, strict=False))
    low, median, high = statistics.quantiles(shares, n=4)
    print(f"ResNet-18, {options.images} images, {result.loss.size} points, {result.weights_moved} weights moved")
    print(f"bare forward  {statistics.median(forward):.3f} s     point {statistics.median(points):.3f} s (medians)")
    print(f"share of the forward-pass limit: {median:.3f} (quartiles {low:.3f} to {high:.3f}), ", end="")
    print(f"in total {sum(forward[:-1]) / sum(points):.3f}; target 0.9")
    print(f"start, once: {stamps[0] - started - statistics.median(points):.2f} s")


if __name__ == "__main__":
    main()
