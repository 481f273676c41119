"""Runs a closure once for each pass of a step."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sparsesam.step.gradients import OldGradient, OutsideGradients, Treatment, gradients_of
from sparsesam.step.passes import Phase, Step
from sparsesam.step.settings import StepKind
from sparsesam.utils.batches import batch_size, slice_batch
from sparsesam.utils.restore import Snapshot, statistics_of

Closure = Callable[..., Any]
Pass = Callable[[Any], Any]  # a call of the closure with a batch or a part of it


def run_closure(step: Step, closure: Closure, batch: Any) -> Any:
    """Call the closure once for each pass of the step.

    Returns the loss at w; the loss at w + e if that pass is the only one, or the only one on the whole batch.
    """
    with torch.enable_grad():
        return _without_graph(_run_passes(step, closure, batch))


def _run_passes(step: Step, closure: Closure, batch: Any) -> Any:
    takes_batch = batch is not None and _has_parameter(closure)

    def run(part: Any) -> Any:
        return closure(part) if takes_batch else closure()

    fraction = step.context.settings.ascent_fraction
    step.refresh_before_first_pass(batch)
    if step.kind is StepKind.PLAIN:
        loss = run(batch)
        step.phase = Phase.READY
        step.is_empty = loss is None and not _has_gradients(step)
        return loss
    if not step.needs_first_pass:
        return _only_pass(step, run, batch)
    if fraction < 1 and not takes_batch:
        raise ValueError(
            f"batch must be given with ascent_fraction={fraction}, and the closure must take it: "
            "opt.step(closure, batch=(x, y)) with def closure(batch): ..."
        )
    rng = step.context.rng.read()
    here = _first_pass(step, run, batch)
    if step.is_empty:
        return here
    with step.second_pass(batch, statistics_return=fraction == 1):
        step.context.rng.write(rng)
        there = run(batch)
    step.is_empty = there is None and not _has_gradients(step)
    # The loss, like the running statistics, is that of the whole batch.
    return here if fraction == 1 else there


def _only_pass(step: Step, run: Pass, batch: Any) -> Any:
    """Run the only pass of a one-pass step, at w + e."""
    context = step.context
    may_clear = step.closure_accumulates or context.gradients.are_used(step.params)
    old = None if may_clear else OldGradient([one.parameter for one in step.params])
    try:
        with step.perturbed(batch, statistics_return=False):
            if old is None:
                context.gradients.clear()
            loss = run(batch)
    finally:
        if old is not None:
            old.release()
    if old is not None:
        _check_gradients(step, old.treatment(), loss)
    step.is_empty |= (loss is None or context.counters.steps > 0) and not _has_gradients(step)
    return loss


def _first_pass(step: Step, run: Pass, batch: Any) -> Any:
    context, part, statistics = step.context, batch, None
    if context.settings.ascent_fraction < 1:
        # The running statistics are updated by the second pass, which sees the whole batch.
        size = batch_size(batch)
        part = slice_batch(batch, slice(0, max(1, math.ceil(context.settings.ascent_fraction * size))), size)
        statistics = Snapshot(statistics_of(context.model.modules()))
    old = step.watch_gradients()
    try:
        with OutsideGradients(context.model, context.base), step.first_pass(in_closure=True):
            loss = run(part)
    finally:
        old.release()
    _check_gradients(step, old.treatment(), loss)
    if statistics is not None:
        statistics.restore()
    return _without_graph(loss)  # otherwise it would keep activations during the second pass


def _check_gradients(step: Step, treatment: Treatment, loss: Any) -> None:
    """Raise for a closure that adds to existing gradients; mark the step as empty if the closure computes none."""
    accumulates = step.closure_accumulates
    if treatment is Treatment.ADDED_TO and not accumulates:
        raise RuntimeError(
            "the closure accumulated into existing gradients, but at w + e only the closure's own gradients are "
            "computed, not the accumulated ones. Clear them in the closure (opt.zero_grad()), or to accumulate: in "
            "Lightning, callbacks=[sparsesam.integrations.lightning.AccumulatedAscent()]; in a loop of your own, run "
            "all micro-batches in the first pass and again in `with opt.perturbed():`; for the closures of "
            "davda54/sam and pytorch-optimizer, use sparsesam.compat.SAM"
        )
    untouched = treatment is Treatment.UNTOUCHED and not accumulates
    step.is_empty = untouched or (loss is None and step.has_every_gradient and not _has_gradients(step))


def run_empty_closure(step: Step, closure: Closure) -> Any:
    """Call a closure that computes nothing: Lightning's manual optimization passes one after perturbed()."""
    old = step.watch_gradients()
    try:
        with torch.enable_grad():
            result = _without_graph(closure())
    finally:
        old.release()
    if old.treatment() is not Treatment.UNTOUCHED:
        raise RuntimeError(
            "step(closure) after perturbed(): the gradient at w + e already exists; call step() without a closure, "
            "or leave both passes to step(closure)"
        )
    return result


def _has_gradients(step: Step) -> bool:
    return next(gradients_of(step.context.base), None) is not None


def _without_graph(result: Any) -> Any:
    return result.detach() if isinstance(result, Tensor) else tree_map(_detached, result)


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if not isinstance(leaf, dict | list):
        return leaf
    # torch's pytrees treat a dict or list subclass as a leaf unless it is registered.
    copied = copy.copy(leaf)
    for key, value in list(leaf.items() if isinstance(leaf, dict) else enumerate(leaf)):
        copied[key] = _without_graph(value)
    return copied


def _has_parameter(closure: Closure) -> bool:
    """Whether the closure takes the batch; a closure for torch.optim takes no argument."""
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(closure).parameters.values()
    )
