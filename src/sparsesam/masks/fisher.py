"""Diagonal empirical Fisher information, exactly one gradient per sample.

    F = 1/N sum_i (grad_w loss(w; x_i, y_i))^2

The definition is the batch-1 loop. The fast way is one forward and one input-gradient backward over the
whole batch, in which hooks give every layer's input and output gradient, and the layer's rule makes the
squared per-sample gradients of them (``layer_rules``). A parameter that no rule covers is measured by
re-running, sample by sample, the smallest module that contains all its uses, or the whole model.

Which method a parameter gets is chosen on the first sample and verified: the fast result of that sample must
equal autograd's, the batched output must equal the single one, and later batches must use the parameters in the
same places. A parameter that fails a check is measured by the loop; the method changes the cost, not the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sparsesam.masks.batches import batch_size, leads_with, slice_batch, to_device
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.fisher_problem import LossFn, ModelLoss, Problem, SampleLabels, problem_of
from sparsesam.masks.layer_rules import Accumulators, LayerCall, find_rule
from sparsesam.masks.memory import SavedBytes, fitting, free_bytes
from sparsesam.masks.observer import CapturedCall, FisherPlan, Observer, detached, floating, only_input, tensors_of
from sparsesam.masks.preserve_model_state import preserve_model_state, requiring_grad


@dataclass(frozen=True)
class FisherDiagonal:
    """Mean squared per-sample gradients and, per parameter, the method by which they were computed.

    ``values``: float32 (float64 for float64 parameters), zeros for a parameter the loss does not depend on.
    ``paths``: "rule: Conv2d", "recomputed: <module name or 'model'>" or "unused".
    """

    values: dict[str, Tensor]
    paths: dict[str, str]
    samples: int


def fisher_diagonal(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    model_loss: ModelLoss | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    labels: Literal["data", "sampled"] = "data",
    sample_labels: SampleLabels | None = None,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
) -> FisherDiagonal:
    """Diagonal Fisher information of the named parameters over the samples of ``batches``.

    With ``loss_fn(output, target)`` a batch is a pair (inputs, targets), inputs being a tensor, a tuple of
    positional or a dictionary of keyword arguments of the model; sample i's loss is
    ``loss_fn(model(x[i:i+1]), y[i:i+1])``, so the reduction over a batch does not matter. With
    ``model_loss(model, batch)`` batches are anything that can be sliced, and every sample runs alone.

    ``labels="sampled"`` draws y_i from softmax(output) over dimension 1 with ``generator`` (the true Fisher
    information); ``sample_labels(output, generator)`` replaces the draw.

    Of a batch, ``chunk`` samples are measured at a time; None: all of them, or fewer where free memory is short.

    The model runs in evaluation mode with frozen statistics and is left as it was found.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}; None lets free memory decide")
    problem = problem_of(loss_fn, model_loss, labels, sample_labels, generator)
    wanted = _wanted_parameters(model, parameters)
    with preserve_model_state(model):
        measurement = _Measurement(model, problem, wanted, chunk)
        for batch in batches:
            measurement.add(to_device(batch, next(iter(wanted.values())).device))
    return measurement.result()


