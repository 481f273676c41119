"""One step, from its first pass to the base optimizer's update."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsesam.ascent.first_pass import FirstPass
from sparsesam.ascent.kinds import ONE_PASS
from sparsesam.ascent.perturbation.explicit import is_usable
from sparsesam.ascent.perturbation.pieces import Target
from sparsesam.ascent.report import layers_left_explicit
from sparsesam.distributed.ddp import average_gradients, unsynchronized
from sparsesam.distributed.shards import local_part, reshard
from sparsesam.step.context import StepContext
from sparsesam.step.gradients import OldGradient, gradients_of, require_gradients
from sparsesam.step.parameters import PerturbedParam, PerturbedParams
from sparsesam.step.settings import StepKind
from sparsesam.utils.restore import Snapshot, statistics_of


class Phase(enum.Enum):
    FIRST = enum.auto()  # the first pass is running
    BETWEEN = enum.auto()  # the first pass is done
    PERTURBED = enum.auto()  # weights are at w + e
    READY = enum.auto()  # weights are at w again, gradients are those at w + e


class Step:
    """The state of one step: created at its beginning, dropped at its end.

    ``params`` are perturbed under ``masks`` (None: the whole parameter). ``first`` records what the first pass left
    out, or its last block if it has several; None: nothing. ``closure_accumulates`` is the optimizer's attribute.
    """

    def __init__(
        self, context: StepContext, kind: StepKind, params: PerturbedParams, *, closure_accumulates: bool
    ) -> None:
        self.context, self.kind, self.params = context, kind, params
        self.closure_accumulates = closure_accumulates
        self.masks = context.masks_of(params)
        self.phase = Phase.FIRST
        self.first: FirstPass | None = None
        self.has_every_gradient = True  # the first pass has left out no gradient
        self.ascent_failed = False
        self.is_empty = False  # the closure computed no gradient
        self.repeats = False  # a trainer reruns earlier micro-batches in a one-pass step

    @property
    def needs_first_pass(self) -> bool:
        """Whether the step needs a gradient at w."""
        return self.context.settings.needs_first_pass(self.kind)

    def watch_gradients(self) -> OldGradient:
        """Watch the existing gradients of the weights that the ascent moves."""
        return OldGradient([one.parameter for one in self.params if not self._target(one, one.parameter).is_still])

    # ---- first pass --------------------------------------------------------------------------------------

    def refresh_before_first_pass(self, batch: Any) -> None:
        """Refresh a mask that does not need the ascent gradient, so that the first pass can be narrowed to it.

        If nothing is left to perturb, the step becomes a plain step of the base optimizer.
        """
        context = self.context
        if not self.needs_first_pass:
            return
        if context.refresh_due(self.params):
            if context.masks.needs_gradient:
                return
            context.refresh(self.params, batch)
            self.masks = context.masks_of(self.params)
        if self._is_still([self._target(one, one.parameter) for one in self.params]):
            self.kind = StepKind.PLAIN

    @contextmanager
    def first_pass(self, *, in_closure: bool) -> Iterator[None]:
        """Run the block as the first pass, or a part of it; the engine leaves out what is not needed."""
        settings, engine = self.context.settings, self.context.engine
        ddp = engine.ddp
        # A mask computed from the gradient needs the gradient averaged over all ranks.
        is_local = settings.ascent_scope == "local" and not self.context.refresh_due(self.params)
        off, no_reuse = self._why_plain(), None
        if settings.ascent_fraction < 1:
            no_reuse = "the ascent uses only a part of the batch"
        elif self.first is not None:
            no_reuse = "several backward passes: activations of the first are not kept"
        with engine.first_pass(
            self.masks,
            settings.ascent,
            settings.norm,
            in_closure=in_closure,
            averages=not is_local,
            no_reuse=no_reuse,
            off=off,
        ) as first:
            if first is None and settings.is_implicit and off is None:
                raise ValueError(f"ascent={settings.ascent!r} needs the engine, which is off: {engine.why_not}")
            averages = first is not None and first.averages and not is_local
            with unsynchronized(ddp if averages or is_local else None):
                yield
                if first is not None:
                    first.closure_returns()
        self.first = first
        self.has_every_gradient &= first is None or first.backward.is_complete
        if averages and first is not None and ddp is not None:
            average_gradients(ddp, first.plan.needed)
            if in_closure and first.backward.closure_continues:
                self.context.warn_once(
                    "the closure read gradients, which it did not do in the first step: under "
                    "DistributedDataParallel the gradients of the first pass are not averaged over the ranks until "
                    "the closure returns. If the closure changes them, use engine=False"
                )

    def _why_plain(self) -> str | None:
        """Returns why the first pass of this step must compute every gradient; None: it need not."""
        if not self.needs_first_pass:
            return "the step has only one pass"
        if self.context.is_joining:
            return "within Join, ranks without inputs only take part in the collectives of a full backward pass"
        if self.context.refresh_due(self.params):
            return "the mask is refreshed from the gradients of this step"
        return None

    def require_unchanged(self, params: PerturbedParams) -> None:
        """Use the current params and masks; raise if they need gradients that the first pass left out."""
        masks = self.context.masks_of(params)
        same = self.masks.keys() == masks.keys() and all(self.masks[name] is mask for name, mask in masks.items())
        if not self.has_every_gradient and (not same or self.context.masks.asked):
            raise RuntimeError(
                "masks or parameter groups changed between first_pass() and perturbed(), and gradients of the newly "
                "perturbed weights were not computed; make such changes before first_pass()"
            )
        self.params, self.masks = params, masks

    # ---- to w + e and back -------------------------------------------------------------------------------

    @contextmanager
    def perturbed(self, batch: Any, *, statistics_return: bool) -> Iterator[None]:
        """Within the block the weights are at w + e; on exit, exceptions included, they are restored."""
        self.phase = Phase.PERTURBED
        statistics = statistics_of(self.context.model.modules()) if statistics_return else []
        written = Snapshot([*self.params.renormalized, *statistics])
        completed = False
        try:
            self._ascend(batch)
            if self.params.shards is not None:
                reshard(self.context.model)
            yield
            completed = True
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error) and sys.version_info >= (3, 11):
                error.add_note(
                    "sparsesam: the weights were moved to w + e between the passes; the second pass must run its "
                    "own forward instead of a graph kept from the first."
                )
            raise
        finally:
            try:
                self._return(written)
            except BaseException:  # Ctrl-C while restoring
                self._return(written)
                raise
            self.phase = Phase.READY if completed else Phase.BETWEEN

    def _return(self, written: Snapshot) -> None:
        self.context.perturbation.undo()
        if self.context.extrapolation is not None:
            self.context.extrapolation.undo()
        if self.params.shards is not None:
            reshard(self.context.model)
        written.restore()

    @contextmanager
    def second_pass(self, batch: Any, *, statistics_return: bool) -> Iterator[None]:
        """Like `perturbed`, with gradients cleared and the outputs that the first pass recorded reused."""
        with self.perturbed(batch, statistics_return=statistics_return):
            self.context.gradients.clear()
            with self.context.engine.second_pass(self.first):
                yield

    @torch.no_grad()
    def _ascend(self, batch: Any) -> None:
        context = self.context
        if self.kind is StepKind.PLAIN:
            return
        if self.kind is StepKind.REUSE:
            context.perturbation.apply_last([self._target(one, one.parameter) for one in self.params])
            return
        if context.settings.is_implicit:
            self._check_implicit()
        elif self.needs_first_pass and self.has_every_gradient:
            require_gradients(context.base, "first")
        if context.refresh_due(self.params):
            if context.awaits_momentum(self.params):
                return
            context.refresh(self.params, batch)
            self.masks = context.masks_of(self.params)
        if context.extrapolation is not None:
            is_moved = context.extrapolation.move(self._tracked)
            context.counters.skipped_ascents += not is_moved and any(target.rho for target in self._tracked)
            return
        directions = context.directions(self.params)
        targets = [self._target(one, directions[one.name]) for one in self.params if one.name in directions]
        if self._is_still(targets):
            # Some weights are to be moved, and none of them has a gradient.
            context.counters.skipped_ascents += any(
                not self._target(one, one.parameter).is_still for one in self.params
            )
            return
        norm = context.last_ascent_norm = self._norm(targets)
        context.has_last = context.settings.off_steps == "reuse"
        if isinstance(norm, Tensor):  # on a device: the same rule, without synchronizing
            context.perturbation.apply(targets, norm)
            context.counters.skip_where(~is_usable(norm))
            return
        if norm > 0 and math.isfinite(norm):
            context.perturbation.apply(targets, norm)
            return
        context.counters.skipped_ascents += 1
        context.has_last = bool(context.perturbation.last)
        self.ascent_failed = norm != 0
        if self.ascent_failed:
            context.warn_once(
                f"the ascent gradient's norm is {norm}: this step is taken without perturbation and counted in "
                "opt.skipped_ascents. Expected at times with a GradScaler; otherwise lower the learning rate or rho."
            )

    def _is_still(self, targets: list[Target]) -> bool:
        """Whether no weight moves, on any rank."""
        if self.params.shards is None:
            return all(target.is_still for target in targets)
        return self.context.masks.is_empty or all(one.rho == 0 for one in self.params)

    def _norm(self, targets: list[Target]) -> float | Tensor:
        """Returns the norm of the targets' directions, over all ranks if they are sharded."""
        context = self.context
        shards = self.params.shards
        if shards is None:
            return context.perturbation.norm(targets, context.settings.norm)
        counted = set(shards.counted(target.name for target in targets))
        own = context.perturbation.norm([t for t in targets if t.name in counted], context.settings.norm)
        return shards.norm(own)

    def _target(self, one: PerturbedParam, direction: Tensor) -> Target:
        ascent = self.context.settings.ascent
        mask = None if ascent == "implicit-dense" else self.masks[one.name]
        # maximize reverses a gradient; a momentum consists of reversed ones already. Momentum-SAM goes against it.
        is_reversed = ascent == "momentum" if ascent in ONE_PASS else one.maximize
        weight = local_part(one.parameter)
        direction = local_part(direction, one.parameter)
        return Target(one.name, weight, direction, mask, -one.rho if is_reversed else one.rho, one.eta)

    @cached_property
    def _tracked(self) -> list[Target]:
        """The targets to extrapolate: those of the last step, if parameters, options and masks are the same."""
        context = self.context
        params, masks, tracked = context.tracked
        is_new = params is not self.params or masks is not context.masks.masks
        if is_new or self.params.shards is not None:
            targets = (self._target(one, one.parameter) for one in self.params)
            tracked = [target for target in targets if target.mask is None or not target.mask.is_empty]
            context.tracked = self.params, context.masks.masks, tracked
        return tracked

    def _check_implicit(self) -> None:
        """Raise unless the first pass computed its gradients through the masked weights."""
        context, first, ascent = self.context, self.first, self.context.settings.ascent
        if first is None:
            if not context.refresh_due(self.params):
                raise RuntimeError(
                    f"ascent={ascent!r} did not see the first pass: in a loop with perturbed(), run it in "
                    "`with opt.first_pass():`"
                )
            require_gradients(context.base, "first")
            return
        if not first.layers_called and first.plan.implicit:
            raise RuntimeError(
                f"ascent={ascent!r} did not see the first pass: it must call the model itself that was given to "
                f"the optimizer, {type(context.model).__name__}, and its linear and convolution layers as modules"
            )
        if first.plan.is_partial and first.backward.is_complete:
            raise RuntimeError(
                f"ascent={ascent!r} needs one plain loss.backward() in the first pass: {first.backward.why_full}"
            )
        explicit = layers_left_explicit(first)
        if explicit:
            context.warn_once(
                f"ascent={ascent!r} acts in calls of linear and convolution layers: the ascent was explicit for "
                f"{', '.join(explicit[:5])}{' and more' if len(explicit) > 5 else ''}"
            )

    # ---- update ------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Run the base optimizer's update, and record it if the next step extrapolates it."""
        context = self.context
        require_gradients(context.base, "second")
        context.gradients.stop_waiting()
        if self.ascent_failed and not all(bool(gradient.isfinite().all()) for gradient in gradients_of(context.base)):
            context.skip_step("both gradients of a step are not finite: weights are not updated (opt.skipped_steps)")
            return
        if context.extrapolation is None:
            context.base.step()
        else:
            next_kind = context.settings.kind_of(context.counters.steps + 1, has_last=False)
            tracked = self._tracked if next_kind is StepKind.ASCEND else []
            context.extrapolation.save(tracked)
            context.base.step()
            context.extrapolation.record(tracked)
        if not self.needs_first_pass:
            context.gradients.note_used(self.params)
        context.counters.steps += 1
