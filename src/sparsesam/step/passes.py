"""One step: what belongs to it, from its first pass to the base optimizer's update."""

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
from sparsesam.ascent.perturbation.explicit import is_usable
from sparsesam.ascent.perturbation.pieces import Target
from sparsesam.ascent.plan import ONE_PASS
from sparsesam.ascent.report import explicit_after_all
from sparsesam.ascent.statistics import Snapshot, statistics_of
from sparsesam.distributed import average_gradients, local_part, reshard, unsynchronized
from sparsesam.step.context import StepContext
from sparsesam.step.gradients import OldGradient, gradients_of, require_gradients
from sparsesam.step.parameters import PerturbedParam, PerturbedParams
from sparsesam.step.settings import StepKind


class Phase(enum.Enum):
    FIRST = enum.auto()  # the first pass runs
    BETWEEN = enum.auto()  # its gradients are there
    PERTURBED = enum.auto()  # weights are at w + e
    READY = enum.auto()  # weights are back, the gradient is that at w + e


class Step:
    """Made at the beginning of a step and gone at its end.

    ``params`` take part in the ascent, under ``masks`` (None: all of it). ``first`` tells what the first pass left
    out, the last of its blocks if it has several; None: nothing. ``closure_accumulates`` is the optimizer's.
    """

    def __init__(
        self, context: StepContext, kind: StepKind, params: PerturbedParams, *, closure_accumulates: bool
    ) -> None:
        self.context, self.kind, self.params = context, kind, params
        self.closure_accumulates = closure_accumulates
        self.masks = context.masks_of(params)
        self.phase = Phase.FIRST
        self.first: FirstPass | None = None
        self.has_every_gradient = True  # no block of the first pass left out a gradient
        self.ascent_failed = False
        self.is_empty = False  # the closure computed no gradient
        self.repeats = False  # a step of one pass runs again what a trainer ran before it

    @property
    def needs_first_pass(self) -> bool:
        """Whether it needs a first pass."""
        return self.context.settings.needs_first_pass(self.kind)

    def watch_gradients(self) -> OldGradient:
        """Watch what happens to gradients that are there now, of weights that the ascent moves."""
        return OldGradient([one.parameter for one in self.params if not self._target(one, one.parameter).is_still])

    # ---- first pass --------------------------------------------------------------------------------------

    def refresh_before_first_pass(self, batch: Any) -> None:
        """A mask that does not look at the ascent's gradient is made before it, so that the pass can be narrowed.

        Where nothing is left to be perturbed, the step is the base optimizer's.
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
        """The block is the first pass of the step, or a part of it, with whatever the engine may leave out."""
        settings, engine = self.context.settings, self.context.engine
        ddp = engine.ddp
        # A mask that is made from the gradient must be made from that of all ranks.
        is_local = settings.ascent_scope == "local" and not self.context.refresh_due(self.params)
        reason = self._why_plain()
        if reason is not None:
            engine.switched_off(reason)
            with unsynchronized(ddp if is_local else None):
                yield
            return
        no_reuse = None
        if settings.ascent_fraction < 1:
            no_reuse = "the ascent is on a part of the batch"
        elif self.first is not None:
            no_reuse = "several backward passes: activations of the first are not kept"
        with engine.first_pass(
            self.masks,
            settings.ascent,
            settings.norm,
            in_closure=in_closure,
            averages=not is_local,
            no_reuse=no_reuse,
        ) as first:
            if first is None and settings.is_implicit:
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
            if in_closure and first.backward.closure_goes_on:
                self.context.warn_once(
                    "the closure looked at gradients, which it did not do in the first step: under "
                    "DistributedDataParallel those of the first pass are this rank's own until the closure returns. "
                    "If it changes them, use engine=False"
                )

    def _why_plain(self) -> str | None:
        """Why this step's first pass must compute everything."""
        if not self.needs_first_pass:
            return "the step has only one pass"
        if self.context.is_joining:
            return "within Join, ranks that are out of inputs answer only the collectives of a whole backward"
        if self.context.refresh_due(self.params):
            return "the mask is made anew in this step, from its gradients"
        return None

    def require_unchanged(self, params: PerturbedParams) -> None:
        """Gradients that the first pass left out are not missing now, whatever takes part now."""
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
        """Within the block the weights are at w + e; on the way out they are back, exceptions included."""
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
            except BaseException:  # Ctrl-C on the way
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
        """The same, where gradients start from zero and what the first pass recorded is used again."""
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
            context.counters.skipped_ascents += not targets  # no gradient came through the unperturbed layers
            return
        norm = context.last_ascent_norm = self._norm(targets)
        context.has_last = context.settings.off_steps == "reuse"
        if isinstance(norm, Tensor):  # on a device, which follows the same rule without telling the host
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
                "opt.skipped_ascents. Expected now and then with a GradScaler; otherwise lower learning rate or rho."
            )

    def _is_still(self, targets: list[Target]) -> bool:
        """Whether nothing is to move, on any rank."""
        if self.params.shards is None:
            return all(target.is_still for target in targets)
        return self.context.masks.is_empty or all(one.rho == 0 for one in self.params)

    def _norm(self, targets: list[Target]) -> float | Tensor:
        """The norm of what the targets follow, over all parts of sharded ones."""
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
        # A momentum is of what the base minimizes, a gradient is of the loss; Momentum-SAM goes against the momentum.
        is_reversed = ascent == "momentum" if ascent in ONE_PASS else one.maximize
        weight = local_part(one.parameter)
        direction = local_part(direction, one.parameter)
        return Target(one.name, weight, direction, mask, -one.rho if is_reversed else one.rho, one.eta)

    @cached_property
    def _tracked(self) -> list[Target]:
        """Those of the last step, if it had the same parameters, options and masks."""
        context = self.context
        params, masks, tracked = context.tracked
        is_new = params is not self.params or masks is not context.masks.masks
        if is_new or self.params.shards is not None:
            targets = (self._target(one, one.parameter) for one in self.params)
            tracked = [target for target in targets if target.mask is None or not target.mask.is_empty]
            context.tracked = self.params, context.masks.masks, tracked
        return tracked

    def _check_implicit(self) -> None:
        """The first pass did send its gradient through the masks."""
        context, first, ascent = self.context, self.first, self.context.settings.ascent
        if first is None:
            if not context.refresh_due(self.params):
                raise RuntimeError(
                    f"ascent={ascent!r} did not see the first pass: in a loop with perturbed(), run it in "
                    "`with opt.first_pass():`"
                )
            require_gradients(context.base, "first")
            return
        if not first.layers_called and first.plan.sliced:
            raise RuntimeError(
                f"ascent={ascent!r} did not see the first pass: it must call the model itself that was given to "
                f"the optimizer, {type(context.model).__name__}, and its linear and convolution layers as modules"
            )
        if first.plan.is_partial and first.backward.is_complete:
            raise RuntimeError(
                f"ascent={ascent!r} needs one plain loss.backward() in the first pass: {first.backward.why_full}"
            )
        explicit = explicit_after_all(first)
        if explicit:
            context.warn_once(
                f"ascent={ascent!r} acts in calls of linear and convolution layers: the ascent was explicit for "
                f"{', '.join(explicit[:5])}{' and more' if len(explicit) > 5 else ''}"
            )

    # ---- update ------------------------------------------------------------------------------------------

    def update(self) -> None:
        """The base optimizer's update, kept where the next step extrapolates it."""
        context = self.context
        require_gradients(context.base, "second")
        context.gradients.stop_waiting()
        if self.ascent_failed and not all(bool(gradient.isfinite().all()) for gradient in gradients_of(context.base)):
            context.skip_step("both gradients of a step are not finite: the weights are left alone (opt.skipped_steps)")
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
