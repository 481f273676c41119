"""Diagonal empirical Fisher information, exactly one gradient per sample.

    F = 1/N sum_i (grad_w loss(w; x_i, y_i))^2

The definition is the batch-1 loop. The fast path runs one forward and one input-gradient backward over the whole batch,
and records every call that has a parameter as argument, with the gradient at its result. A rule for the called function
computes the per-sample gradients from these (``layer_rules``).

The fast path is verified on the first two samples. If it differs from autograd's gradients of single samples, or a call
has no rule, the loop is used. The method changes the cost, not the result.

Measured on ResNet-18 (python -m benchmarks.fisher): 5 to 8 times faster than BackPACK, 3 to 6 times than Opacus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparsesam.distributed.shards import Shards, local_part
from sparsesam.masks.fisher_problem import LossFn, ModelLoss, Problem, SampleLabels
from sparsesam.masks.layer_rules import CallRecorder, add_squares, function_name
from sparsesam.utils.batches import batch_size, leads_with, slice_batch, to_device
from sparsesam.utils.checks import NonFiniteScoreError, check_count
from sparsesam.utils.memory import SavedBytes, fitting, free_bytes
from sparsesam.utils.restore import preserve_model_state


@dataclass(frozen=True)
class FisherDiagonal:
    """Mean squared per-sample gradients and, per parameter, the method by which they were computed.

    ``values``: float32 (float64 for float64 parameters), zeros for a parameter the loss does not depend on.
    ``paths``: "rule: conv2d" or "unused"; "sample by sample: <why>" for all parameters if the fast path fails.
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
    """Computes the diagonal of the Fisher information over the samples of ``batches``, one gradient per sample.

    The model runs in evaluation mode with frozen statistics and is restored afterwards.

    Args:
        model: any module.
        batches: pairs (inputs, targets). Inputs are a tensor, a tuple of positional arguments or a dictionary of
            keyword arguments of the model. With ``model_loss``, batches are anything that can be sliced.
        loss_fn: ``loss_fn(output, target)``. Sample i's loss is ``loss_fn(model(x[i:i+1]), y[i:i+1])``, so the
            reduction over a batch does not matter.
        model_loss: ``model_loss(model, batch)`` in place of ``loss_fn``; samples run one by one.
        parameters: the parameters to measure, by name. Default: all that require a gradient.
        labels: ``"data"``, or ``"sampled"`` from softmax(output) over dimension 1 (the true Fisher information).
        sample_labels: ``sample_labels(output, generator)`` in place of that draw.
        generator: the random generator of that draw.
        chunk: how many samples are measured at a time. Default: all of a batch, fewer where free memory is short.

    Examples:
        >>> diagonal = sparsesam.fisher_diagonal(model, loader, loss_fn)
        >>> diagonal.values["0.weight"].shape == model[0].weight.shape
        True
    """
    if chunk is not None:
        check_count("chunk", chunk, "None lets free memory decide")
    problem = Problem(loss_fn, model_loss, labels, sample_labels, generator)
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
        raise ValueError("there is no parameter to measure: none is given, or none requires a gradient")
    return wanted


