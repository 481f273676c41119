"""The two-phase step around any other optimizer: ascend to w + e, take the gradient there, step from w."""

from __future__ import annotations

import enum
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.attempt import Failure, attempt
from sparsesam.ascent.engine import Engine
from sparsesam.ascent.explicit import Norm, Perturbation, Target, ascent_norm, is_sharded
from sparsesam.ascent.first_pass import ClosureWatch
from sparsesam.ascent.memo import EngineFallbackError
from sparsesam.ascent.noise import Noise, NoiseState
from sparsesam.ascent.plan import Ascent
from sparsesam.ascent.rewind import Rewind
from sparsesam.ascent.statistics import StatisticsSnapshot, versions
from sparsesam.ascent.subset import AscentSubset
from sparsesam.ascent_schedule import AscentSchedule, StepKind
from sparsesam.closures import with_batch
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext
from sparsesam.masks.state import MaskState
from sparsesam.parameters import (
    PerturbedParam,
    check_group,
    named,
)
from sparsesam.schedules import RhoSchedule
from sparsesam.wrapper import OptimizerWrapper

_CHECKPOINT_VERSION = 1

#: Attributes that go into a checkpoint, beside the base optimizer's state and the masks.
PERSISTED = ("steps", "skipped_ascents", "skipped_steps")
#: Attributes that a copy of the optimizer takes along and a checkpoint does not.
CONFIGURATION = (
    *("base", "model", "defaults", "norm", "ascent", "rho_schedule", "cadence", "ascent_fraction"),
    *("_mask_state", "_engine_off"),
)
# All others belong to one step of one process and are made by `_start`.

#: Where torch's optimizers keep their momentum: SGD, RMSprop; Adam and its kin.
_MOMENTUM = ("momentum_buffer", "exp_avg")


class _Phase(enum.Enum):
    IDLE = enum.auto()  # nothing done yet
    PERTURBED = enum.auto()  # weights are at w + e
    READY = enum.auto()  # weights are back, the gradient is that at w + e


