"""Hessian-vector products needed for the largest eigenvalues."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.runner import Session, benchmark
from benchmarks.timing import medians, show
from sparsesam.analysis import HessianOperator, Objective, hessian_eigenvalues
from sparsesam.lab import models
from sparsesam.lab.data.registry import load_digits
from sparsesam.lab.models import small_cnn

Array = npt.NDArray[np.float64]
COUNT, TOLERANCE = 5, 1e-3
SEEDS = range(3)


def ours(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[int, Array]:
    found = hessian_eigenvalues(Objective(model, [(x, y)], F.cross_entropy), COUNT, tolerance=TOLERANCE, seed=seed)
    return found.products, found.eigenvalues


def with_eigsh(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[int, Array]:
    """SciPy's ARPACK on curvlinops' Hessian; curvlinops' own determinism check is not counted."""
    import scipy.sparse.linalg as sparse
    from curvlinops import HessianLinearOperator  # type: ignore[import-untyped]

    operator = HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)], check_deterministic=False
    )
    product = operator.to_scipy()
    counted = 0

    def apply(v: Any) -> Any:
        nonlocal counted
        counted += 1
        return product @ v

    counting = sparse.LinearOperator(product.shape, matvec=apply, dtype=product.dtype)
    start = np.random.default_rng(seed).standard_normal(product.shape[0]).astype(product.dtype)
    values = sparse.eigsh(counting, COUNT, which="LA", tol=TOLERANCE, v0=start, return_eigenvectors=False)
    return counted, np.sort(values)[::-1].astype(np.float64)


def with_pyhessian(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[int, Array]:
    """PyHessian's power iteration with deflation."""
    from pyhessian import hessian  # type: ignore[import-untyped]

    module = sys.modules["pyhessian.hessian"]
    original: Callable[..., Any] = vars(module)["hessian_vector_product"]
    counted = 0

    def counting(*arguments: Any) -> Any:
        nonlocal counted
        counted += 1
        return original(*arguments)

    torch.manual_seed(seed)
    vars(module)["hessian_vector_product"] = counting
    try:
        values, _ = hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=False).eigenvalues(100, TOLERANCE, COUNT)
    finally:
        vars(module)["hessian_vector_product"] = original
        model.zero_grad(set_to_none=True)
    return counted, np.sort(np.array(values, dtype=np.float64))[::-1]


def product_times(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, str]:
    """Returns median CPU milliseconds of one Hessian-vector product."""
    from curvlinops import HessianLinearOperator

    objective = Objective(model, [(x, y)], F.cross_entropy)
    once, kept = (HessianOperator(objective, keep_graph=keep) for keep in (False, True))
    parameters = list(model.parameters())
    theirs = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [(x, y)], check_deterministic=False)
    operators = {"sparsesam": once, "sparsesam, keep_graph": kept, "curvlinops": theirs}
    vector = torch.randn(once.size)
    products = {name: partial(operator.__matmul__, vector) for name, operator in operators.items()}
    with kept.measuring():
        return {name: f"{1e3 * value:.1f}" for name, value in medians(products, 9, time.process_time).items()}


def dense_reference(model: nn.Module, x: Tensor, y: Tensor) -> Array:
    precise = [p.detach().double().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    def loss(*weights: Tensor) -> Tensor:
        output = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x.double(),))
        return F.cross_entropy(output, y)

    blocks: Any = torch.autograd.functional.hessian(loss, tuple(precise))
    rows = [torch.cat([b.reshape(p.numel(), -1) for b in row], dim=1) for row, p in zip(blocks, precise, strict=True)]
    return np.asarray(torch.linalg.eigvalsh(torch.cat(rows)).flip(0)[:COUNT].numpy())


def tight_reference(model: nn.Module, x: Tensor, y: Tensor) -> Array:
    objective = Objective(model, [(x, y)], F.cross_entropy)
    return hessian_eigenvalues(objective, COUNT, tolerance=1e-6, max_products=100).eigenvalues


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


def report(title: str, model: nn.Module, x: Tensor, y: Tensor, reference: Array) -> None:
    print(f"{title}: {sum(p.numel() for p in model.parameters())} weights, {len(x)} samples")
    print(f"eigenvalues {np.array2string(reference, precision=4)}")
    times, rows = product_times(model, x, y), []
    for name, method in {"sparsesam": ours, "curvlinops": with_eigsh, "PyHessian": with_pyhessian}.items():
        found = [method(model, x, y, seed) for seed in SEEDS]
        error = max(float(np.max(np.abs(values - reference) / np.abs(reference))) for _, values in found)
        rows.append((name, max(products for products, _ in found), f"{error:.1e}", times.pop(name, "–")))
    show(" | products | relative error | ms a product", [*rows, *((name, "–", "–", ms) for name, ms in times.items())])


@benchmark(quick={"steps": 2})
def hessian(session: Session, *, steps: int = 500, resnet18: bool = False) -> None:
    """How many Hessian-vector products do the five largest eigenvalues to a relative 1e-3 take?

    All methods use the same trained model and samples; products are counted, which do not depend on the machine's
    load. The reference is a dense eigendecomposition (small network) or Lanczos to 1e-6; curvlinops with SciPy's eigsh
    and PyHessian's power iteration run at their usual settings. Products are the most of three start vectors, the
    error the largest of the eigenvalues and starts. --resnet18 adds ResNet-18, which takes several minutes.
    """
    warnings.filterwarnings("ignore")
    digits = load_digits()
    x, y = digits.train.images / 255, digits.train.labels
    torch.manual_seed(0)
    network = trained(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)), x, y, steps, 0.1)
    report("tanh network, digits", network, x[:512], y[:512], dense_reference(network, x[:512], y[:512]))
    if session.quick:
        return
    torch.manual_seed(0)
    network = trained(small_cnn(), x, y, 300, 0.05)
    report("small_cnn, digits", network, x[:256], y[:256], tight_reference(network, x[:256], y[:256]))
    if resnet18:
        torch.manual_seed(0)
        images = F.interpolate(x[:256], 32).expand(-1, 3, -1, -1).contiguous()
        network = trained(models.resnet18(10), images, y[:256], 40, 0.02)
        some = images[:32], y[:32]
        report("ResNet-18, digits as 3x32x32", network, *some, tight_reference(network, *some))
