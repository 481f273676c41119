"""Cost of the Fisher information relative to other ways to compute it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.lab.models import build_model
from sparsesam.masks.fisher import fisher_diagonal

Squares = dict[str, Tensor]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Squares:
    """One training forward-backward pass: the reference, not a Fisher information."""
    model.train()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {}


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Squares:
    return fisher_diagonal(model, [(x, y)], F.cross_entropy).values


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Squares:
    """torch.func's gradients of four samples at a time, the fastest number for ResNet-18."""
    model.eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Squares, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (image[None],)), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=4)(parameters, x, y)
    return {name: gradient.square_().mean(0) for name, gradient in gradients.items()}


def textbook_loop(model: nn.Module, x: Tensor, y: Tensor) -> Squares:
    """The loop as usually written: one backward pass per sample, and new tensors for every square."""
    model.eval()
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            squares[name] = squares[name] + p.grad**2 / len(x)
    return squares


@benchmark(rounds=5, quick={"model": "resnet10-small", "samples": 4})
def fisher(session: Session, *, model: str = "resnet18", samples: int = 32) -> None:
    """How long does the Fisher information of a ResNet take, against a forward-backward pass and other ways?"""
    torch.manual_seed(0)
    x, y = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
    network = build_model(model)
    for _ in range(3):
        plain(network, x, y)  # moves the running statistics away from their initial values
    contenders: dict[str, Callable[[], Squares]] = {
        "sparsesam": partial(ours, network, x, y),
        "plain forward-backward": partial(plain, copy.deepcopy(network), x, y),
        "loop with backward()": partial(textbook_loop, network, x, y),
        "torch.func.vmap": partial(by_vmap, network, x, y),
    }
    expected, errors = textbook_loop(network, x, y), {}
    for name, run in contenders.items():
        off = [float((square - expected[k]).norm() / expected[k].norm()) for k, square in run().items()]
        errors[name] = max(off, default=0.0)
    seconds = session.medians(contenders)
    rows = [
        (name, f"{value:.3f}", f"{seconds['sparsesam'] / value:.2f}", f"{errors[name]:.1e}")
        for name, value in seconds.items()
    ]
    show(" | s | sparsesam / this | largest relative difference to the loop", rows)