class _Measurement:
    """Sums of squared per-sample gradients over the batches seen so far."""

    def __init__(self, model: nn.Module, problem: Problem, wanted: dict[str, Tensor], chunk: int | None) -> None:
        self.model, self.problem, self.wanted, self.chunk = model, problem, wanted, chunk
        self.sums = _zeros(self.wanted)
        self.samples = 0
        self.sample_bytes = 0  # bytes of activations per sample
        self.tried = 0  # size of the batch on which the fast path was compared with the definition
        self.paths: dict[str, str] = {}  # by parameter that was compared
        #: why samples are measured one by one; None: they are not
        self.loops_because = "model_loss may do anything" if problem.model_loss is not None else None

    def add(self, batch: Any) -> None:
        size = batch_size(self.problem.inputs(batch))
        if self.loops_because is None and self.tried < min(size, 2):
            self.tried = min(size, 2)
            self.loops_because = self._try(slice_batch(batch, slice(0, self.tried), size), self.tried)
        # Activations are kept until the gradient of their layer is computed, which is as large.
        free = free_bytes(next(iter(self.wanted.values())).device)
        at_once = self.chunk or fitting(max(1, size), 2 * self.sample_bytes, free)
        for start in range(0, size, at_once):
            stop = min(start + at_once, size)
            self._add_part(slice_batch(batch, slice(start, stop), size), stop - start)

    def _add_part(self, batch: Any, size: int) -> None:
        if self.loops_because is None:
            self.loops_because = self._add_at_once(batch, size, self.sums)
        if self.loops_because is not None:
            for i in range(size):
                self._add_sample(slice_batch(batch, slice(i, i + 1), size), self.sums, draw=True)
        self.samples += size

    def result(self) -> FisherDiagonal:
        values = _means(self.sums, self.samples, None)
        if self.loops_because is not None:
            self.paths = dict.fromkeys(self.wanted, f"sample by sample: {self.loops_because}")
        return FisherDiagonal(values, {name: self.paths.get(name, "unused") for name in self.wanted}, self.samples)

    def _try(self, batch: Any, size: int) -> str | None:
        """Compare the fast path with autograd on one or two samples; returns why it cannot be used, or None.

        Two samples show whether the model treats samples independently.
        """
        if self.problem.is_sampled:
            batch = self.problem.labelled(batch, self.problem.output(self.model, batch))
        expected, found = _zeros(self.wanted), _zeros(self.wanted)
        saved = SavedBytes([*self.model.parameters(), *self.model.buffers()])
        for i in range(size):
            with saved.counted() if i == 0 else nullcontext():
                self._add_sample(slice_batch(batch, slice(i, i + 1), size), expected, draw=False)
        self.sample_bytes = saved.total
        try:
            refusal = self._add_at_once(batch, size, found, is_trial=True)
        except Exception as error:
            # Autograd has just differentiated these samples, so the recording is the cause.
            return f"recording raised {type(error).__name__}"
        different = [] if refusal else _different(found, expected)
        return refusal or (f"{different[0]} differs from its definition" if different else None)

    def _add_sample(self, sample: Any, into: Mapping[str, Tensor], *, draw: bool) -> None:
        """The definition: the squared gradient of one sample's loss."""
        self._differentiate(True)
        loss = self.problem.sample_loss(self.model, sample, draw=draw)
        if loss.requires_grad:
            _add_squares_of(torch.autograd.grad(loss, list(self.wanted.values()), allow_unused=True), into)

    def _differentiate(self, flag: bool) -> None:
        """Set requires_grad of the parameters; preserve_model_state restores the model's own flags."""
        for parameter in self.wanted.values():
            parameter.requires_grad_(flag)

    def _add_at_once(self, batch: Any, size: int, into: Mapping[str, Tensor], *, is_trial: bool = False) -> str | None:
        """Add the squared gradients of all samples by the fast path; if it cannot be used, return why."""
        self._differentiate(False)
        recorder = CallRecorder(self.wanted, size)
        with recorder:
            output = self.problem.output(self.model, batch)
            flat, structure = tree_flatten(output)
            if not all(leads_with(leaf, size) for leaf in flat if isinstance(leaf, Tensor)):
                return "the output is not laid out by samples"
            used = batch if is_trial else self.problem.labelled(batch, output)
            # split() has one backward; each slice would allocate a gradient of the whole output.
            parts = [leaf.split(1) if isinstance(leaf, Tensor) else (leaf,) * size for leaf in flat]
            losses = [
                self.problem.loss(
                    tree_unflatten([part[i] for part in parts], structure),
                    slice_batch(used, slice(i, i + 1), size),
                )
                for i in range(size)
            ]
        if not all(call.is_unchanged() for call in recorder.calls):
            return "a layer's input was changed in place"
        functions: dict[str, dict[str, None]] = {}  # by parameter, in the order of calls
        for call in recorder.calls:
            for name in call.parameters.values():
                functions.setdefault(name, {})[function_name(call.function)] = None
        if is_trial:
            self.paths = {name: f"rule: {', '.join(used)}" for name, used in functions.items()}
        elif not functions.keys() <= self.paths.keys():
            return "the first samples did not use every parameter"
        total = torch.stack(losses).sum()
        if recorder.refusal is None and total.requires_grad:
            grads = torch.autograd.grad(total, [call.result for call in recorder.calls], allow_unused=True)
            with torch.no_grad(), torch.autocast(total.device.type, enabled=False):
                add_squares(recorder.calls, grads, into)
        return recorder.refusal


def sharded_fisher(
    model: nn.Module, batches: Iterable[Any], problem: Problem, parameters: Mapping[str, Tensor], shards: Shards
) -> dict[str, Tensor]:
    """Returns this rank's part of the diagonal; all ranks run the same sample, and FSDP2 averages its gradient."""
    sums, samples = _zeros(parameters), 0
    with ExitStack() as stack:
        # FSDP2 does not support changing requires_grad after wrapping, and computes gradients in backward() only.
        stack.enter_context(preserve_model_state(model, freeze=False))
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        for batch in batches:
            size = batch_size(problem.inputs(batch))
            for i in range(size):
                sample = to_device(slice_batch(batch, slice(i, i + 1), size), shards.mesh.device_type)
                model.zero_grad()
                problem.sample_loss(model, sample, draw=True).backward()
                found = [None if p.grad is None else local_part(p.grad, p) for p in parameters.values()]
                _add_squares_of(found, sums)
            samples += size
    return _means(sums, samples, shards)


def _zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns zeros: float64 for parameters in double precision, float32 for others."""
    wide = (torch.float64, torch.complex128)
    return {
        name: torch.zeros_like(local_part(p), dtype=torch.float64 if p.dtype in wide else torch.float32)
        for name, p in parameters.items()
    }


def _add_squares_of(gradients: Iterable[Tensor | None], into: Mapping[str, Tensor]) -> None:
    for total, gradient in zip(into.values(), gradients, strict=True):
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            real = (dense.abs() if dense.is_complex() else dense).to(total.dtype)
            total.addcmul_(real, real)


def _means(sums: Mapping[str, Tensor], samples: int, shards: Shards | None) -> dict[str, Tensor]:
    """Returns the means; raises on all ranks that share parameters if a value on one of them is not finite."""
    if samples == 0:
        raise ValueError("batches is empty; at least one sample is needed")
    values = {name: total / samples for name, total in sums.items()}
    bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
    if bad if shards is None else shards.sum_of(len(bad))[0]:
        raise NonFiniteScoreError(
            f"the Fisher information of {repr(bad[0]) if bad else 'another rank'} is not finite; the loss or its "
            "gradient overflows at the current weights (lower the learning rate or rho, or measure in float32)"
        )
    return values


def _different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Returns the names whose roots differ by more than rounding errors, relative to the largest of all norms."""
    norms = {name: square.sum().sqrt().item() for name, square in expected.items()}
    floor = 1e-3 * max(norms.values())
    return [
        name
        for name, square in expected.items()
        if (found[name].sqrt() - square.sqrt()).norm().item() > _tolerance(square) * (norms[name] + floor)
    ]


def _tolerance(tensor: Tensor) -> float:
    """Far above the effect of another order of summation, far below that of a wrong formula."""
    if torch.is_autocast_enabled(tensor.device.type):
        return 5e-2
    return {torch.float64: 1e-7, torch.float32: 1e-3}[tensor.dtype]
