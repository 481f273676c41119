"""Analyses: the speed of a loss landscape, and the Hessian-vector products needed for the largest eigenvalues."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import cifar_batch
from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.analysis import HessianOperator, Objective, hessian_eigenvalues, loss_landscape
from sparsesam.lab.data.registry import load_digits
from sparsesam.lab.models import build_model, small_cnn

Array = npt.NDArray[np.float64]
COUNT, TOLERANCE, SEEDS = 5, 1e-3, range(3)


@benchmark(rounds=5, quick={"model": "resnet10-small", "images": 4})
def landscape(session: Session, *, model: str = "resnet18", images: int = 128) -> None:
    """How fast is a landscape, relative to its forward passes alone?

    The difference between 5 x 5 and 3 x 3 points leaves out the start of a landscape (the check that the loss is
    deterministic, the loss at the center), which is the same for any number of points.
    """
    torch.manual_seed(0)
    network, (x, y) = build_model(model).eval(), cifar_batch(images)
    objective = Objective(network, [(x, y)], F.cross_entropy)

    @torch.no_grad()
    def forwards() -> None:
        for _ in range(5 * 5 - 3 * 3):
            float(F.cross_entropy(network(x), y))

    points = {f"{n} x {n}": partial(loss_landscape, objective, points=n) for n in (3, 5)}
    times = session.compare({"forwards": forwards, **points}, "forwards")
    show(" | s", [(name, f"{ratio.seconds:.3f}") for name, ratio in times.items()])
    speed = times["forwards"].seconds / (times["5 x 5"].seconds - times["3 x 3"].seconds)
    print(f"speed relative to the forwards: {speed:.3f}")


def ours(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[int, Array]:
    found = hessian_eigenvalues(Objective(model, [(x, y)], F.cross_entropy), COUNT, tolerance=TOLERANCE, seed=seed)
    return found.products, found.eigenvalues


def theirs(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    from curvlinops import HessianLinearOperator  # type: ignore[import-untyped]

    parameters = list(model.parameters())
    return HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [(x, y)], check_deterministic=False)


def with_eigsh(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[int, Array]:
    """SciPy's ARPACK on curvlinops' Hessian; curvlinops' own determinism check is not counted."""
    import scipy.sparse.linalg as sparse

    product = theirs(model, x, y).to_scipy()
    counted = 0

    def apply(v: Any) -> Any:
        nonlocal counted
        counted += 1
        return product @ v

    counting = sparse.LinearOperator(product.shape, matvec=apply, dtype=product.dtype)
    start = np.random.default_rng(seed).standard_normal(product.shape[0]).astype(product.dtype)
    values = sparse.eigsh(counting, COUNT, which="LA", tol=TOLERANCE, v0=start, return_eigenvectors=False)
    return counted, np.sort(values)[::-1].astype(np.float64)


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model.eval()


def eigenvalues(session: Session, title: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compare the methods; the reference is Lanczos to 1e-6."""
    objective = Objective(model, [(x, y)], F.cross_entropy)
    reference = hessian_eigenvalues(objective, COUNT, tolerance=1e-6, max_products=100).eigenvalues
    print(f"{title}: {sum(p.numel() for p in model.parameters())} weights, {len(x)} samples")
    print(f"eigenvalues {np.array2string(reference, precision=4)}")
    once, kept = (HessianOperator(objective, keep_graph=keep) for keep in (False, True))
    operators = {"sparsesam": once, "curvlinops": theirs(model, x, y), "sparsesam, keep_graph": kept}
    vector = torch.randn(once.size)
    with kept.measuring():
        products = {name: partial(operator.__matmul__, vector) for name, operator in operators.items()}
        times = session.compare(products, "sparsesam")
    rows: list[tuple[object, ...]] = []
    for name, method in {"sparsesam": ours, "curvlinops": with_eigsh}.items():
        found = [method(model, x, y, seed) for seed in SEEDS]
        error = max(float(np.max(np.abs(values - reference) / np.abs(reference))) for _, values in found)
        rows.append((name, max(count for count, _ in found), f"{error:.1e}", times[name].milliseconds))
    rows.append(("sparsesam, keep_graph", "–", "–", times["sparsesam, keep_graph"].milliseconds))
    show(" | products | relative error | ms a product", rows)


@benchmark(cpu_time=True, quick={"steps": 2})
def hessian(session: Session, *, steps: int = 500) -> None:
    """How many Hessian-vector products do the five largest eigenvalues to a relative 1e-3 take?

    Both methods use the same trained model and samples; products are counted, which do not depend on the machine's
    load. curvlinops runs with SciPy's eigsh at its usual settings. Products are the most of three start vectors, the
    error the largest of the eigenvalues and starts.
    """
    warnings.filterwarnings("ignore")
    digits = load_digits()
    x, y = digits.train.images / 255, digits.train.labels
    torch.manual_seed(0)
    network = trained(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)), x, y, steps, 0.1)
    eigenvalues(session, "tanh network, digits", network, x[:512], y[:512])
    if session.quick:
        return
    torch.manual_seed(0)
    eigenvalues(session, "small_cnn, digits", trained(small_cnn(), x, y, 300, 0.05), x[:256], y[:256])
