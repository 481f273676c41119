"""What each layer costs, and what a step costs that perturbs some of them and skips the rest.

With P the perturbed parameters, a call is used again in the second pass if the module in whose forward it stands
holds none of P and returns before the first use of any. Beyond the base optimizer's step, a step with the engine and
norm="masked" costs

    sum of F over calls that are not used again        the second forward
  + sum of dX over calls that depend on a use of P     the ascent's way back to the frontier
  + sum of dW(kept share) over P                       the ascent's weight gradients
  + moving P to w + e and back

Modules upstream of the earliest perturbed layer, the frontier, cost nothing extra.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsesam.ascent.perturbation.explicit import Perturbation
from sparsesam.ascent.perturbation.pieces import Target
from sparsesam.ascent.rng import RNGState
from sparsesam.budget.call_trace import PASS_KINDS, Clock, FunctionCall, How, ModuleCall, PassKind, stopwatch, trace
from sparsesam.budget.knapsack import Floats
from sparsesam.masks.checks import check_choice, check_count
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.preserve_model_state import preserve_model_state
from sparsesam.parameters import unwrap

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CallCost:
    """One call: F, dX, dW, and dW for 1/4 and 3/4 of the filters where the engine can compute these alone."""

    layer: str
    parameters: tuple[str, ...]
    upstream: frozenset[int]
    module: ModuleCall
    forward: float
    input_gradient: float
    weight_gradient: float
    sliced: tuple[float, float] | None

    def weight_gradient_for(self, share: float) -> float:
        """dW(share) = a + b * share for a part of the filters, the line through what was measured.

        Slicing has a price of its own, so dW of nearly all filters may cost more than dW of all.
        """
        if share == 0:
            return 0.0
        if share == 1 or self.sliced is None:
            return self.weight_gradient
        quarter, three_quarters = self.sliced
        line = quarter + (share - 0.25) / 0.5 * (three_quarters - quarter)
        return max(line, share * self.weight_gradient)


@dataclass(frozen=True)
class LayerCost:
    """A layer's calls summed, together with the calls without parameters that follow it (activations, additions)."""

    layer: str
    parameters: tuple[str, ...]
    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Costs in execution order, in seconds or, with ``how="count"``, in multiply-adds."""

    calls: tuple[CallCost, ...]
    shapes: Mapping[str, torch.Size]
    moving: float  # per weight of a tensor that is perturbed as a whole
    moving_some: float  # per perturbed weight of a tensor that is perturbed in part
    how: How

    @cached_property
    def base(self) -> float:
        """One forward and backward pass; with thousands of weights per call, the update is little beside it."""
        return sum(call.forward + call.input_gradient + call.weight_gradient for call in self.calls)

    @cached_property
    def first_use(self) -> dict[str, int]:
        """The call in which each parameter is first used, in execution order; parameters never used are not there."""
        places: dict[str, int] = {}
        for index, call in enumerate(self.calls):
            for name in call.parameters:
                places.setdefault(name, index)
        return places

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """One entry per layer in the order of first use; their columns sum up to a whole pass."""
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
        return len(self.shapes[name]) > 1 and bool(uses) and all(c.sliced is not None for c in uses)

    def step(self, masks: Mapping[str, Tensor]) -> float:
        """The cost of a step that perturbs these entries, in steps of the base optimizer."""
        kept = {name: mask for name, mask in masks.items() if name in self.first_use and bool(mask.any())}
        extra = self.passing(kept)
        for name, mask in kept.items():
            rows = mask.flatten(1) if mask.dim() > 1 else mask.reshape(1, -1)
            whole_rows = mask.dim() > 1 and torch.equal(rows.any(1), rows.all(1))
            share = int(mask.count_nonzero()) / mask.numel()
            extra += self.perturbing(name, share, sliced=whole_rows)
        return 1 + extra / self.base

    def passing(self, names: Iterable[str]) -> float:
        """The second forward and the ascent's input gradients, when these parameters are perturbed."""
        uses, held = np.zeros((2, len(self.calls)), dtype=bool)
        frontier = len(self.calls)
        for name in names:
            uses |= self._used_by[name]
            held |= self._held_by[name]
            frontier = min(frontier, self.first_use[name])
        after = (self._depends & uses).any(1)
        runs = held | (self._ends > frontier)
        forward, input_gradient = self._prices
        return float(forward[runs].sum() + input_gradient[after].sum())

    def perturbing(self, name: str, share: float, *, sliced: bool = True) -> float:
        """The ascent's weight gradient for a share of a parameter's filters, and moving them there and back."""
        size = self.shapes[name].numel()
        gradient = share if sliced else float(share > 0)
        total = share * size * (self.moving if share == 1 else self.moving_some)
        for part, call in self._uses[name]:
            total += part * call.weight_gradient_for(gradient)
        return total

    @cached_property
    def _uses(self) -> dict[str, list[tuple[float, CallCost]]]:
        """The calls of each parameter, and its part of their weight gradients: by its number of weights."""
        uses: dict[str, list[tuple[float, CallCost]]] = {name: [] for name in self.shapes}
        for call in self.calls:
            total = sum(self.shapes[name].numel() for name in call.parameters)
            for name in call.parameters:
                uses[name].append((self.shapes[name].numel() / max(1, total), call))
        return uses

    @cached_property
    def _used_by(self) -> dict[str, Flags]:
        return {name: np.array([name in call.parameters for call in self.calls]) for name in self.first_use}

    @cached_property
    def _held_by(self) -> dict[str, Flags]:
        return {name: np.array([name in call.module.held for call in self.calls]) for name in self.first_use}

    @cached_property
    def _ends(self) -> npt.NDArray[np.intp]:
        return np.array([call.module.end for call in self.calls])

    @cached_property
    def _depends(self) -> Flags:
        """Row by call: the calls that it depends on."""
        matrix = np.zeros((len(self.calls), len(self.calls)), dtype=bool)
        for index, call in enumerate(self.calls):
            matrix[index, list(call.upstream)] = True
        return matrix

    @cached_property
    def _prices(self) -> Floats:
        """F and dX of each call."""
        return np.array([(call.forward, call.input_gradient) for call in self.calls]).T


