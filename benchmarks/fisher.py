"""Cost of the Fisher information relative to other ways to compute it."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

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


class ModularBlock(nn.Module):
    """A residual block with its activations as modules, as BackPACK's converter requires."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = block.conv1, block.bn1, nn.ReLU()
        self.conv2, self.bn2, self.relu2 = block.conv2, block.bn2, nn.ReLU()
        self.shortcut = block.shortcut

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return cast(Tensor, self.relu2(y + self.shortcut(x)))


def with_backpack(source: nn.Module) -> Callable[[Tensor, Tensor], Squares]:
    """SumGradSquared on a copy, converted by BackPACK's own converter."""
    from backpack import backpack, extend  # type: ignore[import-untyped]
    from backpack.extensions import SumGradSquared  # type: ignore[import-untyped]

    def modular(module: nn.Module) -> nn.Module:
        if hasattr(module, "shortcut"):
            return ModularBlock(module)
        if isinstance(module, nn.Sequential):
            return nn.Sequential(OrderedDict((name, modular(part)) for name, part in module.named_children()))
        return module

    names = [name for name, _ in source.named_parameters()]
    model = extend(modular(copy.deepcopy(source)).eval(), use_converter=True)
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))

    def run(x: Tensor, y: Tensor) -> Squares:
        model.zero_grad()
        with backpack(SumGradSquared()):
            loss(model(x), y).backward()
        own = dict(model.named_parameters())
        return {name: own[name].sum_grad_squared / len(x) for name in names}

    return run


def with_opacus(source: nn.Module) -> Callable[[Tensor, Tensor], Squares]:
    """Per-sample gradients of a copy by GradSampleModule, squared and averaged.

    Opacus does not support batch normalization; its parameters are left out, so Opacus does less than the others.
    """
    from opacus import GradSampleModule  # type: ignore[import-untyped]

    own = copy.deepcopy(source)
    for module in own.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    model = GradSampleModule(own, loss_reduction="sum", strict=False)

    def run(x: Tensor, y: Tensor) -> Squares:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y, reduction="sum").backward()
        squares = {}
        parameters: list[tuple[str, Any]] = list(own.named_parameters())
        for name, p in parameters:
            if not p.requires_grad:
                continue
            squares[name] = p.grad_sample.square().mean(0)
            p.grad_sample = None
        return squares

    return run


@benchmark(rounds=5, quick={"model": "resnet10-small", "samples": 4})
def fisher(session: Session, *, model: str = "resnet18", samples: int = 128, packages: bool = True) -> None:
    """How long does the Fisher information of a ResNet take, against a forward-backward pass and other packages?

    --no-packages leaves out BackPACK and Opacus.
    """
    warnings.filterwarnings("ignore")
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
    if packages:
        contenders |= {"BackPACK": partial(with_backpack(network), x, y), "Opacus": partial(with_opacus(network), x, y)}
    expected, errors = textbook_loop(network, x, y), {}
    for name, run in contenders.items():
        squares = run()
        errors[name] = max(
            [float((squares[k] - expected[k]).norm() / expected[k].norm()) for k in squares], default=0.0
        )
    seconds = session.medians(contenders)
    rows = [
        (name, f"{value:.3f}", f"{seconds['sparsesam'] / value:.2f}", f"{errors[name]:.1e}")
        for name, value in seconds.items()
    ]
    show(" | s | sparsesam / this | largest relative difference to the loop", rows)
