"""Checks cost budgets: predicted and measured cost of a step, in SGD steps, ResNet-18 on CIFAR shapes.

python -m benchmarks.budget [--batch 64] [--rounds 9] [--warmup 2] [--threads 2] [--budgets 1.1 1.25 1.5] [--cpu-time]

All masks are computed first; then the cases take one step each per round, in turn. The measured cost for the budget of
1.25 must be within 5 % of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.cases import Case, cifar_batch, ssam
from benchmarks.timing import arguments, begin, compare, format_ratios, medians
from sparsesam.budget import BudgetMask, BudgetUnit
from sparsesam.budget.choice import best_subset, frontier_options
from sparsesam.budget.costs import LayerCosts, layer_costs
from sparsesam.lab.models import resnet18
from sparsesam.masks.scores import Fisher

UNITS: tuple[BudgetUnit, ...] = ("tensor", "filter")


def main() -> None:
    parser = arguments(__doc__, batch=64, rounds=9, warmup=2, threads=2)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.1, 1.25, 1.5])
    options = begin(parser)
    if options.warmup < 2:
        parser.error(f"--warmup must be at least 2, got {options.warmup}: masks are made in the first step")
    torch.manual_seed(0)
    model, data = resnet18(), cifar_batch(options.batch)
    costs = layer_costs(model, data[0], how="cpu-time" if options.cpu_time else "time")
    score = Fisher(data, cross_entropy, samples=min(16, options.batch))
    rules = {f"{unit} {budget}": BudgetMask(costs, budget, score, unit) for unit in UNITS for budget in options.budgets}
    cases = {"SGD": Case(model, data), **{name: Case(model, data, ssam(rule)) for name, rule in rules.items()}}
    table = compare(cases, "SGD", options)

    print(f"ResNet-18, batch {options.batch}, {options.rounds} interleaved rounds")
    print(format_ratios(table, "SGD"))
    measured = {row.name: row.median for row in table}
    print(f"\n{'':13} {'asked':>6} {'predicted':>10} {'measured':>9} {'off':>7} {'perturbed':>10}  frontier")
    for name, rule in rules.items():
        report = rule.report(cases[name].optimizer.masks)
        off = measured[name] / rule.budget - 1
        print(
            f"{name:13} {rule.budget:6.2f} {report.predicted:10.3f} {measured[name]:9.3f} {off:+7.1%} "
            f"{report.share:10.1%}  {report.frontier}"
        )
    seconds = medians(knapsacks(costs, options.budgets), 5, options.clock)
    shown = ", ".join(f"{name} {1e3 * one:.1f} ms" for name, one in seconds.items())
    print(f"\nall knapsacks of whole tensors: {shown}")


def knapsacks(costs: LayerCosts, budgets: Sequence[float]) -> dict[str, Callable[[], object]]:
    """Returns ours and SciPy's exact solution of every frontier's knapsack, with random scores."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    draws = np.random.default_rng(0)
    problems = [
        (draws.random(len(one.items)), np.array([cost[-1] for cost in one.items.values()]), left)
        for budget in budgets
        for one in frontier_options(costs, costs.shapes, "tensor")
        if (left := (budget - 1) * costs.base - one.fixed) >= 0
    ]

    def scipy_milp() -> list[float]:
        exact = {"integrality": 1, "bounds": Bounds(0, 1), "options": {"mip_rel_gap": 0}}
        return [-milp(-v, constraints=LinearConstraint(c[None], ub=left), **exact).fun for v, c, left in problems]

    def ours() -> list[float]:
        return [float(v[best_subset(v.tolist(), c.tolist(), left)].sum()) for v, c, left in problems]

    assert np.allclose(ours(), scipy_milp(), rtol=1e-9)
    return {"best_subset": ours, "scipy.optimize.milp": scipy_milp}


if __name__ == "__main__":
    main()