def layer_costs(
    model: nn.Module, example_input: Any, *, how: Literal["time", "cpu-time", "count"] = "time", repeats: int = 5
) -> LayerCosts:
    """Measure (``"time"``, medians of ``repeats`` passes after one to warm up) or count what each call costs.

    ``"cpu-time"`` measures what this process computes, with one thread the better clock beside other work;
    ``"count"`` is the same on every machine.

    ``example_input`` is a batch of the size to be trained with: a tensor, a tuple of arguments or a dictionary of
    named ones. Passes run in training mode, as a step does; the model, its buffers and the random state are left as
    found. F and dX + dW are read off a complete pass while it runs, dX off one whose weights take no gradient.
    """
    check_choice("how", how, get_args(How))
    check_count("repeats", repeats, "5 give a usable median")
    model = unwrap(model)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        raise ValueError(f"model must have parameters that require a gradient, got {type(model).__name__} without")
    traces: dict[PassKind, list[list[FunctionCall]]] = {kind: [] for kind in PASS_KINDS}
    device = next(model.parameters()).device
    warmup, repeats = (0, 1) if how == "count" else (1, repeats)
    with preserve_model_state(model, evaluate=False, freeze=False), stopwatch(how, device) as clock:
        for module in model.modules() if not model.training else ():
            module.training = True
        rng = RNGState(model.parameters())
        state = rng.read()
        for turn in range(warmup + repeats):
            for kind in PASS_KINDS:
                rng.write(state)
                traced = trace(model, example_input, clock, kind)
                if turn >= warmup:
                    traces[kind].append(traced)
        moving, moving_some = _moving(model, clock, warmup + repeats)
    calls = _combined(traces)
    return LayerCosts(calls, shapes, moving, moving_some, how)


def _combined(traces: Mapping[PassKind, list[list[FunctionCall]]]) -> tuple[CallCost, ...]:
    everything = traces["everything"]
    first = everything[0]
    for one in itertools.chain.from_iterable(traces.values()):
        if [(call.function, call.parameters) for call in one] != [(call.function, call.parameters) for call in first]:
            raise ValueError(
                "model must make the same calls in each forward of example_input, but they differ from pass to pass; "
                "choose the weights to perturb by hand, with fixed_mask"
            )
    return tuple(
        _cost(
            call,
            _median(everything, index, "forward"),
            {kind: _median(traces[kind], index, "backward") for kind in PASS_KINDS},
        )
        for index, call in enumerate(first)
    )


def _cost(call: FunctionCall, forward: float, backward: Mapping[PassKind, float]) -> CallCost:
    if not call.parameters:
        return CallCost(call.function, (), call.upstream, call.module, forward, backward["everything"], 0.0, None)
    layer = call.parameters[0].rpartition(".")[0] or call.parameters[0]
    # Differences of measurements: a part may not cost less than its share, nor anything less than nothing.
    inputs = min(backward["inputs"], backward["everything"]) if call.leads_back else 0.0
    weight = backward["everything"] - inputs
    sliced = None
    if call.sliced:
        quarter = max(backward["quarter"] - inputs, 0.25 * weight)
        sliced = quarter, max(backward["three quarters"] - inputs, 0.75 * weight, quarter)
    return CallCost(layer, call.parameters, call.upstream, call.module, forward, inputs, weight, sliced)


def _median(traces: list[list[FunctionCall]], index: int, what: Literal["forward", "backward"]) -> float:
    return float(statistics.median(getattr(one[index], what) for one in traces))


def _summed(layer: str, calls: list[CallCost]) -> LayerCost:
    return LayerCost(
        layer,
        tuple(dict.fromkeys(name for call in calls for name in call.parameters)),
        sum(call.forward for call in calls),
        sum(call.input_gradient for call in calls),
        sum(call.weight_gradient for call in calls),
    )


def _moving(model: nn.Module, clock: Clock, repeats: int) -> tuple[float, float]:
    """The cost per weight of the norm, of moving to w + e and of moving back; whole tensors, and half their rows."""
    largest = torch.atleast_1d(max((p.detach() for p in model.parameters() if p.requires_grad), key=Tensor.numel))
    rows = torch.zeros_like(largest, dtype=torch.bool)
    rows[::2] = True
    rates = []
    for mask in (None, PackedMask.pack(rows)):
        count = largest.numel() if mask is None else mask.count
        perturbation, spent = Perturbation(), []
        weight, gradient = largest.clone(), torch.ones_like(largest)
        for _ in range(repeats):
            target = Target("weight", weight, gradient, mask, rho=1e-3, eta=None)
            start = clock()
            with torch.no_grad():
                perturbation.apply([target], perturbation.norm([target], "masked"))
                perturbation.undo()
            spent.append(clock() - start)
        rates.append(statistics.median(spent) / count)
    return rates[0], rates[1]
