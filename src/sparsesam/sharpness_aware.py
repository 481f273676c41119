"""The two-phase step around any other optimizer: ascend to w + e, take the gradient there, step from w."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from sparsesam.ascent.engine import Engine
from sparsesam.ascent.explicit import Perturbation, Target, ascent_norm
from sparsesam.ascent.extrapolation import Extrapolation, TrackedWeight
from sparsesam.ascent.momentum import momentum_of, require_momentum, require_momentum_setting
from sparsesam.ascent.plan import ONE_PASS, Ascent, Norm
from sparsesam.ascent.renormalized import RenormalizedWeights
from sparsesam.ascent.report import explicit_after_all
from sparsesam.ascent.rng import RNGState
from sparsesam.ascent.statistics import StatisticsSnapshot, versions
from sparsesam.ascent.subset import AscentSubset
from sparsesam.ascent.tensors import map_tensors
from sparsesam.ascent_schedule import AscentSchedule, StepKind
from sparsesam.closures import with_batch
from sparsesam.distributed import average_gradients, is_sharded, unsynchronized
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext
from sparsesam.masks.state import MaskState
from sparsesam.parameters import OutsideGradients, PerturbedParam, check_group, named, option_keys
from sparsesam.schedules import RhoSchedule
from sparsesam.step import Phase, Step
from sparsesam.wrapper import OptimizerWrapper

AscentScope = Literal["global", "local"]

_CHECKPOINT_VERSION = 1

#: Attributes that go into a checkpoint, beside the base optimizer's state and the masks.
PERSISTED = ("steps", "skipped_ascents", "skipped_steps")
#: Attributes that a copy of the optimizer takes along and a checkpoint does not.
CONFIGURATION = (
    *("base", "model", "defaults", "norm", "ascent", "rho_schedule", "schedule", "ascent_fraction", "ascent_scope"),
    *("_mask_state", "_engine_enabled", "_wrapped"),
)
# All others belong to one step of one process and are made by `_start`.


class SharpnessAware(OptimizerWrapper):
    """The two-phase step. `SAM` and `SSAM` are the ones to use; see their docstrings."""

    _step: Step | None  # the one that is under way

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        *,
        rho: float,
        mask: MaskRule | None,
        adaptive: bool | Literal["all"],
        eta: float,
        norm: Norm,
        ascent: Ascent,
        rho_schedule: RhoSchedule | None,
        schedule: AscentSchedule,
        ascent_fraction: float,
        ascent_scope: AscentScope,
        engine: bool,
    ) -> None:
        _check_choice("norm", norm, ("full", "masked"))
        _check_choice("ascent", ascent, get_args(Ascent))
        _check_choice("ascent_scope", ascent_scope, get_args(AscentScope))
        if ascent_scope == "local" and not isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                'model must be the DistributedDataParallel itself with ascent_scope="local", got '
                f"{type(model).__name__}"
            )
        if not 0 < ascent_fraction <= 1:
            raise ValueError(f"ascent_fraction must be in (0, 1], got {ascent_fraction}; the paper tries 0.25")
        if ascent in ONE_PASS and (ascent_fraction < 1 or schedule.off_steps == "reuse"):
            what = f"ascent_fraction={ascent_fraction}" if ascent_fraction < 1 else 'off_steps="reuse"'
            raise ValueError(f"{what} has no use with ascent={ascent!r}, which takes no pass of its own; leave it out")
        if ascent == "implicit" and norm == "full":
            raise ValueError(
                'norm must be "masked" with ascent="implicit", got "full": gradients outside the mask are not computed'
            )
        if mask is not None and mask.needs_masked_norm and norm == "full":
            raise ValueError(
                f'norm must be "masked" with {type(mask).__name__}, got "full": the norm of every gradient costs what '
                "the mask is to save"
            )
        super().__init__(base, model, {"rho": rho, "adaptive": adaptive, "eta": eta, "perturb": True})
        if ascent in ("momentum", "momentum-climbing"):
            require_momentum_setting(base)
        self.norm: Norm = norm
        self.ascent: Ascent = ascent
        self.rho_schedule = rho_schedule
        self.schedule = schedule
        self.ascent_fraction = ascent_fraction
        self.ascent_scope: AscentScope = ascent_scope
        self.steps = 0
        self.skipped_ascents = 0
        self.skipped_steps = 0
        self._mask_state = None if mask is None else MaskState(mask)
        self._engine_enabled = engine
        self._wrapped = weakref.ref(model)
        self._start()

    # ---- what the user sees ------------------------------------------------------------------------------

    @property
    def masks(self) -> dict[str, Tensor]:
        """The current masks, ``{parameter name: bool tensor}``; empty before a mask's first use."""
        if self._mask_state is None:
            return {p.name: torch.ones_like(p.parameter, dtype=torch.bool) for p in self._perturbed_params()}
        return {name: mask.unpack() for name, mask in (self._mask_state.masks or {}).items()}

    @property
    def mask(self) -> MaskRule | None:
        """The rule that the masks come from."""
        return None if self._mask_state is None else self._mask_state.rule

    @property
    def sparsity(self) -> float | None:
        """The share of weights that the current masks leave alone; None before a mask's first use."""
        return 0.0 if self._mask_state is None else self._mask_state.sparsity

    @property
    def needs_first_pass(self) -> bool:
        """Whether the coming step needs a gradient at w before ``perturbed()``."""
        return self._takes_first_pass(self._kind)

    @property
    def in_second_pass(self) -> bool:
        """Whether the weights are at w + e: metrics of such a pass are not those of the model."""
        return self._step is not None and self._step.phase is Phase.PERTURBED

    @property
    def skipped_refreshes(self) -> int:
        """How often a mask was kept because its scores were not finite."""
        return 0 if self._mask_state is None else self._mask_state.skipped

    @_disable_dynamo  # as torch.optim does; compiled, the weights would be moved twice
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        batch: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Take one step.

        With a closure (clear, compute, backward, return the loss), both passes run here, with the same random
        numbers, and the loss at w is returned, without its graph. It is the one at w + e where only that pass sees
        the whole batch: with ``ascent_fraction`` below 1, and in a step that has no other pass. The closure is called
        once for each pass. Without one, the two passes must have run already, the second inside ``perturbed()``.

        ``batch`` is for a mask that takes its Fisher from the current batch, and for ``ascent_fraction``: a closure
        that has a parameter is called with the batch, or with the ascent's part of it. ``scaler`` is for a closure
        that scales its loss; call ``scaler.update()`` afterwards, as usual.
        """
        if self.in_second_pass:
            raise RuntimeError("step() inside perturbed() would update the weights at w + e; call it after the block")
        if closure is None:
            if self._step is None or self._step.phase is not Phase.READY:
                raise RuntimeError(
                    "step() needs a gradient at w + e: pass a closure, or run the second pass in "
                    "`with opt.perturbed(): loss_fn(model(x), y).backward()` before step()"
                )
            self._descend(self._step)
            return None
        step = self._begin()
        loss = self._passes(step, with_batch(closure, batch), batch)
        if scaler is None:
            self._descend(step)
        else:
            scaler.step(self)
        return loss

    @contextmanager
    def first_pass(self, *, batch: Any = None) -> Iterator[None]:
        """Within the block, ``loss.backward()`` computes only the gradients that the ascent needs.

        For loops with ``perturbed()``: run the forward and the backward of the first pass in this block, and the
        engine may leave out what the mask makes unnecessary, here and in the second pass. Without it, nothing is
        left out. Gradients of unperturbed weights are not there afterwards. Micro-batches may share a block or have
        one each.
        """
        step = self._step
        if (
            step is not None
            and step.phase is Phase.BETWEEN
            and any(one.parameter.grad is not None for one in step.params)
        ):
            self._require_unchanged(step)
            step.phase = Phase.FIRST
        else:
            step = self._begin()
        with self._discarded_on_error():
            if step.first is None:
                self._refresh_before_first_pass(step, batch)
            with self._first_pass(step, in_closure=False):
                yield
        step.phase = Phase.BETWEEN

    @contextmanager
    def perturbed(self, *, batch: Any = None) -> Iterator[None]:
        """Within the block the weights are at w + e and gradients start from zero; run the second pass there.

        On the way out, exceptions included, the weights are back bit for bit and normalization statistics are
        those of the first pass.
        """
        if self.ascent_fraction < 1:
            raise ValueError(
                f"ascent_fraction={self.ascent_fraction} needs opt.step(closure, batch=...); in a loop with "
                "perturbed() leave it at 1 and run your first pass on a part of the batch"
            )
        if self.in_second_pass:
            raise RuntimeError("perturbed() must not be entered twice; leave the first block before the next ascent")
        step = self._step
        if step is None or step.phase is not Phase.BETWEEN:
            step = self._begin()
            self._engine.switched_off("the first pass was not in `with opt.first_pass():`")
        self._require_unchanged(step)
        after_first_pass = self._takes_first_pass(step.kind) or versions(self.model) != self._statistics_at
        with self._discarded_on_error(), self._excursion(step, batch, statistics_return=after_first_pass):
            self.zero_grad()
            with self._engine.second_pass(step.first):
                yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._step is not None and self._step.phase in (Phase.BETWEEN, Phase.READY):
            self._step = None  # its gradient is gone

    def refresh_mask(self, *, now: bool = False, batch: Any = None) -> None:
        """Make the mask anew in the next ascent, or ``now`` (for SSAM-D, after a backward pass)."""
        if self._mask_state is None:
            raise RuntimeError("refresh_mask() needs a mask; SAM perturbs every weight")
        self._mask_state.asked = True
        if now:
            if self._step is not None and not self._step.has_every_gradient and self._mask_state.rule.needs_gradient:
                raise RuntimeError("refresh_mask(now=True) needs every gradient; call it outside of a first_pass()")
            self._refresh(self._perturbed_params(), batch)

    def engine_report(self) -> dict[str, str]:
        """What the last step did not have to compute, by parameter; under "engine", whether and why (not)."""
        return self._engine.report()

    def _mode(self, name: str) -> Callable[[], None]:
        switch = super()._mode(name)
        if self.in_second_pass:
            raise RuntimeError(
                f"{name}() inside perturbed() would move weights that are at w + e; call it after the block"
            )
        return switch

    # ---- checkpoints and copies --------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {key: getattr(self, key) for key in PERSISTED}
        own["version"] = _CHECKPOINT_VERSION
        own["mask"] = None if self._mask_state is None else self._mask_state.state_dict()
        own["last_perturbation"] = dict(self._perturbation.last)
        own["last_update"] = dict(self._extrapolation.updates)
        return own

    def _check_own_state(self, own: dict[str, Any]) -> None:
        if own.get("version") != _CHECKPOINT_VERSION:
            raise ValueError(
                f"state_dict['sparsesam'] must be of version {_CHECKPOINT_VERSION}, got {own.get('version')}; "
                "load it with the sparsesam that wrote it"
            )
        if (own["mask"] is None) != (self._mask_state is None):
            saved, mine = ("SAM", "SSAM") if own["mask"] is None else ("SSAM", "SAM")
            raise ValueError(f"state_dict is of {saved}, but this optimizer is {mine}; load it into the same kind")
        if self._mask_state is not None:
            self._mask_state.check_state_dict(own["mask"], self.model)

    def _load_own_state(self, own: dict[str, Any] | None) -> None:
        if own is None:
            for key in PERSISTED:
                setattr(self, key, 0)
            if self._mask_state is not None:
                self._mask_state = MaskState(self._mask_state.rule)
            self._start()
            return
        if self._mask_state is not None:
            self._mask_state.load_state_dict(own["mask"], self.model)
        for key in PERSISTED:
            setattr(self, key, own[key])
        self._start(
            {name: e.clone() for name, e in own["last_perturbation"].items()},
            {name: update.clone() for name, update in own.get("last_update", {}).items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        if self.in_second_pass:
            raise RuntimeError("an optimizer cannot be copied inside perturbed(): its weights are at w + e")
        kept = {key: self.__dict__[key] for key in (*CONFIGURATION, *PERSISTED)}
        # A copy belongs to the copied model, whatever that will be wrapped in.
        last = {"last_perturbation": self._perturbation.last, "last_update": self._extrapolation.updates}
        return {**last, **kept, "_wrapped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        last, updates = state.pop("last_perturbation"), state.pop("last_update")
        super().__setstate__(state)
        self._names = named(self.model, self.base)
        self._start(last, updates)

    def _start(
        self, last_perturbation: dict[str, Tensor] | None = None, last_update: dict[str, Tensor] | None = None
    ) -> None:
        """Everything that belongs to one process: a copy or a loaded checkpoint begins here too."""
        self._step = None
        self._warned: set[str] = set()
        self._perturbation = Perturbation(remember=self.schedule.off_steps == "reuse")
        self._perturbation.last = last_perturbation or {}
        devices = {name: parameter.device for parameter, name in self._names.items()}
        self._extrapolation = Extrapolation(
            {name: update.to(devices[name]) for name, update in (last_update or {}).items() if name in devices}
        )
        self._rng = RNGState(self.model.parameters())
        wrapped = None if self._wrapped is None else self._wrapped()
        self._engine = Engine(self.model, wrapped or self.model, enabled=self._engine_enabled)
        self._statistics_at = versions(self.model)

    # ---- a step ------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> StepKind:
        return self.schedule.kind(self.steps, has_last=bool(self._perturbation.last))

    def _takes_first_pass(self, kind: StepKind) -> bool:
        return kind is StepKind.ASCEND and self.ascent not in ONE_PASS

    def _begin(self) -> Step:
        """List and check once what takes part in the coming step."""
        if self.in_second_pass:
            raise RuntimeError("a step must not begin inside perturbed(): the weights are at w + e")
        params = self._perturbed_params()
        if self.rho_schedule is not None:
            keys = option_keys(self.base)
            rho, first = keys["rho"], f"initial_{keys['rho']}"
            for group in self.param_groups:
                group.setdefault(first, group[rho])
                group[rho] = group[first] * self.rho_schedule(self.steps + 1)
                check_group(group, keys)
        self._extrapolation.begin()
        self._step = Step(self._kind, params, self._masks_of(params))
        return self._step

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._step = None
            raise

    def _passes(self, step: Step, call: Callable[[Any], Any], batch: Any) -> Any:
        """Both passes of a closure; the loss at w, or where there is only one pass, that of the pass."""
        with self._discarded_on_error():
            self._refresh_before_first_pass(step, batch)
            if step.kind is StepKind.PLAIN:
                with torch.enable_grad():
                    loss = call(batch)
                step.phase = Phase.READY
                return map_tensors(Tensor.detach, loss)
            here = rng = None
            climbs = self._takes_first_pass(step.kind)
            if climbs:
                rng = self._rng.read()
                here = self._closure_first_pass(step, call, batch)
            with self._excursion(step, batch, statistics_return=climbs and self.ascent_fraction == 1):
                self.zero_grad()
                if rng is not None:
                    self._rng.write(rng)
                with self._engine.second_pass(step.first), torch.enable_grad():
                    there = map_tensors(Tensor.detach, call(batch))
            # Like the normalization statistics, the loss is of the whole batch.
            return here if climbs and self.ascent_fraction == 1 else there

    def _closure_first_pass(self, step: Step, call: Callable[[Any], Any], batch: Any) -> Any:
        part, statistics = batch, None
        if self.ascent_fraction < 1:
            if batch is None or not getattr(call, "takes_batch", False):
                raise ValueError(
                    f"batch must be given with ascent_fraction={self.ascent_fraction}, and the closure must take it: "
                    "opt.step(closure, batch=(x, y)) with def closure(batch): ..."
                )
            # Normalization statistics are those of the whole batch, which the second pass sees.
            part, statistics = AscentSubset.of(batch, self.ascent_fraction).part, StatisticsSnapshot(self.model)
        outside = OutsideGradients(self.model, self.base)
        with self._first_pass(step, in_closure=True), torch.enable_grad():
            loss = map_tensors(Tensor.detach, call(part))
        outside.restore()
        if statistics is not None:
            statistics.restore()
        return loss

    @contextmanager
    def _first_pass(self, step: Step, *, in_closure: bool) -> Iterator[None]:
        """The block is the first pass of the step, with whatever the engine may leave out."""
        ddp = self._engine.ddp
        is_local = self.ascent_scope == "local"
        reason = self._why_plain(step)
        if reason is not None:
            self._engine.switched_off(reason)
            with unsynchronized(ddp if is_local else None):
                yield
            return
        no_reuse = None
        if self.ascent_fraction < 1:
            no_reuse = "the ascent is on a part of the batch"
        elif step.first is not None:
            no_reuse = "several backward passes: activations of the first are not kept"
        with self._engine.first_pass(
            step.masks, self.ascent, self.norm, in_closure=in_closure, no_reuse=no_reuse
        ) as first:
            if first is None:
                self._refuse_implicit()
            averages = first is not None and first.plan.is_partial and not is_local
            with unsynchronized(ddp if averages or is_local else None):
                yield
        step.passed(first)
        if averages and first is not None and ddp is not None:
            average_gradients(ddp, first.plan.needed)

    def _why_plain(self, step: Step) -> str | None:
        """Why this step's first pass must compute everything."""
        if not self._takes_first_pass(step.kind):
            return "the step has only one pass"
        if self._refresh_due(step.params):
            return "the mask is made anew in this step, from its gradients"
        return None

    def _refuse_implicit(self) -> None:
        if self.ascent in ("implicit", "implicit-dense"):
            reason = self._engine.report()["engine"].removeprefix("off: ")
            raise ValueError(f"ascent={self.ascent!r} needs the engine, which is off: {reason}")

    def _require_unchanged(self, step: Step) -> None:
        """Gradients that the first pass left out are not missing now."""
        params = self._perturbed_params()
        masks = self._masks_of(params)
        if step.has_every_gradient:
            step.params, step.masks = params, masks
            return
        same = step.masks.keys() == masks.keys() and all(step.masks[name] is mask for name, mask in masks.items())
        if not same or (self._mask_state is not None and self._mask_state.asked):
            raise RuntimeError(
                "masks or parameter groups changed between first_pass() and perturbed(), and gradients of the newly "
                "perturbed weights were not computed; make such changes before first_pass()"
            )

    @contextmanager
    def _excursion(self, step: Step, batch: Any, *, statistics_return: bool) -> Iterator[None]:
        """To w + e and back."""
        step.phase = Phase.PERTURBED
        statistics = StatisticsSnapshot(self.model) if statistics_return else None
        renormalized = RenormalizedWeights(self.model)
        completed = False
        try:
            self._ascend(step, batch)
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
            self._perturbation.undo()
            self._extrapolation.undo()
            renormalized.restore()
            if statistics is not None:
                statistics.restore()
            step.phase = Phase.READY if completed else Phase.BETWEEN

    @torch.no_grad()
    def _ascend(self, step: Step, batch: Any) -> None:
        if step.kind is StepKind.PLAIN:
            return
        if step.kind is StepKind.REUSE:
            self._perturbation.apply_last([self._target(step, one, one.parameter) for one in step.params])
            return
        if self.ascent in ("implicit", "implicit-dense"):
            self._check_implicit(step)
        elif self.ascent not in ONE_PASS and step.has_every_gradient:
            self._require_gradients("first")
        if self._refresh_due(step.params):
            if self.ascent in ONE_PASS and self._awaits_momentum(step.params):
                return
            self._refresh(step.params, batch)
            step.masks = self._masks_of(step.params)
        if self.ascent == "extrapolation":
            tracked = [one for one in self._tracked(step) if not one.is_still]
            self.skipped_ascents += not self._extrapolation.move(tracked) and bool(tracked)
            return
        directions = self._directions(step.params)
        targets = [self._target(step, one, directions[one.name]) for one in step.params if one.name in directions]
        if all(target.is_still for target in targets):
            self.skipped_ascents += not targets  # no gradient came through the unperturbed layers
            return
        norm = ascent_norm(targets, norm=self.norm)
        if norm > 0 and math.isfinite(norm):
            self._perturbation.apply(targets, norm)
            return
        self.skipped_ascents += 1
        step.ascent_failed = norm != 0
        if step.ascent_failed:
            self._warn_once(
                f"the ascent gradient's norm is {norm}: this step is taken without perturbation and counted in "
                "opt.skipped_ascents. Expected now and then with a GradScaler; otherwise lower learning rate or rho."
            )

    def _directions(self, params: list[PerturbedParam]) -> dict[str, Tensor]:
        """What the ascent follows, for each parameter that has it: its gradient, or its momentum."""
        found = {}
        for one in params:
            by_momentum = self.ascent in ONE_PASS
            direction = momentum_of(self.base, one.parameter) if by_momentum else one.parameter.grad
            if direction is not None:
                found[one.name] = direction.to_dense() if direction.is_sparse else direction
        if self.ascent in ("momentum", "momentum-climbing") and not found:
            require_momentum(self.base, [one.parameter for one in params])
        return found

    def _awaits_momentum(self, params: list[PerturbedParam]) -> bool:
        """Whether a mask that is made from the ascent's direction must wait for the base optimizer's first step."""
        if self._mask_state is None or not self._mask_state.rule.needs_gradient or self._directions(params):
            return False
        require_momentum(self.base, [one.parameter for one in params])
        return True

    def _tracked(self, step: Step) -> list[TrackedWeight]:
        return [TrackedWeight(one.name, one.parameter, step.masks[one.name], one.rho) for one in step.params]

    def _base_step(self, step: Step) -> None:
        """The base optimizer's update, kept where the next step extrapolates it."""
        next_kind = self.schedule.kind(self.steps + 1, has_last=False)
        tracked = self._tracked(step) if self.ascent == "extrapolation" and next_kind is StepKind.ASCEND else []
        self._extrapolation.hold(tracked)
        self.base.step()
        self._extrapolation.record(tracked)

    @torch.no_grad()
    def _descend(self, step: Step) -> None:
        self._require_gradients("second")
        self._step = None
        if step.ascent_failed and not self._gradients_finite():
            self.skipped_steps += 1
            self._warn_once("both gradients of a step are not finite: the weights are left alone (opt.skipped_steps)")
        else:
            self._base_step(step)
        self.steps += 1
        self._statistics_at = versions(self.model)

    def _target(self, step: Step, one: PerturbedParam, direction: Tensor) -> Target:
        mask = None if self.ascent == "implicit-dense" else step.masks[one.name]
        # A momentum is of what the base minimizes, a gradient is of the loss; Momentum-SAM goes against the momentum.
        is_reversed = self.ascent == "momentum" if self.ascent in ONE_PASS else one.maximize
        return Target(one.name, one.parameter, direction, mask, -one.rho if is_reversed else one.rho, one.eta)

    # ---- masks -------------------------------------------------------------------------------------------

    def _masks_of(self, params: list[PerturbedParam]) -> dict[str, PackedMask | None]:
        masks = {} if self._mask_state is None else self._mask_state.masks or {}
        return {one.name: masks.get(one.name) for one in params}

    def _refresh_due(self, params: list[PerturbedParam]) -> bool:
        return self._mask_state is not None and self._mask_state.due(self.steps, {one.name for one in params})

    def _refresh_before_first_pass(self, step: Step, batch: Any) -> None:
        """A mask that does not look at the ascent's gradient is made before it, so that the pass can be narrowed.

        Where nothing is left to be perturbed, the step is the base optimizer's.
        """
        if not self._takes_first_pass(step.kind):
            return
        if self._refresh_due(step.params):
            if self._mask_state is None or self._mask_state.rule.needs_gradient:
                return
            self._refresh(step.params, batch)
            step.masks = self._masks_of(step.params)
        if all(self._target(step, one, one.parameter).is_still for one in step.params):
            step.kind = StepKind.PLAIN

    def _refresh(self, params: list[PerturbedParam], batch: Any) -> None:
        assert self._mask_state is not None
        if any(is_sharded(one.parameter) for one in params):
            raise ValueError(
                "mask must not be given with sharded parameters (fully_shard): a mask needs to see whole tensors; "
                "use SAM, and perturb=False in the parameter groups that are to stay"
            )
        context = ScoreContext(
            self.model,
            {one.name: one.parameter for one in params},
            self._mask_state.generator,
            self.steps,
            directions=self._directions(params),
            previous=self._mask_state.masks,
            batch=batch,
        )
        before = self._masks_of(params)
        self._mask_state.refresh(context)
        self._perturbation.forget()
        for one in params:
            self._extrapolation.change_mask(one.name, one.parameter, before[one.name], self._masks_of([one])[one.name])

    def _check_implicit(self, step: Step) -> None:
        if step.first is None:
            if not self._refresh_due(step.params):
                raise RuntimeError(
                    f"ascent={self.ascent!r} did not see the first pass: in a loop with perturbed(), run it in "
                    "`with opt.first_pass():`"
                )
            self._require_gradients("first")
            return
        explicit = explicit_after_all(step.first)
        if not step.first.layers_called and step.first.plan.sliced:
            raise RuntimeError(
                f"ascent={self.ascent!r} did not see the first pass: it must call the model itself that was given to "
                f"the optimizer, {type(self.model).__name__}, and its linear and convolution layers as modules"
            )
        if step.first.plan.is_partial and step.first.is_complete:
            raise RuntimeError(
                f"ascent={self.ascent!r} needs one plain loss.backward() in the first pass: {step.first.why_not}"
            )
        if explicit:
            self._warn_once(
                f"ascent={self.ascent!r} acts in calls of linear and convolution layers: the ascent was explicit for "
                f"{', '.join(explicit[:5])}{' and more' if len(explicit) > 5 else ''}"
            )

    def _warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _check_choice(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
