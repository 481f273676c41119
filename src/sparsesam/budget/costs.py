"""The cost of each layer, and of a step that perturbs some of the parameters.

With P the perturbed parameters, a call is reused in the second pass if the module in whose forward it is made holds
none of P and returns before the first use of any. In addition to the base optimizer's step, a step with the engine and
norm="masked" costs

    sum of F over calls that are not reused            the second forward
  + sum of dX over calls that depend on a use of P     the ascent's backward up to the frontier
  + sum of dW(kept share) over P                       the ascent's weight gradients
  + moving P to w + e and back

Modules upstream of the earliest perturbed layer, the frontier, cost nothing extra.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsesam.budget.call_trace import PASS_KINDS, CallCost, Clock, How, Trace, stopwatch
from sparsesam.distributed.ddp import unwrap
from sparsesam.perturbation import Perturbation, Target
from sparsesam.utils.checks import check_choice, check_count
from sparsesam.utils.restore import RNGState, preserve_model_state

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerCost:
    """The total cost of a layer's calls and of the calls without parameters that follow it (activations, additions).

    ``share``: the share of its weights that is perturbed, in a report.
    """

    layer: str
    parameters: tuple[str, ...]
    forward: float
    input_gradient: float
    weight_gradient: float
    share: float = 0.0


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Costs in execution order, in seconds or, with ``how="count"``, in multiply-adds."""

    calls: tuple[CallCost, ...]
    shapes: Mapping[str, torch.Size]
    moving: float  # per perturbed weight

    @cached_property
    def base(self) -> float:
        """The cost of one forward and backward pass; with thousands of weights per call, the update costs little."""
        return sum(call.forward + call.input_gradient + call.weight_gradient for call in self.calls)

    @cached_property
    def first_use(self) -> dict[str, int]:
        """The index of the call in which each parameter is first used; parameters that are never used are left out."""
        places: dict[str, int] = {}
        for index, call in enumerate(self.calls):
            for name in call.parameters:
                places.setdefault(name, index)
        return places

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """One entry per layer in the order of first use; the entries sum to the cost of a whole pass."""
        order = [call.layer for call in self.calls if call.parameters]
        groups: dict[str, list[CallCost]] = {layer: [] for layer in dict.fromkeys(order)}
        current = order[0]
        for call in self.calls:
            current = call.layer if call.parameters else current
            groups[current].append(call)
        return tuple(_summed(layer, calls) for layer, calls in groups.items())

    def can_slice(self, name: str) -> bool:
        """Whether the weight gradient of some filters of this parameter costs less than that of all."""
        uses = [call for _, call in self._uses[name]]
        return len(self.shapes[name]) > 1 and bool(uses) and all(call.can_slice for call in uses)

    def step(self, masks: Mapping[str, Tensor]) -> float:
        """Returns the cost of a step that perturbs these entries, in steps of the base optimizer."""
        kept = {name: mask for name, mask in masks.items() if name in self.first_use and bool(mask.any())}
        extra = self.passing(kept)
        for name, mask in kept.items():
            rows = mask.flatten(1) if mask.dim() > 1 else mask.reshape(1, -1)
            whole_rows = mask.dim() > 1 and torch.equal(rows.any(1), rows.all(1))
            share = int(mask.count_nonzero()) / mask.numel()
            extra += self.perturbing(name, share, sliced=whole_rows)
        return 1 + extra / self.base

    def passing(self, names: Iterable[str]) -> float:
        """Returns the cost of the second forward and the ascent's input gradients if these parameters are perturbed."""
        reached = np.zeros((2, len(self.calls)), dtype=bool)
        for name in names:
            reached |= self._reached[name]
        return float(self._prices[reached].sum())

    def perturbing(self, name: str, share: float, *, sliced: bool = True) -> float:
        """Returns the cost of dW for a share of a parameter's filters, and of moving them to w + e and back."""
        size = self.shapes[name].numel()
        gradient = share if sliced else float(share > 0)
        total = share * size * self.moving
        for part, call in self._uses[name]:
            total += part * call.weight_gradient_for(gradient)
        return total

    @cached_property
    def _uses(self) -> dict[str, list[tuple[float, CallCost]]]:
        """The calls that use each parameter, and its share of their weight gradients, by number of weights."""
        uses: dict[str, list[tuple[float, CallCost]]] = {name: [] for name in self.shapes}
        for call in self.calls:
            total = sum(self.shapes[name].numel() for name in call.parameters)
            for name in call.parameters:
                uses[name].append((self.shapes[name].numel() / max(1, total), call))
        return uses

    @cached_property
    def _reached(self) -> dict[str, Flags]:
        """By parameter, the calls that run again if it is perturbed, and the calls that depend on a use of it."""
        found = {}
        for name, place in self.first_use.items():
            uses = {index for index, call in enumerate(self.calls) if name in call.parameters}
            again = [name in call.module.held or call.module.end > place for call in self.calls]
            found[name] = np.array([again, [not uses.isdisjoint(call.upstream) for call in self.calls]])
        return found

    @cached_property
    def _prices(self) -> Floats:
        """The costs of F and dX of each call."""
        return np.array([(call.forward, call.input_gradient) for call in self.calls]).T


def layer_costs(
    model: nn.Module, example_input: Any, *, how: Literal["time", "cpu-time", "count"] = "time", repeats: int = 5
) -> LayerCosts:
    """Measure (``"time"``, medians of ``repeats`` passes after one warm-up pass) or count the cost of each call.

    ``"cpu-time"`` measures the CPU time of this process, which with one thread is more reliable beside other work;
    ``"count"`` is the same on every machine.

    ``example_input`` is a batch of the training size: a tensor, a tuple of positional arguments or a dictionary of
    keyword arguments. Passes run in training mode, as a step does; the model, its buffers and the random state are
    restored. F and dX + dW are measured during a complete pass, dX in a pass without weight gradients.
    """
    check_choice("how", how, get_args(How))
    check_count("repeats", repeats, "5 give a usable median")
    model = unwrap(model)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        raise ValueError(f"model must have parameters that require a gradient, got {type(model).__name__} without")
    calls: list[CallCost] = []
    device = next(model.parameters()).device
    passes = 1 if how == "count" else 1 + repeats
    with preserve_model_state(model, evaluate=False, freeze=False), stopwatch(how, device) as clock:
        for module in model.modules() if not model.training else ():
            module.training = True
        rng = RNGState(model.parameters())
        state = rng.read()
        for kind in PASS_KINDS * passes:
            rng.write(state)
            Trace(model, clock, kind, calls).run(example_input)
        moving = _moving(model, clock, passes)
    return LayerCosts(tuple(calls), shapes, moving)


def _summed(layer: str, calls: list[CallCost]) -> LayerCost:
    return LayerCost(
        layer,
        tuple(dict.fromkeys(name for call in calls for name in call.parameters)),
        sum(call.forward for call in calls),
        sum(call.input_gradient for call in calls),
        sum(call.weight_gradient for call in calls),
    )


def _moving(model: nn.Module, clock: Clock, repeats: int) -> float:
    """Returns the cost per weight of the norm, of moving to w + e and of moving back, on the largest tensor."""
    weight = max((p.detach() for p in model.parameters() if p.requires_grad), key=Tensor.numel).clone()
    target = Target("weight", weight, torch.ones_like(weight), None, rho=1e-3, eta=None)
    perturbation, spent = Perturbation(), []
    for _ in range(repeats):
        start = clock()
        with torch.no_grad():
            perturbation.move([target], perturbation.norm([target], "masked"))
            perturbation.undo()
        spent.append(clock() - start)
    return statistics.median(spent) / weight.numel()
