"""What a method may change, its options, masks and directions. `sam.py` runs the passes, `perturbation.py` the move."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsesam.checkpoint import OwnState
from sparsesam.distributed.shards import as_shard_of, local_part
from sparsesam.gradients import require_gradients
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.scores import ScoreContext
from sparsesam.masks.state import MaskState
from sparsesam.options import Ascent, AscentScope, Options, check_base_and_model
from sparsesam.perturbation import Norm, Perturbation, Radius, Target, is_unmoved, is_usable
from sparsesam.savings import Shortcuts
from sparsesam.schedules import RhoSchedule
from sparsesam.utils.restore import RNGSnapshot, Snapshot
from sparsesam.wrapper import OptimizerWrapper, PerturbedParam, PerturbedParams, inside_wrappers


class Phase(enum.Enum):
    FIRST = enum.auto()  # the first pass is running
    BETWEEN = enum.auto()  # the first pass is done
    PERTURBED = enum.auto()  # weights are at w + e
    READY = enum.auto()  # weights are at w again, gradients are those at w + e


#: By parameter name; None: the whole parameter is perturbed.
Masks = dict[str, PackedMask | None]


@dataclass
class Step:
    """The state of one step: made at its beginning, dropped at its end.

    A step that does not ``ascend`` has one pass, at w. ``first_passes`` is the number of passes before the last;
    ``params`` are perturbed under ``masks`` (None: whole).
    """

    ascends: bool
    first_passes: int
    params: PerturbedParams
    masks: Masks = field(default_factory=dict)
    shortcuts: Shortcuts | None = None
    phase: Phase | None = None
    written: Snapshot | None = None  # what a pass at w + e may write to
    hook: RemovableHandle | None = None  # of the model, while it is at w + e
    rng: RNGSnapshot | None = None  # random states at the start of the first pass
    statistics: Snapshot | None = None  # running statistics there
    first: dict[Tensor, Tensor] = field(default_factory=dict)  # gradients of the first pass, if `combine` needs them
    kept: dict[str, Tensor] = field(default_factory=dict)  # by parameter name, what a variant needs until the end
    ascent_failed: bool = False  # the norm was not finite
    repeats: bool = False  # a trainer reruns earlier micro-batches in a one-pass step

    @property
    def is_complete(self) -> bool:
        """Whether the first pass left out no gradient."""
        return self.shortcuts is None or self.shortcuts.is_complete

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters to perturb."""
        return [param.parameter for param in self.params]


