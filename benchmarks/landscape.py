"""Speed of a loss landscape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.analysis import Objective, loss_landscape
from sparsesam.lab.models import build_model


@benchmark(rounds=5, quick={"model": "resnet10-small", "images": 4})
def landscape(session: Session, *, model: str = "resnet18", images: int = 128) -> None:
    """How fast is a landscape, relative to its forward passes alone?

    The difference between 5 x 5 and 3 x 3 points leaves out the start of a landscape (the check that the loss is
    deterministic, the loss at the center), which is the same for any number of points.
    """
    torch.manual_seed(0)
    network = build_model(model).eval()
    x, y = torch.randn(images, 3, 32, 32), torch.randint(10, (images,))
    objective = Objective(network, [(x, y)], F.cross_entropy)

    @torch.no_grad()
    def forwards() -> None:
        for _ in range(5 * 5 - 3 * 3):
            float(F.cross_entropy(network(x), y))

    cases: dict[str, Callable[[], object]] = {
        "forwards": forwards,
        "3 x 3": partial(loss_landscape, objective, points=3),
        "5 x 5": partial(loss_landscape, objective, points=5),
    }
    seconds = session.medians(cases)
    points = seconds["5 x 5"] - seconds["3 x 3"]
    show(" | s", [(name, f"{value:.3f}") for name, value in seconds.items()])
    print(f"speed relative to the forwards: {seconds['forwards'] / points:.3f}")
