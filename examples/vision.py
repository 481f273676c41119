"""Noisy digits with a small CNN: SGD, SAM, SSAM with a mask for a budget of 1.25 x SGD, and one pass per step.

The budget is for the arithmetic of the layers, which is most of a step of a large network. Steps as short as these (12
ms) take more: the printed cost is measured, without the first step, which also makes the mask.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import sparsesam


def data(noise: float) -> tuple[torch.Tensor, ...]:
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(y), generator=generator)
    x, y = x[order], y[order]
    is_wrong, wrong = torch.rand(1200, generator=generator) < noise, torch.randint(0, 10, (1200,), generator=generator)
    return x[:1200], torch.where(is_wrong, wrong, y[:1200]), x[1200:], y[1200:]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 16, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    epochs = 1 if parser.parse_args().quick else 10
    torch.set_num_threads(1)
    x, y, x_test, y_test = data(noise=0.4)

    def budgeted(base, model):  # perturbs as much as 1.25 x the arithmetic of SGD allows
        samples = list(zip(x[:128], y[:128], strict=True))
        mask = sparsesam.budget_mask(model, x[:64], 1.25, data=samples, loss_fn=F.cross_entropy)
        return sparsesam.SSAM(base, model, rho=0.2, mask=mask, norm="masked")

    methods = {
        "SGD": lambda base, model: base,
        "SAM": lambda base, model: sparsesam.SAM(base, model, rho=0.2),
        "SSAM, budget mask": budgeted,
        "one pass": lambda base, model: sparsesam.ExtrapolatedSAM(base, model, rho=0.1),
    }
    of_sgd = None
    for name, make in methods.items():
        model = network()
        opt = make(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
        seconds = []
        for _ in range(epochs):
            for batch in torch.randperm(len(y)).split(64):

                def loss_of(batch=batch, model=model):
                    return F.cross_entropy(model(x[batch]), y[batch])

                start = time.process_time()
                if isinstance(opt, sparsesam.SharpnessAware):
                    opt.minimize(loss_of)
                else:
                    opt.zero_grad()
                    loss_of().backward()
                    opt.step()
                seconds.append(time.process_time() - start)
            scheduler.step()
        median = statistics.median(seconds[1:])
        of_sgd = of_sgd or median
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).double().mean()
        print(f"{name:18} test accuracy {accuracy:.1%}, {median / of_sgd:.2f} x SGD's CPU time per step")


if __name__ == "__main__":
    main()