class SharpnessAware(OptimizerWrapper):
    """The two-phase step. `SAM` and `SSAM` are the ones to use; see their docstrings."""

    _phase: _Phase

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
        cadence: AscentSchedule,
        ascent_fraction: float,
        engine: bool,
    ) -> None:
        _check_choice("norm", norm, ("full", "masked"))
        _check_choice("ascent", ascent, get_args(Ascent))
        if not 0 < ascent_fraction <= 1:
            raise ValueError(f"ascent_fraction must be in (0, 1], got {ascent_fraction}; the paper tries 0.25")
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
        self.norm: Norm = norm
        self.ascent: Ascent = ascent
        self.rho_schedule = rho_schedule
        self.cadence = cadence
        self.ascent_fraction = ascent_fraction
        self.steps = 0
        self.skipped_ascents = 0
        self.skipped_steps = 0
        self._mask_state = None if mask is None else MaskState(mask)
        self._engine_off = None if engine else "switched off"
        if engine and model is not self.model:
            self._engine_off = f"the model is wrapped in {type(model).__name__}"
        self._start()

    # ---- what the user sees ------------------------------------------------------------------------------

    @property
    def masks(self) -> dict[str, Tensor]:
        """The current masks, ``{parameter name: bool tensor}``; empty before a mask's first use."""
        if self._mask_state is None:
            return {p.name: torch.ones_like(p.parameter, dtype=torch.bool) for p in self._participants()}
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
        return self._kind is StepKind.ASCEND and self.ascent != "momentum"

    @property
    def _kind(self) -> StepKind:
        return self.cadence.kind(self.steps, has_last=bool(self._perturbation.last))

    @property
    def skipped_refreshes(self) -> int:
        """How often a mask was kept because its scores were not finite."""
        return 0 if self._mask_state is None else self._mask_state.skipped

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
        numbers, and the loss at w is returned (at w + e, where a step has only that pass). Without one, the two
        passes must have run already, the second inside ``perturbed()``.

        ``batch`` is for a mask that takes its Fisher from the current batch, and for ``ascent_fraction``: a closure
        that has a parameter is called with the batch, or with the ascent's part of it. ``scaler`` is for a closure
        that scales its loss; call ``scaler.update()`` afterwards, as usual.
        """
        if self._phase is _Phase.PERTURBED:
            raise RuntimeError("step() inside perturbed() would update the weights at w + e; call it after the block")
        if closure is None:
            if self._phase is not _Phase.READY:
                raise RuntimeError(
                    "step() needs a gradient at w + e: pass a closure, or run the second pass in "
                    "`with opt.perturbed(): loss_fn(model(x), y).backward()` before step()"
                )
            self._descend()
            return None
        loss = self._passes(closure, batch)
        if scaler is None:
            self._descend()
        else:
            scaler.step(self)
        return loss

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
        self._engine.only_within_steps = False
        after_first_pass = self.needs_first_pass or versions(self.model) != self._statistics_at
        with self._excursion(batch, after_first_pass=after_first_pass):
            self.zero_grad()
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._phase is _Phase.READY:  # the gradient at w + e is gone, and with it the step that it was for
            self._phase = _Phase.IDLE

    def refresh_mask(self, *, now: bool = False, batch: Any = None) -> None:
        """Make the mask anew in the next ascent, or ``now`` (for SSAM-D, after a backward pass)."""
        if self._mask_state is None:
            raise RuntimeError("refresh_mask() needs a mask; SAM perturbs every weight")
        self._mask_state.asked = True
        if now:
            self._refresh(batch)

    def engine_report(self) -> dict[str, str]:
        """What the last step did not have to compute, by parameter; under "engine", whether and why (not)."""
        return self._engine.report()

    # ---- checkpoints and copies --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._arm()

    def _own_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {key: getattr(self, key) for key in PERSISTED}
        own["version"] = _CHECKPOINT_VERSION
        own["mask"] = None if self._mask_state is None else self._mask_state.state_dict()
        own["last_perturbation"] = dict(self._perturbation.last)
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
        self._start({name: e.clone() for name, e in own["last_perturbation"].items()})

    def __getstate__(self) -> dict[str, Any]:
        if self._phase is _Phase.PERTURBED:
            raise RuntimeError("an optimizer cannot be copied inside perturbed(): its weights are at w + e")
        kept = {key: self.__dict__[key] for key in (*CONFIGURATION, *PERSISTED)}
        return {"last_perturbation": self._perturbation.last, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        last = state.pop("last_perturbation")
        super().__setstate__(state)
        self._names = named(self.model, self.base)
        self._start(last)

    def _start(self, last_perturbation: dict[str, Tensor] | None = None) -> None:
        """Everything that belongs to one process: a copy or a loaded checkpoint begins here too."""
        self._phase = _Phase.IDLE
        self._ascent_failed = False
        self._warned: set[str] = set()
        self._perturbation = Perturbation(remember=self.cadence.off_steps == "reuse")
        self._perturbation.last = last_perturbation or {}
        self._noise = Noise(self.model.parameters())
        self._engine = Engine(self.model)
        self._statistics_at = versions(self.model)
        self._arm()

    # ---- the step ----------------------------------------------------------------------------------------

    def _passes(self, closure: Callable[..., Any], batch: Any) -> Any:
        call = with_batch(closure, batch)
        if self._kind is StepKind.PLAIN:
            self._ascent_failed = False
            with torch.enable_grad():
                loss = call(batch)
            self._phase = _Phase.READY
            return loss
        self._engine.only_within_steps = True
        self._arm()
        loss = noise = None
        if self.needs_first_pass:
            if self._mask_state is not None and not self._mask_state.rule.needs_gradient:
                self._refresh_if_due(batch)
            noise = self._noise.read()
            try:
                loss = self._first_pass(call, batch)
            except BaseException:
                self._engine.forget()
                raise
        with self._excursion(batch, after_first_pass=self.needs_first_pass) as moved:
            if moved or loss is None:  # otherwise the gradient of the first pass is already the one to use
                there = self._second_pass(call, batch, noise)
                loss = there if loss is None else loss
        return loss

    def _first_pass(self, call: Callable[[Any], Any], batch: Any) -> Any:
        self._engine.forget()
        self._engine.same_noise = self._engine.within_step = True
        part = batch
        if self.ascent_fraction < 1:
            if batch is None or not getattr(call, "takes_batch", False):
                raise ValueError(
                    f"batch must be given with ascent_fraction={self.ascent_fraction}, and the closure must take it: "
                    "opt.step(closure, batch=(x, y)) with def closure(batch): ..."
                )
            portion = AscentSubset.of(batch, self.ascent_fraction)
            part, self._engine.portion = portion.part, portion
        plan = self._engine.plan
        if plan is None:
            with torch.enable_grad():
                return call(part)
        if self.ascent != "explicit":
            return self._first_pass_by_engine(call, part)
        before = Rewind(self.model, self._noise)
        with ClosureWatch(plan):
            loss, failure = attempt(lambda: call(part), lambda: False)
        if failure is None:
            return loss
        self._engine.listen(None)
        before.restore()
        with torch.enable_grad():
            loss = call(part)  # what it raises now is its own
        self._warn_of_error(failure)
        self._switch_off(failure.reason)
        return loss

    def _first_pass_by_engine(self, call: Callable[[Any], Any], part: Any) -> Any:
        """The implicit forms cannot do without the engine."""
        try:
            with torch.enable_grad():
                return call(part)
        except EngineFallbackError as error:
            self._switch_off(str(error))  # raises, and says what the implicit form needs
            raise

    def _second_pass(self, call: Callable[[Any], Any], batch: Any, noise: NoiseState | None) -> Any:
        self._begin_second_pass(noise)
        if not self._engine.is_at_work:
            with torch.enable_grad():
                return call(batch)
        before = Rewind(self.model, self._noise)
        loss, failure = attempt(lambda: call(batch), self._engine.missed_a_value)
        if failure is None:
            return loss
        self._engine.compute_in_full(failure.reason)
        before.restore()
        self._begin_second_pass(noise)
        with torch.enable_grad():
            loss = call(batch)  # what it raises now is its own
        self._warn_of_error(failure)
        if self.ascent == "explicit" and self._engine.keeps_values and not failure.value_gone:
            self._engine_off = failure.reason
        self._engine.keeps_values = True
        return loss

    def _warn_of_error(self, failure: Failure) -> None:
        if failure.is_foreign:
            self._warn_once(
                f"a closure failed and was called again: {failure.reason!r} did not come again without the engine; if "
                "it is the model's or the loop's own, it went by unheard, and engine=False lets it through"
            )

    def _begin_second_pass(self, noise: NoiseState | None) -> None:
        self.zero_grad()
        if noise is not None:
            self._noise.write(noise)

    @contextmanager
    def _excursion(self, batch: Any, *, after_first_pass: bool) -> Iterator[bool]:
        """To w + e and back; yields whether a second pass can tell anything that the first did not.

        Without a first pass before it, the pass at w + e is the one that moves normalization statistics.
        """
        if self._phase is _Phase.PERTURBED:
            raise RuntimeError("perturbed() must not be entered twice; leave the first block before the next ascent")
        self._phase = _Phase.PERTURBED
        statistics = StatisticsSnapshot(self.model)
        completed = False
        try:
            yield self._ascend(batch)
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
            if after_first_pass:
                statistics.restore()
            self._engine.forget()
            self._phase = _Phase.READY if completed else _Phase.IDLE

    @torch.no_grad()
    def _ascend(self, batch: Any) -> bool:
        self._ascent_failed = False
        self._set_rho()
        kind = self._kind
        if kind is StepKind.PLAIN:
            return False
        if kind is StepKind.REUSE:
            self._perturbation.apply_last([self._target(one, one.parameter) for one in self._participants()])
            return True
        if self.ascent in ("implicit", "implicit-dense"):
            self._check_implicit()
        elif self.ascent != "momentum" and not self._engine.left_gradients_out:
            self._require_gradients("first")
        self._refresh_if_due(batch)
        complete = self.ascent_fraction == 1 and not self._engine.left_gradients_out
        self._engine.begin_second()
        directions = self._directions()
        targets = [self._target(one, directions[one.name]) for one in self._participants() if one.name in directions]
        if all(target.is_still for target in targets):
            self.skipped_ascents += not targets  # no gradient came through the unperturbed layers
            return not complete
        norm = ascent_norm(targets, norm=self.norm)
        if norm > 0 and math.isfinite(norm):
            self._perturbation.apply(targets, norm)
            return True
        self.skipped_ascents += 1
        self._ascent_failed = norm != 0
        if self._ascent_failed:
            self._warn_once(
                f"the ascent gradient's norm is {norm}: this step is taken without perturbation and counted in "
                "opt.skipped_ascents. Expected now and then with a GradScaler; otherwise lower learning rate or rho."
            )
        return self._ascent_failed or not complete

    def _directions(self) -> dict[str, Tensor]:
        """What the ascent follows, for each participant that has it: its gradient, or its momentum."""
        found = {}
        for one in self._participants():
            if self.ascent == "momentum":
                state = self.base.state.get(one.parameter, {})
                direction = next((state[key] for key in _MOMENTUM if state.get(key) is not None), None)
            else:
                direction = one.parameter.grad
            if direction is not None:
                found[one.name] = direction.to_dense() if direction.is_sparse else direction
        return found

    @torch.no_grad()
    def _descend(self) -> None:
        self._require_gradients("second")
        self._phase = _Phase.IDLE
        if self._ascent_failed and not self._gradients_finite():
            self.skipped_steps += 1
            self._warn_once("both gradients of a step are not finite: the weights are left alone (opt.skipped_steps)")
        else:
            self.base.step()
        self.steps += 1
        self._statistics_at = versions(self.model)
        self._arm()

    def _target(self, one: PerturbedParam, direction: Tensor) -> Target:
        rho = float(one.group["rho"])
        return Target(one.name, one.parameter, direction, self._mask_of(one.name), rho, one.eta)

    def _set_rho(self) -> None:
        for group in self.param_groups:
            self._complete(group)
            if self.rho_schedule is not None:
                group.setdefault("initial_rho", group["rho"])
                group["rho"] = group["initial_rho"] * self.rho_schedule(self.steps + 1)
            check_group(group)

    # ---- mask and engine ---------------------------------------------------------------------------------

    def _mask_of(self, name: str) -> PackedMask | None:
        if self._mask_state is None or self._mask_state.masks is None or self.ascent == "implicit-dense":
            return None
        return self._mask_state.masks[name]

    def _refresh_due(self) -> bool:
        names = {one.name for one in self._participants()}
        return self._mask_state is not None and self._mask_state.due(self.steps, names)

    def _refresh_if_due(self, batch: Any) -> None:
        if self._refresh_due():
            self._refresh(batch)

    def _refresh(self, batch: Any) -> None:
        assert self._mask_state is not None
        self._engine.listen(None)
        if any(is_sharded(one.parameter) for one in self._participants()):
            raise ValueError(
                "mask must not be given with sharded parameters (fully_shard): a mask needs to see whole tensors; "
                "use SAM, and perturb=False in the parameter groups that are to stay"
            )
        context = ScoreContext(
            self.model,
            {one.name: one.parameter for one in self._participants()},
            self._mask_state.generator,
            self.steps,
            directions=self._directions(),
            previous=self._mask_state.masks,
            batch=batch,
        )
        self._mask_state.refresh(context)
        self._perturbation.forget()
        self._engine.plan = None
        self._arm()

    def _arm(self) -> None:
        """Decide whether the coming first pass may leave anything out."""
        reason = self._why_not() or self._engine.why_not()
        if reason is not None and self.ascent in ("implicit", "implicit-dense") and self.needs_first_pass:
            if not self._refresh_due():
                raise ValueError(f"ascent={self.ascent!r} needs the engine, which is off: {reason}")
        masks = (self._mask_state.masks if self._mask_state is not None else None) or {}
        moved = {one.name: masks.get(one.name) for one in self._participants()}  # a newcomer's mask is due: engine off
        self._engine.arm(reason, moved, self.ascent)

    def _check_implicit(self) -> None:
        if not self._engine.left_gradients_out:
            self._require_gradients("first")
        explicit = self._engine.explicit_after_all()
        if explicit and self._engine.recording is None:
            raise RuntimeError(
                f"ascent={self.ascent!r} did not see the first pass: it must call the model itself that was given to "
                f"the optimizer, {type(self.model).__name__}, and in a loop with perturbed() in training mode"
            )
        if explicit:
            self._warn_once(
                f"ascent={self.ascent!r} acts in linear and convolution calls outside of checkpointed regions: the "
                f"ascent was explicit for {', '.join(explicit[:5])}{' and more' if len(explicit) > 5 else ''}"
            )

    def _why_not(self) -> str | None:
        if self._engine_off is not None:
            return self._engine_off
        if self.norm == "full" and self._mask_state is not None and self.ascent == "explicit":
            return 'norm="full" needs every gradient; norm="masked" does not'
        if not self.needs_first_pass:
            return "the coming step has only one pass"
        if self._refresh_due():
            return "the mask is made anew in the next step"
        return None

    def _switch_off(self, reason: str) -> None:
        self._engine_off = reason
        self._arm()

    def _warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _check_choice(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
