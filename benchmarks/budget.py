"""Whether a budget is kept: predicted and measured cost of a step, in SGD steps, ResNet-18 on CIFAR shapes.

python -m benchmarks.budget [--batch 64] [--rounds 9] [--warmup 2] [--threads 2] [--budgets 1.1 1.25 1.5] [--cpu-time]

All masks are made first; then every case takes one step per round, by turns. The budget of 1.25 must be measured
within 5 % of what was asked.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.steps import SGD, closure_of, sgd, void
from benchmarks.timing import format_ratios, interleaved, print_provenance, ratios
from sparsesam.budget import BudgetMask, BudgetUnit
from sparsesam.budget.costs import LayerCosts, layer_costs
from sparsesam.lab.models import resnet18
from sparsesam.masks.scores import Fisher

UNITS: tuple[BudgetUnit, ...] = ("tensor", "filter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"batch": 64, "rounds": 9, "warmup": 2, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.1, 1.25, 1.5])
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; use with --threads 1")
    options = parser.parse_args()
    if options.warmup < 2:
        parser.error(f"--warmup must be at least 2, got {options.warmup}: masks are made in the first step")
    torch.set_num_threads(options.threads)
    print_provenance()

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (options.batch,), generator=generator)
    torch.manual_seed(0)
    model = resnet18()
    costs = layer_costs(model, images, how="cpu-time" if options.cpu_time else "time")
    rules = rules_for(costs, options.budgets, (images, labels))
    steps: dict[str, Callable[[], None]] = {"SGD": sgd(copy.deepcopy(model), images, labels)}
    optimizers = {name: optimizer(copy.deepcopy(model), rule) for name, rule in rules.items()}
    steps |= {name: step(one, images, labels) for name, one in optimizers.items()}
    clock = time.process_time if options.cpu_time else time.perf_counter
    table = ratios(interleaved(steps, "SGD", rounds=options.rounds, warmup=options.warmup, clock=clock))

    print(f"ResNet-18, batch {options.batch}, {options.rounds} interleaved rounds")
    print(format_ratios(table, "SGD"))
    measured = {row.name: row.median for row in table}
    print(f"\n{'':13} {'asked':>6} {'predicted':>10} {'measured':>9} {'off':>7} {'perturbed':>10}  frontier")
    for name, rule in rules.items():
        report = rule.report(optimizers[name].masks)
        off = measured[name] / rule.budget - 1
        print(
            f"{name:13} {rule.budget:6.2f} {report.predicted:10.3f} {measured[name]:9.3f} {off:+7.1%} "
            f"{report.share:10.1%}  {report.frontier}"
        )


def rules_for(costs: LayerCosts, budgets: Sequence[float], batch: tuple[Tensor, Tensor]) -> dict[str, BudgetMask]:
    score = Fisher(batch, cross_entropy, samples=min(16, len(batch[1])))
    return {f"{unit} {budget}": BudgetMask(costs, budget, score, unit) for unit in UNITS for budget in budgets}


def optimizer(model: nn.Module, rule: BudgetMask) -> sparsesam.SSAM:
    return sparsesam.SSAM(torch.optim.SGD(model.parameters(), **SGD), model, rho=0.1, mask=rule, norm="masked")


def step(optimizer: sparsesam.SSAM, images: Tensor, labels: Tensor) -> Callable[[], None]:
    closure = closure_of(optimizer.model, optimizer, images, labels)
    return lambda: void(optimizer.step(closure))


if __name__ == "__main__":
    main()
