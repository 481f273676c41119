"""The measured cost of a step with a mask."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.rng import RNGState
from sparsesam.budget.call_trace import stopwatch
from sparsesam.masks.batches import call_model
from sparsesam.masks.checks import check_count
from sparsesam.masks.fixed import FixedMask
from sparsesam.masks.mask import MaskRule
from sparsesam.optimizer import SSAM

LossFn = Callable[..., Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
Batch = tuple[Any, Any]


def measured_cost(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    rule: MaskRule,
    *,
    base: MakeOptimizer | None = None,
    rounds: int = 7,
    rho: float = 0.05,
) -> float:
    """A step of SSAM with this mask and norm="masked", in steps of the base optimizer: the median of rounds.

    Steps alternate on copies of the model, after two warm-up rounds; the mask is made once, in the first of
    them, and not counted. ``base`` makes the optimizer from the parameters; SGD with momentum if it is left out.
    """
    check_count("rounds", rounds, "7 give a usable median")
    base = base or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9))
    rng = RNGState(model.parameters())
    found = rng.read()
    try:
        plain_model, sparse_model = copy.deepcopy(model).train(), copy.deepcopy(model).train()
        plain = base(plain_model.parameters())
        maker = SSAM(base(sparse_model.parameters()), sparse_model, rho, mask=rule, norm="masked")
        maker.step(_closure(sparse_model, maker, loss_fn, batch), batch=batch)
        sparse = SSAM(maker.base, sparse_model, rho, mask=FixedMask(maker.masks), norm="masked")
        steps = [
            partial(one.step, _closure(its_model, one, loss_fn, batch))
            for one, its_model in ((plain, plain_model), (sparse, sparse_model))
        ]
        ratios = []
        with stopwatch("time", next(model.parameters()).device) as clock:
            for turn in range(2 + rounds):
                seconds = [0.0, 0.0]
                for which in (0, 1) if turn % 2 else (1, 0):
                    start = clock()
                    steps[which]()
                    seconds[which] = clock() - start
                ratios.append(seconds[1] / seconds[0])
        return statistics.median(ratios[2:])
    finally:
        rng.write(found)


def _closure(model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, batch: Batch) -> Callable[[], float]:
    inputs, targets = batch

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_fn(call_model(model, inputs), targets)
        loss.backward()
        return float(loss.detach())

    return closure
