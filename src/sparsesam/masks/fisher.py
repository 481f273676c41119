"""Diagonal empirical Fisher information, exactly one gradient per sample.

    F = 1/N sum_i (grad_w loss(w; x_i, y_i))^2

The definition is the batch-1 loop. The fast way is one forward and one input-gradient backward over the whole batch,
in which every call that a parameter is an argument of is recorded with the gradient at its result (``recorder``). The
rule of the called function makes the squared per-sample gradients of them (``layer_rules``); a call without a rule is
repeated sample by sample.

The fast way is verified on the first two samples: what differs from autograd's gradients of one sample after the other
is measured by the loop. The method changes the cost, not the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparsesam.masks.batches import batch_size, leads_with, slice_batch, to_device
from sparsesam.masks.checks import NonFiniteScoreError, check_count
from sparsesam.masks.fisher_problem import LossFn, ModelLoss, Problem, SampleLabels, problem_of
from sparsesam.masks.memory import SavedBytes, fitting, free_bytes
from sparsesam.masks.preserve_model_state import preserve_model_state, requiring_grad
from sparsesam.masks.recorder import Recorder, Use


@dataclass(frozen=True)
class FisherDiagonal:
    """Mean squared per-sample gradients and, per parameter, the method by which they were computed.

    ``values``: float32 (float64 for float64 parameters), zeros for a parameter the loss does not depend on.
    ``paths``: "rule: conv2d", "recomputed: <functions or modules, or 'model'>" or "unused".
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

    The model runs in evaluation mode with frozen statistics and is left as it was found.

    Args:
        model: any module.
        batches: pairs (inputs, targets), inputs being a tensor, a tuple of positional or a dictionary of keyword
            arguments of the model; with ``model_loss``, anything that can be sliced.
        loss_fn: ``loss_fn(output, target)``. Sample i's loss is ``loss_fn(model(x[i:i+1]), y[i:i+1])``, so the
            reduction over a batch does not matter.
        model_loss: ``model_loss(model, batch)`` in place of ``loss_fn``; every sample runs alone.
        parameters: those to measure, by name. Default: all that require a gradient.
        labels: ``"data"``, or ``"sampled"`` from softmax(output) over dimension 1 (the true Fisher information).
        sample_labels: ``sample_labels(output, generator)`` in place of that draw.
        generator: of the draw.
        chunk: how many samples are measured at a time. Default: all of a batch, fewer where free memory is short.

    Examples:
        >>> diagonal = sparsesam.fisher_diagonal(model, loader, loss_fn)
        >>> diagonal.values["0.weight"].shape == model[0].weight.shape
        True
    """
    if chunk is not None:
        check_count("chunk", chunk, "None lets free memory decide")
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
        self.tried = 0  # samples in the batch on which the fast way was compared with the definition
        self.paths: dict[str, str] = {}
        self.repeated: set[nn.Module] = set()  # recorded as one call
        self.looped: set[str] = set(wanted) if problem.model_loss is not None else set()

    def add(self, batch: Any) -> None:
        size = batch_size(self.problem.inputs(batch))
        if size == 0:
            return
        if self.tried < min(size, 2):
            self.tried = min(size, 2)
            self._try(slice_batch(batch, slice(0, self.tried), size), self.tried)
        at_once = self.chunk or self._fitting(size)
        for start in range(0, size, at_once):
            stop = min(start + at_once, size)
            self._add_part(slice_batch(batch, slice(start, stop), size), stop - start)

    def _fitting(self, size: int) -> int:
        # Activations stay until their layer's gradient is there, which is as large.
        return fitting(size, 2 * self.sample_bytes, free_bytes(next(iter(self.wanted.values())).device))

    def _add_part(self, batch: Any, size: int) -> None:
        self.samples += size
        used = None if self.looped >= self.wanted.keys() else self._add_at_once(batch, size, self.sums, draw=True)
        chosen = {name: self.wanted[name] for name in self.wanted if name in self.looped}
        for i in range(size if chosen else 0):
            sample = slice_batch(batch if used is None else used, slice(i, i + 1), size)
            self._add_sample(sample, chosen, self.sums, draw=used is None)

    def result(self) -> FisherDiagonal:
        if self.samples == 0:
            raise ValueError("batches is empty; at least one sample is needed")
        values = {name: total / self.samples for name, total in self.sums.items()}
        for name, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteScoreError(
                    f"the Fisher information of {name!r} is not finite; the loss or its gradient overflows "
                    "at the current weights (lower the learning rate or rho, or measure in float32)"
                )
        paths = self.paths | dict.fromkeys(self.looped, "recomputed: model")
        return FisherDiagonal(values, {name: paths.get(name, "unused") for name in self.wanted}, self.samples)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p, dtype=_sum_dtype(p)) for name, p in self.wanted.items()}

    def _try(self, batch: Any, size: int) -> None:
        """Compare the fast way with autograd's gradients of one or two samples; what differs is left to the loop.

        Two samples show whether the model keeps samples apart.
        """
        if self.problem.model_loss is not None:
            return
        if self.problem.draw is not None:
            batch = self.problem.labelled(batch, self.problem.output(self.model, batch))
        expected = self._zeros()
        saved = SavedBytes([*self.model.parameters(), *self.model.buffers()])
        for i in range(size):
            with saved.counted() if i == 0 else nullcontext():
                self._add_sample(slice_batch(batch, slice(i, i + 1), size), self.wanted, expected, draw=False)
        self.sample_bytes = saved.total
        self.looped = self._failing(batch, size, expected)
        # A module that uses its parameters in other ways may still keep samples apart as a whole.
        self.repeated = self._holding(self.looped)
        if self.repeated:
            self.looped = self._failing(batch, size, expected)

    def _failing(self, batch: Any, size: int, expected: Mapping[str, Tensor]) -> set[str]:
        """The parameters for which the fast way does not give what is expected."""
        self.looped = set()
        found = self._zeros()
        try:
            self._add_at_once(batch, size, found, draw=False)
        except Exception:
            # Autograd has just differentiated these samples, so the recording is the cause.
            return set(self.wanted)
        return self.looped | _different(found, expected)

    def _holding(self, names: set[str]) -> set[nn.Module]:
        wanted = {id(self.wanted[name]) for name in names}
        inner = (module for module in self.model.modules() if module is not self.model)
        return {module for module in inner if any(id(own) in wanted for own in module._parameters.values())}

    def _add_sample(self, sample: Any, chosen: Mapping[str, Tensor], into: dict[str, Tensor], *, draw: bool) -> None:
        """The definition: the squared gradient of one sample's loss."""
        with requiring_grad(chosen.values()):
            _add_squared_gradients([self.problem.sample_loss(self.model, sample, draw=draw)], [None], chosen, into)

    def _add_at_once(self, batch: Any, size: int, into: dict[str, Tensor], *, draw: bool) -> Any | None:
        """Add the squares of all parameters but the looped ones. Returns the batch with the labels used."""
        recorder = Recorder(self.model, self.wanted, size, self.repeated)
        with recorder.watch():
            output = self.problem.output(self.model, batch)
            used = self.problem.labelled(batch, output) if draw else batch
            total = self._total_loss(output, used, size)
        changed = {name for name, uses in recorder.uses.items() if not all(use.is_unchanged() for use in uses)}
        # What the first samples did not use has not been compared.
        unknown = recorder.uses.keys() - self.paths.keys() if self.samples else set()
        self.looped |= recorder.mixed | changed | unknown
        if total is None:
            self.looped = set(self.wanted)
        for name in self.looped & recorder.uses.keys():
            recorder.done(name)
        try:
            if total is not None:
                self._backward(recorder, total, into)
        finally:
            recorder.release()
        return used

    def _total_loss(self, output: Any, batch: Any, size: int) -> Tensor | None:
        """Sum over the samples of their own losses; None where the output cannot be split into samples."""
        flat, structure = tree_flatten(output)
        if not all(leads_with(leaf, size) for leaf in flat if isinstance(leaf, Tensor)):
            return None
        # One split has one backward; slices would each fill a gradient of the whole output.
        parts = [leaf.split(1) if isinstance(leaf, Tensor) else (leaf,) * size for leaf in flat]
        losses = []
        for i in range(size):
            alone = tree_unflatten([part[i] for part in parts], structure)
            losses.append(self.problem.loss(alone, slice_batch(batch, slice(i, i + 1), size)))
        return torch.stack(losses).sum()

    def _backward(self, recorder: Recorder, total: Tensor, into: dict[str, Tensor]) -> None:
        """One backward for all samples; each rule runs as soon as the gradients for it are complete."""
        rules = {name: rule for name in recorder.uses if (rule := recorder.rule_of(name)) is not None}

        def finish(name: str) -> None:
            if name not in rules:
                return
            self.paths[name] = f"rule: {recorder.uses[name][0].name}"
            calls = recorder.calls_of(name)
            if calls:
                with torch.no_grad(), torch.autocast(total.device.type, enabled=False):
                    rules[name](calls, into[name])
            recorder.done(name)

        recorder.on_grads = finish
        if total.requires_grad and recorder.leaves:
            torch.autograd.grad(total, recorder.leaves, allow_unused=True)
        for name in list(recorder.uses):
            finish(name)
        self._repeat(recorder, into)

    def _repeat(self, recorder: Recorder, into: dict[str, Tensor]) -> None:
        """Calls without a rule: again, one sample at a time, for all parameters that they have in common."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, uses in recorder.uses.items():
            groups.setdefault(tuple(map(id, uses)), []).append(name)
        for names in groups.values():
            uses = recorder.uses[names[0]]
            squares = _repeated(uses, {name: self.wanted[name] for name in names}, recorder.size)
            if squares is None:
                self.looped.update(names)
            else:
                self.paths |= dict.fromkeys(names, f"recomputed: {', '.join(dict.fromkeys(use.name for use in uses))}")
            for name in names:
                into[name] += 0 if squares is None else squares[name]
                recorder.done(name)


def _repeated(uses: Sequence[Use], parameters: Mapping[str, Tensor], size: int) -> dict[str, Tensor] | None:
    """Squared per-sample gradients from the calls alone; None if they do not give again what they gave."""
    squares = {name: torch.zeros_like(one, dtype=_sum_dtype(one)) for name, one in parameters.items()}
    with requiring_grad(parameters.values()):
        for i in range(size):
            outputs: list[Tensor] = []
            grads: list[Tensor | None] = []
            for use in uses:
                try:
                    found = use.of_sample(i, size)
                except RuntimeError:  # of shapes: a tensor was taken for one of samples
                    return None
                for place, (grad, before) in enumerate(zip(use.grads, use.outputs, strict=True)):
                    if grad is None:
                        continue
                    if len(found) != len(use.grads) or not leads_with(grad, size):
                        return None
                    if not _close(found[place], before[i : i + 1]):
                        return None
                    outputs.append(found[place])
                    grads.append(grad[i : i + 1].to(found[place].dtype))
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


def _close(found: Tensor, expected: Tensor) -> bool:
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
