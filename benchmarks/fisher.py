"""Cost of the Fisher information of ResNet-18 relative to other methods.

    python -m benchmarks.fisher [--samples 128] [--rounds 5] [--threads 2] [--quick]

Rounds are interleaved so that other load affects all methods equally; medians are compared. Targets: at most 1.5 x one
plain forward-backward pass over the same images, no slower than torch.func.vmap, BackPACK and Opacus.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.timing import arguments, begin, medians
from sparsesam.lab.models import resnet18
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
    model = extend(modular(_copy(source)).eval(), use_converter=True)
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

    copy = _copy(source)
    for module in copy.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    model = GradSampleModule(copy, loss_reduction="sum", strict=False)

    def run(x: Tensor, y: Tensor) -> Squares:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y, reduction="sum").backward()
        squares = {}
        parameters: list[tuple[str, Any]] = list(copy.named_parameters())
        for name, p in parameters:
            if not p.requires_grad:
                continue
            squares[name] = p.grad_sample.square().mean(0)
            p.grad_sample = None
        return squares

    return run


def _copy(source: nn.Module) -> nn.Module:
    copy = resnet18(num_classes=10)
    copy.load_state_dict(source.state_dict())
    return copy


def main() -> None:
    parser = arguments(__doc__, samples=128, rounds=5, threads=2)
    parser.add_argument("--quick", action="store_true", help="leave out BackPACK and Opacus")
    options = begin(parser)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    x, y = torch.randn(options.samples, 3, 32, 32), torch.randint(10, (options.samples,))
    model = resnet18(num_classes=10)
    for _ in range(3):
        plain(model, x, y)  # moves the running statistics away from their initial values

    trained = _copy(model)
    contenders: dict[str, Callable[[], Squares]] = {
        "sparsesam": lambda: ours(model, x, y),
        "plain forward-backward": lambda: plain(trained, x, y),
        "loop with backward()": lambda: textbook_loop(model, x, y),
        "torch.func.vmap": lambda: by_vmap(model, x, y),
    }
    if not options.quick:
        for name, make in (("BackPACK", with_backpack), ("Opacus", with_opacus)):
            contenders[name] = partial(make(model), x, y)
    expected = textbook_loop(model, x, y)
    print(f"ResNet-18, {options.samples} images 3x32x32, median of {options.rounds} interleaved rounds")
    for name, run in contenders.items():
        squares = run()
        if squares:
            error = max((squares[k] - expected[k]).norm() / expected[k].norm() for k in squares)
            print(f"{name:>24}: largest relative difference to the loop {error:.1e}")
    seconds = medians(contenders, options.rounds, options.clock)
    print(f"\n{'':>24} {'seconds':>8} {'sparsesam / this':>17}")
    for name, value in seconds.items():
        print(f"{name:>24} {value:8.3f} {seconds['sparsesam'] / value:17.2f}")


if __name__ == "__main__":
    main()
