"""Masks: the time of the Fisher information and of selection, and the cost that a budget mask predicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.cases import Case, cifar_batch, ssam
from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.budget import BudgetMask, BudgetUnit, step_costs
from sparsesam.lab.models import build_model
from sparsesam.masks.fisher import fisher_diagonal
from sparsesam.masks.patterns import Unstructured
from sparsesam.masks.scores import Fisher
from sparsesam.masks.select import top_mask

Tensors = dict[str, Tensor]


@benchmark(rounds=9, only="", quick={"model": "resnet10-small", "batch": 2, "budgets": (10.0,)})
def budget(
    session: Session, *, model: str = "resnet18", batch: int = 64, budgets: tuple[float, ...] = (1.1, 1.25)
) -> None:
    """How far is the predicted cost of a step from the measured one, and does a budget mask keep its budget?"""
    torch.manual_seed(0)
    data, network = cifar_batch(batch), build_model(model)
    costs, score = step_costs(network, data[0]), Fisher(data, F.cross_entropy, samples=min(16, batch))
    masks = {
        f"budget {limit}, {unit}s": BudgetMask(costs, limit, score, unit)
        for limit in budgets
        for unit in get_args(BudgetUnit)
    }
    wraps = {"SGD": None, **{label: ssam(mask) for label, mask in masks.items()}}
    cases = {label: Case(network, data, wrap) for label, wrap in session.chosen(wraps, "SGD").items()}
    rows = []
    for label, ratio in session.compare(cases, "SGD").items():
        if label != "SGD":
            predicted = costs.step(cases[label].optimizer.masks)
            off = f"{predicted / ratio.median - 1:+.1%}"
            rows.append((label, f"{cases[label].perturbed:.1%}", f"{predicted:.3f}", ratio, off))
    show(f"{model} | perturbed | predicted | measured (quartiles) | off", rows)


# ---- Fisher information ------------------------------------------------------------------------------------------


def forward_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
    """One training pass: for comparison, not a Fisher information."""
    model.train()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {}


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
    return fisher_diagonal(model, [(x, y)], F.cross_entropy).values


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
    """torch.func's gradients of four samples at a time, the fastest number for ResNet-18."""
    model.eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Tensors, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (image[None],)), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=4)(parameters, x, y)
    return {name: gradient.square_().mean(0) for name, gradient in gradients.items()}


def textbook_loop(model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
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
    network, (x, y) = build_model(model), cifar_batch(samples)
    for _ in range(3):
        forward_backward(network, x, y)  # moves the running statistics away from their initial values
    ways = {
        "sparsesam": partial(ours, network, x, y),
        "plain forward-backward": partial(forward_backward, copy.deepcopy(network), x, y),
        "loop with backward()": partial(textbook_loop, network, x, y),
        "torch.func.vmap": partial(by_vmap, network, x, y),
    }
    expected, rows = textbook_loop(network, x, y), []
    for name, ratio in session.compare(ways, "sparsesam").items():
        off = [float((square - expected[k]).norm() / expected[k].norm()) for k, square in ways[name]().items()]
        rows.append((name, f"{ratio.seconds:.3f}", f"{1 / ratio.median:.2f}", f"{max(off, default=0.0):.1e}"))
    show(" | s | sparsesam / this | largest relative difference to the loop", rows)


# ---- selection ---------------------------------------------------------------------------------------------------


def squared_gaussians(model: str, generator: torch.Generator, *, zeros: float = 0.0) -> Tensors:
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in build_model(model).named_parameters()}
    scores = {name: torch.randn(shape, generator=generator).square_() for name, shape in shapes.items()}
    for score in scores.values() if zeros else ():
        score[torch.rand(score.shape, generator=generator) < zeros] = 0
    return scores


def topk_of_concatenation(scores: Mapping[str, Tensor], count: int) -> Tensors:
    """The naive implementation: concatenate, torch.topk, scatter, split."""
    flat = torch.cat([score.reshape(-1) for score in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.topk(count).indices] = True
    parts = torch.split(mask, [score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


@benchmark(rounds=7, quick={"model": "resnet10-small"})
def selection(session: Session, *, model: str = "resnet18") -> None:
    """How long does it take to select a mask, against torch.topk?

    Scores have the tensor shapes of ResNet-18 (CIFAR stem, 11.17 M weights).
    """
    generator = torch.Generator().manual_seed(0)
    plain, keep = squared_gaussians(model, generator), squared_gaussians(model, generator)
    size = sum(score.numel() for score in plain.values())
    tables: dict[str, dict[str, Callable[[], object]]] = {}
    for title, scores in (("scores", plain), ("scores, 30 % zeros", squared_gaussians(model, generator, zeros=0.3))):
        tables[f"top half of {size:,} {title}"] = {
            "top_mask": partial(top_mask, scores, size // 2),
            "torch.topk of the concatenation": partial(topk_of_concatenation, scores, size // 2),
        }
    entries = Unstructured()
    masks = entries.select(plain, 0.5)
    tables["drop and growth of SSAM-D"] = {
        "drop_and_grow": partial(entries.drop_and_grow, masks, keep, generator, sparsity=0.5, ratio=0.5),
    }
    for title, ways in tables.items():
        ours = next(iter(ways))
        rows = [
            (name, ratio.milliseconds, f"{ratio.median:.1f}") for name, ratio in session.compare(ways, ours).items()
        ]
        show(f"{title} | ms | x {ours}", rows)