def _wanted_parameters(model: nn.Module, names: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    available: dict[str, Tensor] = dict(model.named_parameters())
    if names is None:
        wanted = {name: parameter for name, parameter in available.items() if parameter.requires_grad}
    else:
        unknown = [name for name in names if name not in available]
        if unknown:
            raise ValueError(f"parameters holds {unknown[0]!r}, which model.named_parameters() does not")
        wanted = {name: available[name] for name in names}
    if not wanted:
        raise ValueError("there is no parameter to measure; none is named or none requires a gradient")
    return wanted


class _Measurement:
    """Sums of squared per-sample gradients over the batches seen so far."""

    def __init__(self, model: nn.Module, problem: Problem, wanted: dict[str, Tensor], chunk: int | None) -> None:
        self.model, self.problem, self.wanted, self.chunk = model, problem, wanted, chunk
        self.sample_bytes = 0  # of activations
        self.sums = self._zeros()
        self.samples = 0
        self.plan: FisherPlan | None = None
        self.first_output: Any = None

    def add(self, batch: Any) -> None:
        size = batch_size(self.problem.inputs(batch))
        if size == 0:
            return
        if self.plan is None:
            self.plan = self._first_plan(slice_batch(batch, slice(0, 1), size))
        at_once = self.chunk or self._fitting(size)
        for start in range(0, size, at_once):
            stop = min(start + at_once, size)
            self._add_part(self.plan, slice_batch(batch, slice(start, stop), size), stop - start)

    def _fitting(self, size: int) -> int:
        # Activations stay until their layer's gradient is there, which is as large.
        return fitting(size, 2 * self.sample_bytes, free_bytes(next(iter(self.wanted.values())).device))

    def _add_part(self, plan: FisherPlan, batch: Any, size: int) -> None:
        self.samples += size
        used = self._add_by_hooks(plan, batch, size, self.sums, draw=True)
        chosen = {name: self.wanted[name] for name in self.wanted if name in plan.looped}
        for i in range(size if chosen else 0):
            sample = slice_batch(batch if used is None else used, slice(i, i + 1), size)
            self._add_sample(sample, chosen, self.sums, draw=used is None)

    def result(self) -> FisherDiagonal:
        if self.plan is None:
            raise ValueError("batches is empty; at least one sample is needed")
        values = {name: total / self.samples for name, total in self.sums.items()}
        for name, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteScoreError(
                    f"the Fisher information of {name!r} is not finite; the loss or its gradient overflows "
                    "at the current weights (lower the learning rate or rho, or measure in float32)"
                )
        return FisherDiagonal(values, self._paths(self.plan), self.samples)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in self.wanted.items()}

    def _paths(self, plan: FisherPlan) -> dict[str, str]:
        module_names = {module: name for name, module in self.model.named_modules()}
        paths = dict.fromkeys(self.wanted, "unused") | dict.fromkeys(plan.looped, "recomputed: model")
        for module, names in plan.reruns.items():
            paths.update(dict.fromkeys(names, f"recomputed: {module_names[module]}"))
        for kind, _, own in plan.rules.values():
            paths.update(dict.fromkeys(own.values(), f"rule: {kind}"))
        return {name: paths[name] for name in self.wanted}

    def _first_plan(self, sample: Any) -> FisherPlan:
        """The cheapest way for each parameter that reproduces autograd's gradients of one sample."""
        plan = FisherPlan()
        if self.problem.model_loss is not None or _normalizes_over_samples(self.model):
            plan.loop(self.wanted)
            return plan
        observer = Observer(self.model, self.wanted, plan, 1)
        expected, trial = self._zeros(), self._zeros()
        saved = SavedBytes([*self.model.parameters(), *self.model.buffers()])
        with saved.counted():
            self.first_output, used = self._add_sample(sample, self.wanted, expected, draw=True, observer=observer)
        self.sample_bytes = saved.total
        plan = _planned(self.model, self.wanted, observer)
        try:
            self._add_by_hooks(plan, used, 1, trial, draw=False)
        except Exception:
            # Autograd has just differentiated this sample, so the hooks are the cause.
            plan.loop(self.wanted)
        plan.loop(_different(trial, expected))
        return plan

    def _add_sample(
        self,
        sample: Any,
        chosen: Mapping[str, Tensor],
        into: dict[str, Tensor],
        *,
        draw: bool,
        observer: Observer | None = None,
    ) -> tuple[Any, Any]:
        """The definition: the squared gradient of one sample's loss. Returns output and labelled sample."""
        with requiring_grad(chosen.values()):
            # Only the forward: setting flags and taking gradients touch the parameters too.
            with nullcontext() if observer is None else observer.watch():
                output, sample, loss = self.problem.sample_loss(self.model, sample, draw=draw)
            _add_squared_gradients([loss], [None], chosen, into)
        return tree_map(detached, output), sample

    def _add_by_hooks(
        self, plan: FisherPlan, batch: Any, size: int, into: dict[str, Tensor], *, draw: bool
    ) -> Any | None:
        """Add what rules and reruns give. Returns the batch with the labels used, None if there are none."""
        while plan.rules or plan.reruns:
            observer = Observer(self.model, self.wanted, plan, size)
            with observer.watch():
                output = self.problem.output(self.model, batch)
                used = self.problem.labelled(batch, output) if draw else batch
                total = self._total_loss(output, used, size)
            if total is None or self._mixes_samples(output, size):
                plan.loop(self.wanted)
                continue
            misplaced = observer.misplaced()
            if misplaced:
                plan.loop(misplaced)
                continue
            del output
            try:
                _backward(observer, total, into)
                self._rerun(plan, observer, size, into)
            finally:
                observer.release()
            return used
        return None

    def _total_loss(self, output: Any, batch: Any, size: int) -> Tensor | None:
        """Sum over the samples of their own losses; None where the output cannot be split into samples."""
        flat, structure = tree_flatten(output)
        if not all(leads_with(t, size) for t in tensors_of(flat)):
            return None
        # One split has one backward; slices would each fill a gradient of the whole output.
        parts = [leaf.split(1) if isinstance(leaf, Tensor) else (leaf,) * size for leaf in flat]
        losses = []
        for i in range(size):
            alone = tree_unflatten([part[i] for part in parts], structure)
            losses.append(self.problem.loss(alone, slice_batch(batch, slice(i, i + 1), size)))
        return torch.stack(losses).sum()

    def _mixes_samples(self, output: Any, size: int) -> bool:
        """Whether the first sample's output differs when it is part of a batch; checked for one batch only."""
        alone = self.first_output
        if alone is None or size == 1:
            return False
        self.first_output = None
        return not _close(floating(slice_batch(output, slice(0, 1), size)), floating(alone))

    def _rerun(self, plan: FisherPlan, observer: Observer, size: int, into: dict[str, Tensor]) -> None:
        for module, names in list(plan.reruns.items()):
            runs = [run for run in observer.runs.get(module, ()) if run.received()]
            squares = _rerun_samples(module, runs, {name: self.wanted[name] for name in names}, size)
            if squares is None:
                plan.loop(names)
                continue
            for name, square in squares.items():
                into[name] += square