class PerturbingOptimizer(OptimizerWrapper):
    """An optimizer with masks, which moves its weights to w + e. Every method has these arguments:

    Args:
        base: the optimizer that takes the step. Its parameter groups may hold ``rho``, ``adaptive``, ``eta`` and
            ``perturb=False`` of their own (as ``sam_rho`` and so on if the base has an option of that name, like
            Adadelta); a group that is not perturbed does not count in the norm.
        model: the module whose parameters ``base`` holds.
        rho: the length of e. Without a schedule, ``group["rho"]`` may be changed at any time.
        mask: which weights to perturb: `fisher_mask` (SSAM-F), `dynamic_mask` (SSAM-D), `random_mask`, `fixed_mask`,
            `budget_mask`, or a `Mask` composed of a score, a pattern and a refresh rule; None: all.
        adaptive: ASAM, e = rho * T² g / ||T g|| with T = |w| + eta on weights and 1 on biases; ``"all"``: on biases
            too. It needs a rho about ten times larger. ``"layer"``: T is the norm of the whole weight tensor (layerwise
            ASAM in Müller et al. 2023).
        eta: the eta of ASAM.
        norm: ``"full"`` divides by ||g||, ``"masked"`` by ||m ⊙ g||: gradients outside the mask are then not needed,
            nor those of a group with a rho of 0.
        ascent: ``"explicit"`` masks the gradient. ``"implicit"`` also computes the ascent's input gradients with the
            masked weights of linear and convolution layers, dX = dY · (W ⊙ m); ``"implicit-dense"`` does only that and
            perturbs every weight along the result (the paper's form).
        rho_schedule: a function of the step that returns a factor on each group's initial rho, such as `Cosine`.
        every: ascend in every k-th step; the others are steps of the base optimizer.
        start: the first step that ascends, counted from 0.
        ascent_fraction: ascend along the gradient of this part of the batch; needs ``batch=…``.
        ascent_scope: with DistributedDataParallel, ascend along the gradient averaged over all ranks, ``"global"``, or
            along each rank's own, ``"local"`` (m-sharpness), which is sent only in steps that make a mask from it.
        engine: ``False`` runs two plain passes; the result is the same.
        ascent_steps: ascend in n steps of length rho / n, each along the gradient where the last one led; a step then
            has n + 1 passes and needs `minimize` or a closure.
        radius: where the norm is taken. ``"global"``: ||e|| = rho. ``"layer"``: e = rho * T² g / ||T g|| in every
            parameter tensor. ``"element"``: e = rho * T sign(g) (Müller et al. 2023), which needs a much smaller rho.
    """

    # ---- what a variant changes ------------------------------------------------------------------------------

    #: Whether the first backward must compute every gradient, also of weights that are not perturbed.
    needs_every_gradient: ClassVar[bool] = False
    #: Kinds of tensors, each shaped like its parameter, that checkpoints save: ``self.own.tensors[kind][name]``.
    saved_tensors: ClassVar[tuple[str, ...]] = ()
    #: Options that must keep their default, ``{option: why}``.
    refused: ClassVar[dict[str, str]] = {}
    #: Whether the method works with gradients that are multiplied by a number, as those of a GradScaler are.
    allows_scaler: bool = True

    def passes(self) -> int:
        """Returns the number of passes of a step that ascends."""
        return 1 + self.options.ascent_steps

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        """Returns the direction of the ascent by parameter name; here the gradient."""
        return {p.name: p.parameter.grad for p in params if p.parameter.grad is not None}

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        """Returns rho, negative where the perturbation goes against the direction."""
        return -param.rho if param.maximize else param.rho

    def combine(self, names: list[str], first: list[Tensor] | None, second: list[Tensor]) -> None:
        """Change the gradient of the last pass in place; ``first`` is that at w, None in steps without it.

        Where the gradient at w was not finite, ``first`` is None, or on a device the same as ``second``.
        """

    def after_update(self) -> None:
        """Called after the base optimizer's update."""

    @property
    def combines(self) -> bool:
        return type(self).combine is not PerturbingOptimizer.combine

    # ---- state -----------------------------------------------------------------------------------------------

    _step: Step | None  # the step in progress

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        mask: MaskRule | None = None,
        adaptive: bool | Literal["all", "layer"] = False,
        eta: float = 0.01,
        norm: Norm = "full",
        ascent: Ascent = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
        ascent_steps: int = 1,
        radius: Radius = "global",
    ) -> None:
        check_base_and_model(base, model)
        self.options = Options(
            norm=norm,
            ascent=ascent,
            rho_schedule=rho_schedule,
            every=every,
            start=start,
            ascent_fraction=ascent_fraction,
            ascent_scope=ascent_scope,
            engine=engine,
            ascent_steps=ascent_steps,
            radius=radius,
        )
        self.options.check_method(type(self).__name__, self.passes(), self.refused)
        self.options.check_model(model)
        self.options.check_mask(mask)
        own = OwnState(MaskState(mask), {kind: {} for kind in self.saved_tensors})
        options = {"rho": rho, "adaptive": adaptive, "eta": eta, "perturb": True}
        super().__init__(base, model, own, options)

    def _start(self, own: OwnState) -> None:
        super()._start(own)
        self._step = None
        self._perturbation = Perturbation()
        self._last_norm: float | Tensor | None = None
        self._warned: set[str] = set()

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self.own.counters.steps

    @property
    def skipped_ascents(self) -> int:
        """The number of steps taken without perturbation because the ascent gradient was zero or not finite."""
        return self.own.counters.read().skipped_ascents

    @property
    def skipped_steps(self) -> int:
        """The number of steps without an update: both gradients were not finite, or the closure computed none."""
        return self.own.counters.skipped_steps

    @property
    def skipped_refreshes(self) -> int:
        """The number of refreshes that kept the old mask because the scores were not finite."""
        return self.own.masks.skipped

    @property
    def masks(self) -> dict[str, Tensor]:
        """The current masks, ``{parameter name: bool tensor}``; empty before a mask's first use."""
        if self.mask is None:
            return {p.name: torch.ones_like(p.parameter, dtype=torch.bool) for p in self._perturbed_params()}
        masks, parameters = self.own.masks.masks or {}, self._parameters
        return {name: as_shard_of(parameters[name], mask.unpack()) for name, mask in masks.items()}

    @property
    def sparsity(self) -> float | None:
        """The share of weights that the current masks do not perturb; None before a mask's first use."""
        return self.own.masks.sparsity

    @property
    def last_ascent_norm(self) -> float | None:
        """||g|| of the last ascent, as ``norm`` and ``adaptive`` define it; None before the first."""
        return None if self._last_norm is None else float(self._last_norm)

    def _ascends(self, step: int) -> bool:
        """Whether step 0, 1, 2, … ascends."""
        return step >= self.options.start and (step - self.options.start) % self.options.every == 0

    @property
    def needs_first_pass(self) -> bool:
        """Whether the next step needs a gradient at w before ``perturbed()``."""
        return self._ascends(self.steps) and self.passes() > 1

    @property
    def is_one_pass(self) -> bool:
        """Whether the next step has only one pass, at w + e."""
        return self._ascends(self.steps) and self.passes() == 1

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights are at w + e."""
        return self._step is not None and self._step.phase is Phase.PERTURBED

    @property
    def in_second_pass(self) -> bool:
        """Whether the second pass of a step is running: compute metrics and log while this is False.

        A one-pass step has no second pass; its metrics are those at w + e.
        """
        step = self._step
        return step is not None and step.phase is Phase.PERTURBED and (step.first_passes > 0 or step.repeats)

    def repeat_micro_batches(self) -> None:
        """For trainers that run earlier micro-batches of a step again: from here on, `in_second_pass` is True."""
        if self._step is not None:
            self._step.repeats = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``GradScaler.step`` before anything else: the place to refuse one, also in two phases."""
        self.check_scaler()
        return False

    def check_scaler(self) -> None:
        """Raise if the method does not work with a GradScaler."""
        if not self.allows_scaler:
            raise RuntimeError(
                f"{type(self).__name__} does not work with a GradScaler, which multiplies gradients by a number that "
                "changes between steps; use bfloat16, which needs none, or another method"
            )

    def __getstate__(self) -> dict[str, Any]:
        if self.is_perturbed:
            raise RuntimeError("an optimizer cannot be copied inside perturbed(): its weights are at w + e")
        return super().__getstate__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._step is not None and self._step.phase in (Phase.FIRST, Phase.PERTURBED):
            raise RuntimeError("load_state_dict() inside a pass would lose the weights w; call it after the step")
        super().load_state_dict(state_dict)

    #: The base optimizer's own ``train()`` and ``eval()``, where it has them (schedule-free optimizers).
    train = property(attrgetter("base.train"))
    eval = property(attrgetter("base.eval"))

    # ---- masks -----------------------------------------------------------------------------------------------

    @inside_wrappers
    def refresh_mask(self, *, now: bool = False, batch: Any = None) -> None:
        """Refresh the mask in the next ascent, or ``now`` (for SSAM-D: after a backward pass)."""
        if self.mask is None:
            raise RuntimeError("refresh_mask() needs a mask; without one, every weight is perturbed")
        self.own.masks.is_requested = True
        if now:
            if self._step is not None and not self._step.is_complete and self.own.masks.needs_gradient:
                raise RuntimeError("refresh_mask(now=True) needs every gradient; call it outside of a first_pass()")
            self._refresh(self._perturbed_params(), batch)

    def _refresh_due(self, params: PerturbedParams) -> bool:
        return self.mask is not None and self.own.masks.due(self.steps, params.names)

    def _masks_of(self, params: PerturbedParams) -> Masks:
        masks = self.own.masks.masks or {}
        return {p.name: masks.get(p.name) for p in params}

    def _refresh(self, params: PerturbedParams, batch: Any) -> None:
        self.own.refresh(
            ScoreContext(
                self.model,
                {p.name: p.parameter for p in params},
                self.own.masks.generator,
                self.steps,
                directions=self._local(self.direction(params), params) if self.own.masks.needs_gradient else {},
                previous=self.own.masks.masks,
                batch=batch,
                shards=params.shards,
                ranks=None if self._ddp is None else self._ddp.process_group,
            )
        )

    # ---- the move --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _ascend(self, step: Step, batch: Any) -> None:
        """Move the weights to w + e, after refreshing a mask that is made from the gradient."""
        if not step.ascends:
            return
        if self.options.is_implicit and not self._refresh_due(step.params):
            if step.shortcuts is None:
                raise RuntimeError(
                    f"ascent={self.options.ascent!r} did not see the first pass: in a loop with perturbed(), run it in "
                    "`with opt.first_pass():`"
                )
            step.shortcuts.check_implicit(self._warn_once)
        elif step.first_passes and step.is_complete:
            require_gradients(self.base, "first")
        if self._refresh_due(step.params):
            if not step.first_passes and self.own.masks.needs_gradient and not self.direction(step.params):
                self.own.counters.skipped_ascents += self._moves(step)
                return  # a momentum exists from the second step on
            self._refresh(step.params, batch)
            step.masks = self._masks_of(step.params)
        if step.first_passes and self.combines:
            clone = self._ddp is not None  # whose gradients may be views of buckets
            with_gradient = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
            step.first = {p: p.grad.clone() if clone else p.grad for p in with_gradient}
        self.ascend(step)

    @torch.no_grad()
    def ascend(self, step: Step) -> None:
        """Move the weights by e along `direction`."""
        directions, shards = self._local(self.direction(step.params), step.params), step.params.shards
        targets = [self.target(step, p, directions[p.name]) for p in step.params if p.name in directions]
        if self.options.norm == "masked":  # with a rho of 0, gradients need not be computed, and do not count
            targets = [target for target in targets if not is_unmoved(None, target.rho)]
        if not self._moves(step) or (shards is None and all(target.is_unmoved for target in targets)):
            self.own.counters.skipped_ascents += self._moves(step)  # weights are to be moved, and have no gradient
            return
        norm = self._last_norm = self._perturbation.ascend(targets, self.options.norm, self.options.radius, shards)
        if isinstance(norm, Tensor):  # on a device: the same rule, without synchronizing
            self.own.counters.skip_where(~is_usable(norm))
        elif not is_usable(norm):
            self.own.counters.skipped_ascents += 1
            step.ascent_failed = norm != 0
            if step.ascent_failed:
                self._warn_once(
                    f"the ascent gradient's norm is {norm}: this step is taken without perturbation and counted in "
                    "opt.skipped_ascents. Expected at times with a GradScaler; otherwise lower the learning rate."
                )

    def target(self, step: Step, param: PerturbedParam, direction: Tensor) -> Target:
        mask = None if self.options.ascent == "implicit-dense" else step.masks[param.name]
        weight = param.parameter if step.params.shards is None else local_part(param.parameter)
        rho = self.signed_rho(param)  # the same tensor, if it is one: weights with it are joined on a device
        rho = rho / step.first_passes if step.first_passes > 1 else rho
        return Target(param.name, weight, direction, mask, rho, param.eta, param.layerwise)

    def _local(self, found: dict[str, Tensor], params: PerturbedParams) -> dict[str, Tensor]:
        """Returns directions as dense tensors, or this rank's parts of them."""
        if params.shards is not None:
            found = {p.name: local_part(found[p.name], p.parameter) for p in params if p.name in found}
        return {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}

    def _moves(self, step: Step) -> bool:
        """Whether any weight is to be moved, on any rank."""
        if step.params.shards is not None:
            return not self.own.masks.is_empty and any(isinstance(p.rho, Tensor) or p.rho != 0 for p in step.params)
        return any(not self.target(step, p, p.parameter).is_unmoved for p in step.params)

    # ---- the gradients of both passes ---------------------------------------------------------------------------

    def _combine(self, step: Step) -> None:
        if not self.combines:
            return
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in params):
            raise TypeError(f"{type(self).__name__} combines gradients, which must be dense: make layers sparse=False")
        first, second = None, [local_part(p.grad, p) for p in params]
        if step.first_passes and not step.ascent_failed:
            first = [local_part(step.first.get(p, torch.zeros_like(p)), p) for p in params]
        if first is not None and isinstance(self._last_norm, Tensor):  # on a device: the same, without synchronizing
            usable = is_usable(self._last_norm)
            first = [torch.where(usable.to(g.device), g, s) for g, s in zip(first, second, strict=True)]
        self.combine([self._names[p] for p in params], first, second)
        step.first = {}

    def _warn_once(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RuntimeWarning, stacklevel=4)