def _normalizes_over_samples(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules())


def _planned(model: nn.Module, wanted: Mapping[str, Tensor], observer: Observer) -> FisherPlan:
    """Each parameter goes to the innermost module that contains all its uses and keeps samples apart."""
    plan = FisherPlan()
    for name, parameter in wanted.items():
        stacks = list(observer.uses.get(name, ()))
        if not stacks:
            continue
        common = [m for m in stacks[0] if m is not model and all(m in stack for stack in stacks)]
        place = next((m for m in reversed(common) if observer.separate.get(m, False)), None)
        if place is None:
            plan.loop([name])
            continue
        local = [key for key, own in place._parameters.items() if own is parameter]
        rule = find_rule(place) if len(local) == 1 else None
        if rule is None:
            plan.reruns.setdefault(place, []).append(name)
        else:
            plan.rules.setdefault(place, (*rule, {}))[2][local[0]] = name
    return plan


def _backward(observer: Observer, total: Tensor, into: dict[str, Tensor]) -> None:
    """One backward for all samples; each layer's rule runs as soon as its gradients are complete."""

    def finish(module: nn.Module) -> None:
        if module not in observer.plan.rules:
            return
        _, rule, own = observer.plan.rules[module]
        runs = observer.runs[module]
        calls = [LayerCall(only_input(run), grad) for run in runs if (grad := run.grads[0]) is not None]
        accumulators: Accumulators = {local: into[name] for local, name in own.items()}
        if calls:
            with torch.no_grad(), torch.autocast(total.device.type, enabled=False):
                rule(module, calls, accumulators)
        if module not in observer.plan.reruns:
            # The hooks live as long as the graph, the activations need not.
            del observer.runs[module]
            for run in runs:
                run.release()

    observer.on_grads = finish
    if total.requires_grad and observer.leaves:
        torch.autograd.grad(total, observer.leaves, allow_unused=True)
    for module in list(observer.runs):
        if not all(run.complete() for run in observer.runs[module]):
            finish(module)


def _rerun_samples(
    module: nn.Module, runs: Sequence[CapturedCall], parameters: Mapping[str, Tensor], size: int
) -> dict[str, Tensor] | None:
    """Squared per-sample gradients from the module alone; None if it does not reproduce its outputs."""
    squares = {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in parameters.items()}
    if not all(run.separable(size) for run in runs):
        return None
    with requiring_grad(parameters.values()):
        for i in range(size):
            outputs: list[Tensor] = []
            grads: list[Tensor | None] = []
            for run in runs:
                args, kwargs = slice_batch(run.arguments, slice(i, i + 1), size)
                found = floating(module(*args, **kwargs))
                if len(found) != len(run.grads):
                    return None
                for output, captured, grad in zip(found, run.outputs, run.grads, strict=True):
                    if grad is None:
                        continue
                    if not _close([output], [captured[i : i + 1]]):
                        return None
                    outputs.append(output)
                    grads.append(grad[i : i + 1].to(output.dtype))
            _add_squared_gradients(outputs, grads, parameters, squares)
    return squares


def _add_squared_gradients(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    into: dict[str, Tensor],
) -> None:
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if not pairs:
        return
    ends, starts = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(ends, list(parameters.values()), starts, allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            real = (dense.abs() if dense.is_complex() else dense).to(into[name].dtype)
            into[name].addcmul_(real, real)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


# ---- whether two computations of the same number agree --------------------------------------------------------


def _tolerance(tensor: Tensor) -> float:
    """Far above what another order of summation does, far below what a wrong formula does."""
    if torch.is_autocast_enabled(tensor.device.type):
        return 5e-2
    return {torch.float64: 1e-7, torch.float32: 1e-3}.get(tensor.dtype, 5e-2)


def _close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_tensors_close, found, expected))


def _tensors_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    # Masked scores are -inf in both.
    difference = torch.where(found == expected, torch.zeros_like(found), found - expected)
    return bool(difference.norm() <= _tolerance(found) * expected.nan_to_num(0, 0, 0).norm())


def _different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    """Names whose root squares differ by more than rounding errors relative to the largest of all norms."""
    norms = {name: square.sum().sqrt().item() for name, square in expected.items()}
    floor = 1e-3 * max(norms.values())
    return {
        name
        for name, square in expected.items()
        if (found[name].sqrt() - square.sqrt()).norm().item() > _tolerance(square) * (norms[name] + floor)
    }
